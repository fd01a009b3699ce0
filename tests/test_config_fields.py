"""No silently wrong model: each field of transformers' configuration is honoured, harmless or refused.

One at a time the fields get another value. transformers makes a checkpoint of it; its logits are ours, or a
``CheckpointError`` names what is not supported. Values that transformers itself does not take are passed over.
"""

import copy

import families
import pytest
import torch
from helpers import generate_with_logits
from test_families import IDS, TOLERANCE, error, hf_logits, logits_of
from transformers import PreTrainedConfig

from nanovllm.errors import CheckpointError

CASES = {**families.CASES, **families.MOE_CASES, **families.HYBRID_CASES}
FIRST = {kind: case for case, (kind, _) in reversed(CASES.items())}  # a case of each class
OF_ALL = PreTrainedConfig().to_dict()  # fields of every class, which are tried in one
# None may stand for a value of any type
OTHERS = [True, 3, 0.3, 0.3 * 8, [0, 1, 0, 1], "gelu"]
WORDS = ["gelu", "relu", "dense", "sparse", "full_attention", "sliding_attention", "linear_attention", "linear", "bfloat16"]


def others(value):
    """Other values of a field."""
    if value is None:
        return OTHERS
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, max(value - 1, 0)]
    if isinstance(value, float):
        return [1.7 * value + 0.1]
    if isinstance(value, str):
        return [word for word in WORDS if word != value]
    if isinstance(value, list):
        return [value[::-1], value[:1] * len(value), value[-1:] * len(value), [1] * 4]
    return [{**value, name: other} for name in value for other in others(value[name])]


@pytest.mark.parametrize("kind", FIRST)
def test_every_field(kind, tmp_path, make_llm):
    case, count = FIRST[kind], {}
    config = families.make(tmp_path, case).config
    text = config.get_text_config()
    wrong = []
    for field, value in text.to_dict().items():
        if field in OF_ALL and kind != "Llama":
            continue
        for other in others(value):
            try:
                model = families.make(tmp_path, case, **{field: copy.deepcopy(other)})
                want = hf_logits(model, IDS)
            except Exception as e:  # transformers refuses the value
                count[field] = count.get(field, 0) 
                continue
            count[field] = count.get(field, 0) + 1
            try:
                if case in families.HYBRID_CASES:
                    with make_llm(model=str(tmp_path), max_model_len=256, num_kvcache_blocks=32) as llm:
                        got, want = generate_with_logits(llm, [IDS], 1)[1][0], want[-1:]
                else:
                    got = logits_of(str(tmp_path))
            except CheckpointError as refusal:
                print("REF", kind, field, other, str(refusal)[:120])
                continue
            except Exception as e:
                wrong.append((field, other, repr(e)[:200]))
                continue
            if got.shape != want.shape or not error(got, want) < TOLERANCE:
                wrong.append((field, other, error(got, want) if got.shape == want.shape else got.shape))
    print('WRONG', kind, wrong)
    assert not wrong, wrong
