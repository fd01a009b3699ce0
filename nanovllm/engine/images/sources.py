"""Where images come from: PIL, numpy, bytes, data URLs, and files and URLs that the user has allowed.

Owns the permissions and the bounds: nothing is read from disk or net unless an option of ``LLM`` allows it, and no
image is decoded whose header promises more pixels than ``MAX_PIXELS``. Every error is one of the request.
"""

import base64
import io
import urllib.error
import urllib.parse
import urllib.request
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from nanovllm.errors import RequestError

MAX_BYTES = 64 << 20  # of an encoded image
MAX_PIXELS = 89_000_000  # a page of A4 at 600 dpi has 35 million; PIL warns of more than 89
TIMEOUT_S = 10.0  # of a connection, and of each read
FETCH_S = 60.0  # of all reads of an image
# Others have parsers that run programs (EPS) or that nobody attacks and mends.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
LOCKS = [Lock() for _ in range(64)]  # by identity: two threads must not read one PIL image, which opens its file late
FORMS = "a PIL image, a numpy array uint8 [H, W, 3], bytes, a data URL, or an allowed path or URL"


class Permissions(NamedTuple):
    """The files and hosts that the user has allowed.

    Attributes:
        local_path: a directory without links in its path; files below it may be read. None allows none.
        domains: hosts whose URLs may be fetched; "*" allows every one.
    """

    local_path: Path | None
    domains: tuple[str, ...]


def read_source(source: Any, allowed: Permissions) -> Any:
    """The encoded bytes of an image, or the PIL image itself; raises RequestError."""
    if isinstance(source, dict):  # a cell of Hugging Face's data sets: the bytes, or else the path
        source = source["bytes"] if source.get("bytes") is not None else source.get("path")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _bounded(bytes(source))
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if hasattr(source, "convert") and hasattr(source, "size"):
        return source
    if isinstance(source, Path):
        return _read_file(str(source), allowed)
    if not isinstance(source, str):
        raise RequestError(f"an image must be {FORMS}, not {type(source).__name__}.")
    if source.startswith("data:"):
        return _bounded(_decode_data_url(source))
    if source.startswith(("http://", "https://")):
        return _fetch(source, allowed)
    if source.startswith("file:"):
        source = urllib.request.url2pathname(urllib.parse.urlparse(source).path)
    return _read_file(source, allowed)


def open_image(source: Any) -> Any:
    """Decode to an upright RGB image, as transformers' ``load_image`` does; raises RequestError."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = source if hasattr(source, "convert") else Image.open(io.BytesIO(source), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise RequestError(f"the image has {width:,} x {height:,} pixels; allowed are {MAX_PIXELS:,}.")
        with LOCKS[id(source) // 16 % len(LOCKS)]:
            return ImageOps.exif_transpose(image).convert("RGB")
    except RequestError:
        raise
    except UnidentifiedImageError:
        raise RequestError(f"the image cannot be read: it is none of {', '.join(FORMATS)}.") from None
    except Exception as error:  # decoders raise anything
        advice = "" if isinstance(source, bytes) else " A PIL image must stay open until its request is finished."
        reason = str(error) or type(error).__name__
        raise RequestError(f"the image cannot be read: {reason:.300}.{advice}") from None


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise RequestError(f"the image has more than {MAX_BYTES >> 20} MiB.")
    return data


def _from_array(array: np.ndarray) -> Any:
    from PIL import Image

    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise RequestError(
            f"an array of an image must be uint8 [H, W, 3], [H, W, 4] or [H, W], not {array.dtype} {list(array.shape)}."
        )
    return Image.fromarray(array)


def _decode_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError(f"a data URL must be data:image/...;base64,..., not {url[:60]!r}...")
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise RequestError(f"the image has more than {MAX_BYTES >> 20} MiB.")
    try:
        return base64.b64decode(body)
    except ValueError as error:
        raise RequestError(f"the data URL of an image is no base64: {error}") from None


def _read_file(name: str, allowed: Permissions) -> bytes:
    if (root := allowed.local_path) is None:
        raise RequestError(
            f"the image {name!r:.200} is a file; LLM(allowed_local_media_path=...) must name a directory that holds "
            "it. Or give its bytes."
        )
    try:
        path = Path(root, name).resolve(strict=True)
        if not path.is_relative_to(root):
            raise RequestError(f"the image {name!r:.200} lies outside allowed_local_media_path={str(root)!r}.")
        if not path.is_file():
            raise RequestError(f"the image {name!r:.200} is no regular file.")
        with path.open("rb") as file:
            return _bounded(file.read(MAX_BYTES + 1))
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the image {name!r:.200} cannot be read: {getattr(error, 'strerror', error)}.") from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Checks every hop."""

    def __init__(self, allowed: Permissions):
        self._allowed = allowed

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        with closing(fp):  # not of this hop, but of the answer that leads to it
            _require_domain(newurl, self._allowed)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_domain(url: str, allowed: Permissions) -> None:
    parts = urllib.parse.urlparse(url)
    if parts.scheme not in ("http", "https") or not ("*" in allowed.domains or parts.hostname in allowed.domains):
        raise RequestError(
            f"the image {url!r:.200} is on the net; LLM(allowed_media_domains=[...]) must name its host "
            f"{parts.hostname!r}. Allowed: {list(allowed.domains)}."
        )


def _fetch(url: str, allowed: Permissions) -> bytes:
    try:
        _require_domain(url, allowed)
        # its handlers of files and of FTP are out of reach: the scheme of every hop is checked
        opener = urllib.request.build_opener(_Redirects(allowed))
        request = urllib.request.Request(url, headers={"User-Agent": "nanovllm"})
        with opener.open(request, timeout=TIMEOUT_S) as response:
            data, end = bytearray(), monotonic() + FETCH_S
            while len(data) <= MAX_BYTES and (part := response.read1(1 << 16)):
                data += part
                if monotonic() > end:
                    raise TimeoutError(f"it takes more than {FETCH_S:g} s")
            return _bounded(bytes(data))
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, RequestError):
            raise
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise RequestError(f"the image {url!r:.200} cannot be fetched: {error!s:.200}") from None
