"""Reads the ``config.json`` of an architecture without a row in ``MODELS``, by transformers' own reader.

Owns the facts that the rest of the library asks for, and the refusals that need no weights. Imports no torch.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.models.config import LayerConfig, ModelConfig
from nanovllm.models.config_reader import read_raw
from nanovllm.models.families import Family
from nanovllm.models.rope import DEFAULT_MAX_POSITION
from nanovllm.quantization import read_schemes, rules_of
from nanovllm.quantization.fp8 import rules as fp8_rules
from nanovllm.utils.checkpoint import LOADING_LOCK, TOKEN_IDS
from nanovllm.validation import check

STATELESS = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers that keep only a KV cache
HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of the names of classes that generate
MIN_VERSION = (5, 17)  # transformers with experts by a grouped product, rules of renaming in one table


def refusal(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{name} has no implementation here, and cannot run on transformers' modules: {why}.")


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """The shape of a decoder of transformers. ``layers`` has their number; running the model finds the rest."""

    architecture: str = ""  # class of transformers
    model_path: str = ""
    max_model_len: int = 0
    has_tower: bool = False  # it takes images or sound, which are not supported
    quantization: dict[str, Any] = field(default_factory=dict)  # ``quantization_config``
    is_abridged: bool = False  # one decoder layer of each kind, to compile kernels

    model_class = "nanovllm.transformers_backend.model.TransformersCausalLM"

    def for_length(self, max_model_len: int) -> "TransformersConfig":
        return replace(self, max_model_len=max_model_len)

    def one_layer_of_each_kind(self) -> "TransformersConfig":
        return replace(self, is_abridged=True)

    def quantized(self) -> "TransformersConfig":
        super().quantized()  # raises an error for packed weights
        return self if self.quant_method else replace(self, fp8=0)

    def has_packed_weights(self, start: str = "") -> bool:
        return self.quant_method is not None and self.fp8 is None

    def check_tensor_parallel(self, size: int) -> None:
        for what, count in (("attention heads", self.num_attention_heads), ("KV heads", self.num_key_value_heads),
                            ("vocabulary entries", self.vocab_size)):  # fmt: skip
            if count % size:
                raise ConfigError(f"tensor_parallel_size={size} must divide the model's {count} {what}.")

    def unused_tensors(self, has_tower: bool = False) -> str:
        return "(?!)"  # ``Names`` knows them

    def describe(self, runner: Any) -> str:
        num_values = sum(2 * layer.num_kv_heads * layer.head_dim for layer in runner.model.attentions)
        text = "text alone, " if self.has_tower else ""
        return f" with modules of transformers ({text}{num_values / 512:,.1f} KiB of KV cache a token in 16 bits)"

    def prove(self, model: Any, block_size: int, captures: bool = False, rehearses: bool = False) -> None:
        from nanovllm.transformers_backend.proof import prove

        prove(model, block_size, captures, rehearses)


def read_config(model_path: str, architecture: str) -> TransformersConfig | None:
    """The configuration of a class of transformers; None where it has no such class.

    Raises:
        CheckpointError: its layers keep states besides a KV cache, or transformers cannot read the file.
    """
    with LOADING_LOCK:
        import transformers

    if not architecture.endswith(HEADS) or architecture not in dir(transformers):
        return None
    file, version = Path(model_path, "config.json"), transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise refusal(architecture, f"that needs transformers >= {needed}, and {version} is installed")
    try:
        config: Any = transformers.AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # each class checks fields by rules and errors of its own
        raise CheckpointError(f"{file}: transformers {version} cannot read it ({error!r:.300}).") from error
    text = config.get_text_config(decoder=True)

    def value_of(name: str) -> Any:
        try:
            return getattr(text, name, None)
        except RuntimeError:  # layers differ
            values = [value for layer in text.per_layer_config if (value := getattr(layer, name, None)) is not None]
            return max(values, default=None)

    def get(*names: str, default: Any = None) -> Any:
        return next((value for name in names if (value := value_of(name)) is not None), default)

    if other := sorted(set(map(str, get("layer_types", default=()))) - STATELESS):
        raise refusal(architecture, f"every layer must be attention, and this model has {', '.join(other)}")
    if get("is_encoder_decoder", default=False) or get("add_cross_attention", default=False):
        raise refusal(architecture, "it attends an encoder")
    quantization = read_raw(model_path).get("quantization_config") or {}
    if quantization:
        read_schemes(quantization, Family(), [])  # raises an error for another format
    fp8 = fp8_rules.read_block(quantization) if quantization and rules_of(quantization) is fp8_rules else None
    heads, hidden = int(get("num_attention_heads", default=1)), int(get("hidden_size"))
    kv_heads = int(get("num_key_value_heads", default=heads))
    # text_config has defaults of its class for what the file says outside
    eos, dtype = (value if (value := getattr(config, name, None)) is not None else get(name, default=default)
                  for name, default in (("eos_token_id", ()), ("dtype", "float32")))  # fmt: skip
    eos = check("config.json", "eos_token_id", eos, TOKEN_IDS, CheckpointError)
    latent = (get("qk_nope_head_dim", default=0) + get("qk_rope_head_dim", default=0), get("v_head_dim", default=0))
    head_dim = max(get("head_dim", default=0) or hidden // heads, get("global_head_dim", default=0), *latent)
    positions = int(get("max_position_embeddings", "max_seq_len", default=0))
    size = get("intermediate_size", "ffn_dim", default=4 * hidden)
    layer = LayerConfig(head_dim=int(head_dim), num_key_value_heads=heads if any(latent) else kv_heads)
    return TransformersConfig(
        family=Family(), vocab_size=int(get("vocab_size")), hidden_size=hidden,
        intermediate_size=size if isinstance(size, int) else 4 * hidden, num_attention_heads=heads,
        max_position_embeddings=positions if positions > 0 else DEFAULT_MAX_POSITION,
        rms_norm_eps=1e-6, tie_word_embeddings=False, qkv_bias=False, o_bias=False, mlp_bias=False, act="", qk_norm="",
        attention_scale=1.0, attention_softcap=0.0, logit_softcap=0.0, embed_scale=1.0, residual_scale=1.0,
        per_layer_size=0, logit_scale=1.0, layers=(layer,) * int(get("num_hidden_layers", default=1)), moe=None,
        has_lm_head=True, num_labels=0, activation="", label_tokens=(), recurrent=None, num_nextn_predict_layers=0,
        quant_method=quantization.get("quant_method"), fp8=fp8,
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=tuple(eos), architecture=architecture, model_path=model_path,
        has_tower=text is not config, quantization=quantization,
    )  # fmt: skip
