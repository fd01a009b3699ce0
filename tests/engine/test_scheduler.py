"""The engine's loop, scheduler and block manager against a naive model, over random histories.

The device is played by ``FakeDevice``: it reads nothing but the prepared steps and its request state,
as a real one does, and keeps in each KV slot a hash of the whole token history that led there. Every
launch checks every slot that it attends, so a block given away too early, a stale prefix hit or a
wrong block table shows at the launch that reads it. The next token is a hash of the history too,
so what each request must get is known from the request alone (invariant 7).
"""

import os
import sys
import weakref
from collections import Counter, deque
from types import SimpleNamespace

import pytest
from fake_device import EOS, VOCAB, FakeDevice, Request
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import RequestError, SamplingParams
from nanovllm.engine.block_manager import NO_PARENT, BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import RequestProcessor
from nanovllm.engine.scheduler import DecodeBatch, PrefillBatch, Scheduler
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.engine.tokenizer import AsyncTokenizer


class Harness:
    """An engine with a fake device, and checks of the invariants (docs/architecture.md) after each of its steps."""

    def __init__(
        self,
        max_in_flight=0,
        caching=True,
        block_size=2,
        num_blocks=8,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_model_len=16,
        short_prefills=False,
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
        self.device = FakeDevice(self.config, max_in_flight, self.requests, short_prefills)
        self.engine = engine = LLMEngine.__new__(LLMEngine)
        engine.config, engine.model_runner = self.config, self.device
        engine._finalizer = weakref.finalize(engine, int)
        engine._finalizer.atexit = False
        engine._owner = os.getpid()
        engine.scheduler = Scheduler(self.config, num_blocks, {EOS})
        no_tokenizer = AsyncTokenizer("", skip=True, trust_remote_code=False)
        engine._requests = RequestProcessor(self.config, num_blocks, {EOS}, no_tokenizer)
        engine._in_flight, engine._finished_unscheduled = deque(), []
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
        """Nothing leaks: every block can be handed out, every request slot is free."""
        scheduler = self.scheduler
        manager = scheduler.block_manager
        assert manager.num_available == self.config.num_kvcache_blocks
        assert all(block.ref_count == 0 for block in manager.blocks)
        assert sorted(scheduler.table.free_req_indices) == list(range(self.config.max_num_seqs))
        assert scheduler.is_finished() and scheduler.num_in_flight == 0

    def check(self):
        scheduler, config = self.scheduler, self.config
        table, running, waiting = scheduler.table, scheduler.running, scheduler.waiting
        holders = [*running, *(seq for seq in waiting if seq.req_idx >= 0)]

        # nobody is lost, nobody is twice there
        queued = Counter(seq.seq_id for seq in (*running, *waiting, *self.engine._finished_unscheduled))
        assert queued + Counter(self.outputs.keys()) == Counter(self.requests.keys())
        assert all(seq.status is SequenceStatus.RUNNING for seq in holders)
        assert all(seq.req_idx >= 0 for seq in running)
        assert all(seq is waiting[0] for seq in waiting if seq.req_idx >= 0)  # only the head may be half computed
        assert all(seq.status is SequenceStatus.WAITING and not seq.block_table for seq in waiting if seq.req_idx < 0)

        # invariant 5, and request slots
        assert len(holders) <= config.max_num_seqs
        slots = [seq.req_idx for seq in holders]
        assert sorted(slots + table.free_req_indices) == list(range(config.max_num_seqs))
        assert [table.seq_id[slot] for slot in slots] == [seq.seq_id for seq in holders]
        assert (table.seq_id[table.free_req_indices] == -1).all()
        assert 0 <= scheduler.num_in_flight == len(self.engine._in_flight) <= self.device.max_in_flight

        # invariant 4, and what the device believes
        for seq in holders:
            request, known = self.requests[seq.seq_id], seq.num_tokens
            scheduled = int(table.num_scheduled[seq.req_idx])
            assert seq.num_computed_tokens <= known <= scheduled <= request.limit
            assert scheduled - known <= len(self.engine._in_flight)
            assert known < request.limit
            assert seq.token_ids == request.known[:known].tolist()
            device = self.device
            assert device.block_tables[seq.req_idx, : len(seq.block_table)].tolist() == seq.block_table
            assert device.length[seq.req_idx] == scheduled
            if seq in running:
                assert seq.num_computed_tokens <= scheduled - 1 <= len(seq.block_table) * config.kvcache_block_size
                assert device.last_token[seq.req_idx] == request.known[scheduled - 1]
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
          "short prefill",
          "at max_model_len", "stop", "length")  # fmt: skip


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_random_histories(max_in_flight):
    """Every step keeps the invariants; and enough of the histories hold what engines stumble over."""
    seen = Counter(dict.fromkeys(THINGS, 0))  # thing -> histories; they differ with the version of hypothesis

    @settings(max_examples=1200, derandomize=True, deadline=None, database=None)
    @given(limits=limits, caching=st.booleans(), short=st.booleans(), arrivals=arrivals)
    def one(limits, caching, short, arrivals):
        harness = Harness(max_in_flight, caching, *limits, short)
        play(harness, arrivals)
        harness.run_to_end()
        seen.update(harness.device.seen)
        seen["two or more"] += len(harness.outputs) > 1
        seen["preempted"] += harness.scheduler.num_preemptions > 0
        seen["refused"] += len(harness.requests) < len(arrivals)
        seen["at max_model_len"] += any(s.num_tokens == limits[-1] for s in harness.outputs.values())
        seen.update({seq.finish_reason for seq in harness.outputs.values()})

    one()
    assert seen.keys() == set(THINGS) and min(seen.values()) >= 20, seen


@pytest.mark.parametrize("max_in_flight", [0, 1])
@settings(max_examples=250, derandomize=True, deadline=None, database=None)
@given(limits=limits, first=arrivals, second=arrivals, fail_at=st.integers(1, 25), before=st.integers(0, 20))
def test_random_histories_with_an_abort(max_in_flight, limits, first, second, fail_at, before):
    """A launch fails in the middle, or the caller gives up between two steps; what follows is a normal history."""
    harness = Harness(max_in_flight, True, *limits)
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

    FILES = ("scheduler.py", "block_manager.py", "sequence.py", "request_state.py", "llm_engine.py", "request.py",
             "prepare.py")  # fmt: skip

    def __init__(self, countdown):
        self.countdown = countdown

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(self.FILES) or "nanovllm" not in frame.f_code.co_filename:
            return None
        if frame.f_code.co_name == "_abort":  # a second Ctrl-C may do what it likes
            return None
        if event == "line":
            self.countdown -= 1
            if self.countdown == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_interrupted_at_any_line(max_in_flight):
    """Ctrl-C strikes between any two lines, such as after a block left the free list and before it is in a table."""
    first = [(0, 7, 1, 6, 1, 0), (0, 7, 1, 6, 1, 0), (1, 3, 5, 6, 3, 2), (2, 9, 1, 4, 1, 0)]
    second = [(0, 9, 1, 5, 1, 0), (0, 3, 5, 6, 3, 2), (1, 5, 2, 6, 1, 0)]
    countdown = 1
    while True:
        harness = Harness(max_in_flight, True, 2, 9, 3, 8, 16)
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
    assert len(batch.req_indices) == 2  # the third has no logits yet
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
    harness = Harness(max_in_flight=1, caching=False, block_size=1, num_blocks=4, max_num_seqs=2, max_model_len=5)
    for prompt in ([1], [2]):
        harness.add(prompt, max_tokens=4, ignore_eos=True)
    while not harness.scheduler.num_preemptions:
        in_flight = len(harness.engine._in_flight)
        harness.step()
    assert in_flight == 0
    harness.run_to_end()


def test_surplus_token_after_a_stop_is_dropped():
    """With one step in flight a stop is learnt when the next launch is under way; its token belongs to nobody."""
    params = {"max_tokens": 8, "stop_token_ids": list(range(VOCAB))}
    harness = Harness(max_in_flight=1)
    ids = [harness.add([1, 2, token], **params) for token in (1, 2)]
    harness.run_to_end()
    assert [len(harness.outputs[i].completion_token_ids) for i in ids] == [1, 1]
    assert harness.device.num_launches == 2  # prefill, and the decode step that was surplus


def test_length_stop_is_known_before_it_happens():
    harness = Harness(max_in_flight=1)
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
