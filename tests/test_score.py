"""``LLM.score`` against transformers' log_softmax: within 1e-4 in fp32, ``BF16_TOLERANCE`` in bf16 on a GPU.

And ``LLM.perplexity`` against its loss.
"""

import numpy as np
import pytest
import torch
from helpers import Reference, greedy, prompt_of, run_ahead
from leaks import check_is_empty
from logits_twin import FP32_TOLERANCE, log_softmax
from transformers import AutoModelForCausalLM

from nanovllm import SamplingParams
from nanovllm.core import PrefillBatch
from nanovllm.utils.checkpoint import DEMO_MODEL


def expected(tiny, ids, start=1):
    """Log-probabilities and is-argmax, and how far each token is from being or not being the best."""
    rows = log_softmax(tiny.logits(list(ids))[0].double().numpy())[start - 1 : -1]
    own = rows[np.arange(len(rows)), list(ids)[start:]]
    others = rows.copy()
    others[np.arange(len(rows)), list(ids)[start:]] = -np.inf
    return own, own >= rows.max(-1), np.abs(own - others.max(-1))


def check(tiny, lists, scores, starts=1, tolerance=FP32_TOLERANCE):
    starts = starts if isinstance(starts, list) else [starts] * len(lists)
    assert len(lists) == len(scores)
    for ids, score, start in zip(lists, scores, starts, strict=True):
        logprobs, is_argmax, margin = expected(tiny, ids, start)
        assert len(score.logprobs) == len(score.is_argmax) == len(ids) - start
        assert np.abs(np.array(score.logprobs) - logprobs).max() <= tolerance
        assert ((np.array(score.is_argmax) == is_argmax) | (margin <= 2 * tolerance)).all()
        assert all(isinstance(x, float) for x in score.logprobs) and all(isinstance(x, bool) for x in score.is_argmax)
        assert score.total == pytest.approx(logprobs.sum(), abs=len(ids) * tolerance)


def count_launched(llm):
    """The list of prompt tokens of each prefill from now on."""
    launched, run = [], llm.model_runner.forward

    def counted(batch):
        assert isinstance(batch, PrefillBatch), "a score needs no decode step"
        launched.append(batch.num_tokens)
        return run(batch)

    llm.model_runner.forward = counted
    return launched


@torch.inference_mode()
def cross_entropy(model, ids):
    """transformers' own loss of a text."""
    ids = torch.tensor([ids], device=model.device)
    return model(ids, labels=ids).loss.item()


@pytest.fixture(scope="module")
def lists(reference):
    """Random ones, from two tokens on; one that the model itself has written; two with the same beginning."""
    written = [*prompt_of(5), *reference(prompt_of(5), 40)]
    shared = prompt_of(33, seed=5)
    return [prompt_of(2), prompt_of(17), prompt_of(90), written, [*shared, 4, 5], [*shared, 6], prompt_of(16), [9, 9]]


@pytest.mark.parametrize("options", [
    {}, {"max_num_seqs": 1}, {"num_kvcache_blocks": 6, "max_num_batched_tokens": 19}, {"max_logprobs": 0},
])  # fmt: skip
def test_as_transformers(options, on, lists, tiny):
    """The second time with a warm prefix cache, which scored tokens are not taken from."""
    llm = run_ahead(on(**options))
    losses = [cross_entropy(tiny.model, ids) for ids in lists]
    for _ in range(2):
        check(tiny, lists, llm.score(lists), tolerance=on.tolerance)
        assert np.log(llm.perplexity(lists)) == pytest.approx(losses, abs=on.tolerance)
        check_is_empty(llm)


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}, {"max_num_seqs": 2}])
def test_logits_of_nan_are_an_error(make_llm, tiny, monkeypatch, caplog, options, in_flight):
    """They gave -inf, as the most probable token at its place. The other requests go on."""
    llm = make_llm(**options)
    monkeypatch.setattr(llm.model_runner, "max_in_flight", in_flight)
    bad = 7
    good, first, middle = ([i for i in prompt_of(20, seed) if i != bad] for seed in range(3))
    lists = [good, [bad, *first], [*middle, bad, *middle]]
    with torch.inference_mode():
        llm.model_runner.model.model.embed_tokens.weight[bad] = torch.nan
    for _ in range(2):
        scores = llm.score(lists)
        assert scores[0].error is None and np.isfinite(scores[0].logprobs).all()
        for ids, score in zip(lists[1:], scores[1:], strict=True):
            assert "logits of the prompt are NaN or infinite" in score.error
            assert np.isnan(score.logprobs).tolist() == [True] * (len(ids) - 1) and np.isnan(score.total)
            assert score.is_argmax == [False] * (len(ids) - 1)
        assert np.isnan(llm.perplexity(lists)).tolist() == [False, True, True]
        check_is_empty(llm)
    check(tiny, [good], scores[:1])
    assert caplog.records[0].getMessage().startswith("request 1: logits of the prompt are NaN")
    assert llm.metrics()["request_success"]["error"] == 8


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}, {"max_num_seqs": 2}])
def test_prompt_logprobs_of_nan_are_an_error(make_llm, reference, monkeypatch, options, in_flight):
    """Of every completion of the request: also where what follows the prompt could be sampled."""
    llm = make_llm(**options)
    monkeypatch.setattr(llm.model_runner, "max_in_flight", in_flight)
    bad, good = 7, [i for i in prompt_of(20) if i != 7]
    expected = reference(good, 5)
    assert bad not in expected
    with torch.inference_mode():
        llm.model_runner.model.model.embed_tokens.weight[bad] = torch.nan
    for size, n in (0, 1), (1, 3), (5, 3):
        params = [greedy(size, prompt_logprobs=1), SamplingParams(n=n, max_tokens=size, prompt_logprobs=2)]
        one, several = llm.generate([good, [*good, bad, *good]], params, use_tqdm=False)
        assert (one["finish_reason"], one["token_ids"]) == ("length", expected[:size])
        assert len(one.prompt_logprobs) == len(good)
        assert several.prompt_logprobs is None
        assert [each.finish_reason for each in several.outputs] == ["error"] * n
        assert all("NaN" in each.stop_reason for each in several.outputs)
        check_is_empty(llm)


# -------------------------------------------------------------------- start


@pytest.mark.parametrize("options", ({}, {"max_num_batched_tokens": 8}))
def test_start_for_each_and_for_all(options, lists, make_llm, tiny):
    llm = make_llm(**options)
    starts = [1, 16, 89, 5, 34, 33, 2, 1]
    for given in (starts, tuple(starts)):
        check(tiny, lists, llm.score(lists, start=given), starts)
    long = [ids for ids in lists if len(ids) > 16]
    check(tiny, long, llm.score(long, start=16), 16)
    check(tiny, long, llm.score(long, start=1), 1)
    check(tiny, long, llm.score(long, start=None), 1)


def test_what_stands_before_start_comes_from_the_cache(make_llm, tiny):
    """Only what gives the logits is computed; and scores from the cache are those without it."""
    llm = make_llm(max_num_batched_tokens=256)
    context = prompt_of(64)
    choices = [[*context, *prompt_of(n, seed=7)] for n in (3, 1, 9)]
    llm.score([context])
    launched = count_launched(llm)
    check(tiny, choices, llm.score(choices, start=64), 64)
    assert sum(launched) == 3 * 16 + 2 + 0 + 8  # the block of position 63, which gives the first logits, and the rest
    launched.clear()
    longer = [choices[0], choices[2]]
    check(tiny, longer, llm.score(longer, start=65), 65)
    assert sum(launched) == 2 + 8
    launched.clear()
    check(tiny, choices, llm.score(choices, start=1), 1)
    assert sum(launched) == 3 * 64 + 2 + 0 + 8  # all give logits


# -------------------------------------------------------------------- limits


@pytest.mark.parametrize(("room", "options"), [
    (40, {"max_model_len": 40}), (40, {"max_model_len": 40, "max_num_batched_tokens": 7}),
    (3 * 16, {"num_kvcache_blocks": 3}),
])  # fmt: skip
def test_one_token_more_than_there_is_room_for(room, options, make_llm, tiny):
    """The last token needs no position of its own. Two more are refused: ``test_refusals.py``."""
    llm = make_llm(max_num_seqs=4, **options)
    lists = [prompt_of(room + 1), prompt_of(room)]
    check(tiny, lists, llm.score(lists))
    check(tiny, lists, llm.score(lists, start=room - 1), room - 1)
    check_is_empty(llm)


# -------------------------------------------------------------------- texts


def test_perplexity_of_texts(demo, monkeypatch):
    """Special tokens that the tokenizer adds are tokens of the text; without two tokens there is nothing to count.
    More texts than a window holds are made one by one, and their results alone are kept.
    """
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    texts = ["what is 2 + 3?", "", "a", "the capital of France is Paris", {"prompt_token_ids": [5, 6, 7]}, [9]]
    ids = [demo.tokenizer(text)["input_ids"] for text in texts[:4]] + [[5, 6, 7], [9]]
    expected = [np.exp(cross_entropy(model, each)) if len(each) > 1 else np.nan for each in ids]
    assert np.isnan(expected).tolist() == [False, True, True, False, False, True]
    assert demo.perplexity(texts) == pytest.approx(expected, rel=1e-4, nan_ok=True)
    (one,), nothing = demo.perplexity(texts[0], use_tqdm=False), demo.perplexity([])
    assert one == pytest.approx(expected[0], rel=1e-4) and nothing == []
    bos = {"what is": "<|im_start|>what is"}  # a tokenizer that begins texts: the first word counts, too
    encode = demo._tokenizer.encode
    monkeypatch.setattr(demo._tokenizer, "encode", lambda texts, *more: encode([bos[t] for t in texts], *more))
    begun = cross_entropy(model, demo.tokenizer("<|im_start|>what is")["input_ids"])
    assert demo.perplexity("what is") == pytest.approx([np.exp(begun)], rel=1e-4)
    monkeypatch.undo()
    most, register = [0], demo._outputs.register

    def counted(request, caller):
        register(request, caller)
        most[0] = max(most[0], len(demo._outputs.unfinished))

    monkeypatch.setattr(demo._outputs, "register", counted)
    many = [f"{i} + {i % 7}" for i in range(900)]
    found = demo.perplexity(iter(many))
    assert len(found) == 900 and found[7] == pytest.approx(demo.perplexity(many[7])[0], rel=1e-4)
    assert most[0] <= 2 * demo.config.max_num_seqs
    check_is_empty(demo)


# -------------------------------------------------------------------- ties


@pytest.fixture(scope="module")
def twins(make_checkpoint, tmp_path_factory):
    """A checkpoint that gives tokens 100 and 300 the same logits, always the largest; and transformers on it."""
    reference = Reference(make_checkpoint())
    head = reference.model.lm_head.weight.data
    head[:] *= 0.1
    reference.model.model.norm.weight.data.fill_(0)
    reference.model.model.norm.weight.data[0] = 1
    # only the first coordinate of the last hidden state counts, and whatever its sign, the larger of two rows wins
    head[100, 0] = head[300, 0] = 5.0
    head[101, 0] = head[301, 0] = -5.0
    path = tmp_path_factory.mktemp("twins")
    reference.model.save_pretrained(path)
    return str(path), reference


def test_of_tied_tokens_both_are_the_argmax(twins, make_llm):
    path, reference = twins
    llm = make_llm(model=path)
    prompt = prompt_of(10)
    best = [i for i in (100, 101) if reference.logits(prompt)[0, -1].argmax() == i]
    assert len(best) == 1, "the first of the tie"
    first, second, other = best[0], best[0] + 200, 201 - best[0]
    a, b, c = llm.score([[*prompt, i] for i in (first, second, other)], start=10)
    assert a.logprobs == b.logprobs and a.logprobs > c.logprobs
    assert (a.is_argmax, b.is_argmax, c.is_argmax) == ([True], [True], [False])
    for token, others in (second, [first]), (first, [second]):
        (output,) = llm.generate([[*prompt, token, 7]], greedy(1, prompt_logprobs=2), use_tqdm=False)
        entry = output.prompt_logprobs[10]
        assert list(entry) == [token, *others]
        assert entry[token].rank == 2, "the number of logits >= its own"


def test_numpy_is_taken(make_llm, lists, tiny):
    llm = make_llm()
    arrays = [np.array(ids, np.int64) for ids in lists]
    check(tiny, lists, llm.score(arrays, start=np.int64(1)))
    check(tiny, lists, llm.score(tuple(ids) for ids in lists))
    assert llm.score([]) == []
