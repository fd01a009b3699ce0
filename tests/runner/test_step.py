"""The layout of a step: packed and unpacked, on the host, on the device, and on another rank."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.runner.step import StepHeader, StepInput, StepKind, from_words, pack, to_words, unpack


def segment(size, start):
    return np.arange(start, start + size, dtype=np.int32)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(u=st.integers(0, 5), t=st.integers(1, 9), s=st.integers(1, 4), n=st.integers(0, 4), short=st.booleans(),
       on_device=st.booleans())  # fmt: skip
def test_prefill_there_and_back(u, t, s, n, short, on_device):
    n = min(n, s)
    sizes = (u, u, t, t, t, t, t, 0, 0, n, n) if short else (u, u, t, t, t, s, s, s + 1, s + 1, n, n)
    step = StepInput(*(segment(size, 100 * i) for i, size in enumerate(sizes)))
    kind = StepKind.SHORT_PREFILL if short else StepKind.PREFILL
    header = StepHeader(kind, u, n, num_tokens=t, num_seqs=s, max_seqlen_q=7, max_context=8, features=3)
    there, packed = from_words(to_words(header, pack(header, step)))
    assert there == header and packed.dtype == np.int32
    back = unpack(there, torch.from_numpy(packed) if on_device else packed)
    for name, expected in vars(step).items():
        assert getattr(back, name).tolist() == expected.tolist(), name


@pytest.mark.parametrize("u", [0, 3])
def test_decode_sends_only_what_changed(u):
    header = StepHeader(StepKind.DECODE, num_updates=u, num_sampled=4, max_context=33)
    step = StepInput(segment(u, 5), segment(u, 50))
    packed = pack(header, step)
    assert len(packed) == (0 if u == 0 else 8)  # two segments of 3, padded to multiples of 4
    back = unpack(header, packed)
    assert back.indices.tolist() == step.indices.tolist() and back.values.tolist() == step.values.tolist()
    assert all(len(part) == 0 for part in list(vars(back).values())[2:])


def test_segments_are_aligned():
    """An address that is no multiple of 16 bytes makes Triton compile another variant of every reader."""
    header = StepHeader(StepKind.PREFILL, num_updates=3, num_sampled=1, num_tokens=5, num_seqs=1)
    sizes = (3, 3, 5, 5, 5, 1, 1, 2, 2, 1, 1)
    packed = torch.from_numpy(pack(header, StepInput(*(segment(size, 0) for size in sizes))))
    starts = [s.storage_offset() for s in vars(unpack(header, packed)).values()]
    assert all(start % 4 == 0 for start in starts)
