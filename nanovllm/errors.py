"""The errors that nanovllm raises on purpose.

Their texts give the value, the values allowed and the remedy. ``assert`` is for bugs of the library.
"""

import re

MAX_TEXT = 2000  # longest text of an error, in characters; it may repeat a value of any length
HEAD, TAIL = 1400, 500  # characters kept of a longer one: the value's name, and the remedy
# A URL in any text: the scheme; credentials, or a password that was cut before its "@"; host and path; query and
# fragment, up to a white space and the marks that close a quotation before it.
URL = re.compile(
    r"""([a-z][a-z0-9+.-]{1,19}:/+)(?:[^\s'"/?\#]*@|[^\s'"/@:\[]*:(?!\d{0,5}(?!\w))(?:[^\s'"]*@|[^\s'"/]*))?"""
    r"""([^\s'"?\#]*)(?:[?\#]\S*?(?=['"]?[.,;:)\]}]*(?:\s|$)))?""", re.I,
)  # fmt: skip


def without_secrets(text: str) -> str:
    """A text whose URLs have neither credentials nor queries."""
    return URL.sub(r"\1\2", text)


class NanoVLLMError(Exception):
    """Base of all errors below; each is also a ValueError or a RuntimeError.

    Its text quotes URLs ``without_secrets``. A long text loses its middle.
    """

    def __init__(self, *args: object):
        super().__init__(*(_fitted(arg) if isinstance(arg, str) else arg for arg in args))


def _fitted(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return without_secrets(text)
    # Parts are searched, because the search takes time quadratic in the length; a URL that is cut in two is left out.
    head, tail = text[:HEAD], text[-TAIL:].partition(" ")[2]
    num_cut = len(text) - len(head) - len(tail)
    return f"{without_secrets(head)} [... {num_cut:,} characters ...] {without_secrets(tail)}"


class ConfigError(NanoVLLMError, ValueError):
    """An option of ``LLM(...)`` cannot be honoured."""


class CheckpointError(NanoVLLMError, ValueError):
    """The model's files are missing, damaged or not supported."""


class RequestError(NanoVLLMError, ValueError):
    """A prompt or its sampling parameters cannot be served; nothing was queued."""


def as_request_error(error: BaseException, which: str = "") -> RequestError:
    """Return the error of one request, whatever its type, as RequestError. ``which``: begins its text.

    Interrupts, and errors of the engine itself, are raised again: they concern more than this request.
    """
    if isinstance(error, RequestError):
        return RequestError(f"{which}{error}") if which else error
    if isinstance(error, (NanoVLLMError, KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error
    refused = RequestError(  # any other class, even a panic of tokenizers, which is no Exception
        f"{which}this request fails with {type(error).__name__}: {error!s:.500}. Check the values of its prompt, "
        "parameters and chat template."
    )
    refused.__cause__ = error
    return refused


class OutOfMemoryError(NanoVLLMError, RuntimeError):
    """The device, or the host, has no room for the weights or for a KV cache."""


class EngineError(NanoVLLMError, RuntimeError):
    """The engine cannot be used: it has ended, sleeps, or belongs to another process or thread.

    Or a step failed, which dropped its requests.
    """


class WorkerError(NanoVLLMError, RuntimeError):
    """A tensor-parallel worker failed.

    Attributes:
        rank: the rank that failed.
        worker_traceback: its traceback as text, or how its process ended.
    """

    def __init__(self, rank: int, worker_traceback: str):
        # pickled as these arguments; a traceback is kept whole
        RuntimeError.__init__(self, rank, worker_traceback)
        self.rank, self.worker_traceback = rank, worker_traceback

    def __str__(self) -> str:
        return f"tensor-parallel rank {self.rank} failed; the engine was shut down.\n{self.worker_traceback}"
