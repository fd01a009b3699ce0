"""What scripts read of an engine's configuration."""

from types import SimpleNamespace
from typing import Any

from nanovllm.config import Config


class ModelConfig:
    """``model_config`` of an engine, read by scripts for the context length and the vocabulary."""

    def __init__(self, config: Config, keywords: dict[str, Any]):
        self.model = str(keywords.get("model") or config.model)
        self.tokenizer = str(keywords.get("tokenizer") or self.model)
        self.max_model_len = config.max_model_len
        self.max_seq_len_to_capture = min(8192, config.max_model_len)
        self.trust_remote_code = config.trust_remote_code
        self.seed = config.seed
        self.max_logprobs = config.max_logprobs
        self.logprobs_mode = config.logprobs_mode
        self.enforce_eager = config.enforce_eager
        self.runner_type = self.task = "generate"
        self.is_multimodal_model = self.is_encoder_decoder = False
        self.dtype: Any = None  # set when the runner is there
        self._config = config

    @property
    def hf_config(self) -> Any:
        """transformers' view of config.json."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._config.model_path, trust_remote_code=self.trust_remote_code)

    hf_text_config = hf_config

    def get_vocab_size(self) -> int:
        return self._config.model_config.vocab_size

    def get_hidden_size(self) -> int:
        return self._config.model_config.hidden_size


def vllm_config(config: Config, model_config: ModelConfig, num_blocks: int) -> SimpleNamespace:
    """The fields that are read most, of each part."""
    return SimpleNamespace(
        model_config=model_config,
        cache_config=SimpleNamespace(
            block_size=config.kvcache_block_size, num_gpu_blocks=num_blocks,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=config.tensor_parallel_size, pipeline_parallel_size=1, data_parallel_size=1,
            world_size=config.tensor_parallel_size,
        ),
        lora_config=None,
        speculative_config=None,
    )  # fmt: skip
