"""Engine options: their defaults and every check that needs no device.

Reads the checkpoint's ``config.json`` (plain JSON, without transformers), but no weights.
"""

import os
from dataclasses import dataclass, field, fields
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.models.config import ModelConfig
from nanovllm.models.config_reader import DTYPES, read_model_config
from nanovllm.sampling_params import keyword_hint
from nanovllm.utils.checkpoint import read_generation_config, resolve_model
from nanovllm.validation import (
    Rule,
    at_least,
    check_all,
    choice,
    did_you_mean,
    integer,
    list_of,
    number,
    option,
    optional,
    rules_of,
)

__all__ = ["Config", "SpeculativeConfig", "read_generation_config", "resolve_model"]

DEFAULT_MAX_MODEL_LEN = 4096
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
FLAG = choice(True, False)
DICTIONARY = Rule("a dictionary or None", lambda x: x is None or isinstance(x, dict))
LIMITS = Rule(
    'a dictionary such as {"image": 4}, or None',
    lambda x: x is None or (isinstance(x, dict) and all(isinstance(n, int) and n >= 0 for n in x.values())),
)
MARK = optional(Rule("a non-empty string", lambda x: isinstance(x, str) and x != ""))
PATH = Rule("a path, a hub id", lambda x: isinstance(x, (str, os.PathLike)) and str(x) != "")


def is_directory(path: Any) -> bool:
    return path == "" or (isinstance(path, (str, os.PathLike)) and os.path.isdir(path))


@dataclass(frozen=True)
class SpeculativeConfig:
    """Options of speculation by lookup, under vLLM's names.

    Where the last few tokens stood before, the tokens that followed are a draft of the tokens to come. A step verifies
    drafts; the outputs are the same without them.

    Args:
        method: "ngram" looks into the request's own tokens; "suffix" also into other prompts and finished outputs.
        num_speculative_tokens: longest draft, 1 to 7.
        prompt_lookup_min: number of last tokens that must match there, default 2; more after drafts that were wrong.
        prompt_lookup_max: the latest place with this number of matches is taken, default 4; else the place with most.
        suffix_decoding_max_tree_depth: the same with "suffix".
        suffix_decoding_max_spec_factor: with "suffix", longest draft per equal token.
        suffix_decoding_max_cached_requests: texts of other requests that are kept; at most 2**18 tokens of them.
        adaptive: stop where a step costs more than it gains; False verifies every draft.
    """

    method: str = option(None, choice("ngram", "suffix"))
    num_speculative_tokens: int = option(7, integer("an integer from 1 to 7", lambda n: 1 <= n <= 7))
    prompt_lookup_min: int = option(None, at_least(1))
    prompt_lookup_max: int = option(None, at_least(1))
    suffix_decoding_max_tree_depth: int = option(24, at_least(1))
    suffix_decoding_max_spec_factor: float = option(1.0, number("a number > 0", lambda factor: factor > 0))
    suffix_decoding_max_cached_requests: int = option(10_000, at_least(0))
    adaptive: bool = option(True, FLAG)

    @classmethod
    def of(cls, given: Any) -> "SpeculativeConfig":
        """From the dictionary that a user gives."""
        if isinstance(given, cls):
            return given
        rules = rules_of(cls)
        for name in given:
            if name not in rules:
                hint = did_you_mean(str(name), rules)
                raise ConfigError(f"speculative_config has no option {name!r}.{hint} Options: {', '.join(rules)}.")
        given = {name: value for name, value in given.items() if value is not None}
        values = {option.name: option.default for option in fields(cls)} | given
        shortest, longest = values["prompt_lookup_min"], values["prompt_lookup_max"]
        values["prompt_lookup_min"] = min(2, longest or 2) if shortest is None else shortest
        values["prompt_lookup_max"] = max(4, shortest or 4) if longest is None else longest
        options = cls(**check_all("speculative_config", values, rules, ConfigError))
        if options.prompt_lookup_min > options.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={options.prompt_lookup_min} must not be larger than "
                f"prompt_lookup_max={options.prompt_lookup_max}."
            )
        return options


@dataclass(frozen=True)
class Config:
    """Options of ``LLM(model, **options)``. None for any of them is the default.

    Args:
        model: a local directory, a hub id such as "Qwen/Qwen3-0.6B", or None for the bundled demo model.
        max_num_batched_tokens: limit on tokens in one launch; longer prompts are prefilled in chunks. A CPU takes
            1,024 at most, or max_num_seqs if that is more. Not less than a max_num_seqs that is given alone.
        max_num_seqs: limit on sequences that run at once; fewer, if the states of recurrent layers have no room, or if
            fewer max_num_batched_tokens are given alone.
        max_model_len: limit on prompt and completion tokens together; None is 4096, or the model's positions if fewer.
        gpu_memory_utilization: fraction of the device's memory to fill, the memory of other processes included.
        tensor_parallel_size: number of devices the model is sharded over, 1 to 8.
        enforce_eager: no CUDA graphs and no run-ahead; slower, easier to debug.
        kvcache_block_size: tokens per KV block, a multiple of 16 (of 256 with flash-attn).
        num_kvcache_blocks: size of the KV cache in blocks; -1: as memory allows (2 GiB on the CPU).
        device: "auto" (CUDA if there is a device), "cuda" or "cpu".
        dtype: "auto" (the checkpoint's; float32 on a CPU, unless it is bfloat16 and the CPU has AVX512-BF16 or AMX;
            float16 on a GPU without bfloat16), "bfloat16", "float16" or "half", "float32" or "float"; or torch's.
        kv_cache_dtype: "auto" (the model's) or "fp8" (also "fp8_e4m3"): half the bytes, twice the sequences, keys and
            values rounded to 4 significant bits, with a scale for each layer and KV head.
        state_dtype: "float32" (as published) or "float16" (half the bytes, an error of 1e-4) of the states of recurrent
            layers, which take the place of keys and values.
        num_state_snapshots: of these states, for the prefix cache; -1 takes a tenth of the cache's memory.
        attention_backend: "auto" (the fastest measured), "flash_attn", "triton" or "sdpa".
        load_format: "auto" (safetensors) or "dummy" (random weights; needs only config.json).
        quantization: "fp8" quantizes the linear layers of attention, MLP and experts as they load, with a scale for
            each output feature; None leaves the checkpoint's weights as they are, in 16 bits, FP8 or four.
        lora: a local directory or hub id of a PEFT adapter, which is merged into the weights as they load.
        enable_prefix_caching: reuse the keys and values of equal prompt prefixes, by full blocks.
        seed: of the engine, in [0, 2**63); requests without a seed of their own derive one from it.
        revision: branch, tag or commit of a hub model; ignored for a directory.
        trust_remote_code: let the tokenizer run code that comes with the checkpoint.
        skip_tokenizer_init: load no tokenizer; prompts and outputs are token ids.
        tokenizer: directory or hub id of another tokenizer; None is the model's.
        logprobs_mode: "raw_logprobs" of the model's logits, or "processed_logprobs" of what is sampled from, after
            temperature, penalties, masks and filters.
        max_logprobs: limit on the log-probabilities that a request may ask for at one place; -1 is the vocabulary.
        generation_config: "auto" takes the checkpoint's sampling defaults where a call gives no sampling parameters;
            "vllm" takes none.
        reasoning_start_str: begins a model's thoughts, for thinking_token_budget; None: "<think>" or another mark of
            published models, if that is a token.
        reasoning_end_str: ends them, and may have text around the mark, such as "Time is up.</think>\\n\\n"; None: the
            mark that belongs to the start, if that is a token.
        speculative_config: draft tokens by lookup and verify several at once, with the same outputs; a dictionary, see
            ``SpeculativeConfig``. None: one token a step.
        language_model_only: load no vision tower; prompts are text.
        max_pixel_gib: host memory in GiB for the pixels of images that wait for the vision tower; those of one prompt
            always fit. Images beyond it are read again when their turn comes.
        limit_mm_per_prompt: most images of a prompt, as {"image": 4}; None is no limit.
        mm_processor_kwargs: options of the checkpoint's image processor, such as {"max_pixels": 1_000_000}.
        allowed_local_media_path: directory of images that prompts may name by their paths; "" allows none.
        allowed_media_domains: hosts of images that prompts may name by URLs, or ["*"]; None allows none.
        quiet: print no start-up line. Else one line goes to the logger "nanovllm" at level INFO, or to stderr if
            logging is not configured.

    Raises:
        ConfigError: an option is unknown or out of range.
        CheckpointError: the model is missing, damaged or not supported.
    """

    model: str | None = option(None, optional(PATH))
    max_num_batched_tokens: int = option(16384, at_least(1))
    max_num_seqs: int = option(512, at_least(1))
    max_model_len: int = option(None, optional(at_least(2)))  # None until the model is known
    gpu_memory_utilization: float = option(0.9, number("in (0, 1]", lambda fraction: 0 < fraction <= 1))
    tensor_parallel_size: int = option(1, integer("an integer from 1 to 8", lambda size: 1 <= size <= 8))
    enforce_eager: bool = option(False, FLAG)
    kvcache_block_size: int = option(256, integer("a positive multiple of 16", lambda n: n > 0 and n % 16 == 0))
    num_kvcache_blocks: int = option(-1, integer("an integer >= 1, or -1 for automatic", lambda n: n == -1 or n >= 1))
    device: str = option("auto", choice("auto", "cuda", "cpu"))
    dtype: str = option("auto", choice("auto", *DTYPES))
    state_dtype: str = option("float32", choice("float32", "float16"), feature="engine.hybrid")
    num_state_snapshots: int = option(
        -1, integer("an integer >= 0, or -1 for automatic", lambda n: n >= -1), feature="engine.hybrid"
    )
    kv_cache_dtype: str = option("auto", choice("auto", "fp8", "fp8_e4m3"))
    attention_backend: str = option("auto", choice("auto", "flash_attn", "triton", "sdpa"))
    load_format: str = option("auto", choice("auto", "dummy"))
    quantization: str | None = option(None, choice(None, "fp8"))
    lora: str | None = option(None, optional(PATH))
    enable_prefix_caching: bool = option(True, FLAG)
    seed: int = option(0, integer("an integer in [0, 2**63)", lambda seed: 0 <= seed < 2**63))
    revision: str | None = option(None, optional(Rule("a string", lambda x: isinstance(x, str))))
    trust_remote_code: bool = option(False, FLAG)
    skip_tokenizer_init: bool = option(False, FLAG)
    tokenizer: str | None = option(None, optional(PATH))
    logprobs_mode: str = option("raw_logprobs", choice("raw_logprobs", "processed_logprobs"))
    max_logprobs: int = option(20, integer("an integer >= 0, or -1 for no limit", lambda k: k >= -1))
    generation_config: str = option("auto", choice("auto", "vllm"))
    reasoning_start_str: str | None = option(None, MARK)
    reasoning_end_str: str | None = option(None, MARK)
    speculative_config: SpeculativeConfig | None = option(
        None, Rule("a dictionary or None", lambda x: x is None or isinstance(x, (dict, SpeculativeConfig))),
        feature="engine.speculation",
    )
    language_model_only: bool = option(False, FLAG, feature="engine.images")
    limit_mm_per_prompt: dict | None = option(None, LIMITS, feature="engine.images")
    max_pixel_gib: float = option(2.0, number("a number > 0", lambda gib: gib > 0), feature="engine.images")
    mm_processor_kwargs: dict | None = option(None, DICTIONARY, feature="engine.images")
    allowed_local_media_path: str = option("", Rule("a directory", is_directory, str), feature="engine.images")
    allowed_media_domains: tuple[str, ...] | None = option(
        None, optional(list_of(Rule("", lambda x: isinstance(x, str)), "a list of hosts")), feature="engine.images"
    )
    quiet: bool = option(False, FLAG)
    # derived
    model_path: str = field(init=False)
    tokenizer_path: str = field(init=False)
    lora_path: str | None = field(init=False)
    model_config: ModelConfig = field(init=False)
    speculates: bool = field(init=False)  # whether these options and this kind of model allow speculation

    @classmethod
    def from_options(cls, model: str | None, options: dict[str, Any]) -> "Config":
        """Build from the keyword options of ``LLM``."""
        known = [option.name for option in fields(cls) if option.init]
        for name in options:
            if name not in known:
                hint = keyword_hint(name, known)
                raise ConfigError(f"LLM() has no option {name!r}.{hint} Options: {', '.join(known)}.")
        options = {"max_num_seqs": None, "max_num_batched_tokens": None} | options
        return cls(model, **options)

    def __post_init__(self) -> None:
        # vars(self) bypasses the frozen __setattr__
        unset = {name for name, value in vars(self).items() if value is None}
        defaults = {option.name: option.default for option in fields(self) if option.init}
        options = {name: defaults[name] if value is None else value for name, value in vars(self).items()}
        dtype = str(options["dtype"]).removeprefix("torch.")
        options["dtype"] = DTYPE_ALIASES.get(dtype, dtype)
        vars(self).update(check_all("LLM", options, rules_of(Config), ConfigError))
        if self.attention_backend == "flash_attn" and self.kvcache_block_size % 256:
            raise ConfigError(
                f"kvcache_block_size={self.kvcache_block_size}: flash-attn needs a multiple of 256. "
                "Use 256, or attention_backend='triton'."
            )
        if self.attention_backend == "flash_attn" and self.kv_cache_dtype != "auto":
            raise ConfigError(
                f"kv_cache_dtype={self.kv_cache_dtype!r}: flash-attn reads no FP8 KV cache. Use "
                "attention_backend='auto', or kv_cache_dtype='auto'."
            )
        if self.speculative_config is not None:
            vars(self).update(speculative_config=SpeculativeConfig.of(self.speculative_config))
        # if one of the two is a default, it adapts to the other
        if "max_num_seqs" in unset:
            vars(self).update(max_num_seqs=min(self.max_num_seqs, self.max_num_batched_tokens))
        elif "max_num_batched_tokens" in unset:
            vars(self).update(max_num_batched_tokens=max(self.max_num_seqs, self.max_num_batched_tokens))
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} is larger than max_num_batched_tokens="
                f"{self.max_num_batched_tokens}: one decode step takes a token of every sequence. "
                "Lower the first or raise the second."
            )
        model_path = resolve_model(self.model, self.revision, weights=self.load_format != "dummy")
        tokenizer_path = model_path
        if self.tokenizer not in (None, self.model) and not self.skip_tokenizer_init:
            tokenizer_path = resolve_model(self.tokenizer, weights=False, option="tokenizer")
        lora_path = None if self.lora is None else resolve_model(self.lora, option="lora")
        if self.lora is not None and self.load_format == "dummy":
            raise ConfigError(f"lora={str(self.lora)!r} needs a checkpoint's weights; leave out load_format='dummy'.")
        model_config = read_model_config(model_path)
        model_config.check_tensor_parallel(self.tensor_parallel_size)
        if self.quantization == "fp8":
            model_config = model_config.quantized()
        speculates = (  # recurrent states cannot be rolled back; in a mixture each row needs different experts
            self.speculative_config is not None and model_config.has_lm_head and model_config.recurrent is None
            and (model_config.moe is None or not self.speculative_config.adaptive)
        )  # fmt: skip
        limit = model_config.max_position_embeddings
        max_model_len = self.max_model_len or min(DEFAULT_MAX_MODEL_LEN, limit)
        if max_model_len > limit:
            raise ConfigError(f"max_model_len={max_model_len}: the model has positions for {limit} tokens.")
        vars(self).update(
            model_path=model_path, tokenizer_path=tokenizer_path, lora_path=lora_path,
            model_config=model_config.for_length(max_model_len), max_model_len=max_model_len, speculates=speculates,
        )  # fmt: skip
