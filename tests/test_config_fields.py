"""No silently wrong model: every field of transformers' configuration is honoured, harmless or refused.

One at a time the fields get other values. transformers makes a checkpoint of it, and its logits are ours, or a
``CheckpointError`` says what is not supported. Values that transformers does not take are passed over.
"""

import copy

import families
import pytest
from helpers import generate_with_logits
from histories import ALL
from test_families import IDS, error, hf_logits, logits_of
from transformers import PreTrainedConfig

from nanovllm.errors import CheckpointError

TOLERANCE = 3e-5  # of the largest logit; gelu instead of its tanh form makes 1.6e-4
CASES = {**families.MOE_CASES, **families.CASES, **families.HYBRID_CASES}
CASE_OF = {kind: case for case, (kind, _) in reversed(CASES.items())}  # the first of each class
OF_EVERY_CLASS = PreTrainedConfig().to_dict().keys()  # tried with Llama
NONE = [True, 32, 0.3, [0, 1, 0, 1], ["sparse", "dense"] * 2, "gelu", "all"]  # may stand for a value of any type
WORDS = ["gelu", "relu", "linear", "full_attention", "bfloat16", "all"]
# Kinds of RoPE have fields of their own, and other fields may not fit another number of layers or size of a head.
# Router logits are those of experts, which a case with an MLP in their place does not have.
# The heads of Mamba must have the width that other fields give.
UNTRIED = {"rope_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "return_dict",
           "output_router_logits", "mamba_d_head", "mamba_d_ssm", "mamba_expand", "mamba_n_heads"}  # fmt: skip
MAX_VALUES = 2 if ALL else 1  # of a field


def others(value):
    """Other values than that of a field."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1, value - 1]
    if isinstance(value, float):
        return [1.7 * value + 0.1, 0.6 * value]
    if isinstance(value, list):
        return [value[::-1], value[:1] * len(value), value[-1:] * len(value)]
    return [word for word in WORDS if word != value]


def changes(value):
    """(path, [values]) of each field in there: the whole value with others at the end of the path."""
    if not isinstance(value, dict):
        yield (), others(value)
        return
    for name, field in value.items():
        for path, values in changes(field):
            yield (name, *path), [{**value, name: other} for other in values]


@pytest.mark.parametrize("kind", CASE_OF)
def test_every_field(kind, tmp_path, make_llm):
    case, wrong, untried = CASE_OF[kind], {}, set()
    config = families.make(tmp_path, case).config.get_text_config().to_dict()
    for path, configs in changes(config):
        name, field = ".".join(map(str, path)), path[0]
        if field in OF_EVERY_CLASS and kind != "Llama":
            continue
        if field == "per_layer_config":  # transformers takes the heads of one layer for all of its kind
            continue
        tried = 0
        for value in (other[field] for other in configs):
            try:
                model = families.make(tmp_path, case, **{field: copy.deepcopy(value)})
                want = hf_logits(model, IDS)
            except Exception:  # transformers does not take the value
                continue
            try:
                if case in families.HYBRID_CASES:
                    with make_llm(model=str(tmp_path), max_model_len=256, num_kvcache_blocks=32) as llm:
                        got, want = generate_with_logits(llm, [IDS], 1)[1][0], want[-1:]
                else:
                    got = logits_of(str(tmp_path))
                if got.shape != want.shape or not error(got, want) < TOLERANCE:
                    wrong[name] = value
            except CheckpointError:
                pass
            tried += 1
            if tried == MAX_VALUES:
                break
        if not tried:
            untried.add(path[-1])
    assert not wrong and untried <= UNTRIED
