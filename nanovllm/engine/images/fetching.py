"""Images from the net: hosts that the user has allowed, within one deadline.

Each fetch has a daemon thread of its own. Nobody waits for it beyond the deadline, or at the interpreter's end: servers
may send their status, headers or chunks as slowly as they like.
"""

import base64
import re
import threading
import urllib.parse
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPSConnection
from socket import SHUT_RDWR, socket
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from nanovllm.errors import RequestError, without_secrets

FETCH_S = 60.0  # limit of a whole fetch, from the host's look-up to the last byte of the last redirect
TIMEOUT_S = 10.0  # limit of a connection, and of each read


def fetch(url: str, domains: tuple[str, ...], max_bytes: int) -> bytes:
    """Fetch the bytes of a URL, one more than ``max_bytes`` at most.

    Args:
        domains: hosts that may be asked, by redirects too; "*" allows every one.

    Raises:
        RequestError: the host is not allowed, does not answer within ``FETCH_S``, or answers with an error.
    """
    fetched = None
    try:
        _require_domain(url, domains)
        fetched = _Fetch(url, domains, max_bytes)
        if not wait([fetched.answer], FETCH_S).done:
            fetched.end(TimeoutError(f"it takes more than {FETCH_S:g} s"))
        return fetched.answer.result()
    except RequestError:
        raise
    except Exception as error:  # includes http.client's errors, and the ValueErrors of malformed URLs
        raise RequestError(f"the image {shown(url)} cannot be fetched: {_reason(error)}.") from None
    finally:
        if fetched is not None:
            _running.discard(fetched)


def shown(name: str) -> str:
    """A quoted path or URL for an error text; a URL loses its credentials and everything after its path."""
    if re.match(r"[a-z][a-z0-9+.-]+:/", name, re.I):  # a single letter is a Windows drive
        name = re.sub(r"[\s'\"]", lambda match: urllib.parse.quote(match[0]), re.split("[?#]", name)[0])
    return f"{without_secrets(name)!r:.200}"


def end_all() -> None:
    """End the fetches that run, and refuse others: the interpreter ends."""
    global _has_ended
    _has_ended = True
    for fetched in list(_running):
        fetched.end(RequestError("the image is not fetched, for the interpreter ends."))


class _Fetch:
    """One fetch; ``answer`` has its bytes, or its error."""

    def __init__(self, url: str, domains: tuple[str, ...], max_bytes: int):
        self.answer: Future[bytes] = Future()
        self._lock = threading.Lock()
        self._socket: socket | None = None
        _running.add(self)
        if _has_ended:
            end_all()
        else:
            arguments = url, domains, max_bytes
            threading.Thread(target=self._run, args=arguments, daemon=True, name="nanovllm-fetch").start()

    def end(self, result: bytes | BaseException) -> None:
        """Set the answer, unless there is one; and end the connection, so that its thread ends, too."""
        with self._lock:
            if not self.answer.done():
                if isinstance(result, bytes):
                    self.answer.set_result(result)
                else:
                    self.answer.set_exception(result)
            if self._socket is not None:
                with suppress(OSError):  # the socket is closed
                    # not SSLSocket's own method, which takes the state away from the thread that is reading
                    socket.shutdown(self._socket, SHUT_RDWR)

    def _run(self, url: str, domains: tuple[str, ...], max_bytes: int) -> None:
        try:
            # the scheme of every hop is checked, so the opener's handlers for files and FTP are out of reach
            opener = build_opener(_Redirects(domains), *_handlers(self._connected))
            with opener.open(_request(url), timeout=TIMEOUT_S) as response:
                data = bytearray()
                while len(data) <= max_bytes and (part := response.read1(1 << 16)):
                    data += part
            self.end(bytes(data))
        except BaseException as error:
            if isinstance(error, HTTPError):
                error.close()
            self.end(error)

    def _connected(self, connection: socket) -> None:
        with self._lock:
            self._socket = connection
            if self.answer.done():
                raise TimeoutError


_running: set[_Fetch] = set()
_has_ended = False


def _handlers(connected: Any) -> tuple[Any, Any]:
    """Handlers of urllib, which tell of each connection that they make."""

    def telling(kind: type) -> Any:
        class Connection(kind):
            def connect(self) -> None:
                super().connect()
                connected(self.sock)

        return Connection

    class HTTP(HTTPHandler):
        def http_open(self, req: Any) -> Any:
            return self.do_open(telling(HTTPConnection), req)

    class HTTPS(HTTPSHandler):
        def https_open(self, req: Any) -> Any:
            return self.do_open(telling(HTTPSConnection), req)

    return HTTP(), HTTPS()


class _Redirects(HTTPRedirectHandler):
    """Checks every hop."""

    def __init__(self, domains: tuple[str, ...]):
        self._domains = domains

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        with closing(fp):  # closes the answer that redirects; the next hop is not open yet
            _require_domain(newurl, self._domains)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_domain(url: str, domains: tuple[str, ...]) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not ("*" in domains or parts.hostname in domains):
        raise RequestError(
            f"the image {shown(url)} is on the net; LLM(allowed_media_domains=[...]) must name its "
            f"host {parts.hostname!r:.200}. Allowed: {list(domains)}."
        )


def _request(url: str) -> Request:
    """A request, with a URL's "user:password@" as a header for its host alone."""
    parts = urllib.parse.urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    request = Request(parts._replace(netloc=host).geturl(), headers={"User-Agent": "nanovllm"})
    if credentials:
        encoded = base64.b64encode(urllib.parse.unquote(credentials).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    return request


def _reason(error: Any) -> str:
    """Why a fetch has failed, without a word of the server or of the URL beyond a redirect's."""
    if isinstance(error, HTTPError):
        return f"HTTP Error {error.code}" + (f": {error.reason!s:.300}" if 300 <= error.code < 400 else "")
    if isinstance(error, URLError):  # a URLError wraps another error
        return _reason(error.reason)
    return str(error.strerror or error)[:200] if isinstance(error, OSError) else type(error).__name__
