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
# A commit takes each way with one model of each kind of layer, the mixtures, which have the layers of the dense ones.
# Chunks alone are at night: "chunks of 64, one snapshot" has them, and "all at once". Mamba-2's models take turns.
MAMBA = ("falcon-h1-norm", "granite-mamba-moe", "nemotron-h")
AT_A_COMMIT = [way for way in WAYS_OF_HYBRIDS if way != "chunked"]
CASES = at_night(*product(families.HYBRID_CASES, WAYS_OF_HYBRIDS)) or [
    *product(("qwen3-next", "lfm2-moe"), AT_A_COMMIT), *zip(cycle(MAMBA), AT_A_COMMIT, strict=False),
    ("nemotron-h", "two ranks"),
]


@pytest.mark.parametrize(("name", "way", "device"), [
    *((*case, "cpu") for case in CASES), *(gpu_param(*case, "cuda") for case in CASES if "ranks" not in case[1]),
])  # fmt: skip
def test_way(name, way, device, model):
    check_way(name, WAYS_OF_HYBRIDS[way], device, model)
