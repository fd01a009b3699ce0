"""The Mamba-2 layers of a model, as ``config.json`` describes them. Imports no torch."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from nanovllm.errors import CheckpointError
from nanovllm.models.recurrent import RecurrentConfig, StateShape
from nanovllm.models.rope import POSITIVE, SIZE
from nanovllm.validation import BOOLEAN, Rule, by_field, check, choice, optional

SCALES = Rule("a list of five positive numbers", lambda x: x is None or (len(x) == 5 and all(map(POSITIVE.accepts, x))),
              lambda x: tuple(x or (1.0,) * 5))  # fmt: skip


@dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    num_heads: int
    num_groups: int  # heads of a group share B and C, and are normalised together
    head_dim: int
    state_dim: int
    conv_size: int  # tokens that the convolution sees
    has_conv_bias: bool
    norm: str  # "gated": norm after the gate; "first": norm before the gate; "": no norm
    input_scales: tuple[float, ...]  # factors of z, x, B, C and dt
    output_scale: float

    operations: ClassVar = "mamba2"
    mixers: ClassVar = {
        "linear_attention": "mamba2", "hybrid": "mamba2_beside_attention", "only_mamba": "mamba2",
        "only_attention": "attention", "mlp": "", "moe": "",
    }  # fmt: skip
    mlps: ClassVar = {"only_mamba": "", "only_attention": "", "mlp": "ungated", "moe": "experts"}
    rules: ClassVar = by_field(
        ("mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv", SIZE),
        ("mamba_d_ssm mamba_expand", optional(SIZE)),
        ("mamba_conv_bias mamba_rms_norm mamba_norm_before_gate", optional(BOOLEAN)),
        ("ssm_multipliers", SCALES),
        ("ssm_in_multiplier ssm_out_multiplier", Rule("a number > 0 or None", optional(POSITIVE).accepts,
                                                      lambda x: 1.0 if x is None else float(x))),
        ("mamba_proj_bias projectors_bias", optional(choice(False))),
        ("time_step_limit", Rule("[0, Infinity] or None", lambda x: x is None or list(x) in (
            [0, float("inf")], [0, {"__float__": "Infinity"}]))),
    )  # fmt: skip
    layers_field: ClassVar = "layers_block_type"

    @classmethod
    def read(cls, given: dict[str, Any]) -> Self:
        heads, groups = given["mamba_n_heads"], given["mamba_n_groups"]
        width = check("config.json", "mamba_n_heads * mamba_d_head", heads * given["mamba_d_head"], SIZE,
                      CheckpointError)  # fmt: skip
        check("config.json", "mamba_n_groups * mamba_d_state", groups * given["mamba_d_state"], SIZE, CheckpointError)
        if heads % groups:
            raise CheckpointError(f"config.json: {heads} heads of Mamba cannot share {groups} groups.")
        name, value = "mamba_d_ssm", given["mamba_d_ssm"]
        if value is None and given["mamba_expand"]:
            name, value = "mamba_expand * hidden_size", given["mamba_expand"] * given["hidden_size"]
        if value not in (None, width):
            raise CheckpointError(f"config.json: {name} is {value}, but mamba_n_heads * mamba_d_head is {width}.")
        norm = "first" if given["mamba_norm_before_gate"] else "gated"
        scales = [given["ssm_in_multiplier"] * scale for scale in given["ssm_multipliers"]]
        return cls(
            heads, groups, given["mamba_d_head"], given["mamba_d_state"], given["mamba_d_conv"],
            given["mamba_conv_bias"] is not False, "" if given["mamba_rms_norm"] is False else norm,
            tuple(scales), given["ssm_out_multiplier"],
        )  # fmt: skip

    @classmethod
    def layer_type(cls, given: dict[str, Any], layer: int) -> str:
        return "hybrid"  # Falcon's files leave the field out: all layers are alike

    def state_shapes(self, num_ranks: int) -> tuple[StateShape, ...]:
        """The convolution's ring, and S of each head."""
        heads = self.num_heads // num_ranks
        channels = heads * self.head_dim + 2 * self.num_groups // self.group_ranks(num_ranks) * self.state_dim
        return (
            StateShape((self.conv_size, channels), accumulates=False),
            StateShape((heads, self.head_dim, self.state_dim), accumulates=True),
        )

    def group_ranks(self, num_ranks: int) -> int:
        """Number of ranks that share the groups out; 1: every rank has the only group."""
        return 1 if self.num_groups == 1 else num_ranks

    def divided(self) -> tuple[tuple[str, int], ...]:
        groups = (("groups of Mamba's heads", self.num_groups),) if self.num_groups > 1 else ()
        return (("heads of Mamba", self.num_heads), *groups)
