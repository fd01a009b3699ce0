"""Filters and min_tokens: thresholds against the definition, the Triton kernels against their twins."""

import pytest
import torch

from nanovllm.kernels.sampling import filters

from .sampling_state import (
    BOTH,
    DEVICE,
    KERNELS,
    every_request,
    kept_ids,
    make_state,
    random_state,
    reference,
    same_selection,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("poisoned")
FILTERS = [
    dict(),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=10_000),
    dict(top_p=0.0),
    dict(top_p=0.3),
    dict(top_p=0.95),
    dict(min_p=0.05),
    dict(min_p=1.0),
    dict(top_k=20, top_p=0.7),
    dict(top_k=20, min_p=0.2),
    dict(top_k=50, top_p=0.9, min_p=0.01),
    dict(top_k=5, temperature=0.0),
]


@BOTH
@pytest.mark.parametrize("temperature", [0.6, 1.5])
@pytest.mark.parametrize("ties", [False, True])
def test_thresholds_agree_with_the_definition(ops, temperature, ties):
    logits = torch.randn(len(FILTERS), 300, device=DEVICE) * 3
    if ties:
        logits = logits.round()
    settings = [dict(dict(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0), **f) for f in FILTERS]
    state = make_state(len(settings), **{name: [s[name] for s in settings] for name in settings[0]})
    before = logits.clone()
    thresholds = ops.filter_thresholds(logits, every_request(state), state)
    assert torch.equal(logits, before)
    for i, wanted in enumerate(settings):
        if wanted["temperature"] == 0 or FILTERS[i] in (dict(), dict(top_k=10_000)):
            assert thresholds[i] == -torch.inf
        else:
            values = logits[i].double().tolist()
            kept = {id for id, value in enumerate(values) if value >= float(thresholds[i])}
            assert kept == kept_ids(values, **wanted), FILTERS[i]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size, spread", [(50, 4), (5000, 4), (9000, 0.05)])
def test_triton_thresholds_agree_with_the_twin(vocab_size, spread, dtype):
    """9,000 nearly equal logits are more candidates than the buffer holds."""
    state = random_state(8)
    req_indices = torch.randperm(8, device=DEVICE)[:7].int()
    logits = (torch.randn(7, vocab_size + 3, device=DEVICE) * spread).to(dtype)[:, :vocab_size]
    logits[2, 5] = torch.nan
    logits[3, 7:9] = -torch.inf
    expected = reference.filter_thresholds(logits, req_indices, state)
    actual = KERNELS.filter_thresholds(logits, req_indices, state)
    assert same_selection(logits, expected, actual)


@pytest.mark.parametrize("num_sms", [0, 4], ids=["one program", "several programs"])
@pytest.mark.parametrize("spread", [4, 0.05])
@pytest.mark.parametrize("mix", [dict(top_k=7), dict(top_p=0.8), dict(top_k=50, top_p=0.9), dict(min_p=0.3)])
def test_thresholds_over_several_blocks(mix, spread, num_sms, monkeypatch):
    """Five blocks, the last one not full. Two launches: each must leave its counters at zero."""
    monkeypatch.setattr(filters, "num_sms", lambda device: num_sms)
    state = make_state(1, temperature=0.7, **mix)
    logits = (torch.randn(1, 20_000, device=DEVICE) * spread).to(torch.bfloat16)
    logits[0, [4, 4_096, 9_000, int(logits.argmax())]] = -torch.inf
    expected = reference.filter_thresholds(logits, every_request(state), state)
    for _ in range(2):
        assert same_selection(logits, expected, KERNELS.filter_thresholds(logits, every_request(state), state))


@BOTH
def test_stop_ids_are_masked_until_min_len(ops):
    """Three requests: too short, long enough, without min_len; and a padding request."""
    state = make_state(4, length=[4, 5, 4, 0], min_len=[5, 5, 0, 5])
    state.stop_ids[:, [0, 3, 4, 5]] = torch.tensor([12, 19, 99, 9], dtype=torch.int32, device=DEVICE)
    req_indices = torch.tensor([3, 1, 0, 2], dtype=torch.int32, device=DEVICE)
    wide = torch.randn(4, 30, device=DEVICE).to(torch.bfloat16)
    expected = wide.clone()
    expected[2, [10 + 2, 10 + 9]] = -torch.inf  # the ids 10 .. 19 are in columns 10 .. 19 of the wider tensor
    ops.mask_stop_ids(wide[:, 10:20], req_indices, state, 10)
    assert torch.equal(wide, expected)
    ops.mask_stop_ids(wide[:0, 10:20], req_indices[:0], state)


def test_triton_masks_the_stop_ids_that_the_twin_masks():
    state = random_state(12)
    logits = torch.randn(12, 70, device=DEVICE)
    actual = logits.clone()
    reference.mask_stop_ids(logits, every_request(state), state, 7)
    KERNELS.mask_stop_ids(actual, every_request(state), state, 7)
    assert torch.equal(actual, logits) and logits.isinf().any(1).sum() > 1


@pytest.mark.parametrize("spread", [0.01, 3, 300])
def test_thresholds_by_the_largest_logits(spread):
    """The reference sorts as many logits as bins tell it to. Flat rows, large k, ties with the k-th and logits far
    below the largest need many of them, or all."""
    settings = [
        dict(top_k=1024), dict(top_k=1023, top_p=0.5), dict(top_k=2000), dict(top_p=0.9), dict(min_p=0.9),
        dict(top_p=0.99), dict(top_k=5, top_p=0.5),
    ]  # fmt: skip
    for setting in settings:  # alone: one row that needs all logits sorts those of all rows
        full = dict(dict(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0), **setting)
        state = make_state(1, **{name: [value] for name, value in full.items()})
        logits = torch.randn(1, 3000, device=DEVICE) * spread
        for values in (logits, logits.clamp(max=float(logits.quantile(0.5)))):  # 1,500 tie for the first place
            threshold = float(reference.filter_thresholds(values, every_request(state), state)[0])
            row = values[0].double().tolist()
            assert {i for i, value in enumerate(row) if value >= threshold} == kept_ids(row, **full), setting


def test_a_threshold_does_not_depend_on_the_other_rows():
    """Far from 0 the total in fp32 was too coarse, and all logits that were sorted for another row counted."""
    logits = torch.cat([torch.randn(1, 20_000), torch.randn(1, 20_000) * 3 + 4490]).to(DEVICE)
    state = make_state(2, temperature=[1.5, 0.001], top_p=[0.9, 0.999], top_k=[0, 0], min_p=[0.0, 0.0])
    together = reference.filter_thresholds(logits, every_request(state), state)
    alone = reference.filter_thresholds(logits[1:], every_request(state)[1:], state)
    assert torch.equal(together[1:], alone) and float(alone[0]) == float(logits[1].max())
