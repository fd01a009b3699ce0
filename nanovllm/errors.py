"""The tree of errors that nanovllm raises on purpose.

    NanoVLLMError
    ├── ConfigError       (ValueError)    an option of LLM(...) cannot be honoured
    ├── CheckpointError   (ValueError)    the model's files are missing, damaged or not supported
    ├── RequestError      (ValueError)    a prompt or its sampling parameters cannot be served
    ├── OutOfMemoryError  (RuntimeError)  the device has no room for the weights or a KV cache
    ├── EngineError       (RuntimeError)  the engine was used after exit(), while it was busy, or in a fork
    └── WorkerError       (RuntimeError)  a tensor-parallel worker failed

User mistakes raise one of these and say what was given, what is allowed and what to change.
``assert`` is kept for bugs of the library itself.
"""


class NanoVLLMError(Exception):
    """Base of every error that nanovllm raises on purpose."""


class ConfigError(NanoVLLMError, ValueError):
    """An option of ``LLM(...)`` cannot be honoured."""


class CheckpointError(NanoVLLMError, ValueError):
    """The model's files are missing, damaged or of a kind that is not supported."""


class RequestError(NanoVLLMError, ValueError):
    """A prompt or its sampling parameters cannot be served; nothing was queued."""


class OutOfMemoryError(NanoVLLMError, RuntimeError):
    """The device, or the host, has no room for the weights or for a KV cache."""


class EngineError(NanoVLLMError, RuntimeError):
    """The engine was used after ``exit()``, re-entered while a call was running, or used in a forked process."""


class WorkerError(NanoVLLMError, RuntimeError):
    """A tensor-parallel worker failed.

    Attributes:
        rank: the rank that failed.
        worker_traceback: its traceback as text, or what is known of its end.
    """

    def __init__(self, rank: int, worker_traceback: str):
        self.rank = rank
        self.worker_traceback = worker_traceback
        super().__init__(f"tensor-parallel rank {rank} failed; the engine was shut down.\n{worker_traceback}")

    def __reduce__(self):
        return type(self), (self.rank, self.worker_traceback)
