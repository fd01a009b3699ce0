"""``nanovllm batch``: every row once, whatever happens; the oracle is ``generate``, and the files are read apart."""

import itertools
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import fields

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from helpers import run_python

import nanovllm
from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.cli import main
from nanovllm.config import Config
from nanovllm.contrib.jobs import engines, files
from nanovllm.contrib.jobs.rows import Row, completion_logprobs, openai_logprobs, plain_logprobs, record_of, row_seed
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

OPTIONS = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--kvcache-block-size", "16")


def write_jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(number):
    return [{"id": f"q{i}", "prompt": f"{i} + 3"} for i in range(number)]


def stub(args, rows, rank=0):
    """In the engine's place: answers a row with its own content."""
    for row in rows:
        try:
            content, _, params = engines.request_of(row, args)
        except Exception as error:
            yield engines.error_record(row, engines.as_request_error(error)), (0, 0, 0)
            continue
        asked = f"{params.temperature} {params.max_tokens}"
        yield {"custom_id": row.key, "text": str(content), "finish_reason": asked, "error": None}, (1, 0, 1)


def stopped(number, error):
    """A stub that raises after some rows."""

    def complete(args, rows):
        yield from itertools.islice(stub(args, rows), number)
        raise error

    return complete


@pytest.fixture
def stubbed(monkeypatch):
    monkeypatch.setattr(engines, "complete", stub)


def batch(*argv):
    return main(["batch", *map(str, argv)])


def error_of(capsys, *argv):
    assert batch(*argv) == 1
    return capsys.readouterr().err


# ---------------------------------------------------------------- with the demo model


def test_texts_are_those_of_generate_and_errors_do_not_stop_a_job(tmp_path, capsys):
    rows = [
        *questions(20), "{not JSON", {"id": "empty"}, {"id": "long", "prompt": "a " * 4096},
        {"id": "own", "prompt": "7 + 7", "sampling_params": {"temperature": 0, "logprobs": 1, "max_tokens": 5}},
        {"id": "typo", "prompt": "1", "sampling_params": {"temprature": 0}}, {"id": "ids", "prompt": [17, 4, 99]},
        {"id": "surrogate", "prompt": "\ud800"}, {"id": "talk", "messages": [{"role": "user", "content": "2 + 3"}]},
    ]  # fmt: skip
    out = tmp_path / "out.jsonl"
    argv = (write_jsonl(tmp_path / "in.jsonl", rows), out, *OPTIONS, "--temperature", "0.9", "--max-tokens", "12")
    assert batch(*argv) == 3
    err = capsys.readouterr().err
    assert f"28 rows in {out}: 28 now, 0 before, 5 of them errors.\n" in err and "tokens generated (" in err
    found = {record["custom_id"]: record for record in read_jsonl(out)}
    assert len(found) == len(rows) == len(read_jsonl(out))
    assert all(key == record.get("id", "row-20") for key, record in found.items())  # under the name that it had

    def params(key, **values):
        return SamplingParams(**{"temperature": 0.9, "max_tokens": 12, "seed": row_seed(None, key), **values})

    with LLM(device="cpu", max_num_seqs=3, quiet=True) as llm:
        keys = [f"q{i}" for i in range(20)]
        outputs = llm.generate([f"{i} + 3" for i in range(20)], [params(key) for key in keys], use_tqdm=False)
        own, ids = llm.generate(
            ["7 + 7", [17, 4, 99]], [params("own", temperature=0, logprobs=1, max_tokens=5), params("ids")],
            use_tqdm=False,
        )  # fmt: skip
        (talk,) = llm.chat([{"role": "user", "content": "2 + 3"}], params("talk"), use_tqdm=False)
    for key, output in zip([*keys, "own", "ids", "talk"], [*outputs, own, ids, talk], strict=True):
        record = found[key]
        assert (record["text"], record["finish_reason"]) == (output["text"], output["finish_reason"])
        assert record["prompt_tokens"] == len(output.prompt_token_ids)
        assert record["completion_tokens"] == len(output["token_ids"]) and record["error"] is None
    (completion,) = found["own"]["outputs"]
    assert completion["token_ids"] == own["token_ids"]
    first = own.outputs[0].logprobs[0][own["token_ids"][0]]
    assert completion["logprobs"][0][str(own["token_ids"][0])]["logprob"] == pytest.approx(first.logprob, abs=1e-4)
    messages = {key: record["error"]["message"] for key, record in found.items() if record["error"]}
    assert messages == {
        "row-20": "line 21 of in.jsonl is not JSON: Expecting property name enclosed in double quotes, at column 2.",
        "empty": "the row has neither 'prompt' nor 'messages'.",
        "long": "the prompt has 4097 tokens; with max_model_len=4096 at most 4095 fit. Shorten it or raise "
        "max_model_len.",
        "typo": "SamplingParams has no parameter 'temprature'. Did you mean 'temperature'?",
        "surrogate": "the text cannot be encoded as UTF-8: 'utf-8' codec can't encode character '\\ud800' in "
        "position 0: surrogates not allowed",
    }
    assert found["typo"]["error"]["type"] == "RequestError"


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_the_end_line_counts_rows_that_max_tokens_cut(tmp_path, capsys, name):
    """Nothing told of them, nor of JSON that was cut. Those of earlier runs count, too. JSON that ended by another
    end-of-sequence token than the first one counted as cut.
    """
    pytest.importorskip("llguidance")
    if name == "out":
        pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")

    def row(key, max_tokens, **more):
        more = {"temperature": 0, "max_tokens": max_tokens, **more}
        return {"id": key, "messages": [{"role": "user", "content": "2 + 3"}], "sampling_params": more}

    body = {"messages": [{"role": "user", "content": "introduce yourself"}], "temperature": 0}
    constraint = {"choice": ["a long answer in many words"]}
    rows = [
        row("whole", 20), row("cut", 3, ignore_eos=True), row("error", -5),
        row("cut answer", 2, structured_outputs=constraint), row("whole answer", 40, structured_outputs=constraint),
        row("stopped answer", 40, structured_outputs=constraint, stop=["many"]),
        row("ended by <|endoftext|>", 40, structured_outputs={"choice": ["y"]}, logit_bias={"0": 99, "2": -99}),
        row("one of two cut", 30, n=2, temperature=1.0, structured_outputs={"choice": ["y", "y" * 200]}, logit_bias={}),
        {"custom_id": "line", "body": {**body, "max_tokens": 1}}, {"custom_id": "whole line", "body": body},
    ]  # fmt: skip
    argv = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / name, *OPTIONS
    assert batch(*argv) == 3
    said = capsys.readouterr().err.splitlines()
    found = [record for file in files.Output(argv[1], False).files() for record in files.read(file)]
    (ended,) = (record for record in found if record["custom_id"] == "ended by <|endoftext|>")
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) in (("y", "stop", 0), ("y", "stop", "0"))
    (two,) = (record["outputs"] for record in found if record["custom_id"] == "one of two cut")
    two = [each["finish_reason"] for each in (json.loads(two) if name == "out" else two)]
    num_cut, num_incomplete = 3 + ("length" in two), 2 + ("length" in two)
    cut = f"{num_cut} of them ended at max_tokens."
    expected = [f"10 rows in {argv[1]}: 10 now, 0 before, 1 of them errors.",
                f"{cut} Structured outputs of the rows now that are incomplete: {num_incomplete}."]  # fmt: skip
    assert [line for line in said if " of them " in line and "cached" not in line] == expected
    assert batch(*argv) == 3
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"10 rows in {argv[1]}: 0 now, 10 before, 1 of them errors.", cut
    ]  # fmt: skip


class Panic(BaseException):
    """As tokenizers raise it: no Exception."""


def test_whatever_a_row_raises_is_its_own_error(tmp_path, monkeypatch):
    """Any class but RequestError ended the job, at every restart; also a text that cannot be made, and a failure while
    the row's sequences are made, which dropped the rows that ran."""

    def failing(method, is_bad):
        def failing_for_some(self, given, *args, **options):
            if is_bad(given):
                raise Panic("unwrap on a None")
            return method(self, given, *args, **options)

        return failing_for_some

    encode = failing(AsyncTokenizer.encode, lambda texts: "panic" in texts)
    monkeypatch.setattr(AsyncTokenizer, "encode", encode)
    make = failing(InputProcessor.make_completions, lambda request: request.prompt == "9")
    monkeypatch.setattr(InputProcessor, "make_completions", make)
    monkeypatch.setattr(AsyncTokenizer, "_decode", failing(AsyncTokenizer._decode, lambda ids: len(ids) == 5))
    ask = [{"role": "user", "content": "2 + 3"}]
    rows = [
        *questions(3), {"id": "encode", "prompt": "panic"}, {"id": "make", "prompt": "9"},
        {"id": "decode", "prompt": "7", "sampling_params": {"max_tokens": 5, "ignore_eos": True}},
        {"id": "huge", "prompt": "7", "sampling_params": {"logit_bias": {"3": 2**2000}}},
        {"id": "digit", "prompt": "7", "sampling_params": {"logit_bias": {"\u00b3": 1}}},
        {"id": "half", "prompt": "7", "sampling_params": {"bad_words": ["x", "\udfff"]}},
        {"id": "name", "prompt": "7", "sampling_params": {"structured_outputs": {"cls": 1}}},
        {"custom_id": "template", "body": {"messages": ask, "tools": [{}], "chat_template": {"a": 1}}},
        {"custom_id": "variable", "body": {"messages": ask, "chat_template_kwargs": {"conversation": []}}},
    ]  # fmt: skip
    argv = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", *OPTIONS, "--max-tokens", "4"
    assert batch(*argv) == 3
    found = {record["custom_id"]: record["error"] for record in read_jsonl(tmp_path / "out.jsonl")}
    assert len(found) == len(rows) and [key for key, error in found.items() if error is None] == ["q0", "q1", "q2"]
    assert {error["type"] for error in found.values() if error} == {"RequestError"}
    assert "logit_bias={3: 1148" in found["huge"]["message"] and "logit_bias={'³': 1}" in found["digit"]["message"]
    assert found["encode"]["message"] == found["decode"]["message"] == found["make"]["message"] == (
        "this request fails with Panic: unwrap on a None. Check the values of its prompt, parameters and chat template."
    )
    monkeypatch.setattr(AsyncTokenizer, "encode", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert batch(*argv, "--overwrite") == 130


def test_log_probabilities_of_a_character_of_several_tokens():
    """"bytes" were empty and offsets did not pass the character: every one of its tokens had no text."""
    text = "é🙂!"
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=1,
                            structured_outputs=StructuredOutputsParams(choice=[text]))  # fmt: skip
    with LLM(device="cpu", quiet=True) as llm:
        completion = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    *content, _ = openai_logprobs(completion, 1)["content"]
    assert [at["token"] for at in content] == ["", "é", "", "", "", "🙂", "!"]
    assert [at["bytes"] for at in content] == [[byte] for byte in text.encode()]
    assert completion_logprobs(completion, 1)["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
    first, _ = json.loads(json.dumps(plain_logprobs(completion.logprobs)))[1].values()
    assert first["decoded_token"] == "é"


def test_the_log_probability_of_a_masked_token_is_json():
    """JSON knows no -Infinity, and other readers than Python's refuse it."""
    logprobs = [None, {7: Logprob(-math.inf, 2, "x"), 8: Logprob(-0.5, 1, "y")}]
    written = json.loads(json.dumps(plain_logprobs(logprobs), allow_nan=False))
    assert [at["logprob"] for at in written[1].values()] == [-9999.0, -0.5]
    output = CompletionOutput(0, "x", [7], -math.inf, logprobs=logprobs[1:])
    request = RequestOutput("0", "x", [5], [output])
    (plain,) = record_of(Row("a", {}), request, SamplingParams(logprobs=1), "m")["outputs"]
    assert plain["cumulative_logprob"] is None and "Infinity" not in json.dumps(plain)
    (at,) = json.loads(json.dumps(openai_logprobs(output, 2), allow_nan=False))["content"]
    assert [top["logprob"] for top in (at, *at["top_logprobs"])] == [-9999.0, -0.5, -9999.0]


def test_openai_lines(tmp_path):
    ask = [{"role": "user", "content": "2 + 3"}]

    def line(key, url="/v1/chat/completions", **body):
        return {"custom_id": key, "method": "POST", "url": url, "body": {"model": "m", **body}}

    rows = [
        line("chat", messages=ask, temperature=0, max_completion_tokens=5, logprobs=True, top_logprobs=2),
        line("text", url="/v1/completions", prompt="2 + 3", temperature=0, max_tokens=4),
        line("columns", url="/v1/completions", prompt=["2 + 3"], temperature=0, max_tokens=4, logprobs=2, echo=False,
             best_of=1, suffix=None, tool_choice="auto"),
        line("echo", url="/v1/completions", prompt="x", echo=True), line("best", messages=ask, best_of=3),
        line("list", url="/v1/completions", prompt=["x", "y"]), line("tools", messages=ask, tools=[{}]),
        line("top", messages=ask, top_logprobs=-3), line("less", messages=ask, max_completion_tokens="5"),
        line("tops", messages=ask, top_logprobs=2),
        line("two", messages=ask, n=2, temperature=1.0, seed=5, user="someone"),
        line("open", messages=[*ask, {"role": "assistant", "content": "5"}], continue_final_message=True),
        line("named", messages=ask, temperature=0, max_tokens=2, logprobs=True, logprob_token_ids=[20, 7, 30]),
        line("embed", url="/v1/embeddings", input="x"), line("unknown", messages=ask, functions=[]),
        line("stream", messages=ask, stream=True), line("form", messages=ask, response_format={"type": "xml"}),
    ]  # fmt: skip
    assert batch(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", *OPTIONS) == 3
    found = {record["custom_id"]: record for record in read_jsonl(tmp_path / "out.jsonl")}
    with LLM(device="cpu", quiet=True) as llm:
        (chat,) = llm.chat(ask, SamplingParams(temperature=0, max_tokens=5, logprobs=2), use_tqdm=False)
        (text,) = llm.generate("2 + 3", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        names, chat_tokens = ([llm.tokenizer.decode([i]) for i in ids] for ids in ([20, 7, 30], chat["token_ids"]))
    body = found["chat"]["response"]["body"]
    assert found["chat"]["response"]["status_code"] == 200 and body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": chat["text"]} and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == len(chat["token_ids"])
    assert [len(at["top_logprobs"]) for at in choice["logprobs"]["content"]] == [2] * len(chat["token_ids"])
    (choice,) = found["named"]["response"]["body"]["choices"]
    named = [[at["token"], *(top["token"] for top in at["top_logprobs"])] for at in choice["logprobs"]["content"]]
    assert named == [[text, *names] for text in chat_tokens[:2]]
    num_prompt, num_generated = len(chat.prompt_token_ids), len(chat["token_ids"])
    assert body["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": num_generated,
                             "total_tokens": num_prompt + num_generated}  # fmt: skip
    assert found["text"]["response"]["body"]["choices"][0]["text"] == text["text"]
    (choice,) = found["columns"]["response"]["body"]["choices"]
    columns, whole = choice["logprobs"], "".join(choice["logprobs"]["tokens"])
    assert choice["text"] == text["text"] and whole == text["text"] + "<|im_end|>"
    assert all(len(column) == len(text["token_ids"]) for column in columns.values())
    for token, logprob, top, offset in zip(*columns.values(), strict=True):
        assert whole[offset:].startswith(token) and len(top) == 2 and logprob == top[token] == max(top.values())
    assert [choice["index"] for choice in found["two"]["response"]["body"]["choices"]] == [0, 1]
    messages = {key: record["error"]["message"] for key, record in found.items() if record["error"]}
    assert all(found[key]["response"] is None for key in messages)
    assert messages == {
        "embed": "url must be /v1/chat/completions or /v1/completions, not '/v1/embeddings'.",
        "unknown": "SamplingParams has no parameter 'functions'.",
        "stream": "the body's stream=true is not supported; false is.",
        "echo": "the body's echo=true is not supported; false is.",
        "best": "the body's best_of=3 is not supported; 1 is.",
        "list": "the body's prompt is a list of prompts; give each a line of its own.",
        "tools": "the chat template reads no tools, so the model would not be told of them.",
        "tops": 'the body\'s top_logprobs=2 needs "logprobs": true beside it.',
        "top": "the body: top_logprobs=-3 must be an integer >= 0.",
        "less": "the body: max_completion_tokens='5' must be an integer >= 0.",
        "form": "response_format must be of type text, json_object or json_schema, not {'type': 'xml'}.",
    }


def test_tool_calls_of_openai_lines(tmp_path):
    """Their arguments are JSON text, which templates got as it was: prompts had it encoded twice."""
    template = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"

    def messages(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]

    def body(arguments):
        return {"messages": messages(arguments), "chat_template": template, "temperature": 0, "max_tokens": 3}

    value = {"city": 'K\u00f6ln "am Rhein"', "days": [1, 2]}
    text = json.dumps(value)
    rows = [{"custom_id": key, "url": "/v1/chat/completions", "body": body(arguments)}
            for key, arguments in (("text", text), ("object", value), ("wrong", text[:-1]))]  # fmt: skip
    assert batch(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", *OPTIONS) == 3
    found = {record["custom_id"]: record for record in read_jsonl(tmp_path / "out.jsonl")}
    with LLM(device="cpu", quiet=True) as llm:
        prompt = llm.apply_chat_template(messages(value), chat_template=template)
        (ids,) = llm.tokenize([prompt], add_special_tokens=False)
    used = {key: found[key]["response"]["body"]["usage"]["prompt_tokens"] for key in ("text", "object")}
    assert used == {"text": len(ids), "object": len(ids)}
    assert "the tool call of 'weather' must be an object, or its JSON text" in found["wrong"]["error"]["message"]


# imports once; every life of the job is a fork, which is killed
KILLED = """
import json, os, random, signal, sys, time
import torch, transformers, nanovllm.contrib.jobs.engines
from nanovllm.cli import main
rng, out, num_kills = random.Random(7), sys.argv[2], 0
os.environ["TOKENIZERS_PARALLELISM"] = "false"
size_of = lambda: os.path.getsize(out) if os.path.exists(out) else 0
for life in range(9):
    pid = os.fork()
    if pid == 0:
        os._exit(main(["batch", *sys.argv[1:]]))
    size, limit = size_of(), time.monotonic() + 60
    while life % 3 and size_of() == size and time.monotonic() < limit:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.3))
    if num_kills < 6:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if status == 0:
        break
    num_kills += 1
print(num_kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="lives of the job are forks")
def test_killed_at_random_moments(tmp_path):
    """Every row is there once, and what it drew is what it draws in a job that is left alone."""
    source = write_jsonl(tmp_path / "in.jsonl", questions(300))
    options = (*OPTIONS, "--temperature", "1.5", "--max-tokens", "24", "--ignore-eos")
    done = run_python("-c", KILLED, source, tmp_path / "out.jsonl", *options)
    assert int(done.stdout.splitlines()[-1]) >= 5
    records = read_jsonl(tmp_path / "out.jsonl")
    assert len(records) == 300 and {record["custom_id"] for record in records} == {f"q{i}" for i in range(300)}
    with LLM(device="cpu", quiet=True) as llm:
        params = [SamplingParams(temperature=1.5, max_tokens=24, ignore_eos=True, seed=row_seed(None, f"q{i}"))
                  for i in range(300)]  # fmt: skip
        outputs = llm.generate([f"{i} + 3" for i in range(300)], params, use_tqdm=False)
    texts = {f"q{i}": output["text"] for i, output in enumerate(outputs)}
    assert {record["custom_id"]: record["text"] for record in records} == texts


def test_two_processes(tmp_path):
    """``python -m nanovllm``, with an engine in each of two processes, gives what one engine gives."""
    source = write_jsonl(tmp_path / "in.jsonl", [*questions(70), {"id": "bad"}])
    options = (*OPTIONS, "--temperature", "1", "--max-tokens", "6")
    done = run_python("-m", "nanovllm", "batch", source, tmp_path / "two.jsonl", *options, "--data-parallel-size", "2",
                      "--metrics", tmp_path / "metrics.jsonl", check=False)  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert batch(source, tmp_path / "one.jsonl", *options) == 3
    one, two = (sorted(read_jsonl(tmp_path / f"{x}.jsonl"), key=lambda r: r["custom_id"]) for x in ("one", "two"))
    assert one == two and len(one) == 71
    samples = {sample["process"]: sample for sample in read_jsonl(tmp_path / "metrics.jsonl")}
    finished = {rank: sum(sample["request_success"].values()) for rank, sample in samples.items()}
    assert set(finished) == {0, 1} and sum(finished.values()) == 70 and min(finished.values()) > 20


def test_without_stderr(tmp_path):
    """``2>&-`` ended with 1 and no output; the file that was opened next became stderr."""
    source, out = write_jsonl(tmp_path / "in.jsonl", questions(3)), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "nanovllm", "batch", str(source), str(out), *OPTIONS, "--max-tokens", "3"]
    done = subprocess.run(["sh", "-c", f"exec {shlex.join(command)} 2>&-"], stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (0, b"") and len(read_jsonl(out)) == 3


def leave(*args):
    os._exit(7)


@pytest.mark.parametrize(
    ("work", "max_model_len", "said"),
    [(engines._work, "5000", r"error: max_model_len=5000: the model has positions for 4096 tokens\."),
     (leave, "256", r"error: engine [01] ended with exit code 7\.\n")],
)  # fmt: skip
def test_an_engine_that_fails_in_its_process(tmp_path, monkeypatch, capsys, work, max_model_len, said):
    monkeypatch.setattr(engines, "_work", work)
    source = write_jsonl(tmp_path / "in.jsonl", questions(2000))
    options = (*OPTIONS, "--data-parallel-size", "2", "--max-num-seqs", "2000", "--max-model-len", max_model_len)
    err = error_of(capsys, source, tmp_path / "out.jsonl", *options)
    assert re.search(said, err) and "0 of 2,000 rows are in" in err and "the same command goes on." in err


# ---------------------------------------------------------------- with a stub


def test_every_option_of_sampling_and_engine_is_there(capsys):
    with pytest.raises(SystemExit):
        main(["batch", "--help"])
    text = capsys.readouterr().out
    of_requests = [f for f in fields(SamplingParams) if f.name != "logits_processors"]
    for f in (*of_requests, *(f for f in fields(Config) if f.init and f.name != "quiet")):
        assert f"--{f.name.replace('_', '-')}" in text
    assert """For example '{"198": -5.5}'.""" in " ".join(text.split())


def test_a_mistyped_option(tmp_path, capsys):
    for argv, said in ((("batch", "in", "out", "--temprature", "0"), "--temprature 0. Did you mean '--temperature'?"),
                       (("batch", "in", "out", "--max_tokens=5"), "--max_tokens=5. Did you mean '--max-tokens'?"),
                       (("plot", "in", "out", "more"), "more.")):  # fmt: skip
        with pytest.raises(SystemExit):
            main(argv)
        err = capsys.readouterr().err
        assert err.endswith(f"nanovllm {argv[0]}: error: unknown arguments: {said}\n") and err.count("\n") == 2
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"nanovllm {nanovllm.__version__}\n"


def test_sampling_options_arrive(tmp_path, stubbed, monkeypatch):
    seen = []
    monkeypatch.setattr(engines, "complete", lambda args, rows: seen.append(args.base_params) or stub(args, rows))
    batch(write_jsonl(tmp_path / "in.jsonl", questions(1)), tmp_path / "out.jsonl", "--stop", "a", "--stop", "b",
          "--logit-bias", '{"5": 1.5}', "--stop-token-ids", "[7, 8]", "--no-detokenize", "--structured-outputs",
          '{"regex": "a+"}', "--detokenize", "--max-tokens", "null", "--seed", "3")  # fmt: skip
    (params,) = seen
    assert params.stop == ["a", "b"] and params.logit_bias == {5: 1.5} and params.stop_token_ids == (7, 8)
    assert params.structured_outputs.regex == "a+" and params.max_tokens is None and params.detokenize
    assert params.seed == 3


def test_import_and_help_are_light():
    code = "import sys, nanovllm.cli; sys.exit(bool({'torch', 'transformers', 'pyarrow', 'tqdm'} & set(sys.modules)))"
    run_python("-c", code)


@pytest.mark.parametrize(("start", "end"), [(-1, None), (-5, None), (-30, None), (-71, None), (1500, 1600)])
def test_damaged_lines_are_done_again(tmp_path, stubbed, start, end):
    """Bytes missing at the end: of the last line, up to exactly the whole of it, or of the one before; and zeros
    inside, which power failures leave.

    A resumed job truncated OUT.run.json and wrote it again: killed between the two, the job could never go on."""
    out, run_file = tmp_path / "out.jsonl", tmp_path / "out.jsonl.run.json"
    argv = write_jsonl(tmp_path / "in.jsonl", questions(50)), out
    assert batch(*argv) == 0
    whole, before = out.read_bytes(), run_file.stat()
    damaged = whole[:start] if end is None else whole[:start] + bytes(end - start) + whole[end:]
    out.write_bytes(damaged)
    lines, left = (text.splitlines(keepends=True) for text in (whole, damaged))
    assert batch(*argv) == 0
    assert out.read_bytes() == b"".join(sorted(lines, key=lambda line: line not in left))  # what is done again is last
    assert (run_file.stat().st_ino, run_file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_full_disk_writes_no_row_twice(tmp_path, stubbed, monkeypatch, capsys):
    """Closing the output must not write again what failed halfway, lest it is there twice once there is room."""
    argv = write_jsonl(tmp_path / "in.jsonl", questions(5)), tmp_path / "out.jsonl"
    write = files.Output.write_records

    def full(output, records, file):
        write(output, records, file)
        if records:
            raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.Output, "write_records", full)
        assert error_of(capsys, *argv).endswith("error: No space left on device\n")
    assert batch(*argv) == 0
    assert [record["custom_id"] for record in read_jsonl(argv[1])] == [f"q{i}" for i in range(5)]


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_a_full_disk_is_told_with_the_output_and_the_rows_that_it_holds(tmp_path, stubbed, monkeypatch, capsys, name):
    """The error named no file. Rows of a parquet part that was not written counted as there, or nothing was said."""
    if name == "out":
        pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    resource = pytest.importorskip("resource", reason="Unix")
    argv = write_jsonl(tmp_path / "in.jsonl", questions(50)), tmp_path / name
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # bytes of a file: enough for OUT.run.json
    try:
        said = error_of(capsys, *argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    num_there = argv[1].read_text().count("\n") if name == "out.jsonl" else 0
    assert 0 < num_there < 50 or name == "out"
    assert f"{num_there} of 50 rows are in {argv[1]}; the same command goes on.\n" in said
    assert said.endswith(f"nanovllm batch: error: [Errno 27] File too large: '{argv[1]}'\n")
    assert batch(*argv) == 0
    assert f"50 rows in {argv[1]}: {50 - num_there} now, {num_there} before" in capsys.readouterr().err


def test_errors_are_kept_or_tried_again(tmp_path, stubbed, monkeypatch):
    out = tmp_path / "out.jsonl"
    argv = write_jsonl(tmp_path / "in.jsonl", [*questions(5), {"id": "bad"}]), out
    assert batch(*argv) == 3
    before = out.read_bytes()
    assert batch(*argv) == 3  # the row that failed is there, and counts
    assert out.read_bytes() == before
    done = []

    def mended(args, rows):
        for row in rows:
            done.append(row.key)
            yield {"custom_id": row.key, "text": "now", "error": None}, (1, 0, 1)

    monkeypatch.setattr(engines, "complete", mended)
    assert batch(*argv, "--retry-errors") == 0
    assert done == ["bad"]
    records = read_jsonl(out)
    assert len(records) == 6 and records[-1] == {"custom_id": "bad", "text": "now", "error": None}


def test_ctrl_c(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.jsonl"
    argv = write_jsonl(tmp_path / "in.jsonl", questions(5)), out
    monkeypatch.setattr(engines, "complete", stopped(3, KeyboardInterrupt))
    assert batch(*argv) == 130
    assert f"3 of 5 rows are in {out}; the same command goes on.\n" in capsys.readouterr().err
    monkeypatch.setattr(engines, "complete", stub)
    assert batch(*argv) == 0
    assert len(read_jsonl(out)) == 5


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (lambda text: text + '{"id": "q5", "prompt": "late"}\n', 0,
         "IN has grown while the job ran; done are the 5 rows that it held at the start."),
        (lambda text: text[: text.index('{"id": "q3"')], 1, "IN has changed while the job ran: it held 5 rows, now 3."),
        (lambda text: text.replace("q2", "new"), 1, "IN has changed while the job ran: row 2 has another id, 'new'."),
    ],
)  # fmt: skip
def test_in_that_changes_while_the_job_runs(tmp_path, monkeypatch, capsys, change, status, said):
    """One that grew ended in a traceback; one that lost rows seemed complete."""
    source, out = write_jsonl(tmp_path / "in.jsonl", questions(5)), tmp_path / "out.jsonl"

    def change_it_first(args, rows):
        source.write_text(change(source.read_text()))
        yield from stub(args, rows)

    monkeypatch.setattr(engines, "complete", change_it_first)
    assert batch(source, out, *OPTIONS) == status
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
    ids = [record["custom_id"] for record in read_jsonl(out)]
    assert ids == [f"q{i}" for i in range(5)][: len(ids)] and (len(ids) == 5) == (status == 0)


def test_shards_cover_the_rows(tmp_path, stubbed):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": str(i)} for i in range(10)])  # ids are the rows' numbers
    for k in range(3):
        assert batch(source, tmp_path / "out.jsonl", "--shard", f"{k}/3") == 0
    parts = [read_jsonl(tmp_path / f"out-{k}-of-3.jsonl") for k in range(3)]
    assert [len(part) for part in parts] == [4, 3, 3]
    assert {r["custom_id"]: r["text"] for part in parts for r in part} == {f"row-{i}": str(i) for i in range(10)}


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_limit(tmp_path, stubbed, capsys, name):
    """The first rows in the order of IN, as part of the job: with more, or without a limit, it goes on."""
    if name == "out":
        pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "b.jsonl", [*questions(9)[5:], {"id": "bad"}])
    write_jsonl(tmp_path / "in" / "a.jsonl", questions(5))
    argv = tmp_path / "in", tmp_path / name

    def ids():
        return [record["custom_id"] for file in files.Output(argv[1], False).files() for record in files.read(file)]

    for limit, num_now in ((1, 1), (6, 5), (4, 0)):
        assert batch(*argv, "--limit", limit) == 0
        *_, first = lines = capsys.readouterr().err.splitlines()
        shown = [json.loads(line) for line in lines if line.startswith("{")]
        assert [record["custom_id"] for record in shown] == ["q0", "q1"][:limit] and json.loads(first) == shown[-1]
        assert shown[0]["text"] == "0 + 3" and shown[0]["finish_reason"] == "1.0 64"
        say = f"{limit} rows in {argv[1]}: {num_now} now, {limit - num_now} before, 0 of them errors."
        assert say in lines and f"--limit {limit}: without it the same command does the other rows, too." in lines
    assert ids() == [f"q{i}" for i in range(6)]
    assert batch(*argv) == 3 and ids() == [*(f"q{i}" for i in range(9)), "bad"]
    assert "10 rows in" in capsys.readouterr().err
    assert batch(*argv, "--limit", "9") == 0 and batch(*argv, "--limit", "99") == 3  # the error is of the tenth
    assert batch(*argv, "--limit", "9", "--retry-errors") == 0 and len(ids()) == 10
    assert error_of(capsys, *argv, "--limit", "0").endswith("error: --limit 0: it must be at least 1.\n")


def test_limit_of_a_shard(tmp_path, stubbed, monkeypatch):
    """And of several engines, which share the first rows."""
    source = write_jsonl(tmp_path / "in.jsonl", questions(10))
    assert batch(source, tmp_path / "out.jsonl", "--shard", "1/3", "--limit", "2") == 0
    assert [record["custom_id"] for record in read_jsonl(tmp_path / "out-1-of-3.jsonl")] == ["q1", "q4"]
    several = lambda args, source, todo: stub(args, source.rows_to_do(todo))  # noqa: E731
    monkeypatch.setattr(engines, "complete_in_processes", several)
    assert batch(source, tmp_path / "two.jsonl", "--limit", "3", "--data-parallel-size", "2") == 0
    assert [record["custom_id"] for record in read_jsonl(tmp_path / "two.jsonl")] == ["q0", "q1", "q2"]


def test_no_row_is_read_behind_the_last_one_to_do(tmp_path):
    """A limited job would read the whole input before its last step."""
    source = files.Input(write_jsonl(tmp_path / "in.jsonl", questions(10)), None)
    read, rows = [], source.rows
    source.rows = lambda: (read.append(row.key) or row for row in rows())
    todo = np.arange(10) == 3
    assert [row.key for row in source.rows_to_do(todo)] == ["q3"] and read == ["q0", "q1", "q2", "q3"]


def test_help_tells_of_whitespace(capsys):
    """JSON that was all blanks at max_tokens surprised people."""
    with pytest.raises(SystemExit):
        main(["batch", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "allows whitespace wherever JSON does" in text and "``disable_any_whitespace`` allows none" in text
    assert """For example '{"json": {"type": "object"}, "disable_any_whitespace": true}'.""" in text


def test_rows_of_the_wrong_json_are_error_rows(tmp_path, stubbed):
    """They ended the job: variables of the template that are no object, and brackets deeper than Python's stack."""
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 5}
    rows = [{"id": "a", "prompt": "x"}, {"custom_id": "b", "body": body}, "[" * 100_000,
            {"id": "d", "prompt": "x", "sampling_params": "[" * 100_000}]  # fmt: skip
    assert batch(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl") == 3
    errors = [record["error"] and record["error"]["message"][:50] for record in read_jsonl(tmp_path / "out.jsonl")]
    assert errors == [
        None, "chat_template_kwargs must be an object, not 5.", "line 3 of in.jsonl is not JSON: maximum recursion ",
        "the text in 'sampling_params' is not JSON: maximum",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_prompt_is_for_rows_that_have_an_image(tmp_path, stubbed, suffix):
    """Where some row has an image, one without was answered from nothing; also where none has."""
    cells = {"a": "x.png", "null": None, "empty": "", "list": [], "missing": ...}
    rows = [{"id": key, **({} if cell is ... else {"image": cell})} for key, cell in cells.items()]
    rows.append({"id": "own", "prompt": "2 + 3", "image": None})
    source = tmp_path / f"in{suffix}"
    if suffix == ".jsonl":
        write_jsonl(source, rows)
    elif suffix == ".csv":
        source.write_text('id,image,prompt\na,x.png,\nnull,,\nempty,"",""\nlist,[],\nmissing\nown,,2 + 3\n')
    else:
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
        import pyarrow

        strings = [{"prompt": None, **row, "image": row.get("image") or None} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(strings), source)
    assert batch(source, tmp_path / "out.jsonl", "--chat", "--prompt", "Read it.") == 3
    found = {record["custom_id"]: record for record in read_jsonl(tmp_path / "out.jsonl")}
    assert [key for key, record in found.items() if record["error"] is None] == ["a", "own"]
    assert {record["error"]["message"] for record in found.values() if record["error"]} == {
        "the row has no image in 'image', and --prompt is for rows that have one; give it an image, or a prompt of its "
        "own."
    }  # fmt: skip


def test_an_empty_cell_of_messages_is_none(tmp_path, stubbed):
    """A CSV with prompts and conversations had errors in place of the answers to the prompts."""
    talk = '"[{""role"": ""user"", ""content"": ""x""}]"'
    (tmp_path / "in.csv").write_text(f"id,prompt,messages\na,2 + 3,\nb,,{talk}\nc\n")
    assert batch(tmp_path / "in.csv", tmp_path / "out.jsonl") == 3
    found = {record["custom_id"]: record["error"] for record in read_jsonl(tmp_path / "out.jsonl")}
    assert found.pop("c")["message"] == "the row has neither 'prompt' nor 'messages'."
    assert found == {"a": None, "b": None}


def test_a_column_without_one_image(tmp_path, stubbed):
    """Parquet lost the column; a table without it may have one prompt for all rows."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    import pyarrow

    for columns, status in (({"id": [1], "image": pyarrow.array([None], pyarrow.string())}, 3), ({"id": [1]}, 0)):
        parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
        assert batch(tmp_path / "in.parquet", tmp_path / f"{status}.jsonl", "--prompt", "Read it.") == status


def test_prompts_that_are_no_text_with_chat(tmp_path, stubbed):
    """A list of prompts was joined to one message, an empty one answered. A list of parts is the user's message."""
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "+ 3"}]
    prompts = [["a", "b"], ["a"], [], [17, 4], [{"role": "user", "content": "x"}], {"prompt": "x"}, 5, ["a", parts[0]]]
    rows = [{"id": str(prompt), "prompt": prompt} for prompt in (*prompts, parts, "2 + 3")]
    assert batch(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", "--chat") == 3
    *refused, of_parts, of_text = read_jsonl(tmp_path / "out.jsonl")
    for record, prompt in zip(refused, prompts, strict=True):
        kind = "the token ids " if prompt == [17, 4] else ""
        assert record["error"]["message"].startswith(f"with --chat a prompt must be a text, not {kind}{prompt}. Give ")
    assert refused[3]["error"]["message"].endswith("Give the text, or leave out --chat.")
    assert of_parts["text"] == str([{"role": "user", "content": parts}])
    assert of_text["text"] == str([{"role": "user", "content": "2 + 3"}])


def test_what_has_changed_is_said(tmp_path, stubbed, capsys):
    out, source = tmp_path / "out.jsonl", write_jsonl(tmp_path / "in.jsonl", questions(3))
    assert batch(source, out, "--temperature", "0.5") == 0
    err = error_of(capsys, source, out, "--temperature", "0.7", "--chat", "--dtype", "float32")
    assert err.endswith(
        f"nanovllm batch: error: {out} was begun with something else:\n"
        "  --chat: False then, True now\n  --temperature: 0.5 then, 0.7 now\n  --dtype: None then, 'float32' now\n"
        "Give what was given then, or another OUT, or --overwrite.\n"
    )
    assert batch(source, out, "--temperature", "0.5", "--max-num-seqs", "4") == 0  # changes speed alone
    write_jsonl(source, questions(4))
    err = error_of(capsys, source, out, "--temperature", "0.5")
    assert "  rows of the input: 3 then, 4 now\n  contents of the input: '" in err
    assert batch(source, out, "--temperature", "0.7", "--overwrite") == 0
    assert [record["finish_reason"] for record in read_jsonl(out)] == ["0.7 64"] * 4


@pytest.mark.parametrize("text", ["[1]", "null", '"x"', "5", "{", "[" * 100_000, "\xe9"], ids=range(7))
def test_a_run_file_that_is_damaged(tmp_path, stubbed, capsys, text):
    source, out = write_jsonl(tmp_path / "in.jsonl", questions(2)), tmp_path / "out.jsonl"
    assert batch(source, out) == 0
    (tmp_path / "out.jsonl.run.json").write_text(text, encoding="latin-1")
    err = error_of(capsys, source, out)
    assert err.endswith(f"error: {out}.run.json is damaged; give another OUT, or --overwrite.\n")
    assert batch(source, out, "--overwrite") == 0 == batch(source, out)


@pytest.mark.parametrize("keep", [slice(0, 0), slice(-9), slice(200), slice(9, None)], ids=range(4))
def test_a_part_that_is_damaged(tmp_path, stubbed, capsys, keep):
    pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    source, out = write_jsonl(tmp_path / "in.jsonl", questions(2)), tmp_path / "out"
    assert batch(source, out) == 0
    part = out / "part-000000.parquet"
    part.write_bytes(b"" if keep.stop == 0 else part.read_bytes()[keep])
    if keep.stop != 0:  # one without bytes holds no rows
        err = error_of(capsys, source, out)
        assert f"error: {part} cannot be read: " in err
        assert err.endswith(" Without this file its rows are done again.\n")
        part.unlink()
    assert batch(source, out) == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name")
def test_pipes_are_not_waited_for(tmp_path, stubbed, capsys):
    (tmp_path / "in").mkdir()
    for name in ("a.jsonl", "b.csv", "in/c.parquet"):
        os.mkfifo(tmp_path / name)
    source = write_jsonl(tmp_path / "in" / "a.jsonl", questions(2))
    for pipe in (tmp_path / "a.jsonl", tmp_path / "b.csv", tmp_path / "in"):
        assert " is a folder or a pipe; it must be a file" in error_of(capsys, pipe, tmp_path / "out.jsonl")
    assert "OUT=" in error_of(capsys, source, tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('id,prompt\na,x\nb,"y\nc,z\nd,w\n', 3), ('id,prompt\na,"x\n', 2), ('id,"prompt\na,x\n', 1),
        ('id,prompt\na,"x\ny"\nb,"y\nc,"z"\n', 4), ('id,prompt\na,"x"y"\n', 2),
    ],
)  # fmt: skip
def test_a_quote_that_is_not_closed(tmp_path, stubbed, capsys, text, line):
    """It took the rows that follow into its text, and the job ended with 0."""
    (tmp_path / "in.csv").write_text(text)
    err = error_of(capsys, tmp_path / "in.csv", tmp_path / "out.jsonl")
    assert f"in.csv cannot be read: the row from line {line} on has a quote that is not closed" in err
    (tmp_path / "in.csv").write_text('id,prompt\na,5" x\nb,"a ""b"" c\nd"\n')
    assert batch(tmp_path / "in.csv", tmp_path / "out.jsonl") == 0
    assert [record["text"] for record in read_jsonl(tmp_path / "out.jsonl")] == ['5" x', 'a "b" c\nd']


def test_two_columns_of_one_name(tmp_path, stubbed, capsys):
    """The first one's values were dropped."""
    (tmp_path / "in.csv").write_text("id,prompt,prompt\n1,2 + 3,1 + 1\n")
    err = error_of(capsys, tmp_path / "in.csv", tmp_path / "out.jsonl")
    assert "in.csv has several columns named 'prompt'; give each a name of its own." in err
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    import pyarrow

    table = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "in.parquet")
    assert "in.parquet has several columns named 'prompt'" in error_of(capsys, tmp_path / "in.parquet", tmp_path / "o")


def test_another_model_is_refused(tmp_path, stubbed, capsys, make_checkpoint):
    out, source = tmp_path / "out.jsonl", write_jsonl(tmp_path / "in.jsonl", questions(3))
    assert batch(source, out) == 0
    err = error_of(capsys, source, out, "--model", make_checkpoint())
    assert "  model: 'the demo model' then, '/" in err and "  contents of the model: '" in err
    from nanovllm.utils.checkpoint import DEMO_MODEL

    assert batch(source, out, "--model", DEMO_MODEL) == 0  # the same under another name
    copy = shutil.copytree(DEMO_MODEL, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert "  contents of the model: '" in error_of(capsys, source, out, "--model", copy)


def test_a_model_that_is_changed_in_the_middle_of_its_file(tmp_path, stubbed, capsys):
    """Only the two ends were read: the job went on, and mixed the rows of two models."""
    from nanovllm.utils.checkpoint import DEMO_MODEL

    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    out, source = tmp_path / "out.jsonl", write_jsonl(tmp_path / "in.jsonl", questions(3))
    assert batch(source, out, "--model", model) == 0 == batch(source, out, "--model", model)
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(b"\1")
    assert "  contents of the model: '" in error_of(capsys, source, out, "--model", model)


@pytest.mark.parametrize(("option", "name"), [
    ("--lora", "adapter_model.safetensors"), ("--lora", "adapter_config.json"), ("--tokenizer", "tokenizer.json"),
    ("--tokenizer", "tokenizer.model"),
])  # fmt: skip
def test_an_adapter_or_tokenizer_that_is_changed(tmp_path, stubbed, capsys, option, name):
    """Only its path was compared: an adapter trained again into its directory mixed the rows of two."""
    given = tmp_path / "given"
    given.mkdir()
    (given / name).write_text("1")
    argv = (write_jsonl(tmp_path / "in.jsonl", questions(3)), tmp_path / "out.jsonl", option, given)
    assert batch(*argv) == 0 == batch(*argv)
    (given / name).write_text("2")
    assert f"  contents of {option}: '" in error_of(capsys, *argv)


def test_a_tokenizer_that_is_not_loaded(tmp_path, stubbed):
    source, out = write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "prompt": [17, 4]}]), tmp_path / "out.jsonl"
    assert batch(source, out, "--tokenizer", tmp_path / "nowhere", "--skip-tokenizer-init") == 0


@pytest.mark.parametrize("start", (0, 1, 511 << 20, (1 << 30) - (5 << 20)))
def test_a_large_file_is_sampled_evenly(tmp_path, start):
    """5 MiB of 1 GiB are seen wherever they are."""
    path, size = tmp_path / "large", 1 << 30
    with path.open("wb") as file:
        file.truncate(size)  # takes no space
    before = files.fingerprint([path], 1 << 20)
    assert before == files.fingerprint([path], 1 << 20)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\1" * (5 << 20))
    assert files.fingerprint([path], 1 << 20) != before


@pytest.mark.parametrize("name", ("a.safetensors", "b.json"))
def test_a_file_up_to_the_limit_is_hashed_whole(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(bytes(1 << 20))
    before = files.fingerprint([path], 1 << 20)
    path.write_bytes(bytes(1 << 19) + b"\1" + bytes((1 << 19) - 1))
    assert files.fingerprint([path], 1 << 20) != before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("none.jsonl", "out.jsonl"), "[Errno 2] No such file or directory: '{}/none.jsonl'"),
        (("in.txt", "out.jsonl"),
         "IN={}/in.txt must be a .jsonl, .parquet, .csv file, or a directory that holds some."),
        (("empty.jsonl", "out.jsonl"), "IN={}/empty.jsonl holds no rows."),
        (("twice.jsonl", "out.jsonl"),
         "IN={}/twice.jsonl: rows 1 and 3 (counted from 0) have the same id 'b'. Rows that repeat an id: 1. Make the "
         "ids unique, or name another --id-column."),
        (("in.jsonl", "none/out.jsonl"), "OUT={}/none/out.jsonl: there is no directory {}/none."),
        (("in.jsonl", "in.jsonl"), "OUT={}/in.jsonl is the input, lies in it, or holds it."),
        (("in.jsonl", "/"), "OUT=/ must have a name, for OUT.run.json lies beside it."),
        (("in.jsonl", "twice.jsonl"),
         "{}/twice.jsonl exists and is not of a batch job; give another OUT, or --overwrite."),
        (("in.jsonl", "out.csv"),
         "OUT={}/out.csv must end in .jsonl, or be a directory, without a suffix, for parts of parquet."),
        (("latin.csv", "out.jsonl"),
         "{}/latin.csv cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 10: invalid continuation byte"),
        (("in.jsonl", "out.jsonl", "--shard", "4/4"),
         "--shard 4/4: it must be K/N, with K from 0 to N - 1, such as 0/4."),
        (("in.jsonl", "out.jsonl", "--temperature", "-1"),
         "SamplingParams: temperature=-1 must be a finite number >= 0 (0 is greedy)."),
        (("in.jsonl", "out.jsonl", "--structured-outputs", '{"cls": 1}'),
         "StructuredOutputsParams has no parameter 'cls'."),
        (("in.jsonl", "out.jsonl", "--model", "/none"),
         "model='/none' is not a directory (No such file or directory), nor a hub id; give the directory "
         "that holds config.json."),
        (("in.jsonl", "out.jsonl", "--metrics", "{}/none/m"), "[Errno 2] No such file or directory: '{}/none/m'"),
        (("in.jsonl", "out.jsonl", "--metrics", "{}/in.jsonl"),
         "--metrics {}/in.jsonl: it is IN or OUT, and would be appended to."),
        (("in.jsonl", "out.jsonl", "--metrics", "{}/out.jsonl"),
         "--metrics {}/out.jsonl: it is IN or OUT, and would be appended to."),
        (("spelled.jsonl", "out.jsonl"),  # a number and its text
         "IN={}/spelled.jsonl: rows 0 and 1 (counted from 0) have the same id '1'. Rows that repeat an id: 1. Make the "
         "ids unique, or name another --id-column."),
        (("in.jsonl", "out.jsonl", "--chat-template-kwargs", "[5]"),
         "--chat-template-kwargs must be an object, not [5]."),
        (("in.jsonl", "out.jsonl", "--data-parallel-size", "0"), "--data-parallel-size 0: it must be at least 1."),
        (("in.jsonl", "out.jsonl", "--prompt-column", "question"),
         "IN={}/in.jsonl: no row has 'question' or 'messages'; there are id, prompt. Name a column by --prompt-column "
         "or --messages-column."),
        (("in.jsonl", "out.jsonl", "--id-column", "key"),
         "IN={}/in.jsonl: no row has 'key'; there are id, prompt. Name a column by --id-column."),
    ],
)  # fmt: skip
def test_refused_before_the_model_loads(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.setattr(engines, "complete", None)
    write_jsonl(tmp_path / "in.jsonl", questions(2))
    write_jsonl(tmp_path / "twice.jsonl", [{"id": x, "prompt": "x"} for x in "abcb"])
    write_jsonl(tmp_path / "spelled.jsonl", [{"id": x, "prompt": "x"} for x in (1, "1")])
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "in.txt").write_text("x")
    (tmp_path / "latin.csv").write_bytes(b"prompt\ncaf\xe9 x\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    argv = [*(tmp_path / part for part in argv[:2]), *(part.replace("{}", str(tmp_path)) for part in argv[2:])]
    assert error_of(capsys, *argv) == f"nanovllm batch: error: {message.replace('{}', str(tmp_path))}\n"
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".lock"} == before


def test_two_jobs_at_once(tmp_path, monkeypatch, capsys):
    source, out = write_jsonl(tmp_path / "in.jsonl", questions(2)), tmp_path / "out.jsonl"
    statuses = []

    def meets_another(args, rows):
        statuses.append(batch(source, out))
        yield from stub(args, rows)

    monkeypatch.setattr(engines, "complete", meets_another)
    assert batch(source, out) == 0 and statuses == [1]
    assert f"error: another job is writing to {out}.\n" in capsys.readouterr().err
    assert len(read_jsonl(out)) == 2


@pytest.mark.parametrize("name", [".out.jsonl", ".out.jsonl.jsonl", "out.jsonl.run.jsonl"])
def test_an_input_beside_the_output_is_not_written_to(tmp_path, stubbed, name):
    """The temporary file in which a torn line is cut was .OUT: the input."""
    source, out = write_jsonl(tmp_path / name, questions(4)), tmp_path / "out.jsonl"
    before = source.read_bytes()
    assert batch(source, out) == 0
    out.write_bytes(out.read_bytes()[:-9])
    assert batch(source, out) == 0 and source.read_bytes() == before
    assert sorted(record["custom_id"] for record in read_jsonl(out)) == [f"q{i}" for i in range(4)]


@pytest.mark.parametrize("target", ["out.jsonl", ".out.jsonl.tmp", "out.jsonl.run.json"])
def test_an_input_that_links_to_what_the_job_writes(tmp_path, stubbed, capsys, target):
    (tmp_path / "in").mkdir()
    source = write_jsonl(tmp_path / target, questions(2))
    (tmp_path / "in" / "a.jsonl").symlink_to(source)
    before = source.read_bytes()
    err = error_of(capsys, tmp_path / "in", tmp_path / "out.jsonl", "--overwrite")
    assert err.endswith(f"would write to {tmp_path}/in/a.jsonl, which is a file of IN. Give another OUT.\n")
    assert source.read_bytes() == before
    other = write_jsonl(tmp_path / "other.jsonl", questions(2))
    err = error_of(capsys, other, tmp_path / "out.jsonl", "--metrics", source)
    assert "it is IN or OUT" in err and source.read_bytes() == before


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_two_names_of_one_output(tmp_path, monkeypatch, capsys, name):
    """Both jobs ran, for each name had a lock of its own; and a torn line replaced the link, not the file. A hard link
    has a lock and a run file of its own."""
    if name == "out":
        pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    source, out, link = write_jsonl(tmp_path / "in.jsonl", questions(3)), tmp_path / "real" / name, tmp_path / name
    out.parent.mkdir()
    link.symlink_to(out)
    statuses = []

    def meets_others(args, rows):
        others = [out, link, tmp_path / "real" / ".." / name]
        if name == "out.jsonl":
            others.append(tmp_path / "hard.jsonl")
            os.link(out, others[-1])
            shutil.copy(f"{out}.run.json", f"{others[-1]}.run.json")
        statuses.extend(batch(source, path) for path in others)
        yield from stub(args, rows)

    monkeypatch.setattr(engines, "complete", meets_others)
    assert batch(source, link) == 0 and statuses == [1] * (4 if name == "out.jsonl" else 3)
    assert capsys.readouterr().err.count("another job is writing to ") == len(statuses)
    monkeypatch.setattr(engines, "complete", stub)
    if name == "out.jsonl":
        out.write_bytes(out.read_bytes()[:-1] + b"x")
    assert batch(source, link) == batch(source, out) == 0 and link.is_symlink()
    (file,) = files.Output(out, ids_are_integers=False).files()
    assert len(list(files.READERS[file.suffix](file))) == 3


class Store(MemoryFileSystem):
    """In the place of s3fs and huggingface_hub: no server can be reached."""

    store, pseudo_dirs, protocol, cachable = {}, [""], ("s3", "hf"), False

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.partition("://")[2].strip("/") if "://" in path else path.rstrip("/")

    def _open(self, path, mode="rb", **options):
        return Object(self, path, mode) if mode == "rb" else super()._open(path, mode, **options)


class Object(AbstractBufferedFile):
    """As files of stores are: read by ranges of bytes."""

    num_reads = 0

    def read(self, length=-1):
        Object.num_reads += 1
        return super().read(length)

    def _fetch_range(self, start, end):
        return self.fs.store[self.path].getvalue()[start:end]


@pytest.fixture
def stores(monkeypatch):
    for name in Store.protocol:
        monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, name, Store)
    for store in (Store, MemoryFileSystem):
        monkeypatch.setattr(store, "store", {})
        monkeypatch.setattr(store, "pseudo_dirs", [""])


@pytest.mark.parametrize(
    ("url", "given"),
    [
        ("s3://bucket/parts/", None), ("hf://datasets/someone/some/data", None), ("memory://parts", "memory://parts/*"),
        ("memory://parts", "simplecache::memory://parts"), ("file://{}/parts", None), ("{}/parts", None),
    ],
)  # fmt: skip
def test_a_directory_at_a_url(tmp_path, stores, monkeypatch, capsys, url, given):
    """Rows in the order of the files' names; one job however IN is spelled; as strict as with local files."""
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow"), sys.modules["pyarrow"]
    url = url.replace("{}", str(tmp_path))
    given, copy, out = given or url, tmp_path / "copy", tmp_path / "out.jsonl"
    copy.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "p0"}, {"prompt": "p1"}]), copy / "a.parquet")
    (copy / "b.csv").write_bytes(b'prompt\r\n"p\n2"\r\np3\r\n')
    (copy / "c.jsonl").write_text('{"prompt": "p4"}\nnot JSON\n{"prompt": "p6"}\n')
    (copy / "_SUCCESS").touch()
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.makedirs(path, exist_ok=True)
    for file in copy.iterdir():
        filesystem.pipe(f"{path.rstrip('/')}/{file.name}", file.read_bytes())
    monkeypatch.setattr(engines, "complete", stopped(3, KeyboardInterrupt))
    assert batch(given, out) == 130
    monkeypatch.setattr(engines, "complete", stub)
    assert batch(copy, out) == batch(given, out) == 3
    records = read_jsonl(out)
    assert [record["custom_id"] for record in records] == [f"row-{i}" for i in range(7)]
    assert [record["text"] for record in records] == ["p0", "p1", "p\n2", "p3", "p4", None, "p6"]
    assert records[5]["error"]["message"].startswith("line 2 of c.jsonl is not JSON: ")
    assert len(pickle.loads(pickle.dumps(files.Input(given, None))).files) == 3  # for processes of their own

    def change(name, content):
        filesystem.pipe(f"{path.rstrip('/')}/{name}", content)
        capsys.readouterr()
        return error_of(capsys, url, out)

    assert "  contents of the input: '" in change("c.jsonl", b'{"prompt": "p4"}\nnot JSON\n{"prompt": "p7"}\n')
    assert "  rows of the input: 7 then, 8 now\n" in change("d.jsonl", b'{"prompt": "p7"}\n')
    assert "/b.csv cannot be read: the row from line 2 on has a quote that is" in change("b.csv", b'prompt\n"p2\np3\n')


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *(((pattern, "out.jsonl"), f"IN={pattern}: patterns of local files are not read; give a directory that holds ")
          for pattern in ("file:///data/*.jsonl", "/data/*/in.csv", "part*.parquet")),
        (("memory://none.csv", "out.jsonl"), "IN=memory://none.csv cannot be read: FileNotFoundError: /none.csv"),
        (("memory://deep", "out.jsonl"), "IN=memory://deep must be a .jsonl, .parquet, .csv file, or a directory that "
         "holds some. It holds: README.md, data."),
        (("memory://deep/data/*.csv", "out.jsonl"), "IN=memory://deep/data/*.csv must be a .jsonl, .parquet, .csv "
         "file, or a directory that holds some."),
        (("memory://deep/", "s3://bucket/out.jsonl"), "OUT=s3://bucket/out.jsonl must be a local path, for the job "
         "appends to it; copy it afterwards."),
        (("in.jsonl", "out.jsonl", "--metrics", "memory://m"),
         "--metrics=memory://m must be a local path, for the job appends to it; copy it afterwards."),
        (("nowhere://x.csv", "out.jsonl"), "IN=nowhere://x.csv cannot be opened: Protocol not known: nowhere"),
        (("az://box/x.csv", "out.jsonl"), "IN=az://box/x.csv needs a package that is missing: pip install "
         "'.[remote]' in the checkout (Install adlfs to access Azure Datalake Gen2 and Azure Blob Storage)."),
        (("simplecache::memory://torn.parquet", "out.jsonl"), "memory:///torn.parquet cannot be read: "),
        (("file://{}/in.jsonl", "in.jsonl"), "OUT={}/in.jsonl is the input, lies in it, or holds it."),
        (("in.jsonl", "out.jsonl", "--metrics", "in.jsonl"), "it is IN or OUT, and would be appended to."),
    ],
)  # fmt: skip
def test_urls_that_are_refused(tmp_path, stores, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "adlfs", None)
    write_jsonl(tmp_path / "in.jsonl", questions(2))
    for path, content in (("/deep/README.md", b"x"), ("/deep/data/x.jsonl", b"{}"), ("/torn.parquet", b"PAR1 torn")):
        fsspec.filesystem("memory").pipe(path, content)
    argv = [part.replace("{}", str(tmp_path)) for part in argv]
    err = error_of(capsys, argv[0], argv[1] if "://" in argv[1] else tmp_path / argv[1], *argv[2:])
    assert message.replace("{}", str(tmp_path)) in err and err.count("\n") == 1


def test_lines_of_a_url_are_read_in_blocks(stores):
    """fsspec's own files read and copy a block of 5 MiB for every line: 0.3 ms each."""
    lines = b"".join(b'{"id": %d, "prompt": "%s"}\n' % (i, b"x" * 100) for i in range(9_000))
    fsspec.filesystem("s3").pipe("/bucket/in.jsonl", lines)
    before = Object.num_reads
    assert len(files.Input("s3://bucket/in.jsonl", None).hashes) == 9_000 and Object.num_reads - before < 20


def test_urls_without_fsspec(tmp_path, stubbed, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    err = error_of(capsys, "memory://in.jsonl", tmp_path / "out.jsonl")
    assert "IN=memory://in.jsonl needs a package that is missing: pip install '.[remote]' in the checkout (" in err
    assert batch(write_jsonl(tmp_path / "in.jsonl", questions(2)), tmp_path / "out.jsonl") == 0


def test_csv(tmp_path, stubbed, capsys):
    (tmp_path / "in.csv").write_text(
        'key,question,sampling_params,temperature\na,"1, 2\nand 3","{""max_tokens"": 7}"\nb,x,\nc,y,{,z,z\n,w,,0.5\n',
        encoding="utf-8-sig",
    )
    out = tmp_path / "out.jsonl"
    assert batch(tmp_path / "in.csv", out, "--id-column", "key", "--prompt-column", "question") == 3
    assert "Columns of IN that are not used: temperature.\n" in capsys.readouterr().err
    found = {record["custom_id"]: record for record in read_jsonl(out)}
    assert found["a"]["text"] == "1, 2\nand 3" and found["a"]["finish_reason"] == "1.0 7" and found["b"]["text"] == "x"
    assert found["row-2"]["error"]["message"] == "line 5 of in.csv has more fields than the header."
    assert found["row-3"]["error"]["message"] == "the row's 'key' must be a text or an integer, not ''."


def test_parquet(tmp_path, stubbed, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    import pyarrow

    talk = [{"role": "user", "content": "hello"}]
    rows = [{"id": i, "prompt": None if i == 3 else f"p{i}", "messages": talk if i == 4 else None,
             "sampling_params": {"max_tokens": 9, "top_k": None} if i == 1 else None} for i in range(30)]  # fmt: skip
    (tmp_path / "in").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows[:20]), tmp_path / "in" / "a.parquet")
    write_jsonl(tmp_path / "in" / "b.jsonl", rows[20:])
    monkeypatch.setattr(files, "PART_ROWS", 8)
    monkeypatch.setattr(engines, "complete", stopped(20, ZeroDivisionError))
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        batch(tmp_path / "in", out)
    (out / ".part-000003.parquet.tmp").write_bytes(b"half of a part")
    monkeypatch.setattr(engines, "complete", stub)
    assert batch(tmp_path / "in", out) == 3
    assert sorted(path.name for path in out.iterdir()) == [f"part-{i:06d}.parquet" for i in range(5)]
    table = parquet.read_table(out)
    assert table.schema.field("custom_id").type == pyarrow.int64()
    found = {record["custom_id"]: record for record in table.to_pylist()}
    assert len(found) == table.num_rows == 30
    assert found[0]["text"] == "p0" and found[1]["finish_reason"] == "1.0 9" and found[4]["text"] == str(talk)
    assert json.loads(found[3]["error"])["message"] == "the row has neither 'prompt' nor 'messages'."
    assert batch(tmp_path / "in", out, "--retry-errors") == 3
    assert parquet.read_table(out).num_rows == 30


@pytest.mark.parametrize(
    ("schema", "seen"),
    [
        ({"const": None}, None), ({"title": "x", "const": None}, None), ({"items": {"const": None}}, None),
        ({"const": {"a": None, "b": 1}}, None), ({"enum": [{"a": 1, "b": None}]}, None),
        ({"anyOf": [{"const": None}, {"type": "null"}]}, None),
        ({"enum": [None, "a"]}, {"enum": [None, "a"]}), ({"type": "null", "default": None}, {"type": "null"}),
        ({"anyOf": [{"const": "a"}, {"type": "integer"}]}, {"anyOf": [{"const": "a"}, {"type": "integer"}]}),
        ('{"const": null}', '{"const": null}'),
    ],
)  # fmt: skip
def test_a_null_in_a_schema_of_parquet(tmp_path, schema, seen):
    """Arrow keeps an absent field as null. {"const": null} became {}, which allows everything."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    import pyarrow

    rows = [{"id": 7, "prompt": "x", "sampling_params": {"structured_outputs": {"json": schema}}}, {"id": 8}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    row, other = files.Input(tmp_path / "in.parquet", None).rows()
    assert (row.key, other) == (7, Row(8, {"id": 8}, name="id"))
    if seen is None:
        assert str(row.error).startswith("'sampling_params': {") and "Give the JSON schema as text." in str(row.error)
    else:
        assert row.error is None and row.values["sampling_params"]["structured_outputs"]["json"] == seen


@pytest.mark.parametrize("name", ["id", "key", "custom_id", "text"])
@pytest.mark.parametrize("keys", [[1, 2, 3], ["a", "b", 3]])
@pytest.mark.parametrize("out", ["out.jsonl", "out"])
def test_an_id_keeps_its_name(tmp_path, monkeypatch, name, keys, out):
    """Only custom_id had it, whatever the column of IN. A column of the answer's name keeps the answer."""
    if out == "out":
        pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")

    def answer(args, rows):
        for row in rows:
            request = RequestOutput("0", "x", [5], [CompletionOutput(0, "answer", [7], 0.0)])
            yield record_of(row, request, SamplingParams(), "m"), (0, 0, 0)

    monkeypatch.setattr(engines, "complete", answer)
    source = write_jsonl(tmp_path / "in.jsonl", [{name: key, "prompt": "x"} for key in keys])
    for _ in range(2):
        assert batch(source, tmp_path / out, *(("--id-column", name) if name in ("key", "text") else ())) == 0
    (file,) = files.Output(tmp_path / out, ids_are_integers=False).files()
    found, keys = list(files.read(file)), keys if out == "out.jsonl" or keys[0] == 1 else [*map(str, keys)]
    assert [record["custom_id"] for record in found] == keys
    assert [record[name] for record in found] == (["answer"] * 3 if name == "text" else keys)


def test_half_of_a_surrogate_pair_in_parquet(tmp_path, stubbed):
    """Arrow refused the text and the id when the part was written, at every restart."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": "\udc01 a", "prompt": "x \ud83d"}, {"id": "b", "prompt": "y"}])
    for _ in range(2):  # the second one finds both
        assert batch(source, tmp_path / "out") == 0
    table = parquet.read_table(tmp_path / "out")
    assert table["custom_id"].to_pylist() == ["\\udc01 a", "b"] and table["text"].to_pylist() == ["x \\ud83d", "y"]


def test_overwrite_of_a_directory(tmp_path, stubbed, capsys):
    """Whatever else it holds; but not if that is the input."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    source, out = write_jsonl(tmp_path / "in.jsonl", questions(3)), tmp_path / "out"
    assert batch(source, out) == 0
    (out / ".part-000001.parquet").write_bytes(b"half of a part")
    (out / "_SUCCESS").touch()
    assert "--max-tokens: None then, 7 now" in error_of(capsys, source, out, "--max-tokens", "7")
    assert batch(source, out, "--max-tokens", "7", "--overwrite") == 0 == batch(source, out, "--max-tokens", "7")
    assert parquet.read_table(out)["finish_reason"].to_pylist() == ["1.0 7"] * 3
    inside = out / "part-000000.parquet"
    err = error_of(capsys, inside, out, "--overwrite", "--prompt-column", "text")
    assert err.endswith(f"OUT={out} is the input, lies in it, or holds it.\n") and inside.exists()


def test_parquet_without_pyarrow(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    source = write_jsonl(tmp_path / "in.jsonl", questions(2))
    err = error_of(capsys, source, tmp_path / "out")
    assert err.endswith("error: parquet needs pyarrow: pip install '.[parquet]' in the checkout.\n")


def test_memory_does_not_grow_with_the_rows(tmp_path, stubbed):
    """Of a row that is waiting nothing is kept, of one that is done 8 bytes; sorting them needs some for a moment."""
    peaks = []
    for number in (1_000, 6_000):
        rows = [{"id": f"row {i}", "prompt": "x" * 500} for i in range(number)]
        source = write_jsonl(tmp_path / f"{number}.jsonl", rows)
        del rows
        tracemalloc.start()
        assert batch(source, tmp_path / f"out-{number}.jsonl") == 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 5_000 * 50


def test_rows_are_taken_as_there_is_room(tmp_path, monkeypatch):
    """The engine's own feed is lazy: at most its window and one row are read ahead."""
    read, ahead = [0], []
    rows_of = files.Input.rows

    def counted(self):
        for row in rows_of(self):
            read[0] += 1
            yield row

    source = write_jsonl(tmp_path / "in.jsonl", questions(400))
    monkeypatch.setattr(files.Input, "rows", counted)
    complete = engines.complete

    def watched(args, rows):
        read[0] = 0
        for written, record in enumerate(complete(args, rows), 1):
            ahead.append(read[0] - written)
            yield record

    monkeypatch.setattr(engines, "complete", watched)
    argv = ("--max-tokens", str(random.Random(0).randint(2, 3)), "--temperature", "0")
    assert batch(source, tmp_path / "out.jsonl", *OPTIONS, *argv) == 0
    assert max(ahead) <= 2 * 8 + 1 and len(ahead) == 400


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux")
def test_a_full_disk_costs_the_metrics_alone(tmp_path, caplog):
    """It ended the job, with an error that named no file."""
    argv = write_jsonl(tmp_path / "in.jsonl", questions(3)), tmp_path / "out.jsonl", "--metrics", "/dev/full"
    assert batch(*argv, *OPTIONS) == 0 and len(read_jsonl(argv[1])) == 3
    expected = "--metrics /dev/full: No space left on device. No more metrics are written."
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_a_torn_line_of_metrics_is_ended(tmp_path, stubbed):
    """The resumed job appended its first line to what a killed one had left of its last."""
    argv = write_jsonl(tmp_path / "in.jsonl", questions(2)), tmp_path / "out.jsonl", "--metrics", tmp_path / "metrics"
    for before, after in ((None, b""), (b"{}\n", b"{}\n"), (b'{}\n{"time": 1', b'{}\n{"time": 1\n')):
        if before is not None:
            argv[-1].write_bytes(before)
        assert batch(*argv) == 0 and argv[-1].read_bytes() == after
