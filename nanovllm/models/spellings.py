"""Fields of ``config.json`` that an architecture spells in its own way, for ``Family.spelled``. Imports no torch."""

from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.models.rope import POSITIVE, SIZE
from nanovllm.validation import BOOLEAN, by_field, check_all, choice, optional

LFM2 = by_field(
    ("norm_eps block_ffn_dim_multiplier", optional(POSITIVE)),
    ("block_ff_dim block_multiple_of intermediate_size", optional(SIZE)),
    ("block_auto_adjust_ff_dim tie_embedding", optional(BOOLEAN)),
    ("use_expert_bias", optional(choice(True))),
)


def of_lfm2(raw: dict[str, Any]) -> dict[str, Any]:
    """The MLP has two thirds of the given width, rounded up, unless the file says that it is the real one."""
    given = check_all("config.json", raw, LFM2, CheckpointError)
    size, factor = given["block_ff_dim"] or given["intermediate_size"], raw.get("block_ffn_dim_multiplier", 1.0)
    if size and given["block_auto_adjust_ff_dim"]:
        size, multiple = int(2 * size / 3), given["block_multiple_of"] or 256
        size = size if factor is None else -(-int(factor * size) // multiple) * multiple
    is_tied = raw.get("tie_word_embeddings") if given["tie_embedding"] is None else given["tie_embedding"]
    return {"intermediate_size": size, "rms_norm_eps": given["norm_eps"] or 1e-5, "tie_word_embeddings": is_tied}
