"""The seam of readouts: messages that pickle, and a kind that the library does not know."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import generate, greedy, run_ahead
from leaks import finish

from nanovllm import SamplingParams
from nanovllm.core import PrefillBatch, Sequence
from nanovllm.engine.callers import collect
from nanovllm.readouts import Readout, ReadoutBatch, merged
from nanovllm.readouts.pooled_state import PooledState
from nanovllm.readouts.prompt_logprobs import PromptLogprobs


def int32(values):
    return np.array(values, np.int32)


def test_a_batch_without_readouts_has_no_message():
    assert merged([(None, 1, 0, 5), (None, 2, 3, 4)]) == ()
    assert merged([(PromptLogprobs(int32([4, 5]), 3, 0), 1, 0, 3)]) == ()  # its rows come in a later chunk


def test_messages_by_kind():
    """Rows are packed tokens; of pooled last states sequences of the batch. Messages reach other ranks pickled."""
    scored = PromptLogprobs(int32([7, 8, 9]), 2, 5), PromptLogprobs(int32([3]), 0, -1)
    last = PooledState("last", 4)
    chunks = [(last, 10, 1, 4), (scored[0], 11, 0, 4), (None, 12, 0, 6), (scored[1], 13, 0, 2)]
    of_last, of_scored = pickle.loads(pickle.dumps(merged(chunks)))
    assert (of_last.seq_ids, of_last.rows.tolist()) == ([10], [0])
    assert not of_last.needs_every_state and of_scored.needs_every_state
    assert (of_scored.seq_ids, of_scored.sizes, of_scored.num_top) == ([11, 13], [2, 1], -1)
    assert of_scored.rows.tolist() == [5, 6, 13] and of_scored.token_ids.tolist() == [7, 8, 3]
    (mean,) = merged([(None, 10, 0, 2), (PooledState("mean", 9), 11, 3, 6)])
    assert mean.rows.tolist() == [2, 3, 4] and mean.needs_every_state and mean.sizes.tolist() == [3]


def test_sequences_whose_last_state_is_read_come_first():
    """Sampled and pooled ones; not scored ones without tokens to sample, nor one whose prompt goes on."""
    kinds = {0: PromptLogprobs(int32([7]), 0, 0), 2: PromptLogprobs(int32([7]), 3, 0), 3: PooledState("last", 4)}
    seqs = [Sequence([1, 2, 3, 4], SamplingParams(max_tokens=int(i not in kinds)), i) for i in range(6)]
    for seq in seqs:
        seq.req_idx, seq.readout = 10 + seq.seq_id, kinds.get(seq.seq_id)
    chunks = [(seq, 0, 4) for seq in seqs[:5]] + [(seqs[5], 0, 3)]
    fork = Sequence([1, 2, 3, 4], seq_id=6)
    fork.req_idx = 16
    batch = PrefillBatch.of(chunks, [(seqs[1], seqs[1]), (fork, seqs[1]), (seqs[4], seqs[4])], [], {})
    assert [seq.seq_id for seq in batch.seqs] == [1, 3, 4, 0, 2, 5] and batch.num_read == 3
    assert batch.req_indices.tolist() == [11, 16, 14] and batch.sampled_from.tolist() == [0, 0, 2]
    rows = {each.kind: each.rows.tolist() for each in batch.readouts}
    assert rows == {"pooled_state": [1], "prompt_logprobs": [12, 19]} and batch.needs_every_state


@pytest.mark.parametrize(("kind", "first"), [("last", 8), ("cls", 0), ("mean", 0)])
def test_first_needed(kind, first):
    readout = PooledState(kind, 9)
    assert readout.first_needed == first
    assert [readout.takes_last(stop) for stop in (8, 9)] == [False, kind == "last"]


@dataclass(frozen=True)
class NormRows(ReadoutBatch):
    kind = "norms"
    seq_ids: list[int]
    sizes: list[int]
    rows: np.ndarray

    def arrays(self):
        return {"norm_rows": self.rows}

    def results(self, values):
        ends = np.cumsum(self.sizes)
        for seq_id, size, end in zip(self.seq_ids, self.sizes, ends.tolist(), strict=True):
            yield seq_id, values[end - size : end], bool(np.isfinite(values[end - size : end]).all())


class Norms(Readout):
    """The norm of every hidden state of a prompt from some position on."""

    subject = "norms"

    def __init__(self, first, end):
        super().__init__(first, end)
        self.values = []

    @classmethod
    def merge(cls, wanted):
        rows = [row + each.offset for each in wanted for row in each.rows]
        return NormRows([each.seq_id for each in wanted], [len(each.rows) for each in wanted], int32(rows))

    def add_results(self, values):
        self.values += values.tolist()


def read_norms(rows, hidden, every, tensors, model):
    return every[tensors["norm_rows"].long()].float().norm(dim=1)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}, {"max_num_seqs": 2}])
def test_a_kind_of_ones_own(make_llm, options):
    """One readout, its message and its reader: chunks, run-ahead, prefix cache and other requests come for nothing."""
    llm = run_ahead(make_llm(**options))
    llm.model_runner.readers["norms"] = read_norms
    prompts = [[*range(3, 3 + n)] for n in (5, 20, 33)]
    expected, params = generate(llm, prompts, greedy(4)), SamplingParams(max_tokens=0, detokenize=False)

    def norms(first):
        return [
            llm._inputs.request(None, np.array(ids), params, i, Norms(first, len(ids)))
            for i, ids in enumerate(prompts)
        ]

    whole = collect(llm, norms(0), lambda request: request.readout.values)
    assert [len(values) for values in whole] == [5, 20, 33]
    for ids in prompts:
        llm.add_request(ids, greedy(4))
    part = collect(llm, norms(4), lambda request: request.readout.values)
    for few, all_of_them in zip(part, whole, strict=True):
        assert few == pytest.approx(all_of_them[4:], rel=1e-4)
    finished = finish(llm)
    assert [finished[i] for i in sorted(finished)] == expected
