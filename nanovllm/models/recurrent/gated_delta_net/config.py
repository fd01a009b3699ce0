"""The gated delta net of a model, as ``config.json`` describes it. Imports no torch."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from nanovllm.errors import CheckpointError
from nanovllm.models.recurrent import RecurrentConfig, StateShape
from nanovllm.models.rope import SIZE
from nanovllm.validation import by_field, check, choice, integer, optional


@dataclass(frozen=True)
class GatedDeltaConfig(RecurrentConfig):
    num_key_heads: int
    num_value_heads: int  # a multiple of ``num_key_heads``
    key_dim: int  # per head
    value_dim: int  # per head
    conv_size: int  # tokens that the convolution before it sees

    operations: ClassVar = "gated_delta"
    mixers: ClassVar = {"linear_attention": "gated_delta_net"}
    rules: ClassVar = by_field(
        ("linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim", SIZE),
        ("linear_conv_kernel_dim", integer("an integer >= 2", lambda n: n >= 2 and SIZE.accepts(n))),
        ("full_attention_interval", SIZE),
        ("attn_output_gate", optional(choice(True))),
    )
    layers_field: ClassVar = "full_attention_interval"

    @classmethod
    def read(cls, given: dict[str, Any]) -> Self:
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        delta = cls(*(given[f"linear_{name}"] for name in names))
        widths = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
        check("config.json", "heads of linear attention * their size", max(widths), SIZE, CheckpointError)
        if delta.num_value_heads % delta.num_key_heads:
            raise CheckpointError(
                f"config.json: {delta.num_value_heads} value heads of linear attention cannot share "
                f"{delta.num_key_heads} key heads."
            )
        return delta

    @classmethod
    def layer_type(cls, given: dict[str, Any], layer: int) -> str:
        return "linear_attention" if (layer + 1) % given["full_attention_interval"] else "full_attention"

    def state_shapes(self, num_ranks: int) -> tuple[StateShape, ...]:
        """The convolution's ring, and S of each value head."""
        key_heads, value_heads = self.num_key_heads // num_ranks, self.num_value_heads // num_ranks
        channels = 2 * key_heads * self.key_dim + value_heads * self.value_dim
        return (
            StateShape((self.conv_size, channels), accumulates=False),
            StateShape((value_heads, self.value_dim, self.key_dim), accumulates=True),
        )

    def divided(self) -> tuple[tuple[str, int], ...]:
        return (("key heads of linear attention", self.num_key_heads),)
