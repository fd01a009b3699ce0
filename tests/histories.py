"""How much of the random and the exhaustive tests runs: a part before each commit, all of it at night.

``HISTORIES=all``, which ``.ci/nightly`` sets, runs the full numbers.
"""

import os

import pytest
import torch
from hypothesis import settings

ALL = os.environ.get("HISTORIES") == "all"


def histories(number):
    """Hypothesis settings for ``number`` examples, of which a commit runs the same fifth each time."""
    return settings(max_examples=number if ALL else number // 5, derandomize=True, deadline=None, database=None)


def at_night(*values):
    """More values of a parameter, where kernels are interpreted; each commit's tests have some already."""
    return values if ALL or torch.cuda.is_available() else ()


nightly = pytest.mark.skipif(not at_night(True), reason="runs at night: .ci/nightly")
