"""Plain twins of the logits steps and of log-probabilities, after vLLM's semantics, on numpy float64 rows [V]."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from nanovllm import SamplingParams

FP32_TOLERANCE = 1e-4  # absolute, of a log-probability
BF16_TOLERANCE = 0.1  # the same, of the tiny checkpoint; 0.06 was seen


def adjusted(logits, prompt, generated, params, stop_ids=(), bad=()):
    """Logits after masks, min_tokens, functions, bias and penalties, in this order.

    Args:
        prompt, generated: the tokens before this one.
        stop_ids: what min_tokens holds back.
        bad: lists of token ids; the last is forbidden where the generated ones end in those before it.
    """
    x = np.array(logits, np.float64)
    if params.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(len(x)), params.allowed_token_ids)] = -np.inf
    for *before, last in bad:
        if generated[len(generated) - len(before) :] == before:
            x[last] = -np.inf
    if len(generated) < params.min_tokens:
        x[list(stop_ids)] = -np.inf
    for processor in params.logits_processors or ():
        before = [list(prompt), list(generated)][2 - processor.__code__.co_argcount + 1 :]
        x = processor(*before, torch.from_numpy(x)).numpy()
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += bias
    if params.repetition_penalty != 1:
        processor = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        seen = torch.tensor([[*prompt, *generated]])
        x = processor(seen, torch.from_numpy(x)[None])[0].numpy()
    counts = np.bincount(np.array(generated, int), minlength=len(x))
    x -= params.frequency_penalty * counts
    x -= params.presence_penalty * (counts > 0)
    return x


def filtered(logits, params):
    """Logits over the temperature; -inf where top-k, top-p or min-p cut. Greedy requests are not filtered."""
    if params.is_greedy:
        return logits
    x = logits / params.temperature
    p = np.exp(log_softmax(x))
    order = np.argsort(-p, kind="stable")
    keep = order[: params.top_k if params.top_k > 0 else len(p)]
    if params.top_p < 1:
        cumulative = np.cumsum(p[keep]) / p[keep].sum()
        keep = keep[: np.searchsorted(cumulative, params.top_p) + 1]
    keep = [i for i in keep if p[i] >= params.min_p * p[order[0]]]
    out = np.full_like(x, -np.inf)
    out[keep] = x[keep]
    return out


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class GreedyTwin:
    """Greedy text of transformers' model with the steps in between."""

    def __init__(self, reference):
        self.model = reference.model

    @torch.inference_mode()
    def __call__(self, prompt, params, stop_ids=(), bad=()):
        tokens, cache, new = [], None, prompt
        while len(tokens) < params.max_tokens:
            out = self.model(torch.tensor([new]), past_key_values=cache)
            cache = out.past_key_values
            logits = adjusted(out.logits[0, -1].double().numpy(), prompt, tokens, params, stop_ids, bad)
            tokens.append(int(logits.argmax()))
            new = tokens[-1:]
        return tokens


def close(a, b, tolerance):
    """Equal, both -inf included."""
    return a == b or abs(a - b) <= tolerance


def check_entry(entry, token_id, row, k, tolerance):
    """One position's dict against the whole row of log-probabilities, float64 [V].

    Where two are closer than both may be off, either order is right, and so are their ranks.
    """
    slack = 2 * tolerance
    k = len(row) if k == -1 else min(k, len(row))
    ids = list(entry)
    assert ids[0] == token_id, "the token itself comes first"
    assert len(set(ids)) == len(ids)
    own, ordered = row[token_id], np.sort(row)[::-1]
    for i in ids:
        assert close(entry[i].logprob, row[i], tolerance), (i, entry[i], row[i])
        at_least, at_most = (row > row[i] + slack).sum() + 1, (row >= row[i] - slack).sum()
        assert at_least <= entry[i].rank <= at_most, (i, entry[i], at_least, at_most)
    if k == 0:
        assert len(ids) == 1
        return
    in_top = len(ids) == k
    if in_top:
        assert own >= ordered[k - 1] - slack, "the token was counted among the top"
    else:
        assert len(ids) == k + 1 and own <= ordered[k - 1] + slack
        ids = ids[1:]
    top = sorted(ids, key=lambda i: entry[i].rank)
    if not in_top:
        assert top == ids, "in the order of their ranks"
    else:
        assert [i for i in top if i != token_id] == ids[1:]
    assert [entry[i].rank for i in top] == list(range(1, k + 1)) or in_top
    for i, value in zip(top, ordered, strict=False):  # the top k, and no others
        assert close(row[i], value, slack), (i, row[i], value)


def check_all(entries, token_ids, rows, k, tolerance=FP32_TOLERANCE):
    assert len(entries) == len(token_ids) == len(rows)
    for entry, token_id, row in zip(entries, token_ids, rows, strict=True):
        check_entry(entry, token_id, row, k, tolerance)


def check_named(completion, rows, ids, tolerance=FP32_TOLERANCE):
    """Each token, which has a rank, and these ids in their order, which have none."""
    for entry, token_id, row in zip(completion.logprobs, completion.token_ids, rows, strict=True):
        assert list(entry) == list(dict.fromkeys([token_id, *ids]))
        assert all(close(row[i], x.logprob, tolerance) for i, x in entry.items())
        assert [i for i, x in entry.items() if x.rank is not None] == [token_id]


def check_same(entries, others, tolerance=FP32_TOLERANCE):
    """Two engines' lists; two tokens that are alike may change places, the last with one that is left out."""
    assert (entries is None) == (others is None)
    for x, y in zip(entries or [], others or [], strict=True):
        assert next(iter(x)) == next(iter(y)) and len(x) == len(y)
        both = x.keys() & y.keys()
        assert len(both) >= len(x) - 1
        assert all(close(x[i].logprob, y[i].logprob, tolerance) for i in both)


@cache
def all_logits(tiny, tokens):
    """float64 [len(tokens), V]; most texts occur in several tests."""
    return tiny.logits(tokens)[0].double().numpy()


def logits_of(tiny, prompt, token_ids):
    """What the model gives each generated token, float64 [n, V]."""
    return all_logits(tiny, (*prompt, *token_ids))[len(prompt) - 1 : -1]


def raw_rows(tiny, prompt, token_ids):
    return log_softmax(logits_of(tiny, prompt, token_ids))


def check_request(tiny, output, params, tolerance=FP32_TOLERANCE):
    """Raw log-probabilities of every completion, and of the prompt."""
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        if params.num_logprobs is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
            continue
        rows = raw_rows(tiny, prompt, completion.token_ids)
        if params.logprob_token_ids is None:
            check_all(completion.logprobs, completion.token_ids, rows, params.logprobs, tolerance)
        else:
            check_named(completion, rows, params.logprob_token_ids, tolerance)
        total = sum(entry[i].logprob for entry, i in zip(completion.logprobs, completion.token_ids, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-6)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    if len(prompt) > 1:
        rows = raw_rows(tiny, prompt[:1], prompt[1:])
        check_all(output.prompt_logprobs[1:], prompt[1:], rows, params.prompt_logprobs, tolerance)


STOP_IDS = [17, 23]
STEPS = {  # name -> sampling parameters, each of which changes what is sampled
    "temperature": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "filters": {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.7},
    "below 1": {"repetition_penalty": 0.6, "temperature": 0.8},
    "frequency": {"frequency_penalty": 1.5, "presence_penalty": -1.0},
    "presence": {"presence_penalty": 2.0},
    "bias": {"logit_bias": {5: 6.0, 400: 5.0, 9: -100.0}},
    "allowed": {"allowed_token_ids": list(range(0, 512, 40))},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": STOP_IDS, "logit_bias": {17: 4.0}},
    "all": {"temperature": 0.9, "top_k": 6, "top_p": 0.95, "allowed_token_ids": list(range(100)), "min_tokens": 20,
            "stop_token_ids": STOP_IDS, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3,
            "logit_bias": {3: 2.5, 17: 100.0}},
    "greedy": {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    "plain": {},
}  # fmt: skip


def stepped_requests(k):
    """Prompts and parameters, one for each of ``STEPS``, with ``logprobs=k``."""
    prompts = [[3, 9, 4, 1, 5, i + 20, 5, 17] for i in range(len(STEPS))]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, logprobs=k, seed=i, **changes)
        for i, changes in enumerate(STEPS.values())
    ]
    return prompts, params
