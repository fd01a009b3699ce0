"""Structured outputs through ``LLM``: the demo model would rather write something else, and every answer parses."""

import json
import re
import shutil
from itertools import cycle

import pytest
from helpers import greedy, run
from leaks import check_is_empty, finish

from nanovllm import LLM, RequestError, SamplingParams, StructuredOutputsParams, cli
from nanovllm.engine.structured_outputs.token_masks import GrammarCompiler
from nanovllm.engine.token_processor import TokenProcessors
from nanovllm.utils.checkpoint import DEMO_MODEL

OPTIONS = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "max_num_seqs": 8, "max_model_len": 512,
           "quiet": True}  # fmt: skip
END_OF_TEXT, IM_END = 0, 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= sum
sum ::= number " + " number | "(" sum ")"
number ::= [1-9] [0-9]?
"""
REGEX = r"[A-Z][a-z]{2,9}, (north|south) [0-9]{1,3}°"  # \d: Unicode versions differ in what is a digit
CHOICE = ["positive", "negative", "neither of the two", "naïve – 日本"]
PROMPTS = ["What is 2 + 3?", "introduce yourself", "The", "list all prime numbers within 100", "abc " * 12, "日本", "A"]


def is_person(text):
    person = json.loads(text)
    assert list(person) == ["name", "age", "kind"]
    assert type(person["name"]) is str and len(person["name"]) <= 4
    return type(person["age"]) is int and 0 <= person["age"] <= 150 and person["kind"] in ("cat", "dog")


GUIDES = {  # what the text must be, and whether it is
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, is_person),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"choice": CHOICE}, CHOICE.__contains__),
    "grammar": ({"grammar": GRAMMAR}, lambda text: re.fullmatch(r"\(*[1-9][0-9]? \+ [1-9][0-9]?\)*", text)),
}


def guided(name, **params):
    params = {"temperature": 1.0, "max_tokens": 160, **params}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**GUIDES[name][0]), **params)


def fits(name, completion):
    assert completion.finish_reason == "stop", completion.text
    return bool(GUIDES[name][1](completion.text))


@pytest.fixture
def make_demo():
    made = []

    def make(**options):
        made.append(LLM(**{**OPTIONS, "num_kvcache_blocks": 256, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.exit()


def one(llm, params, prompt="The"):
    (output,) = run(llm, prompt, params)
    return output.outputs[0]


# ---------------------------------------------------------------- every answer parses


@pytest.mark.parametrize("temperature", [0, 1.0, 50.0])
@pytest.mark.parametrize("name", GUIDES)
def test_the_answer_fits(demo, name, temperature):
    outputs = run(demo, PROMPTS, guided(name, temperature=temperature))
    assert all(fits(name, output.outputs[0]) for output in outputs)
    assert all(output["token_ids"][-1] in (IM_END, END_OF_TEXT) for output in outputs)
    if temperature == 50:
        assert len({output["text"] for output in outputs}) > 1


# ---------------------------------------------------------------- beside other parameters


def test_log_probabilities_are_raw(demo):
    """Of the model's own logits: what is forced upon it may be improbable, and need not be of the best."""
    completion = one(demo, guided("regex", temperature=0, logprobs=2))
    assert len(completion.logprobs) == len(completion.token_ids)
    chosen = [at[token] for at, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert min(x.logprob for x in chosen) < -3 and max(x.rank for x in chosen) > 1
    assert all(len(at) in (2, 3) for at in completion.logprobs)
    plain = one(demo, greedy(1, logprobs=2))
    assert list(plain.logprobs[0].items())[:2] == list(completion.logprobs[0].items())[-2:]
    assert completion.cumulative_logprob == pytest.approx(sum(x.logprob for x in chosen), abs=1e-3)


def test_processed_log_probabilities(make_demo):
    """Of what it is sampled from: where the guide leaves one token, it is certain."""
    params = SamplingParams(logprobs=0, max_tokens=1, structured_outputs=StructuredOutputsParams(choice=["Z"]))
    (first,) = one(make_demo(logprobs_mode="processed_logprobs"), params).logprobs[0].values()
    assert (first.logprob, first.rank, first.decoded_token) == (pytest.approx(0, abs=1e-5), 1, "Z")
    (raw,) = one(make_demo(), params).logprobs[0].values()
    assert raw.logprob < -3 and raw.rank > 1


def test_cut_by_max_tokens(demo):
    """The beginning of an answer, with the reason why there is no more; the last token allowed may be its end."""
    params = {"temperature": 50.0, "seed": 3}
    whole = one(demo, guided("json", **params))
    size = len(whole.token_ids)
    for max_tokens in (1, 2, 5, size - 1, size):
        cut = one(demo, guided("json", max_tokens=max_tokens, **params))
        assert cut.finish_reason == ("length" if max_tokens < size else "stop")
        assert cut.token_ids == whole.token_ids[:max_tokens] and whole.text.startswith(cut.text.rstrip("\ufffd"))
    assert cut.text == whole.text


@pytest.fixture(scope="module")
def one_eos(tmp_path_factory):
    """The demo model where <|im_end|> alone ends a sequence, so that id 0 is a token like any other."""
    path = tmp_path_factory.mktemp("demo") / "model"
    shutil.copytree(DEMO_MODEL, path)
    (path / "generation_config.json").write_text("{}")
    with LLM(str(path), num_kvcache_blocks=64, **OPTIONS) as llm:
        assert llm.scheduler.eos_token_ids == {IM_END}
        yield llm


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("beside", [{"min_tokens": 6}, {"allowed_token_ids": [50]}, {"allowed_token_ids": [25]}])
def test_where_nothing_is_allowed_the_sequence_ends(one_eos, temperature, beside):
    """min_tokens forbids the end and the guide all but the end; allowed_token_ids forbid what the guide wants, which is
    an error. All logits were -inf then, and id 0 was sampled: "!" in Qwen3's vocabulary."""
    assert one_eos.tokenizer.encode("7", add_special_tokens=False) == [25]
    params = SamplingParams(
        temperature=temperature, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["7"]), **beside
    )
    completion = one(one_eos, params)
    if beside.get("allowed_token_ids") == [50]:
        assert (completion.token_ids, completion.finish_reason) == ([], "error")
        assert "the sampling parameters forbid every token" in completion.stop_reason
    else:
        assert (completion.token_ids, completion.finish_reason) == ([25, IM_END], "stop")


def test_min_tokens_within_a_grammar(demo):
    """An answer that could be short is not."""
    guide = StructuredOutputsParams(regex=r"(yes|no)( (yes|no))*")
    params = [
        SamplingParams(seed=seed, temperature=50.0, min_tokens=20, max_tokens=99, structured_outputs=guide)
        for seed in range(4)
    ]
    for output in run(demo, "The", params[:1]) + run(demo, PROMPTS[:3], params[1:]):
        assert len(output["token_ids"]) > 20 and output["finish_reason"] == "stop"
        assert re.fullmatch(r"(yes|no)( (yes|no))*", output["text"])


def test_ignore_eos(demo):
    """The text ends where the grammar does, all the same: after it nothing else is allowed."""
    completion = one(demo, guided("choice", ignore_eos=True, max_tokens=24, seed=1))
    assert completion.text in CHOICE


def test_stop_strings_and_tokens(demo):
    """They end an answer early."""
    completion = one(demo, guided("grammar", stop=" + ", seed=0))
    assert re.fullmatch(r"\(*[1-9]\d?", completion.text) and completion.stop_reason == " + "
    (plus,) = demo.tokenizer.encode("+", add_special_tokens=False)
    assert one(demo, guided("grammar", stop=" +", stop_token_ids=[plus], seed=0)).finish_reason == "stop"


def test_allowed_tokens_and_bad_words(demo):
    """All of them must allow a token."""
    digits = [i for digit in "0123456789" for i in demo.tokenizer.encode(digit, add_special_tokens=False)]
    numbers = StructuredOutputsParams(regex="[0-9a-z]{6}")
    params = SamplingParams(structured_outputs=numbers, allowed_token_ids=[*digits, IM_END], seed=0, temperature=9.0)
    assert re.fullmatch("[0-9]{6}", one(demo, params).text)
    either = {"structured_outputs": StructuredOutputsParams(choice=["positive", "negative"]), "temperature": 0}
    first = one(demo, SamplingParams(**either))
    bad = demo.tokenizer.decode(first.token_ids[:1])
    other = one(demo, SamplingParams(bad_words=[bad], **either))
    assert other.token_ids[0] != first.token_ids[0] and other.text in ("positive", "negative")


def test_parameters_are_copied(demo):
    """A schema that its owner changes after the request was made stays what it was."""
    schema = {"type": "integer", "minimum": 1, "maximum": 9}
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(json=schema))
    request = demo.add_request("The", params)
    schema["type"] = params.structured_outputs.json["type"] = "boolean"
    params.structured_outputs = None
    finished = finish(demo)
    assert demo.tokenizer.decode(finished[request], skip_special_tokens=True).strip() in "123456789"


# ---------------------------------------------------------------- grammars that fail while they are decoded


class Panic(BaseException):
    """A panic of Rust code reaches Python as no ``Exception``."""


class FailingGrammar:
    """Allows what ``matcher`` allows at its beginning, until a call of ``where`` raises."""

    def __init__(self, matcher, where, after, error):
        self.matcher, self._where, self._calls_left, self._error = matcher, where, after, error

    def _call(self, where):
        if where == self._where:
            self._calls_left -= 1
            if self._calls_left < 0:
                raise self._error

    def check(self):
        self._call("fill")

    def accept(self, token_id):
        self._call("accept")


def fail_in(monkeypatch, *failures, error=RuntimeError("the parser has too many items")):
    """Grammars of a choice fail from now on, each (where, after how many calls) in turn."""
    make, any_text, failures = GrammarCompiler.compile, StructuredOutputsParams(regex="(?s:.*)"), cycle(failures)
    monkeypatch.setattr(TokenProcessors, "check", lambda self, params: None)

    def failing(self, params):
        if not params.choice:
            return make(self, params)
        return FailingGrammar(make(self, any_text).matcher, *next(failures), error)

    monkeypatch.setattr(GrammarCompiler, "compile", failing)


DOOMED = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["a"]))


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("where", ["fill", "accept"])
@pytest.mark.parametrize("error", [RuntimeError("too many items"), Panic("unreachable"), RequestError("too deep")])
def test_a_grammar_that_fails_ends_its_own_request(demo, monkeypatch, where, in_flight, error):
    """It ended the step, and the requests of everybody with it; a batch job waited for ever."""
    prompts, params = ["The", "A", "The", "A"], [guided("json", seed=1), greedy(20, ignore_eos=False), DOOMED, DOOMED]
    alone = [one(demo, each, prompt) for prompt, each in zip(prompts[:2], params[:2], strict=True)]
    monkeypatch.setattr(demo.model_runner, "max_in_flight", in_flight)
    before = demo.metrics()["request_success"]["error"]
    added = demo.add_request("The", greedy(30))
    fail_in(monkeypatch, (where, 3), error=error)
    outputs = run(demo, prompts, params)
    assert [output["token_ids"] for output in outputs[:2]] == [each.token_ids for each in alone]
    for output in outputs[2:]:
        assert output["finish_reason"] == "error" and len(output["token_ids"]) == 3 + (where == "accept")
        reason = f"the grammar failed while it was decoded ({type(error).__name__}: {error})"
        is_told = isinstance(error, RequestError)
        assert output.outputs[0].stop_reason == (str(error) if is_told else reason)
    assert demo.metrics()["request_success"]["error"] == before + 2
    assert len(finish(demo)[added]) == 30
    check_is_empty(demo)


def test_a_schema_of_too_many_branches_ends_its_own_request(demo):
    """It compiles, and exceeds a limit of llguidance at its first token."""
    schema = {"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "string"}}} for i in range(300)]}
    wide = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    bad, good = run(demo, ["The", "The"], [wide, greedy(5)])
    assert bad["finish_reason"] == "error" and "items; max is 2000" in bad.outputs[0].stop_reason
    assert good["finish_reason"] == "length"
    check_is_empty(demo)


def test_a_schema_with_a_dead_end(demo):
    """After the given names the pattern allows a comma, and no name: an error that names the schema, or an answer."""
    name = {"^Paris$": {"type": "integer"}}
    schema = {"type": "object", "properties": {"Paris": {"type": "integer"}}, "required": ["Paris"],
              "patternProperties": name, "additionalProperties": False}  # fmt: skip
    params = [guided("json", seed=seed) for seed in range(4)]
    for each in params:
        each.structured_outputs, each.max_tokens = StructuredOutputsParams(json=schema), 60
    outputs = run(demo, ["The"] * 5, [*params, greedy(5)])
    for output in outputs[:4]:
        if output["finish_reason"] == "error":
            reason = output.outputs[0].stop_reason
            assert reason.startswith(f"StructuredOutputsParams: json={schema!s:.200} cannot be followed further: ")
        elif output["finish_reason"] == "stop":
            assert json.loads(output["text"]).keys() == {"Paris"}
    assert {output["finish_reason"] for output in outputs[:4]} >= {"error"} and outputs[4]["finish_reason"] == "length"
    check_is_empty(demo)


def test_interrupts_of_a_grammar_are_the_users(demo, monkeypatch):
    """Ctrl-C strikes in the grammar library, too."""
    fail_in(monkeypatch, ("fill", 3), error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        one(demo, DOOMED)
    check_is_empty(demo)


def test_one_completion_of_several_fails(demo, monkeypatch):
    """And a stream of deltas ends with the reason."""
    fail_in(monkeypatch, ("fill", 99), ("accept", 5), ("fill", 99))
    params = SamplingParams(n=3, seed=4, max_tokens=9, ignore_eos=True, structured_outputs=DOOMED.structured_outputs)
    *_, last = deltas = list(demo.stream("The", params))
    assert [completion.finish_reason for completion in last.outputs] == ["length", "error", "length"]
    lengths = [sum(len(delta.outputs[i].token_ids) for delta in deltas) for i in range(3)]
    assert lengths == [9, 6, 9]
    check_is_empty(demo)


def test_the_row_of_a_batch_job_has_the_error(tmp_path, monkeypatch):
    fail_in(monkeypatch, ("accept", 3))
    params = {"structured_outputs": {"choice": ["a"]}}
    rows = [{"id": "bad", "prompt": "A", "sampling_params": params}, {"id": "good", "prompt": "2 + 3"}]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--device", "cpu", "--max-num-seqs", "4", "--kvcache-block-size", "16")
    assert cli.main(["batch", str(source), str(out), *options]) == 3
    found = {record["custom_id"]: record for record in map(json.loads, out.read_text().splitlines())}
    message = "the grammar failed while it was decoded (RuntimeError: the parser has too many items)"
    why = {"type": "RequestError", "message": message}
    assert found["bad"] == {"custom_id": "bad", "id": "bad", "text": None, "error": why}
    assert found["good"]["error"] is None and found["good"]["text"]


# ---------------------------------------------------------------- refused


def test_a_grammar_that_cannot_be_used(demo):
    """Nothing is queued, not even the good prompts. Every reason: ``engine/test_structured.py``."""
    text = "StructuredOutputsParams: regex='(a' cannot be used: "
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    for use, message in (
        (lambda: run(demo, ["A", "B"], [guided("json"), bad]), f"prompt 1: {text}"),
        (lambda: demo.add_request("A", bad), text),
        (lambda: next(demo.stream("A", bad)), text),
        (lambda: next(demo.stream([("A", bad)])), f"prompt 0: {text}"),
    ):
        with pytest.raises(RequestError, match="^" + re.escape(message)):
            use()
        assert demo.is_finished() and not demo._outputs._processors
    assert fits("choice", one(demo, guided("choice")))


def test_edited_kinds_are_checked_again(demo):
    """Two were one of them, none a StopIteration."""
    for changes in ({"choice": ["a"]}, {"regex": None}):
        params = guided("json")
        params.structured_outputs = StructuredOutputsParams(regex="a")
        for name, value in changes.items():
            setattr(params.structured_outputs, name, value)
        with pytest.raises(RequestError, match="give exactly one of"):
            demo.generate("x", params, use_tqdm=False)
