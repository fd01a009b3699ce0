"""Speculation: outputs are those of the engine without it, and it ends where it gains nothing.

``knowing`` engines draft what plain ones have generated, with mistakes: that accepts any number of tokens, whatever the
model. What lookup finds is tested with the demo model, which repeats itself, and in ``HashChains`` against a search.
"""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import DEVICES, generate, greedy, prompt_of, record_calls, run_ahead, use_graphs_on_cpu
from histories import histories
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams, cli
from nanovllm.config import Config, SpeculativeConfig
from nanovllm.core import Sequence
from nanovllm.engine.speculation import lookup as speculation
from nanovllm.engine.speculation.lookup import HashChains, KeptTexts, Speculator
from nanovllm.engine.speculation.scheduler import SpeculativeScheduler
from nanovllm.messages.verify import MAX_VERIFIED_SEQS, DraftTokens
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.utils.checkpoint import DEMO_MODEL

FORCED = {"method": "ngram", "adaptive": False}
TEXT = "one two three four five six seven eight nine ten "


def results(outputs):
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason,
         None if c.logprobs is None else [{i: e.rank for i, e in at.items()} for at in c.logprobs])
        for output in outputs for c in output.outputs
    ]  # fmt: skip


def know(llm, outputs, seed=0, length=7):
    """Draft what these outputs say, wrong from some place on; of sequences that were to be drafted for."""
    speculator, draw = llm.scheduler.speculator, random.Random(seed)
    texts = [[*o.prompt_token_ids, *c.token_ids] for o in outputs for c in o.outputs]
    enter, drafted = speculator._enter, set()

    def draft(seq, room):
        if enter(seq) is None:
            return np.empty(0, np.int32), None, 0.0
        drafted.add(seq.seq_id)
        known = seq.token_ids
        longer = next((text for text in texts if text[: len(known)] == known and len(text) > len(known)), known)
        tokens = np.array(longer[len(known) :][: min(length, room)], np.int32)
        tokens[draw.randrange(8) :] ^= 1
        return tokens.tolist(), None, float(len(tokens))

    speculator._draft = draft
    return drafted


# ---------------------------------------------------------------- equality; every parameter: test_ways.py


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_what_lookup_finds(method):
    """Without any stand-in; the second time "suffix" knows every output."""
    prompts = [TEXT * n for n in (1, 2, 3)]
    params = [SamplingParams(max_tokens=60, ignore_eos=True, **each)
              for each in ({"temperature": 0}, {"seed": 3, "n": 3}, {"temperature": 0, "logprobs": 3})]  # fmt: skip
    with LLM(device="cpu", quiet=True) as llm:
        expected = results(llm.generate(prompts, params, use_tqdm=False))
    with LLM(device="cpu", quiet=True, speculative_config={"method": method, "adaptive": False}) as llm:
        num_steps = []
        for _ in range(2):
            batches = record_calls(llm.model_runner, "forward")
            assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
            num_steps.append(len(batches))
        accepted = llm.metrics()["spec_decode_num_accepted_tokens"]
    assert accepted >= 10
    if method == "suffix":
        assert num_steps[1] < 0.5 * num_steps[0]


def test_windows(checkpoint, make_llm):
    """Each row of a sequence has a window of its own."""
    path, _ = checkpoint("gemma3")
    options = {"model": path, "max_model_len": 256}
    prompts = [[token % 90 for token in prompt_of(n)] for n in (9, 40)]
    params = [greedy(40), SamplingParams(seed=1, max_tokens=40, ignore_eos=True)]
    outputs = make_llm(**options).generate(prompts, params, use_tqdm=False)
    llm = make_llm(speculative_config=FORCED, **options)
    assert any(llm.config.model_config.windows)
    know(llm, outputs)
    assert generate(llm, prompts, params) == [output["token_ids"] for output in outputs]
    assert llm.metrics()["spec_decode_num_accepted_tokens"] > 20


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_engines_of_a_random_model(make_llm, device, kv_cache_dtype):
    """In fp32, with CUDA graphs on a GPU; batches of every size up to the largest that speculates, and beyond."""
    options = {"device": device, "dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 20,
               "max_num_batched_tokens": 256, "max_model_len": 96}  # fmt: skip
    prompts = [prompt_of(5 + i, seed=i) for i in range(MAX_VERIFIED_SEQS + 3)]
    params = [greedy(10 + i) if i % 2 else SamplingParams(seed=i, max_tokens=10 + i, ignore_eos=True)
              for i in range(len(prompts))]  # fmt: skip
    outputs = make_llm(**options).generate(prompts, params, use_tqdm=False)
    llm = make_llm(speculative_config=FORCED, **options)
    if device == "cpu":
        use_graphs_on_cpu(llm)
    know(llm, outputs)
    batches = record_calls(llm.model_runner, "forward")
    assert generate(llm, prompts, params) == [output["token_ids"] for output in outputs]
    sizes = {len(batch.req_indices) for batch in batches if batch.num_rows > 1}
    assert {batch.num_rows for batch in batches} == {1, 4, 8} and max(sizes) == MAX_VERIFIED_SEQS and len(sizes) > 3


# ---------------------------------------------------------------- lookup


def places_before(tokens, text, size, n):
    """(equal tokens, place) of every place before which the last n tokens of ``text[:size]`` stand, but its end."""
    found = []
    for place in range(n, len(tokens) + 1):
        match = 0
        while match < min(place, size, speculation.MAX_MATCH) and tokens[place - 1 - match] == text[size - 1 - match]:
            match += 1
        if match >= n and not (tokens is text and place == size):
            found.append((match, place))
    return found


@histories(200)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=120), st.integers(1, 4), st.integers(1, 9), st.randoms())
def test_hash_chains_find_what_a_search_finds(text, n, enough, rng):
    """Whether tokens were indexed one by one or many at once."""
    tokens = np.array(text, np.int32)
    chains, size = HashChains(tokens, n), 0
    while size < len(text):
        size = min(len(text), size + rng.choice((1, 2, 50)))
        chains.extend(size)
        place, match = chains.longest(chains.text, size, enough)
        latest = sorted(places_before(tokens[:size].tolist(), tokens[:size].tolist(), size, n), key=lambda x: -x[1])
        latest = [(m, p) for m, p in latest if p < size][: speculation.MAX_CHAIN]
        expected = next(((m, p) for m, p in latest if m >= enough), max(latest, default=(0, 0)))
        assert (match, place) == expected


def test_kept_texts_are_bounded(monkeypatch):
    """The latest are found, each by itself; memory stays the same."""
    monkeypatch.setattr(speculation, "MAX_KEPT_TOKENS", 400)
    kept, memory = KeptTexts(2, max_texts=5), None
    for i in range(50):
        text = np.arange(20, dtype=np.int32) + 30 * i
        kept.add(text)
        assert kept.size <= 400 and len(kept._ends) <= 5
        memory = memory or [part.nbytes for part in (kept.tokens, kept._head, kept._before)]
        for j in (i, max(i - 1, 0)):
            place, match = kept.longest(memoryview(np.arange(7, dtype=np.int32) + 30 * j), 7, 24)
            assert match == 7 and kept.tokens[place : place + 14].tolist() == [*range(30 * j + 7, 30 * j + 20), -1]
    assert memory == [part.nbytes for part in (kept.tokens, kept._head, kept._before)]
    assert kept.longest(memoryview(np.arange(7, dtype=np.int32)), 7, 24) == (0, 0)  # the first is forgotten


class Stand:
    """A sequence whose tokens are a script's, as the scheduler's table has them."""

    def __init__(self, tokens, num_prompt_tokens=1, seq_id=0, **params):
        table = SimpleNamespace(tokens=np.array([tokens], np.int32), num_tokens=np.array([num_prompt_tokens], np.int32))
        self.seq = Sequence(tokens[:num_prompt_tokens], SamplingParams(max_tokens=len(tokens), **params), seq_id)
        self.seq.attach(table, 0)
        self.table, self.text = table, tokens

    def go(self, speculator, ahead=False):
        """Decode to the end; the numbers of rows of the steps."""
        steps = []
        while (size := self.seq.num_tokens) < len(self.text):
            drafts = speculator.propose([self.seq], [len(self.text) - size - 1], 10**6, is_ahead=False)
            num = 0
            if drafts is not None:
                sampled = np.array([[*self.text[size : size + drafts.shape[1] + 1], *[-7] * drafts.shape[1]]], np.int32)
                num = int(DraftTokens(drafts).num_accepted(sampled[:, : drafts.shape[1] + 1])[0])
                speculator.verified([self.seq.seq_id], drafts, np.array([num]))
            steps.append(1 if drafts is None else 1 + drafts.shape[1])
            self.table.num_tokens[0] += num + 1
        return steps


def speculator_of(**options):
    return Speculator(SpeculativeConfig.of({"method": "ngram", **options}))


def test_drafts_grow_while_they_are_accepted():
    """Of a text that repeats, with seven tokens a draft soon; the ones behind the last need no place in it."""
    steps = Stand(list(range(40)) * 4, 45).go(speculator_of(adaptive=False))
    assert steps[:2] == [4, 8] and set(steps[2:-1]) == {8} and len(steps) < 20


def test_drafts_end_where_they_are_rejected():
    """Words come again, and what follows is another one each time: the match that a draft needs doubles."""
    rng = random.Random(0)
    text = [token for i in range(400) for token in (rng.randrange(5), 10, 11, 1000 + i)]
    steps = Stand(text, 5).go(speculator_of(adaptive=False))
    assert 0 < sum(rows > 1 for rows in steps) < 12 and len(steps) > 1500


@pytest.fixture
def timed(monkeypatch):
    """timed(steps) -> a speculator that has taken in steps of one sequence: (rows, seconds)."""
    clock, speculator = 0.0, speculator_of()
    monkeypatch.setattr(speculation, "perf_counter", lambda: clock)

    def take_in(*steps):
        nonlocal clock
        for rows, seconds in steps:
            clock += seconds
            speculator.took_in(1, rows)
        return speculator

    return take_in


def test_a_verify_step_that_takes_too_long_is_not_repeated(timed):
    """Eight rows in three times the time of one, as in a mixture of experts, and two tokens each."""
    speculator = timed((1, 1.0), (4, 3.0), (8, 3.0), (1, 1.0))
    assert speculator._pays(2.5, 1, 4) and not speculator._pays(2.0, 1, 4)
    assert not speculator._pays(2.0, 1, 8)
    assert not speculator._pays(15, 8, 8)  # of eight sequences nothing is known
    speculator.took_in(8, 1)
    assert speculator._pays(3, 8, 8) and not speculator._pays(1, 8, 8)
    for _ in range(200):
        speculator._pays(2.0, 1, 4)
    assert speculator._pays(2.0, 1, 4)  # the time was long ago


def test_a_first_step_with_a_pause_is_not_the_last(timed):
    """A thousand times too long, as where a kernel is compiled: it is tried again soon."""
    speculator = timed((1, 1.0), (8, 1000.0))
    assert sum(not speculator._pays(3.0, 1, 8) for _ in range(200)) < 100


def test_steps_may_become_slower(timed):
    """As contexts grow. A plain step of twice the time is believed after some, and drafts that did not pay do."""
    assert not timed((1, 1.0), (4, 3.0))._pays(1.0, 1, 4)
    assert timed(*[(1, 2.0)] * 20)._pays(1.0, 1, 4)


def test_who_drafts():
    speculator, text = speculator_of(adaptive=False), [5, 6, 7] * 8
    kinds = [{}, {"min_tokens": 3}, {"logprobs": 2}, {"stop": "a"}, {"bad_words": ["a"]}, {"repetition_penalty": 1.2},
             {"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]},
             {"structured_outputs": StructuredOutputsParams(regex="a")}]  # fmt: skip
    stands = [Stand(text, 12, seq_id=i, **params) for i, params in enumerate(kinds)]
    drafts = speculator.propose([stand.seq for stand in stands], [7] * 9, 10**6, is_ahead=False)
    assert drafts.tolist() == [[5, 6, 7]] * 4 + [[-1, -1, -1]] * 5
    crowd = [Stand(text, 12, seq_id=100 + i).seq for i in range(5)]
    assert speculator.propose(crowd[:5], [7] * 5, 19, is_ahead=False) is None  # a launch has no room
    assert speculator.propose(crowd[:2], [2, 0], 10**6, is_ahead=False).tolist() == [[5, 6, -1], [-1, -1, -1]]


def test_a_draft_awaited_in_vain_counts_as_rejected():
    """The step in flight ended for it, and its token was another one."""
    speculator, stand = speculator_of(adaptive=False), Stand([5, 6, 7, 8, 5, 6, 9, 9, 9], 6)
    assert speculator.propose([stand.seq], [7], 10**6, is_ahead=True) is not None
    lookup = speculator._lookups[0]
    assert lookup.needed == 2
    stand.table.num_tokens[0] += 1
    speculator.propose([stand.seq], [7], 10**6, is_ahead=False)
    assert lookup.needed == 4


# ---------------------------------------------------------------- the engine around it


def test_steps_run_ahead_where_nothing_is_drafted(make_llm):
    """Random tokens have no draft: each step is launched before the tokens of the one before are taken in."""
    llm = run_ahead(make_llm(speculative_config={"method": "suffix"}, max_num_seqs=4))
    depths, schedule = [], llm.scheduler.schedule

    def recorded():
        depths.append(llm.scheduler.num_in_flight)
        return schedule()

    llm.scheduler.schedule = recorded
    generate(llm, [prompt_of(20, seed=i) for i in range(3)], SamplingParams(temperature=9.0, max_tokens=40, seed=1))
    assert llm.metrics()["spec_decode_num_drafts"] == 0
    assert len(depths) <= 44 and depths.count(0) <= 2


def test_metrics(make_llm):
    llm = make_llm(speculative_config=FORCED)
    assert "spec_decode_num_drafts" not in make_llm().metrics()
    outputs = make_llm().generate([[5, 6, 7]], greedy(20), use_tqdm=False)
    know(llm, outputs)
    generate(llm, [[5, 6, 7]], greedy(20))
    metrics = llm.metrics()
    by_place = metrics["spec_decode_num_accepted_tokens_per_pos"]
    assert len(by_place) == 7 and by_place == sorted(by_place, reverse=True)
    assert metrics["spec_decode_num_accepted_tokens"] == sum(by_place) < metrics["spec_decode_num_draft_tokens"]
    assert metrics["generation_tokens"] == 20
    assert metrics["spec_decode_num_drafts"] >= 20 - 1 - sum(by_place)


def test_defaults():
    options = Config.from_options(str(DEMO_MODEL), {"speculative_config": {"method": "ngram"}}).speculative_config
    assert (options.num_speculative_tokens, options.prompt_lookup_min, options.prompt_lookup_max) == (7, 2, 4)
    assert not Config.from_options(str(DEMO_MODEL), {}).speculates


@pytest.mark.parametrize("case, adaptive, speculates", [
    ("qwen3-moe", True, False), ("qwen3-moe", False, True), ("qwen3.5", False, False),
])  # fmt: skip
def test_models_that_do_not_speculate(checkpoint, make_llm, case, adaptive, speculates):
    """Mixtures unless they are told to; models with recurrent states run as always."""
    path, _ = checkpoint(case)
    llm = make_llm(model=path, max_model_len=256, speculative_config={"method": "ngram", "adaptive": adaptive})
    assert isinstance(llm.scheduler, SpeculativeScheduler) == speculates
    plain = make_llm(model=path, max_model_len=256)
    outputs = plain.generate([[5, 6, 7] * 6], greedy(20), use_tqdm=False)
    if speculates:
        know(llm, outputs)
    assert generate(llm, [[5, 6, 7] * 6], greedy(20)) == [outputs[0]["token_ids"]]
    assert speculates == (llm.metrics().get("spec_decode_num_accepted_tokens", 0) > 0)


def test_batch_jobs_take_it(tmp_path, capsys):
    """As JSON; a job may go on with it, since outputs are the same."""
    source, texts = tmp_path / "in.jsonl", []
    source.write_text("".join(json.dumps({"id": i, "prompt": TEXT * 3 + str(i)}) + "\n" for i in range(4)))
    for name, more in (("plain", []), ("fast", ["--speculative-config", json.dumps(FORCED)])):
        out, metrics = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.metrics"
        argv = ["batch", str(source), str(out), "--temperature", "0", "--max-tokens", "30", "--device", "cpu",
                "--ignore-eos"]  # fmt: skip
        assert cli.main([*argv, "--metrics", str(metrics), *more]) == 0
        rows = sorted(map(json.loads, out.read_text().splitlines()), key=lambda row: row["custom_id"])
        texts.append([row["text"] for row in rows])
    assert texts[0] == texts[1]
    assert json.loads(metrics.read_text().splitlines()[-1])["spec_decode_num_accepted_tokens"] > 0
    assert cli.main([*argv, "--overwrite", "--speculative-config", '{"method": "draft"}']) == 1
    assert "method='draft' must be 'ngram' or 'suffix'" in capsys.readouterr().err
