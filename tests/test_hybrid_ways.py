"""Hybrid models give in every way of computing what each request gives alone; see ``test_ways.py``.

A file of its own, which another worker of pytest-xdist runs at the same time.
"""

from itertools import cycle, product

import families
import pytest
from helpers import gpu_param
from histories import at_night
from test_ways import WAYS, Way, check_way
from test_ways import model as model  # a fixture

WAYS_OF_HYBRIDS = {
    **{way: WAYS[way] for way in ("batched", "preempted, no cache", "chunked", "all at once", "two ranks")},
    "chunks of 64, one snapshot": Way("cached chunked", {"max_num_batched_tokens": 64, "num_state_snapshots": 1}),
}
# A commit takes each way with one model of each list, which together have the layers of them all.
KINDS = ("qwen3.5", "qwen3-next"), ("lfm2", "lfm2-moe"), ("granite-mamba-moe", "falcon-h1-norm", "nemotron-h")
CASES = at_night(*product(families.HYBRID_CASES, WAYS_OF_HYBRIDS)) or [
    *(case for names in KINDS for case in zip(cycle(names), WAYS_OF_HYBRIDS, strict=False)),
    ("nemotron-h", "two ranks"),
]


@pytest.mark.parametrize(("name", "way", "device"), [
    *((*case, "cpu") for case in CASES), *(gpu_param(*case, "cuda") for case in CASES if "ranks" not in case[1]),
])  # fmt: skip
def test_way(name, way, device, model):
    check_way(name, WAYS_OF_HYBRIDS[way], device, model)
