"""Where images come from: PIL, numpy, bytes, data URLs, and files and URLs that the user has allowed.

Owns the permissions: nothing is read from disk or net unless an option of ``LLM`` allows it. Every error is one of the
request.
"""

import base64
import re
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanovllm.engine.images.fetching import fetch, shown
from nanovllm.errors import RequestError

MAX_BYTES = 64 << 20  # size of an encoded image
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
    if isinstance(source, dict):  # a cell of a Hugging Face dataset: the bytes, or else the path
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
    if re.match("https?://", source, re.I):
        return _bounded(fetch(source, allowed.domains, MAX_BYTES))
    if source.startswith("file:"):
        source = urllib.request.url2pathname(urllib.parse.urlparse(source).path)
    return _read_file(source, allowed)


def name_of(source: Any) -> str:
    """The path or URL of an image, quoted; "" if it has none."""
    source = source.get("path") if isinstance(source, dict) and source.get("bytes") is None else source
    is_name = isinstance(source, Path) or (isinstance(source, str) and not source.startswith("data:"))
    return shown(str(source)) if is_name else ""


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
    named = shown(name)
    if (root := allowed.local_path) is None:
        raise RequestError(
            f"the image {named} is a file; LLM(allowed_local_media_path=...) must name a directory that holds "
            "it. Or give its bytes."
        )
    try:
        path = Path(root, name).resolve(strict=True)
        if not path.is_relative_to(root):
            raise RequestError(f"the image {named} lies outside allowed_local_media_path={str(root)!r}.")
        if not path.is_file():
            raise RequestError(f"the image {named} is no regular file.")
        with path.open("rb") as file:
            return _bounded(file.read(MAX_BYTES + 1))
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the image {named} cannot be read: {getattr(error, 'strerror', error)}.") from None
