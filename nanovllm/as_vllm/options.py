"""vLLM's engine keywords: passed on to nanovllm, or accepted at the values that change nothing.

One table serves ``LLM(...)``, ``EngineArgs(...)`` and its command line.
"""

import argparse
import json
import sys
from dataclasses import MISSING, field, fields, make_dataclass, replace
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.models.config import read_model_config
from nanovllm.utils import checkpoint
from nanovllm.validation import did_you_mean

# keyword -> default; None leaves the choice to nanovllm
PASSED: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "tokenizer": None,
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "revision": None,
    "seed": None,
    "gpu_memory_utilization": 0.9,
    "enforce_eager": False,
    "max_model_len": None,
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
    "enable_prefix_caching": None,
    "logprobs_mode": "raw_logprobs",
    "max_logprobs": 20,
    "generation_config": "auto",
    "load_format": "auto",
    "quantization": None,
    "device": "auto",
    "block_size": None,
    "num_gpu_blocks_override": None,
    "worker_extension_cls": "",
    "enable_sleep_mode": False,
    "hf_overrides": None,
    "rope_scaling": None,
    "rope_theta": None,
    "override_generation_config": None,
    "profiler_config": None,
    "download_dir": None,
}
# handled by the adapters themselves
OWN = ("model", "max_model_len", "worker_extension_cls", "enable_sleep_mode", "hf_overrides", "rope_scaling",
       "rope_theta", "generation_config", "override_generation_config", "profiler_config", "download_dir")  # fmt: skip

# keyword -> values that change nothing, the default first
NEUTRAL: dict[str, tuple] = {
    "tokenizer_mode": ("auto", "hf"),
    "tokenizer_revision": (None,),
    "code_revision": (None,),
    "config_format": ("auto", "hf"),
    "model_impl": ("auto", "vllm"),
    "hf_config_path": (None,),
    "hf_token": (None, True, False),
    "task": (None, "auto", "generate"),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none", None),
    "override_pooler_config": (None,),
    "pooler_config": (None,),
    "enable_lora": (False, None),
    "enable_lora_bias": (False,),
    "fully_sharded_loras": (False,),
    "lora_modules": (None,),
    "enable_prompt_adapter": (False,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "enable_expert_parallel": (False,),
    "distributed_executor_backend": (None, "mp", "uni", "ray", "external_launcher"),
    "worker_cls": ("auto",),
    "cpu_offload_gb": (0,),
    "kv_cache_memory_bytes": (None,),
    "kv_transfer_config": (None,),
    "kv_offloading_size": (None,),
    "speculative_config": (None,),
    "speculative_model": (None,),
    "num_speculative_tokens": (None,),
    "logits_processors": (None, []),
    "logits_processor_pattern": (None,),
    "mm_processor_kwargs": (None, {}),
    "enable_prompt_embeds": (False,),
    "scheduling_policy": ("fcfs",),
    "enable_return_routed_experts": (False,),
    "additional_config": (None, {}),
    "model_loader_extra_config": (None, {}),
}

# keyword -> default. Hints on speed, memory and logs, and options of other models: no value changes an output.
HINTS: dict[str, Any] = {
    "disable_log_stats": True,
    "disable_async_output_proc": False,
    "disable_log_requests": True,
    "enable_log_requests": False,
    "served_model_name": None,
    "swap_space": 4,
    "enable_chunked_prefill": None,
    "disable_chunked_mm_input": False,
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
    "num_scheduler_steps": 1,
    "multi_step_stream_outputs": True,
    "num_lookahead_slots": 0,
    "scheduler_delay_factor": 0.0,
    "preemption_mode": None,
    "async_scheduling": None,
    "stream_interval": 1,
    "use_v2_block_manager": True,
    "prefix_caching_hash_algo": "sha256",
    "disable_sliding_window": False,
    "disable_cascade_attn": False,
    "attention_backend": None,
    "disable_custom_all_reduce": False,
    "max_parallel_loading_workers": None,
    "ray_workers_use_nsight": False,
    "max_seq_len_to_capture": 8192,
    "cuda_graph_sizes": None,
    "compilation_config": None,
    "optimization_level": None,
    "use_tqdm_on_load": True,
    "ignore_patterns": None,
    "safetensors_load_strategy": None,
    "tokenizer_pool_size": 0,
    "tokenizer_pool_type": "ray",
    "tokenizer_pool_extra_config": None,
    "max_lora_rank": 16,
    "max_loras": 1,
    "max_cpu_loras": None,
    "lora_extra_vocab_size": 256,
    "lora_dtype": "auto",
    "limit_mm_per_prompt": None,
    "disable_mm_preprocessor_cache": False,
    "mm_processor_cache_gb": 4,
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "guided_decoding_backend": "auto",
    "guided_decoding_disable_fallback": False,
    "structured_outputs_config": None,
    "reasoning_parser": "",
    "collect_detailed_traces": None,
    "otlp_traces_endpoint": None,
    "show_hidden_metrics_for_version": None,
    "data_parallel_backend": "mp",
}
# names of a checkpoint's own quantization; "fp8" is also nanovllm's option
PUBLISHED = ("compressed-tensors", "modelopt")
KNOWN: dict[str, Any] = {**PASSED, **{name: values[0] for name, values in NEUTRAL.items()}, **HINTS}


def check(options: dict[str, Any]) -> None:
    """Raise ConfigError for a keyword that is unknown, or at a value that nanovllm cannot honour."""
    for name, value in options.items():
        if name not in KNOWN:
            raise ConfigError(f"LLM() has no option {name!r}.{did_you_mean(name, KNOWN)}")
        if name in NEUTRAL and not any(is_same(value, neutral) for neutral in NEUTRAL[name]):
            if name == "tokenizer_revision" and value == options.get("revision"):
                continue
            allowed = " or ".join(map(repr, NEUTRAL[name]))
            raise ConfigError(f"LLM: {name}={value!r:.200} is not supported; nanovllm allows {allowed}.")


def is_same(a: Any, b: Any) -> bool:
    """Equality in which True is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def to_nanovllm(options: dict[str, Any]) -> dict[str, Any]:
    """Keywords of vLLM's engine, checked, as options of nanovllm's ``LLM`` but for those in ``OWN``."""
    check(options)
    given = {name: value for name, value in options.items() if name in PASSED and name not in OWN and value is not None}
    if given.get("load_format") in ("safetensors", "hf"):
        given["load_format"] = "auto"
    given["kvcache_block_size"] = block_size = given.pop("block_size", 256)
    blocks = given.pop("num_gpu_blocks_override", None)
    if blocks is not None:  # blocks of vLLM's default size
        given["num_kvcache_blocks"] = -(-blocks * (options.get("block_size") or 16) // block_size)
    num_tokens = given.get("max_num_batched_tokens")
    if num_tokens is not None and "max_num_seqs" not in given:
        given["max_num_seqs"] = min(512, num_tokens)
    return given


def leave_to_checkpoint(given: dict[str, Any], path: str) -> None:
    """Remove a ``quantization`` that names what the checkpoint at ``path`` has anyhow.

    Raises:
        ConfigError: it has another one, or none.
    """
    method = given.get("quantization")
    if method in PUBLISHED:
        fp8 = read_model_config(path).fp8
        if fp8 is None or fp8.method != method:
            has = "none" if fp8 is None else repr(fp8.method)
            raise ConfigError(
                f"LLM: quantization={method!r} names the quantization of a checkpoint, and {path} has {has}. Leave it "
                "out, or take quantization='fp8', which quantizes 16-bit weights as they load."
            )
        del given["quantization"]


class _EngineArgs:
    """Engine keywords as a value: ``LLM(**dataclasses.asdict(EngineArgs(...)))``."""

    def __post_init__(self) -> None:
        check(vars(self))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """``--max-model-len`` and so on."""
        for name, default in KNOWN.items():
            flag, kind = "--" + name.replace("_", "-"), type(default)
            if kind is bool or name == "enable_prefix_caching":
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
            else:
                parser.add_argument(flag, *SHORT.get(name, ()), type=_value if kind not in (str, float) else kind,
                                    default=default)  # fmt: skip
        return parser

    def create_model_config(self) -> Any:
        """What ``llm_engine.model_config`` will be; starts no engine."""
        from nanovllm.as_vllm.views import ModelConfig
        from nanovllm.config import Config

        keywords = keywords_of(self)
        model = keywords.pop("model", PASSED["model"])
        given = to_nanovllm(keywords)
        if given.get("quantization") in PUBLISHED:
            leave_to_checkpoint(given, checkpoint.resolve_model(model, given.get("revision"), weights=False))
        config = Config.from_options(model, given)
        max_model_len = keywords.get("max_model_len") or config.model_config.max_position_embeddings
        return ModelConfig(replace(config, max_model_len=max_model_len), {"model": model, **keywords})

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        return cls(**{name: getattr(args, name) for name in KNOWN if hasattr(args, name)})


SHORT = {"tensor_parallel_size": ("-tp",), "pipeline_parallel_size": ("-pp",), "quantization": ("-q",)}


def _value(text: str) -> Any:
    """An integer or JSON if it reads as one; "None" is None."""
    if text == "None":
        return None
    if text[:1] in ("{", "["):
        return json.loads(text)
    return int(text) if text.lstrip("-").isdigit() else text


EngineArgs: Any = make_dataclass(
    "EngineArgs", [(name, Any, field(default=default)) for name, default in KNOWN.items()], bases=(_EngineArgs,)
)
EngineArgs.__module__ = "vllm.engine.arg_utils"


def keywords_of(engine_args: Any) -> dict[str, Any]:
    """The keywords of an EngineArgs that are not at their defaults."""
    return {
        f.name: getattr(engine_args, f.name) for f in fields(engine_args)
        if f.default is MISSING or getattr(engine_args, f.name) != f.default
    }  # fmt: skip


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes ``--max_model_len`` for ``--max-model-len``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = sys.argv[1:] if args is None else args
        dashed = []
        for arg in args:
            name, equals, value = arg.partition("=")
            dashed.append(name.replace("_", "-") + equals + value if name.startswith("--") else arg)
        return super().parse_known_args(dashed, namespace)
