"""The tree of errors, and the public names."""

import pickle

import pytest

import nanovllm
from nanovllm import (
    CheckpointError,
    ConfigError,
    EngineError,
    NanoVLLMError,
    OutOfMemoryError,
    RequestError,
    WorkerError,
)


def test_the_tree():
    """``except ValueError`` or ``RuntimeError``, as for other libraries, catches these too."""
    for error in (ConfigError, CheckpointError, RequestError):
        assert issubclass(error, NanoVLLMError) and issubclass(error, ValueError)
    for error in (OutOfMemoryError, EngineError, WorkerError):
        assert issubclass(error, NanoVLLMError) and issubclass(error, RuntimeError)


def test_public_names():
    assert all(hasattr(nanovllm, name) for name in nanovllm.__all__)
    assert set(nanovllm.__all__) <= set(dir(nanovllm))  # for completion in an interactive session
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = nanovllm.Engine


def test_worker_error_crosses_processes():
    error = pickle.loads(pickle.dumps(WorkerError(2, "Traceback: boom")))
    assert (error.rank, error.worker_traceback) == (2, "Traceback: boom")
    assert str(error) == "tensor-parallel rank 2 failed; the engine was shut down.\nTraceback: boom"
