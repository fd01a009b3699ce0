"""The layout of a step: packed and unpacked, on the host, on the device, and on another rank."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.runner.prepare import prepare_masks
from nanovllm.runner.step import StepHeader, StepInput, StepKind, from_words, pack, to_words, unpack


def segment(size, start):
    return np.arange(start, start + size, dtype=np.int32)


PREFILLS = [StepKind.PREFILL, StepKind.SHORT_PREFILL, StepKind.PADDED_PREFILL]
sizes_of = {
    "num_updates": st.integers(0, 5), "num_tokens": st.integers(1, 9), "num_seqs": st.integers(1, 4),
    "num_sampled": st.integers(0, 6), "num_logits": st.integers(0, 4), "num_adjustments": st.integers(0, 3),
    "num_masks": st.integers(0, 2), "num_mask_words": st.integers(0, 4), "num_targets": st.integers(0, 5),
    "num_block_copies": st.integers(0, 3),
}  # fmt: skip


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(sizes=st.fixed_dictionaries(sizes_of), kind=st.sampled_from(PREFILLS), on_device=st.booleans())
def test_prefill_there_and_back(sizes, kind, on_device):
    sizes["num_logits"] = min(sizes["num_logits"], sizes["num_sampled"])  # fewer where completions are forked
    header = StepHeader(kind, **sizes, max_seqlen_q=7, max_context=8, features=3, num_logprobs=2, num_prompt_logprobs=1)
    u, t, s, n, logits, a, m, w, p, c = (sizes[name] for name in sizes_of)
    packed_requests = (s, s, s + 1, s + 1 if kind == StepKind.PREFILL else 0)
    requests = (t, t, 0, 0) if kind == StepKind.SHORT_PREFILL else packed_requests
    lengths = (u, u, t, t, t, *requests, logits, n, n if logits < n else 0, a, a, m, w, p, p, c, c)
    step = StepInput(*(segment(size, 100 * i) for i, size in enumerate(lengths)))
    there, packed = from_words(to_words(header, pack(header, step)))
    assert there == header and packed.dtype == np.int32
    back = unpack(there, torch.from_numpy(packed) if on_device else packed)
    for name, expected in step._asdict().items():
        assert getattr(back, name).tolist() == expected.tolist(), name


def test_masks_of_a_guided_step():
    """They follow the forward pass, when the tokens of the step before are known."""
    header, packed = prepare_masks(np.array([4, 2], np.int32), np.array([[1, 2, 3], [4, 5, 6]], np.int32))
    assert header.kind == StepKind.SAMPLE and header.num_sampled == header.num_updates == 0
    back = unpack(*from_words(to_words(header, packed)))
    assert back.mask_req_indices.tolist() == [4, 2] and back.mask_words.tolist() == [1, 2, 3, 4, 5, 6]
    assert all(len(part) == 0 for name, part in back._asdict().items() if not name.startswith("mask"))


@pytest.mark.parametrize("u", [0, 3])
def test_decode_sends_only_what_changed(u):
    header = StepHeader(StepKind.DECODE, num_updates=u, num_sampled=4, max_context=33)
    step = StepInput(segment(u, 5), segment(u, 50))
    packed = pack(header, step)
    assert len(packed) == (0 if u == 0 else 8)  # two segments of 3, padded to multiples of 4
    back = unpack(header, packed)
    assert back.indices.tolist() == step.indices.tolist() and back.values.tolist() == step.values.tolist()
    assert all(len(part) == 0 for part in back[2:])


def test_segments_are_aligned():
    """An address that is no multiple of 16 bytes makes Triton compile another variant of every reader."""
    header = StepHeader(
        StepKind.PREFILL, num_updates=3, num_sampled=3, num_tokens=5, num_seqs=1, num_logits=1, num_adjustments=3,
        num_masks=1, num_mask_words=2, num_targets=3, num_block_copies=1,
    )  # fmt: skip
    sizes = (3, 3, 5, 5, 5, 1, 1, 2, 2, 1, 3, 3, 3, 3, 1, 2, 3, 3, 1, 1)
    packed = torch.from_numpy(pack(header, StepInput(*(segment(size, 0) for size in sizes))))
    starts = [s.storage_offset() for s in unpack(header, packed)]
    assert all(start % 4 == 0 for start in starts)
