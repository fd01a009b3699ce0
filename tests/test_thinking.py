"""thinking_token_budget: a naive oracle of the count, and engines against logits processors that follow it."""

import random
import re

import numpy as np
import pytest
import torch
from helpers import prompt_of, refuses, run, run_ahead
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.engine.text.reasoning import OTHERS, THINK
from nanovllm.engine.thinking import Marks, Thinking

START, END = " the", " So: done."


def behind(text, mark):
    return text.rfind(mark) + len(mark) if mark in text else 0


def next_in(start, end, alone, budget, prompt, completion):
    """(Whether a thought is open, the character that must come next or None), of texts with a character a token."""
    opened, closed = behind(prompt, start), max(behind(prompt, end), behind(prompt, alone))
    is_open = opened > closed
    used, since = len(prompt) - opened if is_open else 0, prompt[max(opened, closed) :]

    def rest():
        """What is still to be written of the end, the mark alone included, once the budget is spent."""
        if not is_open or used < budget:
            return ""
        for text in (end, end[max(0, end.rfind(alone)) :], alone):
            for n in range(len(text) - 1, 0, -1):
                if since.endswith(text[:n]):
                    return text[n:]
        return end

    due = rest()
    for character in completion:
        if due:  # not looked at: it may spell a mark
            assert character == due[0]
            due = due[1:]
            is_open, since = due != "", "" if due == "" else since
        else:
            since += character
            if since.endswith((end, alone) if is_open else start):
                is_open, since = not is_open, ""
            else:
                used += is_open
            due = rest()
    return is_open, due[:1] or None


TEXTS = st.text("abc", min_size=1, max_size=4)


@given(TEXTS, TEXTS, TEXTS, st.integers(0, 6), st.text("abcd", max_size=12), st.text("abcd", min_size=1, max_size=40))
def test_against_the_naive_count(start, end, alone, budget, prompt, wanted):
    """Marks of several tokens that overlap with themselves and each other, in the prompt and in the completion."""
    ids = {text: tuple(map(ord, text)) for text in (start, end, alone)}
    marks = Marks(ids[start], ids[end], tuple(dict.fromkeys((ids[alone], ids[end]))))
    thinking, completion = Thinking(marks, budget, np.array([*map(ord, prompt)], np.int32)), ""
    for character in wanted:
        is_open, forced = next_in(start, end, alone, budget, prompt, completion)
        assert thinking.is_open == is_open
        assert thinking.forced == (None if forced is None else ord(forced))
        completion += forced or character
        was_thought = is_open or next_in(start, end, alone, budget, prompt, completion)[0]
        assert thinking.accept(ord(completion[-1])) == was_thought


MARK_IDS = {"<think>": 3, "</think>": 4}


class Tokenizer:
    """Ids are characters, but for the marks."""

    @staticmethod
    def encode(text, add_special_tokens):
        assert not add_special_tokens
        parts = re.split("(" + "|".join(map(re.escape, MARK_IDS)) + ")", text)
        return [i for part in parts for i in ([MARK_IDS[part]] if part in MARK_IDS else map(ord, part))]


@pytest.mark.parametrize(
    ("start", "end", "alone"),
    [(None, None, "</think>"), (None, "Time is up.</think>\n\n", "</think>"), ("[IN]", "so [IN] end [OUT] ", "[OUT]"),
     ("Thus", "That is it", "That is it"), (" «", "enough, « or » ", "« or »"), ("<a", "b", "b"),
     (None, "Time is up.</think>\n\nSo: ", "</think>"), ("<think>", "</think>\n\n<answer>", "</think>"),
     ("[THINK]\n", "Enough[/THINK] [1] is", "[/THINK]"), ("[IN]", "so [OUT] I say: ", "[OUT]"),
     ("Thoughts:", "Answer:\n\n", "Answer:"),
     ("<|channel|>analysis<|message|>", f"So.{OTHERS[2].end} It is ", OTHERS[2].end)],
)  # fmt: skip
def test_the_mark_alone(start, end, alone):
    """The model writes it without the phrase before it, which ends a thought, too: answers were cut by the phrase.
    With text or line breaks behind it, the mark was not found."""
    marks = Marks.of(Tokenizer, start, end, 1000)
    texts = (start or "<think>", end or "</think>", alone)
    start_ids, end_ids, alone_ids = (tuple(Tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    assert marks == (start_ids, end_ids, tuple(dict.fromkeys((alone_ids, end_ids))))


@pytest.mark.parametrize("pair", [THINK, *OTHERS[:2]], ids=str)
def test_the_marks_that_the_tokenizer_has(pair, monkeypatch):
    """A budget knew <think> alone, and Ministral's tokenizer has [THINK]."""
    monkeypatch.setattr(f"{__name__}.MARK_IDS", dict(zip(pair, (3, 4), strict=True)))
    assert Marks.of(Tokenizer, None, None, 1000) == ((3,), (4,), ((4,),))


@pytest.mark.parametrize("behind_mark", ["", "\n\n", "\n\nSo: "])
def test_the_whole_end_is_forced_and_the_mark_alone_ends_a_thought(behind_mark):
    """What stood behind the mark was never written; the model's own mark ended no thought, and the budget was spent on
    the answer."""
    marks = Marks.of(Tokenizer, None, f"Enough.</think>{behind_mark}", 1000)

    def ids(text):
        return Tokenizer.encode(text, add_special_tokens=False)

    end = ids(f"Enough.</think>{behind_mark}")
    assert marks.end == tuple(end)
    forced = Thinking(marks, 3, np.array(ids("<think>")))
    for token_id in ids("abc"):
        assert forced.forced is None and forced.accept(token_id)
    for token_id in end:
        assert forced.is_open and forced.forced == token_id and forced.accept(token_id)
    assert not forced.is_open and forced.forced is None and not forced.accept(ord("x"))
    own = Thinking(marks, 3, np.array(ids("<think>")))
    assert all(own.accept(token_id) for token_id in ids("a</think>")) and not own.is_open
    assert not any(own.accept(token_id) or own.forced for token_id in ids(f"{behind_mark}and on and on"))


def test_marks_that_the_tokenizer_has_not(demo):
    """By default those of most models; the demo model's tokenizer splits them."""
    with refuses("its tokenizer has no tokens '<think>' and '</think>'. Give LLM(reasoning_start_str=..., "):
        demo.generate("2 + 3", SamplingParams(thinking_token_budget=5))
    with refuses("the model has no tokens for the mark '»'"):
        Marks.of(Tokenizer, "«", "»", ord("»"))


# -------------------------------------------------------------------- in an engine


@pytest.fixture(scope="module")
def thinker():
    """A step ahead of its tokens, with room for half of the requests, so that they are preempted."""
    with LLM(device="cpu", quiet=True, kvcache_block_size=16, max_num_seqs=8, max_model_len=256, num_kvcache_blocks=24,
             max_num_batched_tokens=64, reasoning_start_str=START, reasoning_end_str=END) as llm:  # fmt: skip
        yield run_ahead(llm)


def follower(llm, budget):
    """A logits processor that computes the count anew for each token."""
    marks = Marks.of(llm.tokenizer, START, END, 1024)

    def follow(prompt_ids, token_ids, logits):
        texts = ["".join(map(chr, ids)) for ids in (marks.start, marks.end, marks.ends[0], prompt_ids, token_ids)]
        _, forced = next_in(*texts[:3], budget, *texts[3:])
        if forced is not None:
            logits[:] = -torch.inf
            logits[ord(forced)] = 0.0
        return logits

    return follow


CHANGES = ({"temperature": 0}, {"top_k": 5}, {"top_p": 0.8, "presence_penalty": 2.0}, {"repetition_penalty": 2.0},
           {"n": 3}, {"logit_bias": {288: 9.0, 290: 9.0}}, {"stop": ["on", "do"]}, {"min_tokens": 20}, {"logprobs": 1},
           {"allowed_token_ids": list(range(20, 400))}, {"bad_words": ["the", " So"]}, {"stop_token_ids": [16, 28]},
           {"include_stop_str_in_output": True, "stop": "done"})  # fmt: skip


def test_as_a_function_does(thinker):
    """Random requests side by side; masks and bad words, which forbid the end, come before it, as the function does.
    Noise depends on the place alone, so the tokens behind the end are equal, too."""
    rng = random.Random(0)
    start, end = (thinker.tokenizer.encode(text) for text in (START, END))
    prompts, budgets, changes = [], [], []
    for i in range(3 * len(CHANGES)):
        ids = prompt_of(rng.randrange(1, 40), seed=i)
        prompts.append(ids + rng.choice(([], start, [*start, *ids[:3]], [*start, *end], [*start, 5, *end[:2]])))
        budgets.append(rng.choice((0, 1, 2, 5, 9)))
        more = {"temperature": 1.0, "seed": i, "max_tokens": 24, "ignore_eos": i % 3 > 0, "logit_bias": {start[0]: 6.0}}
        changes.append({**more, **CHANGES[i % len(CHANGES)]})
    rows = list(zip(changes, budgets, strict=True))
    given = [SamplingParams(**each, thinking_token_budget=budget) for each, budget in rows]
    twins = [SamplingParams(**each, logits_processors=[follower(thinker, budget)]) for each, budget in rows]
    before = thinker.scheduler.num_preemptions
    outputs, others = (run(thinker, prompts, params) for params in (given, twins))
    assert thinker.scheduler.num_preemptions > before
    ends = ("token_ids", "text", "finish_reason", "stop_reason")
    found, expected = ([[getattr(c, name) for name in ends] for output in each for c in output.outputs]
                       for each in (outputs, others))  # fmt: skip
    assert found == expected
    assert sum(END in output["text"] for output in outputs) > 15


def test_streamed(thinker):
    params = SamplingParams(temperature=0, max_tokens=30, thinking_token_budget=3)
    (whole,) = run(thinker, ["what is the"], [params])
    deltas = [delta["text"] for delta in thinker.stream("what is the", params)]
    assert "".join(deltas) == whole["text"] and END in whole["text"] and len(deltas) > 20


@pytest.mark.parametrize(
    ("prompt", "bias", "opens"), [("what is the", 0, ""), ("2 + 3", 50.0, START), ("2 + 3", 0, None)]
)
def test_structured_outputs_begin_behind_the_thoughts(prompt, bias, opens, thinker):
    """A thought is free, without an end of the text; the model may open one first, and a prompt need not."""
    (start,) = thinker.tokenizer.encode(START)
    params = SamplingParams(
        temperature=0, max_tokens=40, thinking_token_budget=4,
        structured_outputs=StructuredOutputsParams(regex=r"\d{3}!"), logit_bias={start: bias, 2: 30.0},
    )  # fmt: skip
    (output,) = run(thinker, [prompt], [params])
    thought, end, text = output["text"].rpartition(END)
    assert output["finish_reason"] == "stop" and len(text) == 4 and text[:3].isdigit() and text[3] == "!"
    if opens is None:
        assert not end
    else:
        assert end and thought.startswith(opens)
        assert len(output["token_ids"]) == len(thinker.tokenizer.encode(opens + END)) + 4 + 4 + 1
    expected = (None if opens is None else thought.removeprefix(opens), text)
    assert (output.outputs[0].reasoning, output.outputs[0].content) == expected


@pytest.mark.parametrize("text", [f"a{END} b", f"a{START} b{END} c"])
def test_marks_within_a_constrained_text_are_content(thinker, text):
    """They split it, although it was no thought: neither the prompt nor its first token had opened one."""
    constraint = StructuredOutputsParams(choice=[text])
    params = SamplingParams(temperature=0, max_tokens=40, thinking_token_budget=4, structured_outputs=constraint)
    (output,) = run(thinker, ["2 + 3"], [params])
    assert (output["text"], output.outputs[0].reasoning, output.outputs[0].content) == (text, None, text)


def test_text_behind_the_mark_is_written_before_a_constrained_answer():
    """It never was. The answer begins with it, and the grammar behind it."""
    behind_mark = "\n\nIt is "
    with LLM(device="cpu", quiet=True, reasoning_start_str="<think>",
             reasoning_end_str=f"Enough.</think>{behind_mark}") as llm:  # fmt: skip
        params = SamplingParams(
            temperature=0, max_tokens=60, thinking_token_budget=3,
            structured_outputs=StructuredOutputsParams(regex=r"\d{3}!"),
        )  # fmt: skip
        (output,) = run(llm, ["2 + 3<think>"], [params])
        assert llm.reasoning_marks == ("<think>", "</think>")
    completion = output.outputs[0]
    assert completion.reasoning.endswith("Enough.") and completion.finish_reason == "stop"
    assert re.fullmatch(rf"{behind_mark}\d\d\d!", completion.content)


def test_a_mark_that_a_user_quotes_opens_no_thought(thinker):
    """It switched the grammar off, or spent the budget with the tokens behind it."""
    choice = StructuredOutputsParams(choice=["yes", "no"])
    for constraint in (choice, None):
        params = SamplingParams(temperature=0, max_tokens=20, thinking_token_budget=9, structured_outputs=constraint)
        talk = [{"role": "user", "content": f"introduce yourself, with {START} and " + "words " * 20}]
        (output,) = thinker.chat(talk, params, use_tqdm=False)
        assert END not in output["text"] and (constraint is None or output["text"] in choice.choice)
