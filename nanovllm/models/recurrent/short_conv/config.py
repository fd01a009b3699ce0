"""The short convolutions of a model, as ``config.json`` describes them. Imports no torch."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from nanovllm.models.recurrent import RecurrentConfig, StateShape
from nanovllm.models.rope import SIZE
from nanovllm.validation import at_least, by_field, choice, list_of, optional


@dataclass(frozen=True)
class ShortConvConfig(RecurrentConfig):
    channels: int
    conv_size: int  # tokens that the convolution sees

    operations: ClassVar = "short_conv"
    mixers: ClassVar = {"conv": "short_conv"}
    rules: ClassVar = by_field(
        ("conv_L_cache", SIZE), ("conv_bias", optional(choice(False))),
        ("full_attn_idxs", optional(list_of(at_least(0), "a list of layers"))),
    )  # fmt: skip
    layers_field: ClassVar = "full_attn_idxs"

    @classmethod
    def read(cls, given: dict[str, Any]) -> Self:
        return cls(given["hidden_size"], given["conv_L_cache"])

    @classmethod
    def layer_type(cls, given: dict[str, Any], layer: int) -> str:
        attention = given["full_attn_idxs"]
        return "full_attention" if attention is None or layer in attention else "conv"

    def state_shapes(self, num_ranks: int) -> tuple[StateShape, ...]:
        """The convolution's ring."""
        return (StateShape((self.conv_size, self.channels // num_ranks), accumulates=False),)

    def divided(self) -> tuple[tuple[str, int], ...]:
        return (("channels of the short convolution", self.channels),)
