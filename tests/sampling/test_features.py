"""Each feature's host side: which requests use it, what it counts, and how that reaches the device's tables."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import FEATURES, Slots, running
from histories import histories
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.structured_outputs.token_masks import mask_of
from nanovllm.sampling.feature import INT32_MAX, Logits, Sampled
from nanovllm.sampling.penalties import BIAS_ONLY, entries
from nanovllm.sampling_params import MAX_LOGIT_BIAS, StructuredOutputsParams

SLOTS, MAX_LEN, V = 4, 24, 70


# ---------------------------------------------------------------- which requests use what


@pytest.mark.parametrize(
    ("params", "used"),
    [
        ({}, []),
        ({"top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "logit_bias": {},
          "bad_words": []}, []),
        ({"n": 3, "stop": "a", "prompt_logprobs": 1, "truncate_prompt_tokens": 5}, []),  # no business of the sampler's
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, []),
        ({"temperature": 1e-6, "top_k": 5}, []),
        *(({name: 0.5}, ["filters"]) for name in ("top_p", "min_p")),
        ({"top_k": 5}, ["filters"]),
        ({"min_p": 0.1, "min_tokens": 3, "stop_ids": (1,)}, ["min_tokens", "filters"]),
        ({"temperature": 0, "top_k": 5, "min_tokens": 1, "stop_ids": (1,)}, ["min_tokens"]),
        ({"min_tokens": 1}, []),  # without an id that would stop it
        *(({f"{name}_penalty": 1.1}, ["penalties"]) for name in ("presence", "frequency", "repetition")),
        *(({"logprobs": k}, ["logprobs"]) for k in (0, 5, -1)),
        ({"logprob_token_ids": [5]}, ["logprobs"]),
        ({"thinking_token_budget": 0, "top_k": 5}, ["forced", "filters"]),
        ({"thinking_token_budget": -1}, []),
        ({"temperature": 0, "logit_bias": {1: 2}, "logprobs": 0}, ["penalties", "logprobs"]),
        ({"allowed_mask": mask_of([1], V), "presence_penalty": 1}, ["masks", "penalties"]),
        ({"bad_words": ["a"]}, ["masks"]),
        ({"logits_processors": []}, []),
        ({"logits_processors": [lambda ids, logits: logits], "logit_bias": {1: 2}}, ["processors", "penalties"]),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, ["masks"]),
    ],
)
def test_what_a_request_uses(params, used):
    """Only what changes its logits: greedy sampling needs no filter."""
    slots = Slots(SLOTS, vocab_size=V)
    slots.add(running([1], 2, **params))
    assert slots.used(2) == used


def test_what_a_batch_uses():
    """What one of its requests does; the most alternatives, of which -1 is the whole vocabulary."""
    slots = Slots(SLOTS, vocab_size=V)
    for slot, params in enumerate(({}, {"logprobs": 0}, {"logprobs": 3, "top_k": 5}, {"logprobs": -1})):
        slots.add(running([1], slot, **params))
    both = ["filters", "logprobs"]
    for rows, used, num_top in (([], [], 0), ([0], [], 0), ([0, 1], ["logprobs"], 0), ([2, 0], both, 3),
                                ([3, 2], both, V)):  # fmt: skip
        assert slots.used(*rows) == used
        assert slots.num_top(*rows) == num_top


def test_a_batch_waits_for_masks_of_constrained_requests_only():
    """Of the others they are known, and sent, when the request gets its slot."""
    slots = Slots(SLOTS, vocab_size=V)
    slots.add(running([1], 0, bad_words=["a"]), running([1], 1, allowed_mask=mask_of([1], V)), running([1], 2))
    waits = slots.sampler.waits
    assert [waits(np.array(rows, np.int32)) for rows in ([0], [1], [2], [2, 1, 0], [])] == [True, False, False, True,
                                                                                          False]  # fmt: skip
    slots.add(running([1], 0))
    assert not waits(np.arange(3))


def test_plain_requests_cost_nothing():
    """Their arrays are their rows and nothing else, no table is made on the device, and no feature is applied."""
    slots = Slots(SLOTS, vocab_size=V)
    slots.add(running([5, 6], 0, completion=[7]), running([5], 2, [3], temperature=0))
    for name in FEATURES:
        getattr(slots.features, name).apply = None  # fails where it is called
    assert slots.send().keys() == {"state_indices", "state_values"}
    tokens, logprobs = slots.sampler(torch.zeros(2, V), torch.tensor([0, 2]), slots.sampler.used_by(np.array([0, 2])))
    assert slots.used(0, 2) == [] and len(tokens) == 2 and logprobs is None
    assert slots.features.masks.table is slots.features.penalties.table is None
    # a row has room for these already
    slots.add(running([5, 6], 1, completion=[7], top_k=5, stop_ids=(3,), min_tokens=2, logprobs=1))
    assert slots.send().keys() == {"state_indices", "state_values"}


# ---------------------------------------------------------------- penalties and biases

tokens = st.lists(st.integers(0, 9), max_size=10)
biases = st.dictionaries(st.integers(0, 15), st.floats(-5, 5, width=16), max_size=6)


@histories(200)
@given(prompt=tokens.filter(len), completion=tokens, bias=biases, penalty=st.sampled_from([1.0, 1.5]))
def test_entries_against_a_plain_count(prompt, completion, bias, penalty):
    """Every token of a penalised request has one entry; so has every biased one."""
    params = SamplingParams(repetition_penalty=penalty, logit_bias=bias)
    history = np.array(prompt + completion, np.int32) if penalty != 1 else None
    num_counted, ids, counts, values = entries(params, history, len(prompt))
    assert ids.dtype == counts.dtype == np.int32 and values.dtype == np.float32
    expected = {token: (BIAS_ONLY, value) for token, value in bias.items()}
    if penalty != 1:
        generated = Counter(completion)
        expected |= {token: (generated[token], bias.get(token, 0.0)) for token in prompt + completion}
    found = dict(zip(ids.tolist(), zip(counts.tolist(), values.tolist(), strict=True), strict=True))
    assert len(found) == len(ids) and found == expected
    # the device counts the tokens beyond; without penalties it need not
    assert num_counted == (len(prompt) + len(completion) if penalty != 1 else INT32_MAX)


def entries_of(slots, req_idx):
    """{token id: (count, bias)} of a request slot on the device."""
    table = slots.features.penalties.table
    columns = (column[req_idx, : table.num_entries[req_idx]].tolist()
               for column in (table.token_ids, table.counts, table.bias))  # fmt: skip
    return {token: (count, bias) for token, count, bias in zip(*columns, strict=True)}


def test_entries_reach_the_devices_table():
    slots = Slots(SLOTS, max_model_len=MAX_LEN, vocab_size=V)
    bias = {6: 1.5, 60: -2.0}
    slots.add(running([5, 5, 6], 2, completion=[7, 7, 5], frequency_penalty=0.5, logit_bias=bias), running([8], 1),
              running([1], 0, logit_bias={69: 0.25}))  # fmt: skip
    assert slots.send()["penalty_values"] == (2 + 3 * 4) + (2 + 3 * 1)  # two sizes, and the entries
    assert entries_of(slots, 2) == {5: (1, 0.0), 6: (0, 1.5), 7: (2, 0.0), 60: (BIAS_ONLY, -2.0)}
    assert entries_of(slots, 0) == {69: (BIAS_ONLY, 0.25)}
    table = slots.features.penalties.table
    assert table.num_counted[[0, 2]].tolist() == [INT32_MAX, 6]
    assert not table.num_entries[[1, 3, SLOTS]].any()
    assert table.token_ids.shape == (SLOTS + 1, V)


def test_entries_of_a_slots_last_owner_are_gone():
    slots = Slots(SLOTS, max_model_len=MAX_LEN, vocab_size=V)
    slots.add(running([5, 6, 7], 1, completion=[8], presence_penalty=1, logit_bias={9: 3.0}))
    slots.send()
    slots.add(running([5], 1, presence_penalty=1))
    slots.send()
    assert entries_of(slots, 1) == {5: (0, 0.0)} and slots.features.penalties.table.num_counted[1] == 1


@pytest.mark.parametrize(("max_model_len", "vocab_size", "capacity"),
                         [(100, 10**6, 100 + MAX_LOGIT_BIAS), (4096, 500, 500)])  # fmt: skip
def test_room_for_entries(max_model_len, vocab_size, capacity):
    """Every distinct token a request can have and every bias, or the vocabulary if that is smaller."""
    slots = Slots(1, max_model_len=max_model_len, vocab_size=vocab_size)
    slots.add(running([1], logit_bias={3: 1.0}))
    slots.send()
    assert slots.features.penalties.table.token_ids.shape == (2, capacity)


# ---------------------------------------------------------------- masks


def allowed_of(slots, req_idx):
    """Token ids that a request slot may sample, bit by bit."""
    words = slots.features.masks.table[req_idx].numpy().view(np.uint32).tolist()
    return [token for token in range(V) if words[token // 32] >> token % 32 & 1]


def test_masks():
    """Bit t % 32 of word t // 32, in the 32nd word's sign bit too; with the request, or before a sampling."""
    slots, num_words = Slots(SLOTS, vocab_size=V), -(-V // 32)
    all_allowed = {3: [0, 31, 32, 63, 69], 1: [33]}
    slots.add(*(running([5], i, allowed_mask=mask_of(allowed, V)) for i, allowed in all_allowed.items()))
    sent = slots.send()
    assert (sent["mask_req_indices"], sent["masks"]) == (2, 2 * num_words)
    masks = slots.features.masks
    assert {i: allowed_of(slots, i) for i in all_allowed} == all_allowed
    assert masks.table.shape == (SLOTS + 1, num_words) and not masks.table[[0, 2, SLOTS]].any()
    late = np.array([0, 3], np.int32), np.stack([mask_of([i, 64], V) for i in (7, 8)])
    masks.begin(Sampled(late[0], masks=late), slots.arrays)
    assert slots.send()["masks"] == 2 * num_words
    assert [allowed_of(slots, i) for i in range(4)] == [[7, 64], [33], [], [8, 64]]


def test_forced_tokens_on_two_ranks():
    """In the order of the batch, in the first of its rows; the rank that has the column leaves it one token."""
    slots = Slots(SLOTS, vocab_size=V)
    slots.add(*(running([5], i, thinking_token_budget=1) for i in range(3)), running([5], 3))
    forced, none = slots.features.forced, (np.empty(0, np.int32), np.empty((0, 3), np.int32))
    assert [forced.waits(np.array([i])) for i in (0, 3)] == [True, False]
    req_indices, logits = np.array([3, 0, 2], np.int32), torch.randn(6, V).bfloat16()
    for pairs, rows in (([[2, 5], [0, 60]], {4: 5, 2: 60}), ([], {}), ([[0, 34]], {2: 34}), ([[0, 35]], {2: 35})):
        forced.begin(Sampled(req_indices, 2, (*none, np.array(pairs, np.int32).reshape(-1, 2))), slots.arrays)
        slots.send()
        parts = [forced.apply(Logits(part, None, SimpleNamespace(rank=rank, size=2)), None).values
                 for rank, part in enumerate(logits.chunk(2, 1))]  # fmt: skip
        expected = logits.clone()
        for row, token_id in rows.items():
            expected[row] = -torch.inf
            expected[row, token_id] = 0.0
        assert torch.equal(torch.cat(parts, 1), expected)


def test_released_tables_are_made_again():
    slots = Slots(SLOTS, vocab_size=V)
    for allowed in ([5], [6]):
        slots.add(running([5], 1, allowed_mask=mask_of(allowed, V), logit_bias={allowed[0]: 1.0}))
        slots.send()
        assert allowed_of(slots, 1) == allowed and entries_of(slots, 1) == {allowed[0]: (BIAS_ONLY, 1.0)}
        slots.sampler.release()
        assert slots.features.masks.table is slots.features.penalties.table is None
