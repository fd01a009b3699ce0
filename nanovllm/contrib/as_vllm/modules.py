"""The module tree that scripts written for vLLM import, put in place of vLLM's.

``install`` makes ``vllm`` and everything below it, and a finder that answers before any installed vLLM could. Each
module has all the names, because vLLM moves them from version to version. A name that none has is an AttributeError, in
an import an ImportError; a module that is not in the table is a ModuleNotFoundError.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from nanovllm.errors import EngineError

VLLM_VERSION = "0.33.0"  # whose interface this is
PATH = Path(__file__).resolve().parent / "path"  # holds a package ``vllm`` for child processes, and its version

# below vllm; the packages that these are in are there too
LEAVES = """version envs sampling_params pooling_params beam_search outputs logprobs sequence inputs.data inputs.llm
    tokenizers transformers_utils.tokenizer logger config multimodal platforms usage.usage_lib lora.request
    prompt_adapter.request entrypoints.llm entrypoints.chat_utils engine.arg_utils engine.llm_engine
    engine.async_llm_engine v1.engine.llm_engine v1.engine.async_llm v1.sample.logits_processor.interface
    v1.sample.logits_processor.builtin v1.worker.gpu_worker
    v1.metrics.reader v1.metrics.stats worker.worker worker.worker_base utils.argparse_utils utils.network_utils
    utils.counter utils.torch_utils distributed.parallel_state distributed.utils
    distributed.device_communicators.pynccl model_executor.utils model_executor.models.registry
    model_executor.parallel_utils.parallel_state"""
PATHS = [("vllm", *leaf.split(".")) for leaf in LEAVES.split()]
MODULES = {".".join(path[:n]) for path in PATHS for n in range(1, len(path) + 1)}

# module -> the names that it has, imported when they are first asked for; "new=old" gives another name
SOURCES = {
    ".llm": "LLM LLMEngine",
    ".options": "EngineArgs FlexibleArgumentParser",
    ".sampling": "SamplingParams RequestOutputKind FlatLogprobs StructuredOutputsParams "
        "GuidedDecodingParams=StructuredOutputsParams",
    ".worker": "Worker=DriverWorker",
    ".processors": "LogitsProcessor AdapterLogitsProcessor RequestLogitsProcessor BatchUpdate MoveDirectionality "
        "process_dict_updates",
    ".helpers": "LoRARequest get_tokenizer cached_get_tokenizer=get_tokenizer get_cached_tokenizer=get_tokenizer "
        "cached_tokenizer_from_config=get_tokenizer resolve_hf_chat_template random_uuid get_open_port set_random_seed "
        "resolve_chat_template=resolve_hf_chat_template seed_everything=set_random_seed cleanup_dist_env_and_memory "
        "current_platform destroy_model_parallel=cleanup_dist_env_and_memory "
        "destroy_distributed_environment=cleanup_dist_env_and_memory",
    ".pooling": "PoolingParams PoolerConfig PoolingOutput",
    "nanovllm.sampling_params": "RepetitionDetectionParams",
    "nanovllm.outputs": "RequestOutput CompletionOutput Logprob PoolingRequestOutput EmbeddingOutput "
        "ClassificationOutput ScoringOutput EmbeddingRequestOutput=PoolingRequestOutput "
        "ClassificationRequestOutput=PoolingRequestOutput ScoringRequestOutput=PoolingRequestOutput",
    "nanovllm.contrib.beam_search": "BeamSearchParams BeamSearchOutput BeamSearchSequence",
    "builtins": "TextPrompt=dict TokensPrompt=dict TokenInputs=dict",
    "logging": "init_logger=getLogger",
}  # fmt: skip
SOURCE_OF = {new: (source, old or new) for source, names in SOURCES.items()
             for new, _, old in (name.partition("=") for name in names.split())}  # fmt: skip
HINTS = """CompilationConfig StructuredOutputsConfig CUDAGraphMode CompilationMode UsageContext PassConfig
    ProfilerConfig PromptType SingletonPrompt DataPrompt AnyTokenizer TokenizerLike ChatCompletionMessageParam
    PromptLogprobs SampleLogprobs LogprobsOnePosition"""  # on speed; and types, for annotations
UNSUPPORTED = """AsyncLLMEngine AsyncEngineArgs AsyncLLM EmbedsPrompt KVTransferConfig KVEventsConfig
    SpeculativeConfig WeightTransferConfig VllmConfig ModelConfig ModelRegistry PyNcclCommunicator StatelessProcessGroup
    WorkerWrapperBase MultiModalDataDict ImagePrompt Counter Gauge Histogram Vector Metric
    RequestMetrics RequestStateStats GroupCoordinator PromptAdapterRequest SamplingType get_ip
    get_distributed_init_method get_tensor_model_parallel_rank load_chat_template"""
NAMES = [*SOURCE_OF, *HINTS.split(), *UNSUPPORTED.split()]
ENVIRONMENT = {"VLLM_USE_V1": True, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ENABLE_V1_MULTIPROCESSING": False}


class Unsupported(type):
    """A class that may be imported, derived from and asked about by isinstance, but not made; nor has it methods."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        name = cls.__mro__[-2].__name__
        hint = " Use LLM, or EngineThread of nanovllm.integrations in an asyncio loop." if "Async" in name else ""
        raise EngineError(f"vLLM's {name} is not supported by nanovllm, which stands in for vLLM here.{hint}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return cls


class Hint(type):
    """A class of any fields, with any name as in an enumeration, such as ``CompilationConfig`` and ``UsageContext``."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


@cache
def resolve(name: str) -> Any:
    """The object that stands for vLLM's ``name``; the same under all its paths."""
    if name in SOURCE_OF:
        source, own_name = SOURCE_OF[name]
        return getattr(importlib.import_module(source, __package__), own_name)
    return Hint(name, (SimpleNamespace,), {}) if name in HINTS.split() else Unsupported(name, (), {})


class StandIn(ModuleType):
    """A module whose names are resolved when they are first asked for."""

    __version__ = VLLM_VERSION
    __version_tuple__ = tuple(map(int, VLLM_VERSION.split(".")))
    __all__ = NAMES
    __file__ = str(PATH / "vllm" / "__init__.py")

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, origin=self.__file__, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if self.__name__ == "vllm.envs" and name.startswith("VLLM_"):
            return os.environ.get(name, ENVIRONMENT.get(name))
        if (submodule := sys.modules.get(f"{self.__name__}.{name}")) is not None:
            return submodule
        if name not in NAMES:
            raise AttributeError(f"nanovllm's stand-in for the module {self.__name__!r} has no {name!r}")
        return resolve(name)


class Finder:
    """Keeps Python from looking for modules below ``vllm`` elsewhere: ``install`` has made all there are."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.startswith("vllm."):
            raise ModuleNotFoundError(
                f"nanovllm, which stands in for vLLM here, has no module {fullname!r}", name=fullname
            )


def install() -> None:
    """Put nanovllm in vLLM's place, in this process and in its children."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    for name in MODULES:
        sys.modules[name] = StandIn(name)
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
    paths = [str(PATH), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if str(PATH) not in sys.path:
        sys.path.insert(1, str(PATH))  # a process that multiprocessing spawns gets this list
