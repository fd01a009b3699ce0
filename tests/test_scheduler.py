"""The engine's loop, scheduler and block manager against a naive model, over random histories.

The device is played by ``FakeDevice``: it reads nothing but the packed steps and its row state, as
a real one does, and keeps in each KV slot a hash of the whole token history that led there. Every
launch checks every slot that it attends, so a block given away too early, a stale prefix hit or a
wrong block table shows at the launch that reads it. The next token is a hash of the history too,
so what each request must get is known from the request alone (invariant 7).
"""

import os
import sys
import weakref
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import RequestError, SamplingParams
from nanovllm.engine.block_manager import NO_PARENT, BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.runner.model_runner import ModelRunner, StepHandle
from nanovllm.runner.request_state import RequestState, StagedWrites
from nanovllm.engine.scheduler import DecodeBatch, PrefillBatch, Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.runner.step import StepInput, read_header
from nanovllm.kernels.reference import decode_inputs

VOCAB, EOS = 5, 0
ROOT = 12345  # hash of the empty history


def chain(parent: int, token: int) -> int:
    return hash((parent, token))


def pick(state: int, forbidden=()) -> int:
    """The fake model: the token after the history whose hash is ``state``."""
    token = (state >> 8) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


class Request:
    """What a request must see and get, from the request alone."""

    def __init__(self, prompt, params, max_model_len, eos=(EOS,)):
        self.prompt, self.params = prompt, params
        self.tokens, self.finish_reason, self.stop_reason = list(prompt), None, None
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
        self.limit = min(len(prompt) + params.max_tokens, max_model_len)
        states = [ROOT]
        for token in prompt:
            states.append(chain(states[-1], token))
        # one token more than it gets: after a stop the launch in flight samples a surplus one
        known = list(prompt)
        while len(known) <= self.limit:
            too_short = len(known) < len(prompt) + params.min_tokens
            known.append(pick(states[-1], stops if too_short else ()))
            states.append(chain(states[-1], known[-1]))
        self.known, self.states = np.array(known, np.int32), np.array(states[1:], np.int64)
        for token in known[len(prompt) : self.limit]:
            self.tokens.append(token)
            if token in stops:
                self.finish_reason = "stop"
                self.stop_reason = token if token in params.stop_token_ids else None
                break
        else:
            self.finish_reason = "length"

    @property
    def completion(self):
        return self.tokens[len(self.prompt) :]


class FakeDevice(ModelRunner):
    """Packs steps as the real runner does, and runs them on KV slots that hold hashes of histories."""

    def __init__(self, config, depth, requests):
        self.config, self.depth, self.requests = config, depth, requests
        self.block_size = config.kvcache_block_size
        self.max_blocks = -(-config.max_model_len // self.block_size)
        self.device = torch.device("cpu")
        self.request_state = RequestState(config.max_num_seqs, self.max_blocks, self.device)
        self.updates = StagedWrites(config.max_num_seqs, self.max_blocks)
        self.prefill_graphs = None
        self.kv = np.zeros(config.num_kvcache_blocks * self.block_size, np.int64)
        # numpy views of the device's memory: torch would dominate the time of 2,000 histories
        self.last_token, self.length = self.request_state.last_token.numpy(), self.request_state.length.numpy()
        self.block_tables, self.sampled_tokens = self.request_state.block_tables.numpy(), self.request_state.sampled_tokens.numpy()
        self.fail_at = None
        self.num_launches = 0
        self.seen = set()  # what happened, as a check that histories hold what they should

    def run(self, batch):
        assert 0 < batch.num_tokens <= self.config.max_num_batched_tokens
        self.batch = batch
        if isinstance(batch, PrefillBatch):
            self.seen |= {"chunk"} if len(batch.rows) < len(batch.seqs) else set()
            self.seen |= {"full budget"} if batch.num_tokens == self.config.max_num_batched_tokens else set()
            self.seen |= {"hit" for seq in batch.admitted if seq.num_cached_tokens}
            self.seen |= {"again" for seq in batch.admitted if seq.num_completion_tokens}
            ends = zip(batch.seqs, batch.stops, strict=True)
            self.seen |= {"chunk to a block's end" for s, n in ends if n < len(s) and n % self.block_size == 0}
        prepare = self.prepare_prefill if isinstance(batch, PrefillBatch) else self.prepare_decode
        self.run_model(prepare(batch))
        return StepHandle(self.request_state.sampled_tokens, batch, None, None)

    def run_model(self, packed):
        self.num_launches += 1
        if self.num_launches == self.fail_at:
            raise KeyboardInterrupt
        header = read_header(packed)
        step = StepInput.unpack(header, torch.from_numpy(packed.copy()))
        assert len(set(step.cells.tolist())) == len(step.cells), (
            "two values for one cell: which one stays is undefined"
        )
        self.request_state.apply(step.cells, step.values)
        run = self._prefill if header.is_prefill else self._decode
        tokens, rows = run(header, step)
        self.last_token[rows] = tokens
        self.sampled_tokens[self.length[rows] % 2, rows] = tokens
        self.length[rows] += 1
        assert header.num_sampled == len(tokens) == len(self.batch.rows)

    def _slots(self, row, start, stop):
        positions = np.arange(start, stop)
        slots = (
            self.block_tables[row, positions // self.block_size] * self.block_size + positions % self.block_size
        )
        assert len(set(slots.tolist())) == len(slots)
        return slots

    def _store(self, request, slots, start, stop, input_ids):
        assert input_ids.tolist() == request.known[start:stop].tolist()
        self.kv[slots] = request.states[start:stop]

    def _attend(self, request, row, context):
        np.testing.assert_array_equal(self.kv[self._slots(row, 0, context)], request.states[:context])
        forbidden = self.request_state.columns.forbidden[row].tolist()
        too_short = context < self.request_state.columns.min_length[row].item()
        return pick(request.states[context - 1].item(), forbidden if too_short else ())

    def _prefill(self, header, step):
        batch, step = self.batch, StepInput(*(segment.numpy() for segment in vars(step).values()))
        assert header.num_tokens == len(step.input_ids) == batch.num_tokens
        assert bool(header.has_prefix) == any(batch.starts)
        requests = [self.requests[seq.seq_id] for seq in batch.seqs]
        for i, request in enumerate(requests):
            packed = slice(step.cu_seqlens_q[i], step.cu_seqlens_q[i + 1])
            stop = int(step.context_lens[i])
            start = stop - (packed.stop - packed.start)
            assert stop - start <= header.max_seqlen_q and stop <= header.max_context
            assert step.cu_seqlens_k[i + 1] - step.cu_seqlens_k[i] == stop
            assert step.positions[packed].tolist() == list(range(start, stop))
            slots = self._slots(step.rows[i], start, stop)
            assert step.slot_mapping[packed].tolist() == slots.tolist()
            self._store(request, slots, start, stop, step.input_ids[packed])
        tokens = [
            self._attend(r, row, n) for r, row, n in zip(requests, step.rows, step.context_lens, strict=True)
        ]
        sampled = len(step.sampled_rows)
        assert step.sampled_tokens.tolist() == (step.cu_seqlens_q[1 : sampled + 1] - 1).tolist()
        assert step.sampled_rows.tolist() == step.rows[:sampled].tolist()
        return np.array(tokens[:sampled], np.int32), step.sampled_rows

    def _decode(self, header, step):
        state, batch = self.request_state, self.batch
        assert (state.batch_req_indices[header.num_sampled :] == state.padding_req_idx).all()
        rows = state.batch_req_indices[: header.num_sampled]
        inputs = decode_inputs(rows, state.last_token, state.length, state.block_tables, self.block_size)
        input_ids, positions, slots, context_lens = (x.numpy() for x in inputs)
        rows = rows.numpy().copy()
        assert len(set(rows.tolist())) == len(rows)
        requests = [self.requests[i] for i in batch.seq_ids.tolist()]
        for i, request in enumerate(requests):
            position = int(positions[i])
            assert context_lens[i] == position + 1 <= header.max_context
            assert slots[i] == self._slots(rows[i], position, position + 1)[0]
            self._store(request, slots[i : i + 1], position, position + 1, input_ids[i : i + 1])
        tokens = [self._attend(r, row, n) for r, row, n in zip(requests, rows, context_lens, strict=True)]
        return np.array(tokens, np.int32), rows


class Harness:
    """An engine whose device is fake, and the checks of DESIGN's invariants after each of its steps."""

    def __init__(
        self,
        depth=0,
        caching=True,
        block_size=2,
        num_blocks=8,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_model_len=16,
    ):
        self.config = SimpleNamespace(
            kvcache_block_size=block_size,
            num_kvcache_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
            max_model_len=max_model_len,
            enable_prefix_caching=caching,
            model_config=SimpleNamespace(vocab_size=VOCAB),
            seed=0,
            tensor_parallel_size=1,
        )
        self.requests, self.outputs = {}, {}
        self.device = FakeDevice(self.config, depth, self.requests)
        self.engine = engine = LLMEngine.__new__(LLMEngine)
        engine.config, engine.model_runner = self.config, self.device
        engine._finalizer = weakref.finalize(engine, int)
        engine._finalizer.atexit = False
        engine._owner = os.getpid()
        engine.scheduler = Scheduler(self.config, {EOS})
        engine._in_flight, engine._finished_unscheduled, engine._num_requests = deque(), [], 0
        self.num_steps = 0

    @property
    def scheduler(self):
        return self.engine.scheduler

    def add(self, prompt, **params) -> int | None:
        """The request's id; None if it was refused, which must be for a reason."""
        params = SamplingParams(**params)
        config = self.config
        limit = min(len(prompt) + params.max_tokens, config.max_model_len)
        fits = 0 < len(prompt) < config.max_model_len
        fits = fits and (limit - 1 <= config.num_kvcache_blocks * config.kvcache_block_size or not params.max_tokens)
        # the id is handed out inside; the device may not see the request before it is known here
        expected = Request(prompt, params, config.max_model_len) if fits else None
        try:
            seq_id = self.engine.add_request(prompt, params)
        except RequestError:
            assert not fits
            return None
        assert fits
        self.requests[seq_id] = expected
        return seq_id

    def step(self):
        finished, batch = self.engine._step()
        self.num_steps += 1
        for seq in finished:
            assert seq.seq_id not in self.outputs
            self.outputs[seq.seq_id] = seq
        self.check()
        return batch

    def run_to_end(self):
        budget = 50 + 20 * sum(request.limit for request in self.requests.values())
        while not self.engine.is_finished():
            self.step()
            budget -= 1
            assert budget > 0, "no progress"
        self.check_outputs()
        self.check_empty()

    def check_outputs(self):
        assert self.outputs.keys() == self.requests.keys()
        for seq_id, request in self.requests.items():
            seq = self.outputs[seq_id]
            assert seq.status is SequenceStatus.FINISHED
            if request.params.max_tokens == 0:
                assert seq.completion_token_ids == [] and seq.finish_reason == "length"
                continue
            assert seq.token_ids == request.tokens
            assert seq.finish_reason == request.finish_reason
            assert seq.stop_reason == request.stop_reason
            assert 0 <= seq.num_cached_tokens < len(request.prompt)

    def check_empty(self):
        """Nothing leaks: every block can be handed out, every row is free."""
        scheduler = self.scheduler
        manager = scheduler.block_manager
        assert manager.num_available == self.config.num_kvcache_blocks
        assert all(block.ref_count == 0 for block in manager.blocks)
        assert sorted(scheduler.table.free_rows) == list(range(self.config.max_num_seqs))
        assert scheduler.is_finished() and scheduler.num_in_flight == 0

    def check(self):
        scheduler, config = self.scheduler, self.config
        table, running, waiting = scheduler.table, scheduler.running, scheduler.waiting
        holders = [*running, *(seq for seq in waiting if seq.row >= 0)]

        # nobody is lost, nobody is twice there
        queued = Counter(seq.seq_id for seq in (*running, *waiting, *self.engine._finished_unscheduled))
        assert queued + Counter(self.outputs.keys()) == Counter(self.requests.keys())
        assert all(seq.status is SequenceStatus.RUNNING for seq in holders)
        assert all(seq.row >= 0 for seq in running)
        assert all(seq is waiting[0] for seq in waiting if seq.row >= 0)  # only the head may be half computed
        assert all(seq.status is SequenceStatus.WAITING and not seq.block_table for seq in waiting if seq.row < 0)

        # invariant 5, and rows
        assert len(holders) <= config.max_num_seqs
        rows = [seq.row for seq in holders]
        assert sorted(rows + table.free_rows) == list(range(config.max_num_seqs))
        assert [table.seq_id[row] for row in rows] == [seq.seq_id for seq in holders]
        assert (table.seq_id[table.free_rows] == -1).all()
        assert 0 <= scheduler.num_in_flight == len(self.engine._in_flight) <= self.device.depth

        # invariant 4, and what the device believes
        for seq in holders:
            request, known = self.requests[seq.seq_id], seq.num_tokens
            scheduled = int(table.num_scheduled[seq.row])
            assert seq.num_computed_tokens <= known <= scheduled <= request.limit
            assert scheduled - known <= len(self.engine._in_flight)
            assert known < request.limit
            assert seq.token_ids == request.known[:known].tolist()
            device = self.device
            assert device.block_tables[seq.row, : len(seq.block_table)].tolist() == seq.block_table
            assert device.length[seq.row] == scheduled
            if seq in running:
                assert seq.num_computed_tokens <= scheduled - 1 <= len(seq.block_table) * config.kvcache_block_size
                assert device.last_token[seq.row] == request.known[scheduled - 1]
        self.check_blocks(holders)

    def check_blocks(self, holders):
        """Invariants 1 and 2."""
        manager, size = self.scheduler.block_manager, self.config.kvcache_block_size
        free, cached = list(manager.free_block_ids), list(manager.cached_block_ids)
        references = Counter(block_id for seq in holders for block_id in seq.block_table)
        assert all(len(set(seq.block_table)) == len(seq.block_table) for seq in holders)
        assert sorted([*free, *cached, *references]) == list(range(self.config.num_kvcache_blocks))
        assert all(block.ref_count == references[block.block_id] for block in manager.blocks)
        assert all(manager.blocks[i].hash is None for i in free)
        assert all(manager.blocks[i].hash is not None for i in cached)
        named = {block.hash: block.block_id for block in manager.blocks if block.hash is not None}
        assert named == manager.hash_to_block_id
        if not self.config.enable_prefix_caching:
            assert not named
        # what the prefix cache promises is what launches wrote, and its hash is the chain's
        histories = {}
        for request in self.requests.values():
            for i, state in enumerate(request.states[size - 1 :: size].tolist()):
                histories[state] = request.known[: (i + 1) * size]
        for block_id in named.values():
            block = manager.blocks[block_id]
            history = histories[int(self.device.kv[(block_id + 1) * size - 1])]
            assert block.token_ids == history[-size:].tobytes()
            block_hash = NO_PARENT
            for i in range(0, len(history), size):
                block_hash = BlockManager.compute_hash(history[i : i + size], block_hash)
            assert block.hash == block_hash


# ---------------------------------------------------------------- random histories

limits = st.tuples(
    st.integers(1, 4),  # block_size
    st.integers(2, 12),  # num_blocks
    st.integers(1, 5),  # max_num_seqs
    st.integers(1, 12),  # max_num_batched_tokens
    st.integers(2, 20),  # max_model_len
)
# (steps before it, prompt length, prompt as digits, max_tokens, kind of stop, min_tokens)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(1, 14),
        st.integers(0, 127),
        st.integers(0, 10),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=10,
)
STOPS = [
    {},
    {"ignore_eos": True},
    {"stop_token_ids": [3]},
    {"ignore_eos": True, "stop_token_ids": [2, 3]},
]


def play(harness, arrivals):
    for steps, length, digits, max_tokens, stop, min_tokens in arrivals:
        for _ in range(steps):
            harness.step()
        # two distinct tokens and few leading digits: many prompts share their beginnings
        prompt = [1 + (digits >> (i // 2) & 1) for i in range(length)]
        harness.add(prompt, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), **STOPS[stop])


THINGS = ("chunk", "chunk to a block's end", "full budget", "hit", "preempted", "again", "refused", "two or more",
          "at max_model_len", "stop", "length")  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1])
def test_random_histories(depth):
    """Every step keeps the invariants; and enough of the histories hold what engines stumble over."""
    seen = Counter(dict.fromkeys(THINGS, 0))  # thing -> histories; they differ with the version of hypothesis

    @settings(max_examples=1200, derandomize=True, deadline=None, database=None)
    @given(limits=limits, caching=st.booleans(), arrivals=arrivals)
    def one(limits, caching, arrivals):
        harness = Harness(depth, caching, *limits)
        play(harness, arrivals)
        harness.run_to_end()
        seen.update(harness.device.seen)
        seen["two or more"] += len(harness.outputs) > 1
        seen["preempted"] += harness.scheduler.num_preemptions > 0
        seen["refused"] += len(harness.requests) < len(arrivals)
        seen["at max_model_len"] += any(len(s) == limits[-1] for s in harness.outputs.values())
        seen.update({seq.finish_reason for seq in harness.outputs.values()})

    one()
    assert seen.keys() == set(THINGS) and min(seen.values()) >= 20, seen


@pytest.mark.parametrize("depth", [0, 1])
@settings(max_examples=250, derandomize=True, deadline=None, database=None)
@given(limits=limits, first=arrivals, second=arrivals, fail_at=st.integers(1, 25), before=st.integers(0, 20))
def test_random_histories_with_an_abort(depth, limits, first, second, fail_at, before):
    """A launch fails in the middle, or the caller gives up between two steps; what follows is a normal history."""
    harness = Harness(depth, True, *limits)
    harness.device.fail_at = fail_at
    try:
        play(harness, first)
        for _ in range(before):
            harness.step()
        harness.engine._abort()
    except KeyboardInterrupt:
        pass
    assert harness.engine.is_finished()
    harness.check_empty()
    harness.device.kv[:] = 0  # nothing from before is to be trusted, and nothing may be found
    harness.device.fail_at = None
    for name in (harness.requests, harness.outputs):
        name.clear()
    play(harness, second)
    harness.run_to_end()


# ---------------------------------------------------------------- Ctrl-C anywhere


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in the engine's own host code."""

    FILES = ("scheduler.py", "block_manager.py", "sequence.py", "request_state.py", "llm_engine.py", "model_runner.py")

    def __init__(self, countdown):
        self.countdown = countdown

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(self.FILES) or "engine" not in frame.f_code.co_filename:
            return None
        if frame.f_code.co_name == "_abort":  # a second Ctrl-C may do what it likes
            return None
        if event == "line":
            self.countdown -= 1
            if self.countdown == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("depth", [0, 1])
def test_interrupted_at_any_line(depth):
    """Ctrl-C strikes between any two lines, such as after a block left the free list and before it is in a table."""
    first = [(0, 7, 1, 6, 1, 0), (0, 7, 1, 6, 1, 0), (1, 3, 5, 6, 3, 2), (2, 9, 1, 4, 1, 0)]
    second = [(0, 9, 1, 5, 1, 0), (0, 3, 5, 6, 3, 2), (1, 5, 2, 6, 1, 0)]
    countdown = 1
    while True:
        harness = Harness(depth, True, 2, 9, 3, 8, 16)
        previous, interrupt = sys.gettrace(), Interrupt(countdown)
        try:
            sys.settrace(interrupt)
            play(harness, first)
            while not harness.engine.is_finished():
                harness.engine._step()
            break  # it came to its end before the countdown did
        except KeyboardInterrupt:
            sys.settrace(previous)
            harness.engine._abort()
        finally:
            sys.settrace(previous)
        harness.check_empty()
        harness.device.kv[:] = 0
        for name in (harness.requests, harness.outputs):
            name.clear()
        play(harness, second)
        harness.run_to_end()
        countdown += 13
    assert countdown > 500


# ---------------------------------------------------------------- the policy, by hand


def test_prefill_goes_first_in_order_of_arrival():
    harness = Harness(block_size=4, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=10)
    ids = [harness.add([1] * n, max_tokens=3, ignore_eos=True) for n in (4, 4, 4)]
    batch = harness.step()
    assert isinstance(batch, PrefillBatch)
    assert [seq.seq_id for seq in batch.seqs] == ids and batch.stops == [4, 4, 2]  # 4 + 4 leaves 2 of 10
    assert len(batch.rows) == 2  # the third has no logits yet
    batch = harness.step()
    assert isinstance(batch, PrefillBatch) and (batch.starts, batch.stops) == ([2], [4])
    batch = harness.step()
    assert isinstance(batch, DecodeBatch) and batch.seq_ids.tolist() == ids
    harness.run_to_end()


def test_the_last_to_come_is_preempted_and_comes_back_first():
    harness = Harness(caching=False, block_size=2, num_blocks=4, max_num_seqs=3, max_model_len=10)
    ids = [harness.add([1, 2], max_tokens=5, ignore_eos=True) for _ in range(3)]
    harness.step()
    harness.step()  # three tables of one block grow, one block is free: the last two give way, one after the other
    assert [seq.seq_id for seq in harness.scheduler.running] == ids[:2]
    assert [seq.seq_id for seq in harness.scheduler.waiting] == ids[2:]
    assert harness.scheduler.num_preemptions == 1
    harness.run_to_end()
    assert list(harness.outputs) == ids


def test_preempted_sequence_finds_its_blocks_again():
    harness = Harness(block_size=2, num_blocks=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=10)
    first = harness.add([1, 2, 1], max_tokens=5, ignore_eos=True)
    second = harness.add([2, 2, 1], max_tokens=5, ignore_eos=True)
    starts = []
    while not harness.engine.is_finished():
        batch = harness.step()
        if isinstance(batch, PrefillBatch):
            starts += [(seq.seq_id, start) for seq, start in zip(batch.seqs, batch.starts, strict=True)]
    harness.run_to_end()
    assert harness.scheduler.num_preemptions == 1
    assert starts[:2] == [(first, 0), (second, 0)]
    assert starts[2][0] == second


def test_run_ahead_drains_before_it_preempts():
    """Only tokens the host knows can be computed again, so schedule() waits rather than preempt what is in flight."""
    harness = Harness(depth=1, caching=False, block_size=1, num_blocks=4, max_num_seqs=2, max_model_len=5)
    for prompt in ([1], [2]):
        harness.add(prompt, max_tokens=4, ignore_eos=True)
    while not harness.scheduler.num_preemptions:
        in_flight = len(harness.engine._in_flight)
        harness.step()
    assert in_flight == 0
    harness.run_to_end()


def test_surplus_token_after_a_stop_is_dropped():
    """With depth 1 a stop is learnt when the next launch is under way; its token belongs to nobody."""
    params = {"max_tokens": 8, "stop_token_ids": list(range(VOCAB))}
    harness = Harness(depth=1)
    ids = [harness.add([1, 2, token], **params) for token in (1, 2)]
    harness.run_to_end()
    assert [len(harness.outputs[i].completion_token_ids) for i in ids] == [1, 1]
    assert harness.device.num_launches == 2  # prefill, and the decode step that was surplus


def test_length_stop_is_known_before_it_happens():
    harness = Harness(depth=1)
    harness.add([1, 2, 1], max_tokens=3, ignore_eos=True)
    harness.run_to_end()
    assert harness.device.num_launches == 3  # no surplus one


def test_refusals_leave_no_trace():
    harness = Harness(block_size=2, num_blocks=3, max_model_len=16)
    good = harness.add([1, 2], max_tokens=5)  # 7 tokens; the last needs no slot: 6 slots, 3 blocks
    assert good is not None
    assert harness.add([1, 2], max_tokens=6) is None
    assert harness.add([1] * 7, max_tokens=1) is None
    assert harness.add([1] * 16, max_tokens=1) is None
    assert harness.add([], max_tokens=1) is None
    assert [seq.seq_id for seq in harness.scheduler.waiting] == [good]
    harness.run_to_end()


def test_sequence_counters():
    seq = Sequence([5, 6, 7], SamplingParams(max_tokens=4), seq_id=3, block_size=2)
    assert (len(seq), seq.num_tokens, seq.num_prompt_tokens, seq.num_completion_tokens) == (3, 3, 3, 0)
    assert (seq.num_blocks, seq.last_block_num_tokens, seq.last_token) == (2, 1, 7)
    seq.append_token(8)
    assert (seq.num_blocks, seq.last_block_num_tokens, seq.last_token) == (2, 2, 8)
    assert seq.block(1).tolist() == [7, 8] and seq.max_num_tokens == 7
    assert (seq.prompt_token_ids, seq.completion_token_ids) == ([5, 6, 7], [8])
    assert seq.status is SequenceStatus.WAITING and not seq.is_finished
