"""The errors that nanovllm raises on purpose.

Their texts give the value, the values allowed and the remedy. ``assert`` is for bugs of the library.
"""


MAX_TEXT = 2000  # characters of an error; a text may repeat a value of any length
HEAD, TAIL = 1400, 500


class NanoVLLMError(Exception):
    """Base of all errors below; each is also a ValueError or a RuntimeError. A long text loses its middle."""

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= MAX_TEXT:
            return text
        return f"{text[:HEAD]} [... {len(text) - HEAD - TAIL:,} characters ...] {text[-TAIL:]}"


class ConfigError(NanoVLLMError, ValueError):
    """An option of ``LLM(...)`` cannot be honoured."""


class CheckpointError(NanoVLLMError, ValueError):
    """The model's files are missing, damaged or not supported."""


class RequestError(NanoVLLMError, ValueError):
    """A prompt or its sampling parameters cannot be served; nothing was queued."""


def as_request_error(error: BaseException, which: str = "") -> RequestError:
    """Return the error of one request, whatever its type, as RequestError. ``which``: begins its text.

    Interrupts, and errors of the engine behind the request, are raised again: they are not of this request alone.
    """
    if isinstance(error, RequestError):
        return RequestError(f"{which}{error}") if which else error
    if isinstance(error, (NanoVLLMError, KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error
    refused = RequestError(  # of any other class: a panic of tokenizers is not even an Exception
        f"{which}this request fails with {type(error).__name__}: {error!s:.500}. Check the values of its prompt, "
        "parameters and chat template."
    )
    refused.__cause__ = error
    return refused


class OutOfMemoryError(NanoVLLMError, RuntimeError):
    """The device, or the host, has no room for the weights or for a KV cache."""


class EngineError(NanoVLLMError, RuntimeError):
    """The engine was used after ``exit()`` or in a forked process, or ``generate`` while it was busy."""


class WorkerError(NanoVLLMError, RuntimeError):
    """A tensor-parallel worker failed.

    Attributes:
        rank: the rank that failed.
        worker_traceback: its traceback as text, or how its process ended.
    """

    def __init__(self, rank: int, worker_traceback: str):
        super().__init__(rank, worker_traceback)  # pickled as these arguments
        self.rank, self.worker_traceback = rank, worker_traceback

    def __str__(self) -> str:
        return f"tensor-parallel rank {self.rank} failed; the engine was shut down.\n{self.worker_traceback}"
