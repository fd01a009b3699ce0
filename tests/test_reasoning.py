"""``output.outputs[0].reasoning`` and ``.content``: the text split at the marks of the model's thinking."""

import json
import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from helpers import greedy, refuses, run
from tokenizers import AddedToken, Tokenizer

from nanovllm import CompletionOutput, SamplingParams, StructuredOutputsParams
from nanovllm.cli import main
from nanovllm.engine.text.detokenizer import decode_completion
from nanovllm.engine.text.fast_tokenizer import FastTokenizer
from nanovllm.engine.text.reasoning import OTHERS, THINK, ReasoningFinder, marks_of
from nanovllm.utils.checkpoint import DEMO_MODEL

TURN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
SPLITS = [  # the prompt, the completion (S and E: the marks), its reasoning and its content
    # models that open the block themselves: Qwen3, SmolLM3
    (TURN, "Sa\nE\n\nb", "a\n", "\n\nb"),
    (TURN, "\nSaEb", "a", "\nb"),
    (TURN, "Sa", "a", ""),  # cut by max_tokens
    (TURN, "SE", "", ""),
    (TURN, "b", None, "b"),
    (TURN, "", None, ""),
    (TURN, "SaEbEc", "a", "bEc"),  # the answer quotes it
    (TURN, "SaSbEc", "aSb", "c"),
    (TURN, "bSaEc", "a", "bc"),
    (TURN, "the mark S", None, "the mark S"),
    # templates that open it: Qwen3-Thinking, DeepSeek-R1; and a last message to go on with
    (TURN + "S\n", "aEb", "a", "b"),
    (TURN + "S\n", "a", "a", ""),
    (TURN + "S", "SaEb", "a", "b"),  # some models open it once more
    (TURN + "S", "a S bE c", "a S b", " c"),
    (TURN + "Sso far", " aEb", " a", "b"),
    (TURN + "Sso farE and ", "b", None, "b"),
    # those that close it: enable_thinking=False
    (TURN + "S\n\nE\n\n", "b", None, "b"),
    (TURN + "S\n\nE\n\n", "the mark E", None, "the mark E"),
    (TURN + "E", "SaEb", "a", "b"),
    # what users write is no block
    ("<|im_start|>user\nwhat is S?<|im_end|>\n<|im_start|>assistant\n", "b", None, "b"),
    ("<|im_start|>user\nS\n\nE<|im_end|>\n<|im_start|>assistant\n", "b", None, "b"),
    # without a template
    ("hi", "aEb", "a", "b"),
    ("hi S", "aEb", "a", "b"),
    ("hi S", "a", "a", ""),
]  # fmt: skip


def tokenizer_with(marks, special):
    """The demo model's, with tokens for the marks; ``special`` None: without."""
    backend = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokens = [AddedToken(mark, special=bool(special), normalized=False) for mark in marks]
    if special is not None:
        (backend.add_special_tokens if special else backend.add_tokens)(tokens)
    return FastTokenizer(backend, 2)


@pytest.mark.parametrize("marks", [THINK, *OTHERS[:2]], ids=str)
@pytest.mark.parametrize("special", [None, False, True], ids=["text", "tokens", "special tokens"])
def test_splits(marks, special):
    """In the text with special tokens and, where these are the marks, without them too."""
    tokenizer = tokenizer_with(marks, special)
    finder = ReasoningFinder(tokenizer, marks)
    assert special is None or marks_of(tokenizer) == marks
    for case in SPLITS:
        prompt, given, *expected = (x and x.replace("S", marks.start).replace("E", marks.end) for x in case)
        prompt_ids, ids = (np.array(tokenizer.encode(text), np.int64) for text in (prompt, given))
        for skip in (False, True):
            text = decode_completion(tokenizer, ids.tolist(), skip, True)
            block = finder.find(prompt_ids, text, ids.tolist(), skip, True)
            output = CompletionOutput(0, text, ids.tolist(), reasoning_block=block)
            shown = expected
            if skip and special:  # the text lacks those that are quoted, too
                shown = [x and x.replace(marks.start, "").replace(marks.end, "") for x in expected]
            assert [output.reasoning, output.content] == shown, (case, skip)
    long = np.array([*tokenizer.encode(TURN + marks.start), *tokenizer.encode("and so on " * 20)], np.int64)
    assert finder.find(long, "a", [], True, True) == (0, 0, 1, 1) or special is None


def test_gpt_oss():
    """Its channels are special tokens, of which the text keeps the words between."""
    backend = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    backend.add_special_tokens([f"<|{name}|>" for name in ("channel", "message", "start", "end", "return")])
    tokenizer = FastTokenizer(backend, 2)
    finder = ReasoningFinder(tokenizer, marks_of(tokenizer))
    whole = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>5<|return|>"
    turn = "<|start|>user<|message|>2 + 3<|end|><|start|>assistant"
    called = f"{turn}<|channel|>analysis<|message|>add<|end|><|start|>assistant<|channel|>commentary<|message|>5<|end|>"
    for prompt, text, expected in (
        (turn, whole, ("hm", "5")), (turn, whole.split("<|end|>")[0], ("hm", "")), (turn, "5", (None, "5")),
        (called + turn, whole, ("hm", "5")), (called + "<|start|>assistant", "5", (None, "5")),
        (turn + "<|channel|>analysis<|message|>I", whole.removeprefix("<|channel|>analysis<|message|>"), ("hm", "5")),
    ):  # fmt: skip
        prompt_ids, ids = np.array(tokenizer.encode(prompt)), tokenizer.encode(text)
        shown = decode_completion(tokenizer, ids, True, True)
        output = CompletionOutput(0, shown, ids, reasoning_block=finder.find(prompt_ids, shown, ids, True, True))
        assert (output.reasoning, output.content) == expected


# ---------------------------------------------------------------- in an engine


def says(llm, text):
    """A logits processor that makes the model say it, and then its end-of-sequence token."""
    ids = [*llm.tokenize([text])[0], 2, 2]
    return lambda before, logits: torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor(ids[len(before)]), 0)


TEXT = "<think>\nhm, 2</think>\n\nIt is 5."


def test_outputs(demo):
    """Each of n, cut by a stop string or not; pickled, copied; without a text."""
    params = SamplingParams(n=2, max_tokens=60, logits_processors=[says(demo, TEXT)])
    (output,) = run(demo, "2 + 3", params)
    assert [(o.reasoning, o.content, o.text) for o in output.outputs] == [("\nhm, 2", "\n\nIt is 5.", TEXT)] * 2
    for again in (pickle.loads(pickle.dumps(output)).outputs[0], replace(output.outputs[0], reasoning_block=None)):
        assert again == output.outputs[0] and "reasoning" not in repr(again)
    assert pickle.loads(pickle.dumps(run(demo, "2 + 3", params)))[0].outputs[1].content == "\n\nIt is 5."
    assert asdict(output.outputs[0])["text"] == TEXT
    with pytest.raises(AttributeError, match=r"its first completion has: output\.outputs\[0\]\.reasoning"):
        _ = output.reasoning
    opened = {"prompt_token_ids": demo.tokenize(["<|im_start|>assistant\n<think>\n"])[0]}
    for prompt, stop, text in ((opened, "hm", "so hm, 2</think>5"), ("hi", ",", TEXT), (opened, "5", "a</think>b 5")):
        params = greedy(60, stop=stop, logits_processors=[says(demo, text)])
        (completion,) = run(demo, prompt, params)[0].outputs
        reasoning, _, content = text.split(stop)[0].removeprefix("<think>").partition("</think>")
        assert (completion.reasoning, completion.content, completion.stop_reason) == (reasoning, content, stop)
    (none,) = run(demo, "hi", greedy(3, detokenize=False))[0].outputs
    assert (none.reasoning, none.content) == (None, "") == (CompletionOutput(0, "", []).reasoning, "")


def test_chats(demo):
    """The template says where a completion begins."""
    template = "<|im_start|>{{ messages[0].content }}<|im_end|><|im_start|>{{ '<think>' if on else '<think></think>' }}"
    for is_on, expected in ((True, ("a", "b")), (False, (None, "a</think>b"))):
        params = greedy(30, ignore_eos=False, logits_processors=[says(demo, "a</think>b")])
        messages = [{"role": "user", "content": "<think> or </think>?"}]
        (output,) = demo.chat(messages, params, use_tqdm=False, chat_template=template, on=is_on)
        assert (output.outputs[0].reasoning, output.outputs[0].content) == expected


@pytest.mark.parametrize("marks", [None, ("<|im_start|>", "<|im_end|>")], ids=["text", "special tokens"])
def test_deltas(demo, marks):
    """Parts of deltas join to those of the whole; marks of several tokens are part of what they stand in until they
    are whole.
    """
    demo.reasoning_marks = marks
    try:
        text = "<|im_start|>a b c<|im_end|> d e" if marks else TEXT
        params = greedy(40, stop="e", logits_processors=[says(demo, text)])
        deltas = list(demo.stream("2 + 3", params))
        (whole,) = run(demo, "2 + 3", params)[0].outputs
    finally:
        demo.reasoning_marks = None
    assert (whole.reasoning, whole.content) == (("a b c", " d ") if marks else ("\nhm, 2", "\n\nIt is 5."))
    assert "".join(delta["text"] for delta in deltas) == whole.text
    contents, reasonings = ("".join(getattr(d.outputs[0], n) or "" for d in deltas) for n in ("content", "reasoning"))
    assert (reasonings, contents) == (whole.reasoning, whole.content) or marks is None
    assert contents.endswith(whole.content) and whole.reasoning in reasonings


def test_marks(demo):
    assert demo.reasoning_marks == ("<think>", "</think>") == THINK
    demo.reasoning_marks = ["Thoughts:", "Answer:"]
    assert demo.reasoning_marks.end == "Answer:"
    (completion,) = run(demo, "x", greedy(60, logits_processors=[says(demo, "Thoughts: a Answer: b")]))[0].outputs
    assert (completion.reasoning, completion.content) == (" a ", " b")
    demo.reasoning_marks = None
    for wrong in ("<think>", ("<think>",), ("", "</think>"), ("a", 3), 5):
        with refuses("reasoning_marks must be two non-empty strings"):
            demo.reasoning_marks = wrong
    assert demo.reasoning_marks == THINK


OPENED = "<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n<think>\n"
CONSTRAINTS = [
    ({"choice": ["yes", "no"]}, "yes"), ({"regex": "[0-9]{3}"}, "123"), ({"grammar": 'start: "a" "b"'}, "ab"),
    ({"json": {"enum": ["Oslo"]}}, '"Oslo"'), ({"json_object": True}, '{"a": 5}'),
    ({"json": {"type": "string"}}, '"so </think> 5"'),  # the model would rather think
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "text"), CONSTRAINTS, ids=[*map(str, range(len(CONSTRAINTS)))])
def test_a_constrained_text_is_the_content(demo, constraint, text):
    """It was called reasoning where the template opens <think>, and the content was empty; of JSON with the end mark in
    a string, the half of it."""
    pytest.importorskip("llguidance")
    params = greedy(40, ignore_eos=False, logits_processors=[says(demo, text)])
    params.structured_outputs = StructuredOutputsParams(**constraint)
    (completion,) = run(demo, OPENED, params)[0].outputs
    assert (completion.text, completion.reasoning, completion.content) == (text, None, text)
    contents = [delta.outputs[0].content for delta in demo.stream(OPENED, params)]
    assert "".join(contents) == text
    params.max_tokens = 2
    (completion,) = run(demo, OPENED, params)[0].outputs
    assert (completion.reasoning, completion.content) == (None, completion.text)


@pytest.mark.parametrize("pattern", [r"[a-z]+</think>[0-9]", r"[a-z]+<\/think>[0-9]"])
def test_a_constraint_that_describes_the_thinking(demo, pattern):
    pytest.importorskip("llguidance")
    params = greedy(40, ignore_eos=False, logits_processors=[says(demo, "hm</think>5")])
    params.structured_outputs = StructuredOutputsParams(regex=pattern)
    (completion,) = run(demo, OPENED, params)[0].outputs
    assert (completion.text, completion.reasoning, completion.content) == ("hm</think>5", "hm", "5")


@pytest.mark.parametrize("suffix", [".jsonl", ""])
def test_rows_of_batch_jobs(tmp_path, suffix):
    """Rows of models that think have both parts, others neither."""
    pytest.importorskip("llguidance")
    parquet = pytest.importorskip("pyarrow.parquet")
    choices = {"a": "<think>x</think>5", "b": "5", "c": "x</think>6"}
    rows = [{"id": key, "prompt": "hi", "sampling_params": {"n": 1 + (key == "c"), "temperature": 1.0,
             "structured_outputs": {"choice": [text]}}} for key, text in choices.items()]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / f"out{suffix}"
    assert main(["batch", str(tmp_path / "in.jsonl"), str(out), "--device", "cpu", "--max-num-seqs", "4"]) == 0
    written = parquet.read_table(out).to_pylist() if not suffix else map(json.loads, out.read_text().splitlines())
    found = {row["custom_id"]: row for row in written}
    assert [(found[key].get("reasoning"), found[key].get("content")) for key in "abc"] == [
        ("x", "5"), (None, None), ("x", "6")
    ]  # fmt: skip
    assert "reasoning" not in found["b"] or not suffix
    outputs = found["c"]["outputs"] if suffix else json.loads(found["c"]["outputs"])
    assert [(each["reasoning"], each["content"]) for each in outputs] == [("x", "6")] * 2
