"""Imports as they stand at the top of the field's modules, most of them unused there."""
# ruff: noqa: F401

import sys
from importlib import import_module

import vllm
import vllm.envs as envs
from vllm import LLM, AsyncEngineArgs, EngineArgs, ModelRegistry, PoolingParams, RequestOutput, initialize_ray_cluster
from vllm.assets.image import ImageAsset
from vllm.config import AttentionConfig, CompilationConfig, KVTransferConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.speculative import SpeculativeConfig
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.parallel_state import destroy_model_parallel, get_tensor_model_parallel_rank
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.llm import LLM as from_entrypoints
from vllm.inputs import PromptType, TextPrompt, TokensPrompt
from vllm.logger import init_logger
from vllm.lora.models import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.deepseek_ocr import NGramPerReqLogitsProcessor
from vllm.model_executor.utils import set_random_seed
from vllm.multimodal.image import ImagePrompt
from vllm.multimodal.utils import fetch_image
from vllm.outputs import CompletionOutput, EmbeddingRequestOutput
from vllm.reasoning import ReasoningParser
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams, RequestOutputKind, StructuredOutputsParams
from vllm.sequence import Logprob
from vllm.tokenizers import TokenizerLike
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.tokenizer import AnyTokenizer, get_tokenizer
from vllm.usage.usage_lib import UsageContext
from vllm.utils import FlexibleArgumentParser, get_ip, get_open_port, random_uuid
from vllm.utils.system_utils import update_environment_variables
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

assert from_entrypoints is LLM and vllm.RequestOutput is RequestOutput and vllm.inputs.data.TokensPrompt is TokensPrompt
assert envs.VLLM_USE_V1 and envs.VLLM_NO_SUCH is None and len(random_uuid()) == 32
assert AsyncLLM is AsyncLLMEngine and issubclass(AsyncEngineArgs, EngineArgs)
assert tuple(map(int, vllm.__version__.split(".")[:2])) >= (0, 33) and AttentionConfig(backend="FLASH_ATTN")
assert not isinstance(vllm, PoolingParams) and issubclass(Worker, object)
assert UsageContext.LLM_CLASS != UsageContext.API_SERVER and CompilationConfig(level=3).level == 3
for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
    module = import_module(name)
    assert all(hasattr(module, attribute) for attribute in dir(module)), name
