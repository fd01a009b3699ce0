"""Token masks, bias and penalties: twins against their definitions, the Triton kernels against their twins."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from nanovllm.sampling.penalties import PenaltyTable

from .sampling_state import BOTH, DEVICE, KERNELS, every_request, make_state, reference

pytestmark = pytest.mark.usefixtures("poisoned")


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def with_columns(state, **values):
    """The state with these columns as strided views of one integer table."""
    words = torch.zeros((len(state.length), 2 * len(values) + 1), dtype=torch.int32, device=DEVICE)
    columns = {}
    for i, (name, value) in enumerate(values.items()):
        columns[name] = words[:, 2 * i + 1]
        if name.endswith("penalty"):
            columns[name] = columns[name].view(torch.float32)
        columns[name][:] = torch.as_tensor(value, device=DEVICE)
    return SimpleNamespace(**(vars(state) | columns))


# ---------------------------------------------------------------- token masks


def random_masks(num_requests, num_ids):
    """Packed masks in columns 1 .. of a wider tensor, and the same as booleans."""
    allowed = torch.rand(num_requests, num_ids) < 0.4
    padded = torch.nn.functional.pad(allowed, (0, -num_ids % 32)).view(num_requests, -1, 32).long()
    words = (padded << torch.arange(32)).sum(2)
    wide = torch.full((num_requests, words.shape[1] + 2), -1, dtype=torch.int32)
    wide[:, 1:-1] = torch.where(words < 2**31, words, words - 2**32).int()
    return wide.to(DEVICE)[:, 1:-1], allowed.to(DEVICE)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [31, 5001])
def test_forbidden_tokens_are_masked(ops, vocab_size, dtype):
    """Slots 1 and 3 are masked; slot 2 is not, nor is the padding slot 4, which has no row of the mask."""
    state = with_columns(make_state(5, length=[3, 1, 4, 7, 0]), is_masked=int32([0, 1, 0, 1, 1]))
    token_mask, allowed = random_masks(4, vocab_size)
    req_indices = int32([3, 4, 0, 1, 2])
    wide = torch.randn(5, vocab_size + 9, device=DEVICE).to(dtype)
    wide[:, 11] = torch.nan
    expected = wide.clone()
    for row, slot in ((0, 3), (3, 1)):
        expected[row, 5 : 5 + vocab_size][~allowed[slot]] = -torch.inf
    ops.apply_token_mask(wide[:, 5 : 5 + vocab_size], req_indices, state, token_mask)
    assert torch.equal(wide.nan_to_num(nan=77), expected.nan_to_num(nan=77))
    ops.apply_token_mask(wide[:0], req_indices[:0], state, token_mask)


@BOTH
def test_ranks_mask_their_part_of_the_vocabulary(ops):
    """Borders inside a word of the mask. The last rank holds ids beyond the mask, which are forbidden."""
    state = with_columns(make_state(3), is_masked=1)
    token_mask, allowed = random_masks(3, 4201)
    logits = torch.randn(3, 4300, device=DEVICE)
    expected = logits[:, :4201].masked_fill(~allowed, -torch.inf)
    parts = [logits[:, a:b].clone() for a, b in ((0, 1), (1, 4130), (4130, 4300))]
    for part, start in zip(parts, (0, 1, 4130), strict=True):
        ops.apply_token_mask(part, every_request(state), state, token_mask, start)
    whole = torch.cat(parts, 1)
    assert torch.equal(whole[:, :4201], expected) and (whole[:, 4201:] == -torch.inf).all()


# ---------------------------------------------------------------- bias and penalties

NO_PENALTIES = dict(repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
PENALTIES = [
    NO_PENALTIES,
    NO_PENALTIES | dict(repetition_penalty=1.3),
    NO_PENALTIES | dict(frequency_penalty=0.7),
    NO_PENALTIES | dict(presence_penalty=-1.5),
    dict(repetition_penalty=0.8, frequency_penalty=-0.3, presence_penalty=1.1),
]


def penalty_columns(penalties):
    return {name: torch.tensor([p[name] for p in penalties]) for name in NO_PENALTIES}


def make_table(prompts, biases, width):
    """What the host writes for prompts (lists of ids) and biases (dicts id -> bias); views of one integer tensor."""
    num_requests = len(prompts)
    words = torch.full((num_requests, 3 * width + 4), -99, dtype=torch.int32, device=DEVICE)
    table = PenaltyTable(
        words[:, 0], words[:, 2], words[:, 3 : 3 + width], words[:, 3 + width : 3 + 2 * width],
        words.view(torch.float32)[:, 3 + 2 * width : 3 + 3 * width],
    )  # fmt: skip
    for slot, (prompt, bias) in enumerate(zip(prompts, biases, strict=True)):
        ids = list(dict.fromkeys([*prompt, *bias]))
        table.num_entries[slot], table.num_counted[slot] = len(ids), len(prompt)
        table.token_ids[slot, : len(ids)] = int32(ids)
        table.counts[slot, : len(ids)] = int32([0 if id in prompt else -1 for id in ids])
        table.bias[slot, : len(ids)] = torch.tensor([bias.get(id, 0.0) for id in ids])
    return table, words


def penalized_by_definition(logits, prompt, output, bias, repetition_penalty, frequency_penalty, presence_penalty):
    """One sequence's logits, a list of floats."""
    result = []
    for id, x in enumerate(logits):
        count = output.count(id)
        x = x + bias.get(id, 0.0)
        if id in prompt or count > 0:
            x = x / repetition_penalty if x > 0 else x * repetition_penalty
        result.append(x - frequency_penalty * count - presence_penalty * (count > 0))
    return torch.tensor(result)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_over_a_generation(ops, dtype):
    """Five requests and a padding slot generate for six steps, mostly ids below 10, so that many repeat."""
    vocab_size, width = 60, 80
    prompts = [[], [7], [3, 3, 9], list(range(0, 60, 2)), [5, 5, 5, 1], []]
    biases = [{4: 2.5}, {}, {3: -1.0, 50: 4.0}, {1: -100.0, 2: 1.0}, {59: 0.5}, {}]
    penalties = [*PENALTIES, NO_PENALTIES]
    state = make_state(6, length=[max(1, len(prompt)) for prompt in prompts])
    state.length[5] = 0
    state = with_columns(state, is_penalized=int32([1, 0, 1, 1, 1, 1]), **penalty_columns(penalties))
    table, words = make_table(prompts, biases, width)
    last_token = torch.zeros(6, 2, dtype=torch.int32, device=DEVICE)[:, 1]
    outputs = [[] for _ in prompts]
    table.num_counted[0] = 1  # an empty prompt: the token of length 1 is not an output
    for step in range(6):
        req_indices = torch.randperm(6, device=DEVICE).int()
        logits = (torch.randn(6, vocab_size + 3, device=DEVICE) * 3).to(dtype)[:, 1:-2]
        logits[:, 8], logits[:, 9] = -torch.inf, torch.nan
        before = logits.clone()
        adjusted = ops.apply_penalties(logits, req_indices, state, last_token, table)
        assert adjusted.dtype == torch.float32 and adjusted.is_contiguous()
        assert torch.equal(logits.nan_to_num(nan=77), before.nan_to_num(nan=77))
        for row, slot in enumerate(req_indices.tolist()):
            expected = logits[row].float().cpu()
            if slot not in (1, 5):
                expected = penalized_by_definition(
                    expected.tolist(), prompts[slot], outputs[slot], biases[slot], **penalties[slot]
                )
            torch.testing.assert_close(adjusted[row].cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        for slot in range(5):
            outputs[slot].append(int(torch.randint(0, 60 if step % 3 == 2 else 10, ())))
            last_token[slot] = outputs[slot][-1]
        state.length[:5] += 1
    for slot in (0, 2, 3, 4):
        counted = outputs[slot][:-1]
        entries = {*prompts[slot], *biases[slot], *counted}
        ids = table.token_ids[slot, : len(entries)].tolist()
        assert table.num_entries[slot] == len(entries) and set(ids) == entries
        counts = [max(count, 0) for count in table.counts[slot, : len(entries)].tolist()]
        assert counts == [counted.count(id) for id in ids]
    assert table.num_entries[1] == 1 and table.num_entries[5] == 0
    assert (words[:, [1, -1]] == -99).all()  # columns between and behind the table's


@BOTH
def test_a_token_is_counted_once(ops):
    state = with_columns(make_state(1, length=3), is_penalized=1, **penalty_columns([PENALTIES[4]]))
    table, _ = make_table([[1, 2]], [{}], 8)
    last_token, logits = int32([6]), torch.randn(1, 20, device=DEVICE)
    first = ops.apply_penalties(logits, every_request(state), state, last_token, table)
    again = ops.apply_penalties(logits, every_request(state), state, last_token, table)
    assert torch.equal(first, again) and table.counts[0, :3].tolist() == [0, 0, 1] and table.num_counted[0] == 3


def copies(table):
    return replace(table, **{field.name: getattr(table, field.name).clone() for field in fields(table)})


def random_penalties(num_requests, vocab_size, width):
    """A state, its last tokens and its table, with up to `width` - 1 entries each: several blocks of the kernel."""
    penalties = [PENALTIES[i % len(PENALTIES)] for i in range(num_requests)]
    state = make_state(num_requests, length=torch.randint(3, 6, (num_requests,)))
    is_penalized = int32([i % 5 != 1 for i in range(num_requests)])
    state = with_columns(state, is_penalized=is_penalized, **penalty_columns(penalties))
    state.length[2] = 0
    table, _ = make_table([[]] * num_requests, [{}] * num_requests, width)
    table.num_counted[:] = torch.randint(3, 6, (num_requests,))
    last_token = int32(torch.randint(0, vocab_size, (num_requests,)))
    for slot in range(num_requests):
        size = int(torch.randint(width // 2, width, ()))
        table.num_entries[slot] = size
        table.token_ids[slot, :size] = torch.randperm(vocab_size)[:size].int()
        table.counts[slot, :size] = torch.randint(-1, 4, (size,)).int()
        table.bias[slot, :size] = torch.randn(size)
        if slot % 2 and last_token[slot] not in table.token_ids[slot, :size]:
            last_token[slot] = table.token_ids[slot, size - 1]
    return state, last_token, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size, width", [(40, 7), (7001, 2600)])
def test_triton_penalizes_as_the_twin(vocab_size, width, dtype):
    state, last_token, table = random_penalties(11, vocab_size, width)
    twin_table = copies(table)
    req_indices = torch.randperm(11, device=DEVICE)[:9].int()
    logits = (torch.randn(9, vocab_size + 3, device=DEVICE) * 3).to(dtype)[:, :vocab_size]
    logits[3, ::2], logits[4, ::3] = -torch.inf, torch.nan
    expected = reference.apply_penalties(logits, req_indices, state, last_token, twin_table)
    actual = KERNELS.apply_penalties(logits, req_indices, state, last_token, table)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert (expected != logits.float()).any(1).sum() >= 5
    for field in fields(table):
        used = torch.arange(width, device=DEVICE) < table.num_entries[:, None]
        pair = [getattr(t, field.name) for t in (table, twin_table)]
        assert torch.equal(*(x[used] if x.dim() == 2 else x for x in pair)), field.name
    KERNELS.apply_penalties(logits[:0], req_indices[:0], state, last_token, table)


@BOTH
def test_ranks_penalize_their_part_of_the_vocabulary(ops):
    """Together they are the whole, and every rank's table counts every token."""
    state, last_token, table = random_penalties(7, 500, 90)
    for slot, index in ((4, 0), (3, -1)):  # an uncounted token that is new to the table, on the first or last rank
        new_ids = sorted(set(range(500)) - set(table.token_ids[slot].tolist()))
        last_token[slot], table.num_counted[slot] = new_ids[index], 0
    logits = torch.randn(7, 500, device=DEVICE)
    shards = [(0, 170), (170, 171), (171, 500)]
    tables = [copies(table) for _ in shards]
    whole = ops.apply_penalties(logits, every_request(state), state, last_token, table)
    parts = [
        ops.apply_penalties(logits[:, a:b], every_request(state), state, last_token, t, a)
        for (a, b), t in zip(shards, tables, strict=True)
    ]
    assert torch.equal(torch.cat(parts, 1), whole) and not torch.equal(whole, logits)
    for rank_table in tables:
        assert torch.equal(rank_table.num_entries, table.num_entries)
        for slot, size in enumerate(table.num_entries.tolist()):
            assert torch.equal(rank_table.token_ids[slot, :size], table.token_ids[slot, :size])
            assert torch.equal(rank_table.counts[slot, :size], table.counts[slot, :size])
