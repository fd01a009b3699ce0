"""The model's shape and switches, as layers, loader and runner read them. Imports no torch.

``config_reader.py`` makes them of a ``config.json``.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.errors import ConfigError
from nanovllm.models.families import Family
from nanovllm.models.recurrent import RecurrentConfig
from nanovllm.models.rope import RopeScaling
from nanovllm.quantization.fields import linears
from nanovllm.quantization.fp8.rules import RENAMED_TENSORS, UNUSED_TENSORS, Fp8
from nanovllm.quantization.mxfp4.rules import GROUP, Mxfp4

if TYPE_CHECKING:
    from nanovllm.quantization.packed import PackedScheme


@dataclass(frozen=True)
class MoEConfig:
    """The mixture of experts of the sparse layers; ``Family`` has the rest."""

    num_experts: int  # routed experts per layer
    top_k: int  # experts per token
    expert_size: int  # intermediate size of an expert
    renormalize: bool = True  # the weights of the chosen experts sum to 1
    routed_scale: float = 1.0  # factor of all weights
    num_groups: int = 1  # groups of neighbouring experts, all of one size
    top_groups: int = 1  # the best groups, from which experts are chosen
    shared_size: int = 0  # intermediate size of the shared expert, which every token passes; 0: none
    swiglu_limit: float = 0.0  # limit of the clamped SwiGLU; 0: the model's own activation


class Scales(NamedTuple):
    """Factors of a layer's products, folded into weights; ``residual_scale`` multiplies the results in addition."""

    attention: float = 1.0  # factor of the attention's result
    gate: float = 1.0  # factor of the MLP's gate before the activation
    mlp: float = 1.0  # factor of the MLP's result


@dataclass(frozen=True)
class LayerConfig:
    """The shape and the switches of one decoder layer."""

    mixer: str = "attention"  # how tokens see each other, a key of ``MIXERS``; "": the layer has no mixer
    window: int = 0  # tokens that a token attends to, itself included; 0: all before it
    rope: RopeScaling | None = None  # None: positions are not rotated (NoPE)
    mlp: str = "dense"  # a key of ``MLPS``; "": the layer has no MLP
    head_dim: int = 0  # this and the next two fields are for attention
    num_key_value_heads: int = 0
    keys_are_values: bool = False  # values are the keys before their norm and RoPE
    intermediate_size: int = 0
    kind: str = "full_attention"  # the layer's name in ``layer_types``
    shares_kv: bool = False  # the layer attends to the keys and values of the last layer of its kind that stores any
    fp8_linears: frozenset[str] = frozenset()  # keys of ``linears`` whose layers are FP8
    # keyed by ``linears``, or by part if the parts of a product differ; such parts become 16 bits
    packed_schemes: tuple[tuple[str, "PackedScheme"], ...] = ()

    @property
    def attends(self) -> bool:
        """Whether the layer has keys and values, with or without a recurrent state."""
        return self.mixer.endswith("attention")

    @property
    def num_stored_heads(self) -> int:
        """KV heads that this layer stores."""
        return 0 if self.shares_kv else self.num_key_value_heads

    def for_length(self, max_model_len: int) -> "LayerConfig":
        """Adapt to requests of at most ``max_model_len`` tokens: a window that holds them all is dropped."""
        window = self.window if self.window < max_model_len else 0
        return replace(self, window=window, rope=self.rope and self.rope.for_length(max_model_len))


@dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of a decoder; names as in ``config.json`` where it has them."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    act: str  # gated activation of the MLP, "silu" or "gelu_tanh"
    qk_norm: str  # see ``Family``
    attention_scale: float  # factor of the scores before the softmax
    attention_softcap: float  # scores x are cap * tanh(x / cap); 0: as they are
    logit_softcap: float  # the same for logits
    embed_scale: float  # factor of the embeddings
    per_layer_size: int  # size of the embedding of each token that each layer has of its own; 0: none
    residual_scale: float  # factor of the results of attention and MLP
    logit_scale: float  # factor of the logits
    layers: tuple[LayerConfig, ...]  # the decoder's layers, first to last
    moe: MoEConfig | None  # None in a dense model
    has_lm_head: bool  # without a head it generates nothing
    num_labels: int  # outputs of a classification head; 0 without one
    activation: str  # activation of those outputs: "softmax", "sigmoid" or "" for none
    label_tokens: tuple[str, ...]  # a reranker's tokens whose logits are its head, the answer "no" first
    recurrent: RecurrentConfig | None  # None without recurrent layers
    num_nextn_predict_layers: int  # layers for speculation, which the checkpoint stores after the others
    quant_method: str | None  # the checkpoint's format; None: not quantized. "mxfp4": its experts are MXFP4
    # Width and height of the square of FP8 weights that share a scale; 0: a scale for each output feature; None: no
    # weight is FP8. ``LayerConfig.fp8_linears`` says which weights are.
    fp8: int | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    scales: Scales = Scales()
    num_positions: int = 0  # rows of the tables of RoPE

    model_class = "nanovllm.models.decoder.CausalLM"

    @property
    def attention_layers(self) -> tuple[LayerConfig, ...]:
        return tuple(layer for layer in self.layers if layer.attends)

    @property
    def head_dim(self) -> int:
        """Size of the largest heads."""
        return max(layer.head_dim for layer in self.attention_layers)

    @property
    def num_key_value_heads(self) -> int:
        """KV heads of the layers that have the fewest."""
        return min(layer.num_key_value_heads for layer in self.attention_layers)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(layer.window for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeScaling | None, ...]:
        """Rotary settings of the attention layers; None: not rotated."""
        return tuple(layer.rope for layer in self.attention_layers)

    @property
    def last_storing(self) -> int:
        """The last layer with a state, or with keys and values of its own; later ones need no token of the prompt."""
        return max(i for i, layer in enumerate(self.layers) if layer.mixer and not layer.shares_kv)

    def for_length(self, max_model_len: int) -> "ModelConfig":
        """Adapt the layers and the tables of RoPE to requests of at most ``max_model_len`` tokens."""
        layers = tuple(layer.for_length(max_model_len) for layer in self.layers)
        return replace(self, layers=layers, num_positions=max_model_len)

    def quantized(self) -> "ModelConfig":
        """With FP8 weights in the linear layers of attention, MLP and experts; as it is if the checkpoint has them."""
        if self.family.gpt_oss_experts:
            raise ConfigError(
                "quantization='fp8' is not supported for gpt-oss. Leave it out: its published experts are MXFP4, which "
                "takes half as much, and stay so on a GPU."
            )
        if self.has_packed_weights():
            noun = next(scheme.noun for layer in self.layers for _, scheme in layer.packed_schemes)
            noun = "integers of a few bits" if noun == "integers" else noun
            raise ConfigError(
                f"quantization='fp8', but the checkpoint's weights are {noun} ({self.quant_method}). "
                "Leave it out, or take the 16-bit checkpoint."
            )
        num_experts = self.moe.num_experts if self.moe else 0
        names = frozenset(linears(num_experts, self.family.recurrent, self.family.ungated))
        layers = tuple(replace(layer, fp8_linears=names) for layer in self.layers)
        return self if self.quant_method else replace(self, layers=layers, fp8=0)

    def precision(self, layer: LayerConfig, name: str) -> "Fp8 | PackedScheme | Mxfp4 | None":
        """How a decoder layer's linear layer is stored, a key of ``linears``; None: 16 bits."""
        scheme = dict(layer.packed_schemes).get(name)
        if scheme and scheme.bits == 4:
            return scheme
        if self.quant_method == "mxfp4" and name.startswith("mlp.experts."):
            return Mxfp4()
        return Fp8(self.fp8) if self.fp8 is not None and name in layer.fp8_linears else None

    def has_packed_weights(self, start: str = "") -> bool:
        """Whether a linear layer whose name has this start is stored as group-quantized integers or NVFP4."""
        return any(name.startswith(start) for layer in self.layers for name, _ in layer.packed_schemes)

    def renamed_tensors(self) -> tuple[tuple[str, str], ...]:
        """(in the checkpoint, here) parts of tensor names, replaced in this order."""
        return self.family.renamed + RENAMED_TENSORS * (self.fp8 is not None)

    def unused_tensors(self, has_tower: bool = False) -> str:
        """A regular expression of the tensors that checkpoints may hold and the model does without."""
        unused = [r".*rotary_emb\.inv_freq", self.family.skipped or r"(?!)"]
        unused += [self.family.tower] * (not has_tower and self.family.tower != "")
        unused += [
            rf"model\.(language_model\.)?layers\.{i}\.self_attn\.([kv]_proj|[kv]_norm)\..*"
            for i, layer in enumerate(self.layers) if layer.shares_kv
        ]  # fmt: skip
        drafts = range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)
        unused += [rf"model\.(language_model\.)?layers\.{i}\..*" for i in drafts]
        unused += [UNUSED_TENSORS] * (self.fp8 is not None)
        unused += sorted({scheme.unused_tensors for layer in self.layers for _, scheme in layer.packed_schemes})
        has_no_lm_head = self.tie_word_embeddings or not self.has_lm_head  # a stored one is the embedding's copy
        return "|".join(unused + [r"(.*\.)?lm_head\.weight"] * has_no_lm_head)

    def one_layer_of_each_kind(self) -> "ModelConfig":
        """One layer of each kind that runs other kernels, around the one where a prefill drops tokens."""
        last = self.last_storing

        def kinds(layers: tuple[LayerConfig, ...]) -> list[LayerConfig]:
            found: dict[LayerConfig, LayerConfig] = {}
            for layer in layers:
                found.setdefault(replace(layer, rope=None), layer)
            return list(found.values())

        return replace(self, layers=(*kinds(self.layers[:last]), self.layers[last], *kinds(self.layers[last + 1 :])))

    def describe(self, runner: Any) -> str:
        """A clause of the line at start, about the model of a rank's runner."""
        return ""

    def prove(self, model: Any, block_size: int, captures: bool = False, rehearses: bool = False) -> None:
        """Compare a loaded model with its original. Rows need none: tests compare them with transformers."""

    def check_padded_heads(self, head_dim: int, padded: int) -> None:
        """Raise ConfigError unless heads padded with zeros to size ``padded`` give the model's numbers."""
        if padded == head_dim:
            return
        what = f"the model's heads of {head_dim} are padded with zeros to {padded} for the GPU's kernels, and"
        if self.qk_norm:
            raise ConfigError(f"{what} its norms of q and k would count them. Use device='cpu', which pads nothing.")
        fp8_linears = frozenset().union(*(layer.fp8_linears for layer in self.layers))
        cut = "blocks of its FP8 scales" if self.fp8 and any(x.startswith("self_attn.") for x in fp8_linears) else ""
        cut = "groups of its packed integers" if self.has_packed_weights("self_attn.") else cut
        if cut:
            raise ConfigError(
                f"{what} the {cut} would be cut. Load the 16-bit checkpoint (quantization='fp8' "
                "gives it a scale for each output feature), or use device='cpu', which pads nothing."
            )

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ConfigError unless the model divides over ``size`` ranks (KV heads fewer than ranks are replicated)."""
        for what, count in (
            ("attention heads", self.num_attention_heads),
            ("vocabulary entries", self.vocab_size),
            ("intermediate units", self.intermediate_size),
            ("intermediate units of an expert", self.moe.expert_size if self.moe else 0),
            ("intermediate units of the shared expert", self.moe.shared_size if self.moe else 0),
            *(self.recurrent.divided() if self.recurrent else ()),
        ):
            if count % size:
                raise ConfigError(f"tensor_parallel_size={size} must divide the model's {count} {what}.")
        if size > 1 and any(scheme.act_order for layer in self.layers for _, scheme in layer.packed_schemes):
            raise ConfigError(
                f"tensor_parallel_size={size} cuts the groups of weights that GPTQ has ordered by their activations "
                "(desc_act). Use tensor_parallel_size=1, or a checkpoint without desc_act."
            )
        if self.moe and self.quant_method == "mxfp4" and self.moe.expert_size // size % GROUP:
            raise ConfigError(
                f"tensor_parallel_size={size} must leave each rank a multiple of {GROUP} of the "
                f"{self.moe.expert_size} intermediate units of an expert, which share a scale of MXFP4."
            )
        for heads in {layer.num_key_value_heads: None for layer in self.attention_layers}:
            if heads % size and size % heads:
                raise ConfigError(
                    f"tensor_parallel_size={size} must divide the model's {heads} KV heads, "
                    "or be a multiple of their number."
                )
