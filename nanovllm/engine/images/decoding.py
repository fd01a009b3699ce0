"""Encoded images become upright RGB images; pixels, and the work of a file's decoder, are bounded.

Opens files by PIL's plugins themselves: ``PIL.Image.open`` applies a limit of pixels that is global to the process.
"""

import io
import re
import struct
from threading import Lock
from typing import Any

import numpy as np

from nanovllm.errors import RequestError

MARKER = re.compile(rb"\xff+([\x02-\xcf\xd9-\xfe])")  # JPEG markers that a segment follows, and the marker of the end
MAX_PIXELS = 89_000_000  # an A4 page at 600 dpi has 35 million; PIL warns above 89 million
MAX_READS = 100_000  # reads by a decoder, which parses chunks, markers and tags in Python
MAX_EXIF_BYTES = 1 << 17  # size of a JPEG segment, written as hexadecimal digits
MAX_PARTS = 1 << 16  # markers in a JPEG; strips or pages in a TIFF
MAX_WORK_NS = 1e9  # time on one core, estimated from the times below: worst cases of 2026 at 2.5 GHz
PIXEL_NS, ALPHA_NS, SCAN_NS = 4.0, 4.0, 1.2  # per pixel: conversion to RGB, compositing of alpha, each scan of a JPEG
# Other formats have parsers that run programs (EPS), or parsers that nobody attacks and mends. Values: nanoseconds of
# decoding per byte of the file, and per byte of the decoded pixels.
FORMATS = {
    "JPEG": (20, 0), "PNG": (15, 3.4), "WEBP": (60, 5), "GIF": (10, 2), "BMP": (0, 1), "TIFF": (15, 3), "PPM": (0, 1),
    "JPEG2000": (150, 13), "AVIF": (100, 5.5),
}  # fmt: skip
LOCKS = [Lock() for _ in range(64)]  # by id(): two threads must not read one PIL image, which opens its file late


def open_image(source: Any) -> Any:
    """Decode to an upright RGB image, transparent parts on white; raises RequestError.

    Args:
        source: the bytes of a file, or a PIL image, which is left as it is.
    """
    from PIL import Image, ImageOps

    try:
        name, image = _opened(source) if isinstance(source, bytes) else ("", source)
        width, height = image.size
        if not width * height:
            raise RequestError(f"the image is empty: it has {width:,} x {height:,} pixels.")
        if width * height > MAX_PIXELS:
            raise RequestError(f"the image has {width:,} x {height:,} pixels; allowed are {MAX_PIXELS:,}.")
        if name:
            _check_work(name, image, source)
            ImageOps.exif_transpose(image, in_place=True)
            return _as_rgb(image, image, name == "PNG" and source[24] == 16)
        with LOCKS[id(source) // 16 % len(LOCKS)]:
            if image.format == "TIFF" and image.n_frames > 1:
                raise _several_pages(image.n_frames)
            return _as_rgb(ImageOps.exif_transpose(image), image, False)
    except RequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # raised by a plugin that calls PIL's limit
        raise RequestError(f"the image has too many pixels; allowed are {MAX_PIXELS:,}.") from None
    except Exception as error:  # decoders raise any class
        advice = "" if isinstance(source, bytes) else " A PIL image must stay open until its request is finished."
        reason = str(error) or type(error).__name__
        raise RequestError(f"the image cannot be read: {reason:.300}.{advice}") from None


# ---------------------------------------------------------------- files


class _Reader(io.BytesIO):
    """A file that a decoder may not read for ever, by chunks of a byte each or by many tags of one place."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self._num_reads, self._num_bytes = MAX_READS, (1 << 22) + 4 * len(data)

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._num_reads -= 1
        self._num_bytes -= len(data)
        if self._num_reads < 0 or self._num_bytes < 0:
            raise RequestError("the image cannot be read: it has too many parts.")
        return data


def _opened(data: bytes) -> tuple[str, Any]:
    """Format and PIL image of a file, whose header alone is read."""
    from PIL import Image

    Image.init()
    for name in FORMATS:
        factory, accepts = Image.OPEN.get(name, (None, None))  # an old PIL has no AVIF
        try:
            if factory and accepts(data[:16]) is True:
                if name == "TIFF":
                    _check_tiff(data)
                return name, factory(_Reader(data), "")
        except (SyntaxError, IndexError, TypeError, struct.error):  # PIL's plugins report another format by these
            continue
    raise RequestError(f"the image cannot be read: it is none of {', '.join(FORMATS)}.")


def _check_work(name: str, image: Any, data: bytes) -> None:
    """Raise RequestError where the decoder would work for more than a second."""
    is_raw = name == "TIFF" and image.info.get("compression") == "raw"
    (width, height), (per_byte, per_value) = image.size, FORMATS["BMP" if is_raw else name]
    num_values = width * height * len(image.getbands()) * _depth(name, image, data) // 8
    num_ns = len(data) * per_byte + num_values * per_value
    num_ns += width * height * (PIXEL_NS + (ALPHA_NS if _is_transparent(image) else 0.0))
    if name == "JPEG":
        num_ns += width * height * SCAN_NS * _num_scans(data, image)
    elif name == "PPM" and data[1:2] in b"123":  # numbers as text, parsed in Python; a comment shifts all that follows
        num_ns += len(data) * 250 + data.count(b"#") * 1e5
    covered = sum((x1 - x0) * (y1 - y0) for _, (x0, y0, x1, y1), *_ in image.tile)
    if num_ns > MAX_WORK_NS or covered > 5 * width * height:  # 5: CMYK and alpha planes
        raise _too_much_work(f"{width:,} x {height:,} pixels of {name}, {len(data):,} bytes")
    exif = image.info.get("exif") or image.info.get("Raw profile type exif") or b""
    if len(exif) > MAX_EXIF_BYTES:
        raise RequestError(f"the image has {len(exif):,} bytes of EXIF data; allowed are {MAX_EXIF_BYTES:,}.")


def _depth(name: str, image: Any, data: bytes) -> int:
    """Bits of a channel in the file."""
    if name == "PNG":
        return data[24]
    depths = image.tag_v2.get(258, (8,)) if name == "TIFF" else (16 if image.mode.startswith("I") else 8,)
    return max(depths) if isinstance(depths, tuple) else depths


def _num_scans(data: bytes, image: Any) -> int:
    """Scans of a JPEG's first image; a progressive one may have any number, each of all its pixels.

    A sequential one whose first scan has all components has one. Then the pixels are not searched for the next marker,
    which would hold the interpreter for 5 ms of a page.
    """
    num_scans = at = 0
    for _ in range(MAX_PARTS):
        marker = MARKER.search(data, at)
        if marker is None or marker[1] == b"\xd9":
            return num_scans
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
        if marker[1] == b"\xda":
            num_scans += 1
            num_components = data[marker.end() + 2 : marker.end() + 3]
            if "progressive" not in image.info and num_components == bytes([image.layers]):
                return num_scans
    return MAX_PARTS


def _check_tiff(data: bytes) -> None:
    """Raise RequestError for a TIFF of several pages, or of more strips than its pixels need."""
    order, is_big = "<" if data[:2] == b"II" else ">", 43 in data[2:4]  # BigTIFF has 64-bit offsets
    first, head, entry, offset_code = (8, "Q", "HHQ8s", "Q") if is_big else (4, "H", "HHL4s", "L")
    size = struct.calcsize(order + entry)
    (offset,), num_pages = struct.unpack_from(order + offset_code, data, first), 0
    offsets: set[int] = set()  # a chain of pages may form a ring
    while offset and offset not in offsets and len(offsets) < MAX_PARTS:
        is_first = not offsets
        offsets.add(offset)
        try:
            (num_entries,) = struct.unpack_from(order + head, data, offset)
            start = offset + struct.calcsize(order + head)
            end = start + num_entries * size
            # Tags are sorted, and a page's first tag tells its kind. Thumbnails and masks of other pages do not count.
            fields = data[start : end if is_first else min(end, start + size)]
            fields = fields[: len(fields) // size * size]
            tags = {tag: (kind, num, value) for tag, kind, num, value in struct.iter_unpack(order + entry, fields)}
            (offset,) = struct.unpack_from(order + offset_code, data, end)
        except struct.error:  # the file is truncated
            offset = 0
            continue
        subfile = struct.unpack(order + "L", tags[254][2][:4])[0] if 254 in tags else 0
        num_pages += not subfile & 5
        if is_first and max((tags[tag][1] for tag in (273, 279, 324, 325) if tag in tags), default=0) > MAX_PARTS:
            raise _too_much_work(f"a TIFF of more than {MAX_PARTS:,} strips or tiles")
    if num_pages > 1:
        raise _several_pages(num_pages)


def _several_pages(num_pages: int) -> RequestError:
    return RequestError(
        f"the image is a TIFF of {num_pages:,} pages; give each page as an image of its own "
        "(image.seek(k), then image.copy())."
    )


def _too_much_work(what: str) -> RequestError:
    return RequestError(
        f"the image takes more than a second to decode: {what}. Give a smaller one, or a JPEG that is not progressive."
    )


# ---------------------------------------------------------------- modes


def _is_transparent(image: Any) -> bool:
    palette = image.palette if image.mode == "P" else None
    return (
        image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info
        or (palette is not None and palette.mode.endswith("A"))
    )  # fmt: skip


def _as_rgb(image: Any, original: Any, is_deep: bool) -> Any:
    """An image as RGB, on white.

    Args:
        original: the image before it was turned upright, which has the tags of its file.
        is_deep: the key of transparency has 16 bits, and the pixels have lost 8 of them.
    """
    from PIL import Image

    # PNG and PPM have no integers but 16-bit ones
    if image.mode.startswith("I;16") or (image.mode == "I" and original.format in ("PNG", "PPM")):
        return _grey(image, original).convert("RGB")
    if image.mode in ("I", "F"):
        raise RequestError(
            f"the image has mode {image.mode!r}, and the range of its values is not known. Scale them to 0 ... 255 and "
            "give mode 'L'."
        )
    if not _is_transparent(image):
        return image if image.mode == "RGB" else image.convert("RGB")
    if is_deep and image.mode == "RGB":
        image.info["transparency"] = tuple(value >> 8 for value in image.info["transparency"])
    image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    page = Image.new("RGB", image.size, "white")
    page.paste(image, mask=image)
    return page


def _grey(image: Any, original: Any) -> Any:
    """An image of 16 bits in 8: the upper ones, as of colours of 16 bits."""
    from PIL import Image

    values, tags = np.asarray(image), getattr(original, "tag_v2", {})
    (depth,) = depths if isinstance(depths := tags.get(258, 16), tuple) else (depths,)
    grey = (values >> (depth - 8)).astype(np.uint8)  # TIFF allows 12 bits
    if tags.get(262) == 0:  # WhiteIsZero
        grey = 255 - grey
    if (transparent := image.info.get("transparency")) is not None:
        grey[values == transparent] = 255
    return Image.fromarray(grey)
