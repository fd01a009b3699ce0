"""A sequence's counters, with and without a request slot."""

import pytest

from nanovllm import SamplingParams
from nanovllm.core import Sequence, SequenceStatus
from nanovllm.engine.scheduler import SequenceTable


@pytest.mark.parametrize("running", [False, True])
def test_counters(running):
    seq = Sequence([5, 6, 7], SamplingParams(max_tokens=4), seq_id=3, block_size=2)
    table = SequenceTable(2, 16)
    if running:
        table.add(seq)
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_completion_tokens, seq.max_num_tokens) == (3, 3, 0, 7)
    assert seq.num_blocks == 2 and seq.block(0).tolist() == [5, 6] and seq.block(1).tolist() == [7]
    assert (seq.token_ids, seq.prompt_token_ids, seq.completion_token_ids) == ([5, 6, 7], [5, 6, 7], [])
    assert seq.status is SequenceStatus.WAITING


def test_a_request_slot_holds_the_tokens_and_gives_them_back():
    table = SequenceTable(2, 16)
    seqs = [Sequence([5, 6, 7 + i], SamplingParams(max_tokens=40), seq_id=3 + i) for i in range(2)]
    for seq in seqs:
        table.add(seq)
    assert [seq.req_idx for seq in seqs] == [0, 1] and table.free_req_indices == []
    assert table.max_tokens.tolist() == [16, 16]  # max_model_len caps prompt + max_tokens
    table.tokens[0, 3], table.num_tokens[0] = 9, 4
    table.remove(seqs[0])
    assert seqs[0].completion_token_ids == [9] and seqs[0].req_idx == -1
    table.tokens[0] = -1  # the next owner of the slot
    assert seqs[0].token_ids == [5, 6, 7, 9]
    assert table.seq_id.tolist() == [-1, 4] and table.free_req_indices == [0]
