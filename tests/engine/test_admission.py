"""Who enters when, in a scheduler whose launches are answered at once, whatever their tokens."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tokens_of

from nanovllm import SamplingParams
from nanovllm.core import DecodeBatch, Sequence
from nanovllm.engine import admission, callers
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler

BLOCK_SIZE = 4
RANDOM = Random(0)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    monkeypatch.setattr(admission, "MANY_SEQS", 8)


def make_scheduler(num_blocks, max_num_seqs=64, max_num_batched_tokens=10_000):
    config = SimpleNamespace(
        max_num_batched_tokens=max_num_batched_tokens,
        kvcache_block_size=BLOCK_SIZE,
        model_config=SimpleNamespace(vocab_size=100),
        max_num_seqs=max_num_seqs,
        max_model_len=200,
    )
    return Scheduler(config, lambda: BlockManager(num_blocks, BLOCK_SIZE))


def add(scheduler, num, num_prompt_tokens, max_tokens, prefix=(), ignore_eos=True, min_tokens=0):
    for _ in range(num):
        prompt = [*prefix, *(RANDOM.randrange(100) for _ in range(num_prompt_tokens - len(prefix)))]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, min_tokens=min_tokens)
        scheduler.add(Sequence(prompt, params, RANDOM.getrandbits(60), BLOCK_SIZE))


def in_cohorts():
    """A scheduler with 80 sequences of 6 tokens that become 38, which enter two at a time."""
    scheduler = make_scheduler(num_blocks=105)
    add(scheduler, 80, 6, 32)
    scheduler.admission.num_expected = 80
    return scheduler


def run(scheduler, num_steps=None):
    """[(decode steps before, sequences that a prefill admits)], and the sequences in each decode step."""
    entries, widths = [], []
    while not scheduler.is_finished() and len(widths) != num_steps:
        batch = scheduler.schedule()
        if isinstance(batch, DecodeBatch):
            widths.append(len(batch.req_indices))
        else:
            entries.append((len(widths), len(batch.new)))
        scheduler.postprocess(batch, np.zeros(len(batch.req_indices), np.int32))
    return entries, widths


@pytest.mark.parametrize("seed", range(20))
def test_nobody_of_known_length_is_preempted(seed, monkeypatch):
    """Many lengths, so that not every end of a sequence is looked at."""
    monkeypatch.setattr(admission, "MANY_SEQS", 1)
    random = Random(seed)
    scheduler = make_scheduler(num_blocks=random.randint(100, 300), max_num_batched_tokens=64)
    for _ in range(200):
        add(scheduler, 1, random.randint(1, 40), random.randint(1, 100))
    _, widths = run(scheduler)
    assert scheduler.num_preemptions == 0 and max(widths) >= 8


def test_they_enter_in_cohorts():
    """10 of 10 blocks at once, or 8 cohorts of 2, which take 104 in all."""
    scheduler = in_cohorts()
    entries, widths = run(scheduler)
    assert scheduler.schedule() is None
    assert {num for _, num in entries} == {2} and [step for step, _ in entries[:9]] == [0, *range(3, 34, 4)]
    assert widths[31:-31] == [16] * len(widths[31:-31]) and scheduler.num_preemptions == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "plan_cohorts", lambda *args: None)
        patch.setattr(admission, "MANY_SEQS", 0)
        scheduler = make_scheduler(num_blocks=105)
        add(scheduler, 80, 6, 32)
        entries, others = run(scheduler)
    assert {num for _, num in entries} == {10} and len(widths) < 0.8 * len(others)


@pytest.mark.parametrize("why, num, num_prompt_tokens, options", [
    ("all at once have blocks for their end", 10, 8, {}),
    ("few waves", 20, 8, {}),
    ("the prompt takes most blocks", 80, 36, {"max_tokens": 8}),
    ("they may stop", 80, 6, {"ignore_eos": False}),
    ("they share a block", 80, 6, {"prefix": [1, 2, 3, 4]}),
    ("too short", 80, 6, {"max_tokens": 7}),
])  # fmt: skip
def test_no_cohorts(why, num, num_prompt_tokens, options):
    scheduler = make_scheduler(num_blocks=105)
    add(scheduler, num, num_prompt_tokens, **{"max_tokens": 32} | options)
    assert admission.plan_cohorts(scheduler, len(scheduler.waiting)) is None, why


def test_no_cohorts_where_some_are_longer():
    scheduler = make_scheduler(num_blocks=105)
    add(scheduler, 40, 6, 32)
    assert admission.plan_cohorts(scheduler, len(scheduler.waiting)) is not None
    add(scheduler, 1, 6, 31)
    assert admission.plan_cohorts(scheduler, len(scheduler.waiting)) is None


def test_another_length_ends_the_cohorts():
    """The next ones need not wait until an eighth of the way is over."""
    scheduler = make_scheduler(num_blocks=105)
    add(scheduler, 40, 6, 32)
    scheduler.admission.num_expected = 40
    run(scheduler, 2)
    assert len(scheduler.running) == 2
    scheduler.finish(list(scheduler.waiting))
    add(scheduler, 5, 8, 4)
    run(scheduler, 1)
    assert len(scheduler.running) == 2 + 5


def test_the_others_enter_if_the_first_is_aborted():
    scheduler = in_cohorts()
    run(scheduler, 2)
    scheduler.finish([scheduler.running[0]])
    _, widths = run(scheduler)
    assert max(widths) >= 8 and scheduler.num_preemptions == 0


def test_another_call_leaves_the_cohorts_alone():
    """One that is queued while they enter."""
    scheduler = in_cohorts()
    run(scheduler, 2)
    scheduler.admission.num_expected = 1
    add(scheduler, 1, 6, 32)
    entries, widths = run(scheduler)
    assert {num for _, num in entries} == {1, 2} and max(widths) == 16 and scheduler.num_preemptions == 0


def test_cohorts_end_with_their_call():
    scheduler = in_cohorts()
    run(scheduler)
    add(scheduler, 5, 6, 32)
    entries, _ = run(scheduler)
    assert entries == [(0, 5)]


def test_cohorts_of_sequences_that_max_model_len_cuts():
    scheduler = make_scheduler(num_blocks=600)
    add(scheduler, 80, 6, 1000)  # to 200 tokens
    cohorts = admission.plan_cohorts(scheduler, 80)
    assert cohorts is not None and cohorts.growth == 194


def test_a_large_call_without_cohorts_reserves_nothing_while_few_run():
    """Ten have blocks for their end, and 26 for the prompt; the first prefill takes as many as it has tokens for."""
    scheduler = make_scheduler(num_blocks=105, max_num_batched_tokens=160)
    add(scheduler, 20, 8, 32)
    scheduler.admission.num_expected = 20
    run(scheduler, 1)
    assert len(scheduler.running) == 20


class OneAtATime(BlockManager):
    """Refuses a second sequence in a prefill, as hybrid models do where it shares a state that is being saved."""

    has_admitted = False

    def can_allocate(self, seq, num_reserved=0):
        return not self.has_admitted and super().can_allocate(seq, num_reserved)

    def allocate(self, seq):
        self.has_admitted = True
        return super().allocate(seq)

    def take_messages(self):
        self.has_admitted = False
        return super().take_messages()


def test_who_was_refused_because_of_the_prefill_is_asked_again():
    scheduler = make_scheduler(num_blocks=105)
    scheduler.block_manager = OneAtATime(105, BLOCK_SIZE)
    add(scheduler, 8, 8, 20)
    entries, widths = run(scheduler)
    assert entries == [(0, 1)] * 8 and len(widths) == 19


def test_the_first_in_the_queue_is_asked_about_once_while_nobody_leaves(monkeypatch):
    scheduler, begin, asked = make_scheduler(num_blocks=105), admission.Admission.begin, []
    monkeypatch.setattr(admission.Admission, "begin", lambda self: asked.append(1) or begin(self))
    monkeypatch.setattr(admission, "plan_cohorts", lambda *args: None)
    monkeypatch.setattr(admission, "MANY_SEQS", 0)
    add(scheduler, 21, 8, 32)
    entries, widths = run(scheduler)
    assert [num for _, num in entries] == [10, 10, 1] and len(widths) > 90
    assert len(asked) <= 2 * len(entries)


def test_a_call_plans_for_all_its_prompts(make_llm, monkeypatch):
    """Its first step sees eight of them. What they generate is the same."""
    plans, plan = [], admission.plan_cohorts
    monkeypatch.setattr(callers, "FIRST", 8)
    monkeypatch.setattr(admission, "plan_cohorts", lambda *args: plans.append(plan(*args)) or plans[-1])
    prompts = [[RANDOM.randrange(100) for _ in range(20)] for _ in range(60)]
    params = [SamplingParams(temperature=1, seed=i, max_tokens=80, ignore_eos=True) for i in range(60)]
    roomy, tight = make_llm(max_num_seqs=32), make_llm(max_num_seqs=32, num_kvcache_blocks=80)
    expected, tokens = (tokens_of(llm.generate(prompts, params, use_tqdm=False)) for llm in (roomy, tight))
    assert tokens == expected and tight.scheduler.num_preemptions == 0
    assert [cohorts.size for cohorts in plans if cohorts] == [2]
