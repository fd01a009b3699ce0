"""Token masks and adjustments of requests: what the host counts, and how it reaches the device's tables."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.sequence import INT32_MAX, Sequence, SequenceTable
from nanovllm.engine.structured import mask_of
from nanovllm.runner.sampling_tables import (
    BIAS_ONLY,
    SamplingTables,
    StagedTables,
    adjustment_entries,
    mask_words,
    table_capacity,
)
from nanovllm.sampling_params import MAX_LOGIT_BIAS

SLOTS, MAX_LEN, V = 4, 24, 70


def running(prompt, completion=(), req_idx=0, **params):
    """A sequence with a request slot, as it is after a preemption if it has a completion."""
    seq, table = Sequence(prompt, SamplingParams(**params)), SequenceTable(SLOTS, MAX_LEN)
    table.free_req_indices = [req_idx]
    table.add(seq)
    n = len(prompt) + len(completion)
    table.tokens[req_idx, len(prompt) : n], table.num_tokens[req_idx] = completion, n
    return seq


tokens = st.lists(st.integers(0, 9), max_size=10)
biases = st.dictionaries(st.integers(0, 15), st.floats(-5, 5, width=16), max_size=6)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(prompt=tokens.filter(len), completion=tokens, bias=biases, penalty=st.sampled_from([1.0, 1.5]))
def test_entries_against_a_plain_count(prompt, completion, bias, penalty):
    """Every token of a penalised request has one entry; so has every biased one."""
    seq = running(prompt, completion, repetition_penalty=penalty, logit_bias=bias)
    num_counted, ids, counts, values = adjustment_entries(seq)
    assert ids.dtype == counts.dtype == np.int32 and values.dtype == np.float32
    expected = {token: (BIAS_ONLY, value) for token, value in bias.items()}
    if penalty != 1:
        generated = Counter(completion)
        expected |= {token: (generated[token], bias.get(token, 0.0)) for token in prompt + completion}
    found = dict(zip(ids.tolist(), zip(counts.tolist(), values.tolist(), strict=True), strict=True))
    assert len(found) == len(ids) and found == expected
    # the device counts the tokens beyond; without penalties it need not
    assert num_counted == (len(prompt) + len(completion) if penalty != 1 else INT32_MAX)


class Mirror:
    """Host and device side together."""

    def __init__(self):
        self.staged = StagedTables(MAX_LEN, V)
        self.tables = SamplingTables(SLOTS, MAX_LEN, V, torch.device("cpu"))

    def add(self, seq):
        self.staged.add(seq, seq.sampling_params.features)

    def send(self) -> tuple[int, int]:
        """Number of words of adjustments and of masks that were sent."""
        indices, values, req_indices, words = self.staged.drain()
        assert {array.dtype for array in (indices, values, req_indices, words)} == {np.dtype(np.int32)}
        assert len(set(indices.tolist())) == len(indices)
        if len(indices):
            self.tables.set_adjustments(torch.from_numpy(indices), torch.from_numpy(values))
        if len(req_indices):
            self.tables.set_masks(torch.from_numpy(req_indices), torch.from_numpy(words))
        return len(indices), len(words)

    def entries(self, req_idx):
        """{token id: (count, bias)} of a request slot."""
        table = self.tables.adjustments
        columns = (column[req_idx, : table.num_entries[req_idx]].tolist()
                   for column in (table.token_ids, table.counts, table.bias))  # fmt: skip
        return {token: (count, bias) for token, count, bias in zip(*columns, strict=True)}

    def allowed(self, req_idx):
        """Token ids that a request slot may sample, bit by bit."""
        words = self.tables.token_mask[req_idx].numpy().view(np.uint32).tolist()
        return [token for token in range(V) if words[token // 32] >> token % 32 & 1]


def test_rows_reach_the_devices_table():
    mirror = Mirror()
    mirror.add(running([5, 5, 6], [7, 7, 5], req_idx=2, frequency_penalty=0.5, logit_bias={6: 1.5, 60: -2.0}))
    mirror.add(running([1], req_idx=0, logit_bias={69: 0.25}))
    mirror.send()
    assert mirror.entries(2) == {5: (1, 0.0), 6: (0, 1.5), 7: (2, 0.0), 60: (BIAS_ONLY, -2.0)}
    assert mirror.entries(0) == {69: (BIAS_ONLY, 0.25)}
    table = mirror.tables.adjustments
    assert table.num_counted[[0, 2]].tolist() == [INT32_MAX, 6]
    assert not table.num_entries[[1, 3, SLOTS]].any()
    assert table.token_ids.shape == (SLOTS + 1, table_capacity(MAX_LEN, V))


def test_a_slot_keeps_nothing_of_its_last_owner():
    mirror = Mirror()
    mirror.add(running([5, 6, 7], [8], req_idx=1, presence_penalty=1, logit_bias={9: 3.0}))
    mirror.send()
    mirror.add(running([5], req_idx=1, presence_penalty=1))
    mirror.send()
    assert mirror.entries(1) == {5: (0, 0.0)} and mirror.tables.adjustments.num_counted[1] == 1


def test_masks():
    """Bit t % 32 of word t // 32, in the 32nd word's sign bit too."""
    mirror = Mirror()
    for req_idx, allowed in ((3, [0, 31, 32, 63, 69]), (1, [33])):
        seq = running([5], req_idx=req_idx, allowed_token_ids=allowed)
        seq.allowed_mask = mask_of(allowed, V)
        mirror.add(seq)
    assert mirror.send() == (0, 2 * mask_words(V))
    assert mirror.allowed(3) == [0, 31, 32, 63, 69] and mirror.allowed(1) == [33]
    assert mirror.tables.token_mask.shape == (SLOTS + 1, 3) and not mirror.tables.token_mask[[0, 2, SLOTS]].any()


def test_plain_requests_cost_nothing():
    """Neither words on their way nor memory on the device."""
    mirror = Mirror()
    mirror.add(running([5, 6], [7], top_k=5, min_tokens=2, logprobs=1))
    assert mirror.send() == (0, 0)
    assert mirror.tables.token_mask is mirror.tables.adjustments is None
    mirror.add(running([5, 6], [7], presence_penalty=1))
    assert mirror.send() == (2 + 3 * 3, 0)
    assert mirror.send() == (0, 0)


def test_reset_drops_what_was_not_sent():
    mirror = Mirror()
    seq = running([5], presence_penalty=1, allowed_token_ids=[5])
    seq.allowed_mask = mask_of([5], V)
    mirror.add(seq)
    mirror.staged.reset()
    assert mirror.send() == (0, 0)


@pytest.mark.parametrize(("max_model_len", "vocab_size", "capacity"),
                         [(100, 10**6, 100 + MAX_LOGIT_BIAS), (4096, 500, 500)])  # fmt: skip
def test_capacity(max_model_len, vocab_size, capacity):
    """Room for every distinct token a request can have and every bias, or for the vocabulary if that is smaller."""
    assert table_capacity(max_model_len, vocab_size) == capacity
