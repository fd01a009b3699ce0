"""Imports as they stand at the top of the field's modules, most of them unused there."""
# ruff: noqa: F401

import sys
from importlib import import_module

import vllm
import vllm.envs as envs
from vllm import LLM, AsyncEngineArgs, ModelRegistry, PoolingParams, RequestOutput
from vllm.config import CompilationConfig, KVTransferConfig
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.parallel_state import destroy_model_parallel, get_tensor_model_parallel_rank
from vllm.distributed.utils import StatelessProcessGroup
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.entrypoints.llm import LLM as from_entrypoints
from vllm.inputs import PromptType, TextPrompt, TokensPrompt
from vllm.logger import init_logger
from vllm.model_executor.utils import set_random_seed
from vllm.outputs import CompletionOutput, EmbeddingRequestOutput
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams, RequestOutputKind, StructuredOutputsParams
from vllm.sequence import Logprob
from vllm.tokenizers import TokenizerLike
from vllm.transformers_utils.tokenizer import AnyTokenizer, get_tokenizer
from vllm.usage.usage_lib import UsageContext
from vllm.utils import FlexibleArgumentParser, get_ip, get_open_port, random_uuid
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker.gpu_worker import Worker

assert from_entrypoints is LLM and vllm.RequestOutput is RequestOutput and vllm.inputs.data.TokensPrompt is TokensPrompt
assert envs.VLLM_USE_V1 and envs.VLLM_NO_SUCH is None and len(random_uuid()) == 32
assert not isinstance(vllm, PoolingParams) and issubclass(Worker, object)
assert UsageContext.LLM_CLASS != UsageContext.API_SERVER and CompilationConfig(level=3).level == 3
for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
    module = import_module(name)
    assert all(hasattr(module, attribute) for attribute in dir(module)), name
