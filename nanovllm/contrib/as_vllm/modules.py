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

VLLM_VERSION = "0.33.0"  # version of the interface offered here
PATH = Path(__file__).resolve().parent / "path"  # holds a package ``vllm`` for child processes, and its version
ROOT = str(Path(__file__).resolve().parents[3])  # holds nanovllm, which need not be installed

# below vllm; the packages that these are in are there too
LEAVES = """version envs sampling_params pooling_params beam_search outputs logprobs sequence inputs.data inputs.llm
    tokenizers transformers_utils.tokenizer logger config multimodal platforms usage.usage_lib lora.request
    prompt_adapter.request entrypoints.llm entrypoints.chat_utils engine.arg_utils engine.llm_engine
    engine.async_llm_engine engine.protocol v1.engine.llm_engine v1.engine.async_llm
    v1.sample.logits_processor.interface v1.sample.logits_processor.builtin v1.worker.gpu_worker
    v1.worker.gpu_model_runner v1.executor.abstract v1.executor.ray_utils v1.metrics.reader v1.metrics.stats
    v1.metrics.loggers worker.worker worker.worker_base utils.argparse_utils utils.network_utils utils.system_utils
    utils.counter utils.torch_utils distributed.parallel_state distributed.utils distributed.weight_transfer.base
    distributed.weight_transfer.nccl_engine distributed.device_communicators.pynccl model_executor.utils
    model_executor.models.registry model_executor.models.deepseek_ocr model_executor.model_loader.weight_utils
    model_executor.model_loader.utils model_executor.parallel_utils.parallel_state config.attention config.cache
    config.compilation config.lora config.model config.parallel config.scheduler config.speculative
    config.structured_outputs config.vllm config.weight_transfer multimodal.utils multimodal.image multimodal.inputs
    assets.image assets.audio assets.video assets.base reasoning renderers transformers_utils.config lora.lora_model
    lora.models lora.peft_helper lora.utils lora.worker_manager"""
PATHS = [("vllm", *leaf.split(".")) for leaf in LEAVES.split()]
MODULES = {".".join(path[:n]) for path in PATHS for n in range(1, len(path) + 1)}

# module -> the names that it has, imported when they are first asked for; "new=old" gives another name
SOURCES = {
    ".llm": "LLM LLMEngine",
    ".async_llm": "AsyncLLM AsyncLLMEngine=AsyncLLM",
    ".options": "EngineArgs AsyncEngineArgs=EngineArgs FlexibleArgumentParser",
    ".metrics": "Metric Counter Gauge Histogram Vector",
    ".sampling": "SamplingParams RequestOutputKind FlatLogprobs StructuredOutputsParams "
        "GuidedDecodingParams=StructuredOutputsParams",
    ".worker": "Worker=DriverWorker",
    ".processors": "LogitsProcessor AdapterLogitsProcessor RequestLogitsProcessor BatchUpdate MoveDirectionality "
        "process_dict_updates",
    ".helpers": "LoRARequest get_tokenizer cached_get_tokenizer=get_tokenizer get_cached_tokenizer=get_tokenizer "
        "cached_tokenizer_from_config=get_tokenizer resolve_hf_chat_template random_uuid get_open_port set_random_seed "
        "resolve_chat_template=resolve_hf_chat_template seed_everything=set_random_seed cleanup_dist_env_and_memory "
        "current_platform load_chat_template convert_image_mode rescale_image_size "
        "destroy_model_parallel=cleanup_dist_env_and_memory "
        "destroy_distributed_environment=cleanup_dist_env_and_memory",
    ".pooling": "PoolingParams PoolerConfig PoolingOutput",
    "nanovllm.sampling_params": "RepetitionDetectionParams",
    "nanovllm.outputs": "RequestOutput CompletionOutput Logprob PoolingRequestOutput EmbeddingOutput "
        "ClassificationOutput ScoringOutput EmbeddingRequestOutput=PoolingRequestOutput "
        "ClassificationRequestOutput=PoolingRequestOutput ScoringRequestOutput=PoolingRequestOutput",
    "nanovllm.contrib.beam_search": "BeamSearchParams BeamSearchOutput BeamSearchSequence",
    "builtins": "TextPrompt=dict TokensPrompt=dict TokenInputs=dict MultiModalDataDict=dict",
    "transformers.image_utils": "fetch_image=load_image",
    "logging": "init_logger=getLogger",
}  # fmt: skip
SOURCE_OF = {new: (source, old or new) for source, names in SOURCES.items()
             for new, _, old in (name.partition("=") for name in names.split())}  # fmt: skip
HINTS = """CompilationConfig StructuredOutputsConfig CUDAGraphMode CompilationMode UsageContext PassConfig
    AttentionConfig KernelConfig MambaConfig LoggingConfig ObservabilityConfig ProfilerConfig PromptType
    SingletonPrompt DataPrompt AnyTokenizer TokenizerLike ChatCompletionMessageParam
    PromptLogprobs SampleLogprobs LogprobsOnePosition ReasoningConfig"""  # on speed; and types, for annotations
UNSUPPORTED = """EngineClient EmbedsPrompt KVTransferConfig KVEventsConfig SpeculativeConfig WeightTransferConfig
    VllmConfig ModelConfig CacheConfig LoRAConfig ParallelConfig SchedulerConfig ModelRegistry PyNcclCommunicator
    StatelessProcessGroup WorkerWrapperBase GPUModelRunner Executor initialize_ray_cluster StatLoggerBase
    ImagePrompt ImageAsset AudioAsset VideoAsset fetch_video fetch_audio
    encode_image_base64 encode_image_url encode_audio_base64 encode_video_base64
    RequestMetrics RequestStateStats GroupCoordinator PromptAdapterRequest SamplingType get_ip
    get_distributed_init_method get_tensor_model_parallel_rank get_config get_model get_model_loader
    default_weight_loader WeightTransferInitRequest WeightTransferUpdateRequest NCCLWeightTransferEngine
    ReasoningParser ReasoningParserManager NGramPerReqLogitsProcessor LoRAModel PEFTHelper LRUCacheWorkerLoRAManager
    WorkerLoRAManager get_adapter_absolute_path kill_process_tree update_environment_variables set_ulimit"""
REMEDIES = {
    "ModelRegistry": " The checkpoint's config.json names an architecture: leave the registration out for those of "
        "nanovllm's guide (\"Models\"); others are not served.",
    "SpeculativeConfig": " Give LLM(speculative_config={'method': 'ngram'}), a dictionary.",
}  # fmt: skip
NAMES = [*SOURCE_OF, *HINTS.split(), *UNSUPPORTED.split()]
ENVIRONMENT = {"VLLM_USE_V1": True, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ENABLE_V1_MULTIPROCESSING": False}


class Unsupported(type):
    """A class that may be imported, derived from and asked about by isinstance, but not made; nor has it methods."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        name = cls.__mro__[-2].__name__
        hint = REMEDIES.get(name, "")
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
        sys.path.insert(1, str(PATH))  # processes that multiprocessing or an engine starts get this list
    if ROOT not in sys.path:
        sys.path.append(ROOT)
