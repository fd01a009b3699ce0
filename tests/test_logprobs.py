"""Log-probabilities of generated tokens and of prompts against transformers' log_softmax.

Within 1e-4 in fp32. A bf16 engine is compared with transformers' fp32 model within ``BF16_TOLERANCE``; its own tokens
are scored, so that a different choice does not matter.
"""

import copy
import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
from helpers import greedy, prompt_of, run, run_ahead
from logits_twin import (
    FP32_TOLERANCE,
    STEPS,
    adjusted,
    check_all,
    check_request,
    filtered,
    log_softmax,
    logits_of,
    raw_rows,
    stepped_requests,
)

from nanovllm import RequestError, SamplingParams, StructuredOutputsParams
from nanovllm.utils.packed_logprobs import logprobs_at

PROMPT = [3, 9, 4, 1, 5]


# -------------------------------------------------------------------- side by side


def mixed_requests():
    """Some share two blocks, one has one token; greedy and sampled; different numbers of top tokens, or named ones;
    without a completion, with a part of the prompt, with a stop token."""
    shared, long = prompt_of(35, seed=1), prompt_of(70)
    rows = [  # prompt, logprobs, prompt_logprobs, other parameters
        (shared, 5, None, {}), (PROMPT, 0, 2, {}), ([*shared[:33], 7, 8, 9], None, 5, {}), (long, 20, 20, {}),
        ([4], 1, 0, {}), (shared + prompt_of(20), None, None, {}), (shared, 3, 1, {}), (prompt_of(50), None, 0, {}),
        (prompt_of(37), 2, 1, {"temperature": 1.0, "n": 4}), (prompt_of(30), 1, 1, {"truncate_prompt_tokens": 10}),
        (prompt_of(33), None, 1, {"logprob_token_ids": [511, 0, 7, 0]}), (PROMPT, None, None, {}),
        (shared, None, None, {"temperature": 1.0, "n": 2, "logprob_token_ids": list(range(5, 500, 20))}),
        (prompt_of(40), 1, 2, {"max_tokens": 0}), (prompt_of(9), 2, None, {"stop_token_ids": list(range(0, 512, 5))}),
    ]  # fmt: skip
    params = [
        SamplingParams(**{"max_tokens": 30 + i, "ignore_eos": True, "temperature": 1.3 * (i % 2), "seed": i,
                          "logprobs": k, "prompt_logprobs": of_prompt, **more})
        for i, (_, k, of_prompt, more) in enumerate(rows)
    ]  # fmt: skip
    return [row[0] for row in rows], params


@pytest.mark.parametrize("is_preempted", [False, True])
def test_different_numbers_in_one_batch(is_preempted, on, tiny):
    """And none; the second time with a warm prefix cache, which scored prompts are not taken from."""
    llm = run_ahead(on(num_kvcache_blocks=9, max_num_batched_tokens=17) if is_preempted else on())
    prompts, params = mixed_requests()
    for _ in range(2):
        outputs = run(llm, prompts, params)
        for prompt, output, p in zip(prompts, outputs, params, strict=True):
            assert output.prompt_token_ids == prompt[-(p.truncate_prompt_tokens or len(prompt)) :]
            check_request(tiny, output, p, on.tolerance)
            assert len({tuple(completion.token_ids) for completion in output.outputs}) == p.n
            assert output.num_cached_tokens == 0 or p.prompt_logprobs is None, "their logits would be missing"
        assert outputs[-1]["finish_reason"] == "stop"
    assert is_preempted or outputs[0].num_cached_tokens == 32
    assert (llm.scheduler.num_preemptions > 2) == is_preempted


def test_chunks_beside_mates_that_ask_for_more(make_llm, tiny):
    """A launch reports as many alternatives as its greediest request wants, so the chunks of a prompt had different
    widths, and could not be joined; nor those of a score."""
    llm, params = make_llm(max_num_batched_tokens=16), greedy(1, prompt_logprobs=1)
    llm.add_request(PROMPT, greedy(1, prompt_logprobs=5))  # fills up the first launch together with a first chunk
    (output,) = run(llm, [prompt_of(40)], params)
    check_request(tiny, output, params)
    llm.add_request(PROMPT, greedy(1, prompt_logprobs=5))
    (score,) = llm.score([prompt_of(40, seed=1)])
    rows = raw_rows(tiny, prompt_of(40, seed=1)[:1], prompt_of(40, seed=1)[1:])
    assert score.logprobs == pytest.approx(rows[np.arange(39), prompt_of(40, seed=1)[1:]], abs=FP32_TOLERANCE)


def test_longer_than_a_slice_of_logits(make_llm, tiny):
    """A prompt is scored 256 rows at a time."""
    params = greedy(2, logprobs=1, prompt_logprobs=3)
    llm = make_llm(max_num_batched_tokens=1024)
    prompts = [prompt_of(600), prompt_of(257), prompt_of(258)]
    for output in run(llm, prompts, params):
        check_request(tiny, output, params)


# -------------------------------------------------------------------- how many


def test_the_whole_vocabulary(on, tiny):
    """-1 reports every token, beside batch mates that want few."""
    llm = on(max_logprobs=-1)
    params = [greedy(6, logprobs=-1, prompt_logprobs=-1), greedy(8, logprobs=2, prompt_logprobs=0), greedy(7)]
    outputs = run(llm, [PROMPT, prompt_of(40), [8, 7]], params)
    for output, p in zip(outputs, params, strict=True):
        check_request(tiny, output, p, on.tolerance)
    for entry in (*outputs[0].outputs[0].logprobs, *outputs[0].prompt_logprobs[1:]):
        assert len(entry) == 512
        assert sum(math.exp(x.logprob) for x in entry.values()) == pytest.approx(1, abs=1e-4)


def test_more_than_the_vocabulary_is_the_vocabulary(make_llm, tiny):
    """Alone in its batch; and True is one."""
    llm = make_llm(max_logprobs=-1)
    for name, k in itertools.product(("logprobs", "prompt_logprobs"), (-1, 512, 513, 100_000, True)):
        (output,) = run(llm, PROMPT, greedy(3, **{name: k}))
        check_request(tiny, output, greedy(3, **{name: int(k)}))


def test_named_ids_beside_a_number():
    """As in vLLM the number can only be theirs; ids that occur twice count once."""
    for ids, k in (([5, 3], None), ([5, 3], 2), ((np.int64(5), 3, 5), 2), ([5], True)):
        params = SamplingParams(logprob_token_ids=ids, logprobs=k)
        assert params.logprob_token_ids == list(dict.fromkeys(ids)) and params.num_logprobs == len(set(ids))
    for ids, k in (([5, 3], 0), ([5, 3], 3), ([5, 5], 2), ([5], -1)):
        with pytest.raises(RequestError, match=f"logprobs={k} must be None or {len(set(ids))}, the number"):
            SamplingParams(logprob_token_ids=ids, logprobs=k)


@pytest.mark.parametrize("name", ("logprobs", "prompt_logprobs"))
def test_max_logprobs(name, make_llm):
    """Refused before anything is queued."""
    llm, few, none = make_llm(), make_llm(max_logprobs=3), make_llm(max_logprobs=0)
    for engine, k, limit in (llm, 21, 20), (llm, -1, 20), (few, 4, 3), (few, -1, 3), (none, 1, 0):
        with pytest.raises(RequestError) as error:
            run(engine, [PROMPT, PROMPT], [greedy(2), greedy(2, **{name: k})])
        assert str(error.value) == (
            f"prompt 1: {name}={k} must be at most max_logprobs={limit}; see LLM(max_logprobs={k})."
        )
        assert engine.is_finished()
    assert len(run(llm, PROMPT, greedy(2, **{name: 20}))) == 1
    assert len(run(none, PROMPT, greedy(2, **{name: 0}))) == 1


# -------------------------------------------------------------------- raw


def test_raw_is_what_the_model_gives(on, tiny):
    """Values and ranks before temperature, filters, penalties, biases and masks."""
    llm = on(max_num_seqs=16)
    prompts, params = stepped_requests(4)
    outputs = run(llm, prompts, params)
    for output, p in zip(outputs, params, strict=True):
        check_request(tiny, output, p, on.tolerance)
    ranks = [
        completion.logprobs[i][token_id].rank for completion in (outputs[11].outputs[0],)
        for i, token_id in enumerate(completion.token_ids)
    ]  # fmt: skip
    assert max(ranks) > 30, "allowed_token_ids leaves raw ranks alone"


# -------------------------------------------------------------------- processed


def processed_rows(tiny, prompt, token_ids, params):
    """log_softmax of what each token was sampled from, float64 [n, V]."""
    logits = logits_of(tiny, prompt, token_ids)
    steps = [
        filtered(adjusted(row, prompt, token_ids[:i], params, params.stop_token_ids), params)
        for i, row in enumerate(logits)
    ]
    return log_softmax(np.stack(steps))


def test_processed_is_what_is_sampled_from(on, tiny):
    """An explicit twin: masks, min_tokens, bias, penalties, temperature, filters; -inf where they cut."""
    exact = on.tolerance == FP32_TOLERANCE
    llm = on(max_num_seqs=16, logprobs_mode="processed_logprobs")
    prompts, params = stepped_requests(9)
    cut = 0
    for name, output, p in zip(STEPS, run(llm, prompts, params), params, strict=True):
        if not exact and name in ("top_k", "top_p", "min_p", "filters", "all"):
            continue  # rounding moves tokens across their edges
        (completion,) = output.outputs
        rows = processed_rows(tiny, output.prompt_token_ids, completion.token_ids, p)
        scale = 1 / min(p.temperature or 1, 1)  # the temperature multiplies what logits are off by
        try:
            check_all(completion.logprobs, completion.token_ids, rows, 9, on.tolerance * scale)
        except AssertionError as error:
            raise AssertionError(name) from error
        values = [x.logprob for entry in completion.logprobs for x in entry.values()]
        cut += -math.inf in values
        assert all(entry[i].logprob > -math.inf for entry, i in
                   zip(completion.logprobs, completion.token_ids, strict=True))  # fmt: skip
        assert completion.cumulative_logprob == pytest.approx(
            sum(entry[i].logprob for entry, i in zip(completion.logprobs, completion.token_ids, strict=True)), abs=1e-6
        )
    assert cut >= 3 or not exact  # top_k, the filters, and all together


def test_processed_prompts_stay_raw(make_llm, tiny):
    params = SamplingParams(
        temperature=0.5, top_k=3, logit_bias={5: 4.0}, repetition_penalty=2.0, max_tokens=3, prompt_logprobs=4
    )
    (output,) = run(make_llm(logprobs_mode="processed_logprobs"), PROMPT * 5, params)
    check_request(tiny, output, params)


# -------------------------------------------------------------------- the objects


def test_decoded_tokens(demo):
    params = greedy(6, logprobs=2, prompt_logprobs=1, ignore_eos=False)
    (output,) = run(demo, "2 + 3 = ", params)
    for entry in (*output.outputs[0].logprobs, *output.prompt_logprobs[1:]):
        assert {x.decoded_token for x in entry.values()} == {demo.tokenizer.decode([i]) for i in entry}
        for i, x in entry.items():
            assert x.decoded_token == demo.tokenizer.decode([i])
    (output,) = run(demo, "2 + 3 = ", dataclasses.replace(params, detokenize=False))
    assert output.outputs[0].text == ""
    assert all(x.decoded_token is None for entry in (*output.outputs[0].logprobs, *output.prompt_logprobs[1:])
               for x in entry.values())  # fmt: skip


def test_characters_of_several_tokens(demo):
    """Every token of an emoji had no text and no bytes, so nobody could tell where the character is."""
    text = "🙂 你é"
    params = greedy(20, logprobs=2, prompt_logprobs=1, ignore_eos=False,
                    structured_outputs=StructuredOutputsParams(choice=[text]))  # fmt: skip
    (output,) = run(demo, text, params)
    ids, completion = output.prompt_token_ids, output.outputs[0]
    assert len(ids) == 10 and demo.tokenizer.decode(ids[:1]) == "\ufffd"  # a token for each byte but the spaces's
    end = [("<|im_end|>", b"<|im_end|>")]
    expected = list(zip(["", "", "", "🙂", " ", "", "", "你", "", "é"], map(bytes, zip(text.encode())), strict=True))
    for token_ids, logprobs in (ids[1:], output.prompt_logprobs[1:]), (completion.token_ids, completion.logprobs):
        chosen = [at[i] for at, i in zip(logprobs, token_ids, strict=True)]
        found = [(at.decoded_token, at.token_bytes) for at in chosen]
        assert found == (expected[1:] if token_ids == ids[1:] else expected + end)
    deltas = [delta.outputs[0] for delta in demo.stream(text, params)]  # a character may begin in the delta before
    assert [at for delta in deltas for at in delta.logprobs] == completion.logprobs and len(deltas) > 5


def test_parts_of_characters():
    """What completes no character: "" until that is certain; an alternative completes the sampled tokens before it."""
    known = {0: ("", b"\xe2"), 1: ("", b"\x82"), 2: ("", b"\xac"), 3: ("a", b"a"), 4: ("", b"\xac\xe2"), 5: ("b", b"b")}

    def texts(ids, others, before=()):
        rows = np.array([[0, 1, other, 0] for other in others], np.int32)
        found = logprobs_at(rows, ids, lambda wanted: {i: known[i] for i in wanted}, True, before)
        return [tuple(entry.decoded_token for entry in at.values()) for at in found]

    assert texts([0, 1, 2, 3], [3, 2, 4, 0]) == [("", "a"), ("", ""), ("€", "€"), ("a", "")]
    assert texts([4, 1, 4, 1, 2], [3, 5, 2, 3, 4]) == [("\ufffd", "a"), ("", "b"), ("€", "€"), ("", "a"), ("€", "€")]
    assert texts([0, 1, 3, 5], [3, 3, 5, 2]) == [("", "a"), ("\ufffd", "a"), ("a", "b"), ("b", "\ufffd")]
    assert texts([2, 3], [1, 5], before=[3, 0, 1]) == [("€", "₂"), ("a", "b")]
    assert logprobs_at(np.zeros((1, 4), np.int32), [1], None)[0][1].decoded_token is None


def test_lists_are_made_once_and_when_read(make_llm, monkeypatch):
    from nanovllm.engine import token_processor
    from nanovllm.readouts import prompt_logprobs
    calls = []

    def counted(*args):
        calls.append(1)
        return logprobs_at(*args)

    for module in (token_processor, prompt_logprobs):
        monkeypatch.setattr(module, "logprobs_at", counted)
    (output,) = run(make_llm(), PROMPT, greedy(3, logprobs=1, prompt_logprobs=1))
    assert not calls
    assert output.outputs[0].cumulative_logprob < 0 and not calls
    first = output.outputs[0].logprobs
    assert output.outputs[0].logprobs is first and len(calls) == 1
    prompt = output.prompt_logprobs
    assert output.prompt_logprobs is prompt and len(calls) == 2
    output.outputs[0].logprobs = None
    output.prompt_logprobs = [1]
    assert output.outputs[0].logprobs is None and output.prompt_logprobs == [1] and len(calls) == 2


def test_copies(make_llm):
    """Pickled, copied and as plain dictionaries, before and after the lists were read."""
    params = greedy(3, logprobs=1, prompt_logprobs=1)
    llm = make_llm()
    (expected,) = run(llm, PROMPT, params)
    lists = expected.outputs[0].logprobs, expected.prompt_logprobs
    for make_copy in (lambda x: pickle.loads(pickle.dumps(x))), copy.deepcopy, copy.copy:
        (output,) = run(llm, PROMPT, params)
        for again in make_copy(output), make_copy(make_copy(output)):
            assert (again.outputs[0].logprobs, again.prompt_logprobs) == lists
            assert again.outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob
            assert dict(again) == dict(expected)
    (output,) = run(llm, PROMPT, params)
    completion = pickle.loads(pickle.dumps(output.outputs[0]))
    assert completion == expected.outputs[0]
    (output,) = run(llm, PROMPT, params)
    as_dict = dataclasses.asdict(output.outputs[0])
    assert as_dict["logprobs"] == [
        {i: dataclasses.asdict(x) for i, x in entry.items()} for entry in lists[0]
    ]  # fmt: skip
    assert as_dict["token_ids"] == expected.outputs[0].token_ids
    assert "logprob" in repr(output.outputs[0])
