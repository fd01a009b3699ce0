"""nanovllm: offline LLM inference whose spine can be read in an afternoon.

Owns the public names; everything else may move. The import is light: torch, transformers, triton and flash-attn are
loaded by the first use of ``LLM``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nanovllm.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    NanoVLLMError,
    OutOfMemoryError,
    RequestError,
    WorkerError,
)
from nanovllm.outputs import CompletionOutput, Logprob, PoolingRequestOutput, RequestOutput, Score
from nanovllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from nanovllm.contrib.beam_search import BeamSearchParams
    from nanovllm.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM", "BeamSearchParams", "CheckpointError", "CompletionOutput", "ConfigError", "EngineError", "Logprob",
    "NanoVLLMError", "OutOfMemoryError", "PoolingRequestOutput", "RepetitionDetectionParams", "RequestError",
    "RequestOutput", "SamplingParams", "Score", "StructuredOutputsParams", "WorkerError", "__version__",
]  # fmt: skip


def __getattr__(name: str):
    if name == "LLM":
        from nanovllm.llm import LLM

        return LLM
    if name == "BeamSearchParams":
        from nanovllm.contrib.beam_search import BeamSearchParams

        return BeamSearchParams
    if name == "config":  # ``nanovllm.config.Config`` lists the options of ``LLM``
        return import_module("nanovllm.config")
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
