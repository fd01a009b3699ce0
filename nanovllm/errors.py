"""The tree of errors that nanovllm raises on purpose.

    NanoVLLMError
    ├── ConfigError       (ValueError)
    ├── CheckpointError   (ValueError)
    ├── RequestError      (ValueError)
    ├── OutOfMemoryError  (RuntimeError)
    ├── EngineError       (RuntimeError)
    └── WorkerError       (RuntimeError)

Mistakes of users raise one of these, with the value given, the values allowed and the remedy. ``assert`` is for bugs
of the library.
"""


class NanoVLLMError(Exception):
    """Base of every error that nanovllm raises on purpose."""


class ConfigError(NanoVLLMError, ValueError):
    """An option of ``LLM(...)`` cannot be honoured."""


class CheckpointError(NanoVLLMError, ValueError):
    """The model's files are missing, damaged or not supported."""


class RequestError(NanoVLLMError, ValueError):
    """A prompt or its sampling parameters cannot be served; nothing was queued."""


class OutOfMemoryError(NanoVLLMError, RuntimeError):
    """The device, or the host, has no room for the weights or for a KV cache."""


class EngineError(NanoVLLMError, RuntimeError):
    """The engine was used after ``exit()``, while another call was running, or in a forked process."""


class WorkerError(NanoVLLMError, RuntimeError):
    """A tensor-parallel worker failed.

    Attributes:
        rank: the rank that failed.
        worker_traceback: its traceback as text, or how its process ended.
    """

    def __init__(self, rank: int, worker_traceback: str):
        self.rank = rank
        self.worker_traceback = worker_traceback
        super().__init__(f"tensor-parallel rank {rank} failed; the engine was shut down.\n{worker_traceback}")

    def __reduce__(self):
        return type(self), (self.rank, self.worker_traceback)
