"""The module tree that scripts written for vLLM import, put in place of vLLM's.

``install`` adds a finder that answers for ``vllm`` and everything below it before any installed vLLM could. A name that
is not in the table is an AttributeError, in an import an ImportError; a module that is not is a ModuleNotFoundError.
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from nanovllm.as_vllm import VLLM_VERSION

PATH = Path(__file__).resolve().parent / "path"  # holds a package ``vllm``, for child processes

# name -> module of nanovllm that has it, imported when it is first asked for
SOURCES = {
    "LLM FlatLogprobs": "as_vllm.llm",
    "LLMEngine": "as_vllm.engine",
    "EngineArgs FlexibleArgumentParser": "as_vllm.options",
    "SamplingParams RequestOutputKind SamplingType StructuredOutputsParams GuidedDecodingParams": "as_vllm.sampling",
    "RequestOutput CompletionOutput Logprob": "outputs",
    "BeamSearchParams BeamSearchOutput BeamSearchSequence": "engine.beam_search",
    "Worker": "as_vllm.workers",
    "TextPrompt TokensPrompt LoRARequest get_tokenizer cached_get_tokenizer resolve_hf_chat_template "
    "load_chat_template random_uuid get_open_port get_ip get_distributed_init_method set_random_seed init_logger "
    "ModelRegistry cleanup_dist_env_and_memory destroy_model_parallel destroy_distributed_environment "
    "get_tensor_model_parallel_rank current_platform": "as_vllm.helpers",
}  # fmt: skip
SOURCE_OF = {name: source for names, source in SOURCES.items() for name in names.split()}

# names that are another's, or plain values
ALIASES = {
    "TokenInputs": "TokensPrompt",
    "seed_everything": "set_random_seed",
    "get_cached_tokenizer": "cached_get_tokenizer",
    "cached_tokenizer_from_config": "cached_get_tokenizer",
    "resolve_chat_template": "resolve_hf_chat_template",
}
ANY = ("PromptType", "SingletonPrompt", "AnyTokenizer", "TokenizerLike", "ChatCompletionMessageParam", "PromptLogprobs",
       "SampleLogprobs", "LogprobsOnePosition", "DataPrompt")  # fmt: skip
SETTINGS = ("CompilationConfig", "StructuredOutputsConfig", "CUDAGraphMode", "CompilationMode", "UsageContext",
            "PassConfig", "ProfilerConfig")  # fmt: skip
UNSUPPORTED = (
    "AsyncLLMEngine", "AsyncEngineArgs", "AsyncLLM", "PoolingParams", "PoolerConfig", "PoolingRequestOutput",
    "PoolingOutput", "EmbeddingRequestOutput", "EmbeddingOutput", "ClassificationRequestOutput",
    "ClassificationOutput", "ScoringRequestOutput", "ScoringOutput", "EmbedsPrompt", "KVTransferConfig",
    "KVEventsConfig", "SpeculativeConfig", "WeightTransferConfig", "VllmConfig", "ModelConfig",
    "LogitsProcessor", "BatchUpdate", "MoveDirectionality", "AdapterLogitsProcessor", "RequestLogitsProcessor",
    "PyNcclCommunicator", "StatelessProcessGroup", "WorkerWrapperBase", "MultiModalDataDict", "ImagePrompt",
    "RepetitionDetectionParams", "Counter", "Gauge", "Histogram", "Vector", "Metric", "RequestMetrics",
    "RequestStateStats", "GroupCoordinator", "PromptAdapterRequest",
)  # fmt: skip

PARALLEL = "destroy_model_parallel destroy_distributed_environment cleanup_dist_env_and_memory " \
           "get_tensor_model_parallel_rank"  # fmt: skip
INPUTS = "TextPrompt TokensPrompt TokenInputs PromptType SingletonPrompt DataPrompt EmbedsPrompt"
OUTPUTS = "RequestOutput CompletionOutput PoolingRequestOutput PoolingOutput EmbeddingRequestOutput EmbeddingOutput " \
          "ClassificationRequestOutput ClassificationOutput ScoringRequestOutput ScoringOutput"  # fmt: skip
BEAMS = "BeamSearchOutput BeamSearchSequence"
SAMPLING = "SamplingParams BeamSearchParams RequestOutputKind SamplingType StructuredOutputsParams " \
           "GuidedDecodingParams RepetitionDetectionParams"  # fmt: skip
PROCESSORS = "LogitsProcessor BatchUpdate MoveDirectionality AdapterLogitsProcessor RequestLogitsProcessor"
UTILS = "random_uuid get_open_port get_ip get_distributed_init_method FlexibleArgumentParser Counter"
LOGPROBS = "Logprob FlatLogprobs PromptLogprobs SampleLogprobs LogprobsOnePosition"
TOKENIZERS = "get_tokenizer cached_get_tokenizer get_cached_tokenizer AnyTokenizer TokenizerLike"
METRICS = "Counter Gauge Histogram Vector Metric"

MODULES = {  # module below vllm -> its names
    "": f"LLM LLMEngine AsyncLLMEngine AsyncEngineArgs EngineArgs SamplingParams PoolingParams ModelRegistry "
        f"{INPUTS} {OUTPUTS} version",
    "version": "",
    "envs": "",
    "sampling_params": SAMPLING,
    "pooling_params": "PoolingParams",
    "beam_search": BEAMS,
    "entrypoints": "",
    "entrypoints.llm": "LLM RequestOutput SamplingParams BeamSearchParams StructuredOutputsParams",
    "entrypoints.chat_utils": "resolve_hf_chat_template resolve_chat_template load_chat_template "
                              "ChatCompletionMessageParam",
    "engine": "",
    "engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "engine.llm_engine": "LLMEngine",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "v1": "",
    "v1.engine": "",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.sample": "",
    "v1.sample.logits_processor": PROCESSORS,
    "v1.worker": "",
    "v1.worker.gpu_worker": "Worker",
    "v1.metrics": "",
    "v1.metrics.reader": METRICS,
    "v1.metrics.stats": "RequestStateStats",
    "worker": "",
    "worker.worker": "Worker",
    "worker.worker_base": "WorkerWrapperBase",
    "outputs": OUTPUTS,
    "logprobs": LOGPROBS,
    "sequence": f"{LOGPROBS} RequestMetrics",
    "inputs": INPUTS,
    "inputs.data": INPUTS,
    "inputs.llm": INPUTS,
    "prompt_adapter": "",
    "prompt_adapter.request": "PromptAdapterRequest",
    "lora": "",
    "lora.request": "LoRARequest",
    "tokenizers": TOKENIZERS,
    "transformers_utils": "",
    "transformers_utils.tokenizer": TOKENIZERS,
    "utils": f"{UTILS} set_random_seed",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "utils.network_utils": "get_open_port get_ip get_distributed_init_method",
    "utils.counter": "Counter",
    "utils.torch_utils": "set_random_seed",
    "distributed": f"{PARALLEL} StatelessProcessGroup",
    "distributed.parallel_state": f"{PARALLEL} GroupCoordinator",
    "distributed.utils": "StatelessProcessGroup",
    "distributed.device_communicators": "",
    "distributed.device_communicators.pynccl": "PyNcclCommunicator",
    "model_executor": "set_random_seed",
    "model_executor.utils": "set_random_seed",
    "model_executor.models": "ModelRegistry",
    "model_executor.models.registry": "ModelRegistry",
    "model_executor.parallel_utils": "",
    "model_executor.parallel_utils.parallel_state": PARALLEL,
    "platforms": "current_platform",
    "logger": "init_logger",
    "config": "CompilationConfig StructuredOutputsConfig CUDAGraphMode CompilationMode PassConfig KVTransferConfig "
              "KVEventsConfig SpeculativeConfig ProfilerConfig WeightTransferConfig VllmConfig ModelConfig "
              "PoolerConfig",
    "usage": "",
    "usage.usage_lib": "UsageContext",
    "multimodal": "MultiModalDataDict",
}  # fmt: skip
VALUES: dict[tuple[str, str], Any] = {
    ("", "__version__"): VLLM_VERSION,
    ("", "__version_tuple__"): tuple(map(int, VLLM_VERSION.split("."))),
    ("version", "__version__"): VLLM_VERSION,
}


@cache
def resolve(name: str) -> Any:
    """The object that stands for vLLM's ``name``; the same under all its paths."""
    name = ALIASES.get(name, name)
    if name in SOURCE_OF:
        return getattr(importlib.import_module(f"nanovllm.{SOURCE_OF[name]}"), name)
    from nanovllm.as_vllm import helpers

    if name in SETTINGS:
        return helpers.Names(name, (helpers.Settings,), {})
    return Any if name in ANY else helpers.unsupported(name)


class StandIn(ModuleType):
    """A module whose names are resolved when they are first asked for."""

    def __getattr__(self, name: str) -> Any:
        below = self.__name__.partition(".")[2]
        if name.startswith("__") and (below, name) not in VALUES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if below == "envs":
            from nanovllm.as_vllm.helpers import environment_variable

            return environment_variable(name)
        if (below, name) in VALUES:
            value = VALUES[below, name]
        elif f"{below}.{name}".strip(".") in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        elif name in MODULES[below].split():
            value = resolve(name)
        else:
            raise AttributeError(f"nanovllm's stand-in for the module {self.__name__!r} has no {name!r}")
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES[self.__name__.partition(".")[2]].split()})

    @property
    def __all__(self) -> list[str]:
        return MODULES[self.__name__.partition(".")[2]].split()


class Distribution(importlib.metadata.Distribution):
    """For ``importlib.metadata.version("vllm")``."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return PATH / path


class Finder(MetaPathFinder, Loader):
    """Answers for ``vllm`` and all modules below it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        root, _, below = fullname.partition(".")
        if root != "vllm":
            return None
        if below not in MODULES:
            raise ModuleNotFoundError(
                f"nanovllm, which stands in for vLLM here, has no module {fullname!r}", name=fullname
            )
        return ModuleSpec(fullname, self, origin=str(PATH / "vllm" / "__init__.py"), is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(PATH / "vllm" / "__init__.py")

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        return [Distribution()] if getattr(context, "name", None) == "vllm" else []


def install() -> None:
    """Put nanovllm in vLLM's place, in this process and in those it will start."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    paths = [str(PATH), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if str(PATH) not in sys.path:
        sys.path.insert(1, str(PATH))  # a process that multiprocessing spawns gets this list
    importlib.import_module("vllm")
