"""vLLM's engine keywords, passed on or accepted at the values that change nothing, and the engine they ask for.

One table serves ``LLM(...)``, ``EngineArgs(...)`` and its command line.
"""

import argparse
import json
import os
import re
import sys
import weakref
from dataclasses import make_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm.config import Config, SpeculativeConfig, resolve_model
from nanovllm.contrib.as_vllm.pooling import PoolerConfig
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.llm import LLM
from nanovllm.validation import did_you_mean, has_feature, rules_of

# options that mean the same in nanovllm: keyword -> default; None leaves the choice to nanovllm
PASSED: dict[str, Any] = {
    "tokenizer": None, "skip_tokenizer_init": False, "trust_remote_code": False, "revision": None, "seed": None,
    "tensor_parallel_size": 1, "dtype": "auto", "kv_cache_dtype": "auto", "quantization": None, "load_format": "auto",
    "device": "auto", "gpu_memory_utilization": 0.9, "enforce_eager": False, "max_num_seqs": None,
    "max_num_batched_tokens": None, "enable_prefix_caching": None, "logprobs_mode": "raw_logprobs", "max_logprobs": 20,
    "language_model_only": False, "limit_mm_per_prompt": None, "mm_processor_kwargs": None,
    "allowed_local_media_path": "",
}  # fmt: skip
# handled here and in llm.py
OWN: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B", "max_model_len": None, "block_size": None, "num_gpu_blocks_override": None,
    "hf_overrides": None, "rope_scaling": None, "rope_theta": None, "download_dir": None, "generation_config": "auto",
    "override_generation_config": None, "worker_extension_cls": "", "enable_sleep_mode": False, "profiler_config": None,
    "enable_lora": False, "logits_processors": None, "worker_cls": "auto", "pooler_config": None,
    "override_pooler_config": None, "mamba_ssm_cache_dtype": "auto", "speculative_config": None, "chat_template": None,
    "kv_cache_memory_bytes": None, "reasoning_config": None, "reasoning_parser": "",
    "allowed_media_domains": None,
}  # fmt: skip
# separate options -> fields of speculative_config; the last four are from versions before vLLM 0.9
SPEC_NAMES = {
    "spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens",
    "speculative_model": "model", "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max", "ngram_prompt_lookup_min": "prompt_lookup_min",
}  # fmt: skip
# values, the default first -> keywords for which other values raise an error
ONLY: list[tuple[tuple, str]] = [
    ((None,), """tokenizer_revision code_revision hf_config_path lora_modules kv_transfer_config kv_events_config
        kv_offloading_size qlora_adapter_name_or_path quantization_param_path logits_processor_pattern
        override_attention_dtype quantization_config device_ids data_parallel_rank data_parallel_start_rank
        scheduler_cls io_processor_plugin ec_transfer_config weight_transfer_config watermark_config
        diffusion_config engram_config default_mm_loras lora_target_modules reasoning_parser_plugin"""),
    ((None, {}, []), """additional_config model_loader_extra_config model_class_overrides
        aux_output_config kv_cache_dtype_skip_layers sleep_preserve_parameter_names"""),
    ((False, None), """enable_lora_bias enable_prompt_adapter enable_expert_parallel enable_prompt_embeds
        enable_return_routed_experts return_sampling_mask enable_trace_replay use_fp64_gumbel enable_mm_embeds
        mm_encoder_only tokens_only enable_tower_connector_lora enable_elastic_ep enable_fault_tolerance
        enable_mamba_cache_stochastic_rounding data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_multi_port_external_lb"""),
    ((1,), """pipeline_parallel_size data_parallel_size prefill_context_parallel_size decode_context_parallel_size
        nnodes"""),
    ((0, None), "cpu_offload_gb offload_group_size node_rank"),
    (("", None), "model_weights"),
    (("auto", "hf"), "tokenizer_mode config_format"),
    (("auto", "vllm"), "model_impl"),
    (("auto", "generate", "pooling"), "runner"),
    ((None, "auto", "generate", "embed", "embedding", "classify", "score"), "task"),
    (("auto", "none", None, "embed", "classify"), "convert"),
    ((None, True, False), "hf_token"),
    ((None, "mp", "uni", "ray", "external_launcher"), "distributed_executor_backend"),
    (("auto", None), "mamba_cache_dtype"),
    (("fcfs",), "scheduling_policy"),
]  # fmt: skip
NEUTRAL: dict[str, tuple] = {name: values for values, names in ONLY for name in names.split()}
# hints on speed, memory and logs, and options of other models; none of their values changes an output
ON = """disable_log_stats disable_log_requests multi_step_stream_outputs use_v2_block_manager use_tqdm_on_load
    swa_bounded_replay scheduler_reserve_full_isl"""
OFF = """disable_async_output_proc enable_log_requests disable_chunked_mm_input disable_sliding_window
    disable_custom_all_reduce ray_workers_use_nsight disable_mm_preprocessor_cache guided_decoding_disable_fallback
    fully_sharded_loras worker_use_ray engine_use_ray calculate_kv_scales
    enable_bf16x3_router_gemm monokernel numa_bind enable_hc_sp enable_ep_weight_filter enable_dbo enable_eplb
    enable_shm_tensor_arena aggregate_engine_logging allow_deprecated_quantization
    long_prefill_token_threshold_adaptive interleave_mm_strings skip_mm_profiling specialize_active_lora
    enable_mixed_moe_lora_format enable_moe_shared_loras kv_cache_metrics cudagraph_metrics
    enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details jit_monitor_verbose
    enable_mm_processor_stats sleep_mode_offload_cudagraph enable_cumem_allocator enable_nccl_comm_suspend
    enable_mamba_shared_prefix_checkpoint use_replayssm kv_sharing_fast_prefill fail_on_environ_validation"""
UNSET = """served_model_name swap_space enable_chunked_prefill max_num_partial_prefills max_long_partial_prefills
    long_prefill_token_threshold num_scheduler_steps num_lookahead_slots scheduler_delay_factor preemption_mode
    async_scheduling stream_interval prefix_caching_hash_algo attention_backend max_parallel_loading_workers
    max_seq_len_to_capture cuda_graph_sizes compilation_config optimization_level ignore_patterns
    safetensors_load_strategy tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config max_lora_rank
    max_loras max_cpu_loras lora_extra_vocab_size lora_dtype mm_processor_cache_gb guided_decoding_backend
    structured_outputs_config mamba_block_size mamba_cache_mode
    collect_detailed_traces otlp_traces_endpoint show_hidden_metrics_for_version data_parallel_backend
    max_context_len_to_capture max_log_len log_level logging_config log_config_file watchdog_config shutdown_timeout
    jit_monitor_mode custom_histogram_buckets kv_cache_metrics_sample per_request_spec_decode_metrics
    performance_mode attention_config kernel_config mamba_config moe_backend linear_backend all2all_backend
    sparse_indexer_topk_backend gdn_prefill_backend kda_prefill_backend kda_decode_backend mamba_backend
    mamba_ssu_algorithm mamba_cache_philox_rounds replayssm_buffer_len cudagraph_capture_sizes
    max_cudagraph_capture_size ir_op_priority enable_flashinfer_autotune disable_cascade_attn
    safetensors_prefetch_num_threads safetensors_prefetch_block_size pt_load_map_location sleep_mode_backend
    master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind_nodes
    numa_bind_cpus data_parallel_size_local data_parallel_address data_parallel_rpc_port dp_sync_interval
    dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
    disable_nccl_for_dp_synchronization enable_batch_sharded_sampling elastic_ep_max_dp_size ubatch_size
    dbo_decode_token_threshold dbo_prefill_token_threshold eplb_config expert_placement_strategy
    fault_tolerance_config prefix_match_unit prefix_cache_retention_interval disable_hybrid_kv_cache_manager
    offload_backend cpu_offload_params offload_num_in_group offload_prefetch_step offload_params
    kv_offloading_backend max_num_scheduled_tokens max_num_active_seqs max_num_queued_reqs max_num_queued_tokens
    prefill_schedule_interval watermark renderer_num_workers max_lora_cls_labels media_io_kwargs
    mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
    mm_encoder_fp8_scale_save_margin mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize
    ec_manager_config video_pruning_rate video_pruning_method"""
HINTS = {name: value for value, names in ((True, ON), (False, OFF), (None, UNSET)) for name in names.split()}
FIRST = {name: values[0] for name, values in NEUTRAL.items()}
DEFAULTS: dict[str, Any] = {**OWN, **PASSED, **dict.fromkeys(SPEC_NAMES), **FIRST, **HINTS}
ROPE_FIELDS = ("rope_theta", "rope_scaling")  # older files have them in place of rope_parameters
ROPE_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")  # with another scaling
# reasoning parsers that split at the marks that the tokenizer has tokens for, or else at <think> and </think>
PARSERS = """deepseek_r1 deepseek_v3 ernie45 glm45 glm47 holo2 hunyuan_a13b hy_v3 mimo minimax_m2 mistral nemotron_v3
    olmo3 openai_gptoss qwen3 seed_oss step3 step3p5"""
MARKS: dict[str, tuple[str, str] | None] = {
    **dict.fromkeys(PARSERS.split()), "granite": ("Here is my thought process:", "Here is my response:"),
}  # fmt: skip
# A checkpoint's own quantizations, and names of vLLM's kernels for them; "fp8" is also nanovllm's option.
PUBLISHED = {name: name for name in ("compressed-tensors", "modelopt", "mxfp4", "awq", "gptq", "auto-round")} | {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "inc": "auto-round", "modelopt_fp4": "modelopt",
}  # fmt: skip


def check(keywords: dict[str, Any]) -> None:
    """Raise ConfigError for a keyword that is unknown, or at a value that nanovllm cannot honour."""
    for name, value in keywords.items():
        if name not in DEFAULTS:
            raise ConfigError(f"LLM() has no option {name!r}.{did_you_mean(name, DEFAULTS)}")
        is_the_models = name == "tokenizer_revision" and value == keywords.get("revision")
        if name in NEUTRAL and value not in NEUTRAL[name] and not is_the_models:
            allowed = " or ".join(map(repr, NEUTRAL[name]))
            raise ConfigError(f"LLM: {name}={value!r:.200} is not supported; nanovllm allows {allowed}.")
    if (parser := parser_of(keywords)) and str(parser) not in MARKS:
        raise ConfigError(f"LLM: reasoning_parser={parser!r:.100} is not supported; allowed are {', '.join(MARKS)}.")
    speculative_config(keywords)
    reasoning_config(keywords)


def parser_of(keywords: dict[str, Any]) -> Any:
    """The name of a reasoning parser, or None: an option, or a field of ``structured_outputs_config``."""
    return keywords.get("reasoning_parser") or _structured_outputs(keywords).get("reasoning_parser")


def thinks_first(keywords: dict[str, Any], llm: LLM) -> bool:
    """Whether structured outputs begin after the thinking, as vLLM's do with a reasoning parser.

    Not with ``enable_in_reasoning``, and not where the marks are several tokens and ``reasoning_config`` names none.
    """
    if not parser_of(keywords) or _structured_outputs(keywords).get("enable_in_reasoning"):
        return False
    if llm.config.skip_tokenizer_init:
        return False
    if llm.config.reasoning_start_str and llm.config.reasoning_end_str:
        return True
    return all(len(ids) == 1 for ids in llm.tokenize([*llm.reasoning_marks], add_special_tokens=False))


def _structured_outputs(keywords: dict[str, Any]) -> dict[str, Any]:
    given = keywords.get("structured_outputs_config") or {}
    return given if isinstance(given, dict) else getattr(given, "__dict__", {})


def reasoning_config(keywords: dict[str, Any]) -> dict[str, Any]:
    """Translate vLLM's marks around thoughts, a dictionary or ``ReasoningConfig``; a parser's name changes none."""
    given = keywords.get("reasoning_config") or {}
    values = given if isinstance(given, dict) else getattr(given, "__dict__", {"": given})
    if unknown := values.keys() - {"reasoning_start_str", "reasoning_end_str", "reasoning_parser"}:
        raise ConfigError(
            f"LLM: reasoning_config={given!r:.200} is not supported; nanovllm reads reasoning_start_str and "
            f"reasoning_end_str, not {min(unknown)!r}."
        )
    return {name: value for name, value in values.items() if value and name != "reasoning_parser"}


def speculative_config(keywords: dict[str, Any]) -> dict[str, Any] | None:
    """Translate vLLM's options of speculation by lookup; other methods, which need a model of their own, are refused.

    Hints that lookup here has no use for are left out, because they change no output.
    """
    asked = {name: keywords[name] for name in ("speculative_config", *SPEC_NAMES) if keywords.get(name) is not None}
    if not asked:
        return None
    said, whole = ", ".join(f"{name}={value!r:.200}" for name, value in asked.items()), asked.get("speculative_config")
    given = dict(whole) if isinstance(whole, dict) else {}
    for name in [name for name in SPEC_NAMES if name in asked]:
        if SPEC_NAMES[name] in given:
            raise ConfigError(f"LLM: {said} gives {SPEC_NAMES[name]!r} twice; leave out {name}.")
        given[SPEC_NAMES[name]] = asked[name]
    method = "ngram" if given.get("model") in ("ngram", "[ngram]") else given.get("method")
    if method not in ("ngram", "suffix"):
        raise ConfigError(f"LLM: {said} is not supported; nanovllm allows None, or the method 'ngram' or 'suffix'.")
    options = {name: given[name] for name in rules_of(SpeculativeConfig) if given.get(name) is not None}
    if isinstance(length := options.get("num_speculative_tokens"), int):
        options["num_speculative_tokens"] = min(length, SpeculativeConfig.num_speculative_tokens)
    return {**options, "method": method}


def to_nanovllm(keywords: dict[str, Any]) -> dict[str, Any]:
    """Check vLLM's keywords and translate them to options of nanovllm's ``LLM``; of ``OWN`` the KV cache's."""
    check(keywords)
    given = {name: keywords[name] for name in PASSED if keywords.get(name) is not None}
    if given.get("load_format") in ("safetensors", "hf"):
        given["load_format"] = "auto"
    if has_feature("engine.images"):  # None allows every host in vLLM, and none here
        given["allowed_media_domains"] = keywords.get("allowed_media_domains") or ["*"]
    if isinstance(limits := given.get("limit_mm_per_prompt"), dict):  # a limit may be a dictionary with sizes
        counts = {kind: limit.get("count", 999) if isinstance(limit, dict) else limit for kind, limit in limits.items()}
        given["limit_mm_per_prompt"] = counts
    if (state_dtype := keywords.get("mamba_ssm_cache_dtype")) not in (None, "auto"):
        given["state_dtype"] = state_dtype
    if (speculation := speculative_config(keywords)) is not None:
        given["speculative_config"] = speculation
    given |= reasoning_config(keywords)
    block_size, blocks = keywords.get("block_size"), keywords.get("num_gpu_blocks_override")
    given["kvcache_block_size"] = block_size or 256
    if blocks is not None:  # blocks of vLLM's default size
        given["num_kvcache_blocks"] = -(-blocks * (block_size or 16) // given["kvcache_block_size"])
    elif (num_bytes := keywords.get("kv_cache_memory_bytes")) is not None:
        given["num_kvcache_blocks"] = num_blocks_in(num_bytes, keywords["model"], given)
    if (method := given.get("quantization")) not in (None, "fp8", *PUBLISHED):
        raise ConfigError(
            f"LLM: quantization={method!r:.200} is not supported; nanovllm allows None, 'fp8' or the checkpoint's own: "
            f"{', '.join(map(repr, PUBLISHED))}. Take such a checkpoint, or the 16-bit one."
        )
    if method in PUBLISHED:
        config = config_of(keywords["model"], given.get("revision"))
        if (published := config.model_config.quant_method) != PUBLISHED[method]:
            has = "none" if published is None else repr(published)
            raise ConfigError(
                f"LLM: quantization={method!r} names the quantization of a checkpoint, and {config.model_path} has "
                f"{has}. Leave it out, or take quantization='fp8', which quantizes 16-bit weights as they load."
            )
        del given["quantization"]  # the checkpoint has it anyhow
    return given


def num_blocks_in(num_bytes: Any, model: str, given: dict[str, Any]) -> int:
    """Count the KV blocks in ``kv_cache_memory_bytes`` of each device; states of recurrent layers come on top.

    The dtype "auto" on a CPU counts as float32, so that the cache may take half of the bytes there.
    """
    import torch

    config = config_of(model, given.get("revision")).model_config
    is_cpu = given.get("device") == "cpu" or not torch.cuda.is_available()
    dtype = str(given.get("dtype", "auto")).removeprefix("torch.")
    has_four_bytes = dtype in ("float32", "float") or (dtype == "auto" and (is_cpu or config.dtype == "float32"))
    bytes_of_one = 1 if given.get("kv_cache_dtype", "auto") != "auto" else 4 if has_four_bytes else 2
    num_ranks, values = given.get("tensor_parallel_size") or 1, 0
    for layer in config.attention_layers:
        head_dim = layer.head_dim if is_cpu else max(16, 1 << (layer.head_dim - 1).bit_length())  # as kernels pad it
        values += 2 * -(-layer.num_stored_heads // num_ranks) * head_dim
    block = values * given["kvcache_block_size"] * bytes_of_one
    if not isinstance(num_bytes, int) or num_bytes < block:
        raise ConfigError(
            f"LLM: kv_cache_memory_bytes={num_bytes!r:.100} must be an integer of at least {block}, the bytes of one "
            f"block of {given['kvcache_block_size']} tokens; or leave it out, and give gpu_memory_utilization."
        )
    return num_bytes // block


def start(model: str, keywords: dict[str, Any]) -> LLM:
    """The engine that vLLM's keywords ask for.

    Without ``max_model_len`` it is the model's own context length, or what the KV cache holds if that is less.
    """
    check(keywords)
    claim_devices(keywords.get("tensor_parallel_size") or 1)
    has_weights, download_dir = keywords.get("load_format") != "dummy", keywords.get("download_dir")
    path = resolve_model(model, keywords.get("revision"), has_weights, cache_dir=download_dir)
    overlay = overlaid(path, keywords)
    if overlay is not None:
        path = overlay.name
    if overlay is not None or download_dir:
        model = path
    for name in ("pooler_config", "override_pooler_config"):
        if (given := keywords.get(name)) is not None:
            (PoolerConfig(**given) if isinstance(given, dict) else given).check(path)
    max_model_len = keywords.get("max_model_len")
    if is_default := max_model_len in (None, -1, "auto"):
        max_model_len = config_of(path).model_config.max_position_embeddings
    llm = LLM(model, max_model_len=max_model_len, **to_nanovllm({**keywords, "model": model}))
    if (parser := parser_of(keywords)) and not reasoning_config(keywords):
        llm.reasoning_marks = MARKS[parser]
    if overlay is not None:
        weakref.finalize(llm, overlay.cleanup)
    capacity = llm.model_runner.num_kvcache_blocks * llm.config.kvcache_block_size
    if is_default and capacity < llm.config.max_model_len:
        # the engine's tables are wider than needed now, and every check of a request reads this value
        vars(llm.config).update(max_model_len=capacity)
    return llm


def config_of(model: str, revision: str | None = None) -> Config:
    """The configuration of a checkpoint under nanovllm's default options; reads no weights."""
    return Config.from_options(model, {"revision": revision, "load_format": "dummy", "skip_tokenizer_init": True})


def overlaid(path: str, keywords: dict[str, Any]) -> TemporaryDirectory | None:
    """A directory with links to the files of ``path`` and the config.json that keywords change; None if they do not."""
    overrides = keywords.get("hf_overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"LLM: hf_overrides={overrides!r:.100} must be a dictionary of fields of config.json.")
    overrides = {**overrides, **{n: keywords[n] for n in ("rope_scaling", "rope_theta") if keywords.get(n)}}
    if not overrides:
        return None
    directory = TemporaryDirectory(prefix="nanovllm-")
    for file in Path(path).iterdir():
        if file.name != "config.json":
            Path(directory.name, file.name).symlink_to(file.resolve())
    try:
        config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}/config.json cannot be read ({error}).") from None
    Path(directory.name, "config.json").write_text(json.dumps(overridden(config, overrides)), encoding="utf-8")
    return directory


def overridden(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json with other values, each of them wherever the field is read.

    That may be within ``text_config`` or, for RoPE, within ``rope_parameters``. Parts such as ``vision_config`` keep
    their other fields.
    """
    config = dict(config)
    for name, value in overrides.items():
        text, rope = config.get("text_config"), config.get("rope_parameters")
        if name.endswith("_config") and isinstance(value, dict) and isinstance(config.get(name), dict):
            config[name] = overridden(config[name], value)
            continue
        if isinstance(text, dict) and name in ROPE_FIELDS and (text.get("rope_parameters") or not rope):
            config["text_config"] = overridden(text, {name: value})
            continue
        if isinstance(text, dict) and (name in text or name not in config) and name not in ("model_type", *ROPE_FIELDS):
            config["text_config"] = overridden(text, {name: value})
            if name not in config:
                continue
        if name in ROPE_FIELDS and rope:
            if any(isinstance(of_kind, dict) for of_kind in rope.values()):
                raise ConfigError(
                    f"LLM: {name}={value!r:.100}: RoPE differs between the layers of this model; give "
                    f"hf_overrides={{'rope_parameters': ...}}, as in its config.json."
                )
            if name == "rope_theta":
                config["rope_parameters"] = {**rope, "rope_theta": value}
                continue
            config.pop("rope_scaling", None)
            kept = {field: rope[field] for field in ROPE_KEPT if field in rope}
            config["rope_parameters"] = {**kept, **(value or {"rope_type": "default"})}
        else:
            config[name] = value
    return config


def claim_devices(size: int) -> None:
    """In one of several data-parallel processes (``VLLM_DP_SIZE``), see only the devices of its rank.

    A launcher may have chosen them already; then fewer are visible than all ranks need.
    """
    rank = os.environ.get("VLLM_DP_RANK_LOCAL", os.environ.get("VLLM_DP_RANK", ""))
    num_ranks = int(os.environ.get("VLLM_DP_SIZE", "1"))
    if num_ranks < 2 or not rank.isdigit():
        return
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = list(map(str, range(torch.cuda.device_count()))) if visible is None else visible.split(",")
    if len(devices) >= num_ranks * size and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[int(rank) * size : (int(rank) + 1) * size])


class EngineConfig:
    """An engine's options under vLLM's names. One object is ``vllm_config`` and all its parts.

    Made of nanovllm's ``config``, vLLM's ``keywords`` and, if the engine runs, its ``runner``.
    """

    pipeline_parallel_size = data_parallel_size = 1
    is_multimodal_model = is_encoder_decoder = False
    lora_config = speculative_config = None
    model_config = cache_config = scheduler_config = parallel_config = property(lambda self: self)

    def __init__(self, config: Config, keywords: dict[str, Any], runner: Any = None):
        vars(self).update(vars(config))  # max_model_len, max_num_seqs, tensor_parallel_size and so on
        self._config, self.model = config, str(keywords["model"])
        pools = keywords.get("runner") == "pooling" or not config.model_config.has_lm_head
        self.runner_type = self.task = "pooling" if pools else "generate"
        self.tokenizer = str(keywords.get("tokenizer") or self.model)
        self.max_seq_len_to_capture = min(8192, config.max_model_len)
        self.block_size, self.world_size = config.kvcache_block_size, config.tensor_parallel_size
        self.dtype = getattr(runner, "dtype", config.dtype)
        self.num_gpu_blocks = getattr(runner, "num_kvcache_blocks", None)

    @property
    def hf_config(self) -> Any:
        """transformers' view of config.json."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._config.model_path, trust_remote_code=self._config.trust_remote_code)

    hf_text_config = hf_config

    def get_vocab_size(self) -> int:
        return self._config.model_config.vocab_size


class _EngineArgs:
    """Engine keywords as a value: ``LLM(**dataclasses.asdict(EngineArgs(...)))``."""

    def __post_init__(self) -> None:
        check(vars(self))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """``--max-model-len`` and so on."""
        short = {"tensor_parallel_size": ["-tp"], "pipeline_parallel_size": ["-pp"], "quantization": ["-q"]}
        for name, default in DEFAULTS.items():
            flags = ["--" + name.replace("_", "-"), *short.get(name, ())]
            if isinstance(default, bool) or name.startswith(("enable_", "disable_")):
                parser.add_argument(*flags, action=argparse.BooleanOptionalAction, default=default)
            else:
                kind = type(default) if isinstance(default, (str, float)) else _value
                parser.add_argument(*flags, type=kind, default=default)
        return parser

    def create_model_config(self) -> EngineConfig:
        """The ``model_config`` of an engine with these options; starts none."""
        config = Config.from_options(vars(self)["model"], to_nanovllm(vars(self)))
        max_model_len = vars(self)["max_model_len"] or config.model_config.max_position_embeddings
        return EngineConfig(replace(config, max_model_len=max_model_len), vars(self))

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        return cls(**{name: getattr(args, name) for name in DEFAULTS if hasattr(args, name)})


def _value(text: str) -> Any:
    """An integer or JSON if it reads as one; "None" is None."""
    is_json = text[:1] in ("{", "[") or text.lstrip("-").isdigit()
    return None if text == "None" else json.loads(text) if is_json else text


EngineArgs: Any = make_dataclass("EngineArgs", [(name, Any, DEFAULTS[name]) for name in DEFAULTS], bases=(_EngineArgs,))
EngineArgs.__module__ = "vllm.engine.arg_utils"


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes ``--max_model_len`` for ``--max-model-len``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else args
        dashed = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), arg) for arg in given]
        return super().parse_known_args(dashed, namespace)
