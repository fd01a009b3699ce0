"""Gemma 4 gives in every way of computing what each request gives alone; see ``test_ways.py``.

Blocks of its layers have two shapes, and the last layers of E2B and E4B store nothing: their prefills compute only the
tokens to sample from. A file of its own, which another worker of pytest-xdist runs at the same time.
"""

from functools import cache
from itertools import product

import families
import pytest
from helpers import gpu_param
from histories import at_night
from test_ways import WAYS, Model, check_way

WAYS_OF_GEMMA4 = ("batched", "preempted, no cache", "all at once", "drafts, all at once", "two ranks, all at once")
CASES = at_night(*product(("gemma4", "gemma4-moe", "gemma4-e4b"), WAYS_OF_GEMMA4)) or [
    ("gemma4-e4b", "all at once"), ("gemma4-moe", "drafts, all at once"), ("gemma4-e4b", "two ranks, all at once"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model(name) -> ``Model``."""

    @cache
    def make(name):
        path = tmp_path_factory.mktemp(name)
        families.make(path, name, max_position_embeddings=1024)
        return Model(str(path), 144, skip_tokenizer_init=True)

    return make


@pytest.mark.parametrize(("name", "way", "device"), [
    *((*case, "cpu") for case in CASES), *(gpu_param(*case, "cuda") for case in CASES if "ranks" not in case[1]),
])  # fmt: skip
def test_way(name, way, device, model):
    check_way(name, WAYS[way], device, model)
