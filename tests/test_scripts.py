"""The scripts that people run first, on the CPU: mostly as they run them, in a process of their own."""

import gc
import json
import os
import re
import sys
from dataclasses import fields

import pytest
from helpers import ROOT, run_python

import bench
import example
from benchmarks import host_overhead
from nanovllm import CheckpointError, SamplingParams
from nanovllm.config import Config


def run(*argv, **options):
    return run_python(*argv, PYTHONPATH="", **options)


def report_of(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def test_example_without_arguments():
    out = run("example.py").stdout
    assert re.search(r"Prompt: +introduce yourself\nCompletion: .*nanovllm", out)
    assert re.search(r"Prompt: +list all prime numbers within 100\nCompletion: 2, 3, 5, .*, 89, 97\n", out)


def run_example(monkeypatch, *argv):
    """In this process, which has imported torch and transformers already."""
    monkeypatch.setattr(sys, "argv", ["example.py", "--device", "cpu", *argv])
    example.main()


def test_example_with_prompts(monkeypatch, capsys):
    run_example(monkeypatch, "--max-tokens", "3", "introduce yourself", "2 + 3")
    out = capsys.readouterr().out
    assert out.count("Prompt:") == out.count("Completion:") == 2
    assert re.search(r"Prompt: +2 \+ 3\nCompletion: ", out)


def test_example_names_a_missing_model(monkeypatch):
    with pytest.raises(CheckpointError, match="/there/is/no/such/model"):
        run_example(monkeypatch, "--model", "/there/is/no/such/model")


def test_bench_ends_with_one_line_of_json(tmp_path):
    """All workloads, two repeats, with a profile; a table comes before the JSON."""
    trace = tmp_path / "trace.json"
    done = run("bench.py", "--workload", "all", "--scale", "64", "--dtype", "float32", "--repeats", "2",
               "--profile", str(trace))  # fmt: skip
    report = report_of(done.stdout)
    assert report["dtype"] == report["engines"][0]["dtype"] == "float32"
    assert report["scale"] == 64 and report["model"] == "demo model" and report["versions"]["torch"]
    (engine,) = report["engines"]
    assert engine["engine"] == "nanovllm" and engine["import_s"] > 0 and engine["start_s"] > 0
    assert engine["how"] == "2048 KV blocks of 256 tokens"  # as many as there are, not the option's -1
    names = ["headline", "single", "prefill", "sharedprefix", "batch32", "batch256", "short", "prefillshort",
             "embed", "embedshort", "embedmixed"]  # fmt: skip
    assert [w["workload"] for w in engine["workloads"]] == names
    for w in engine["workloads"]:
        assert len(w["repeats_tokens_per_s"]) == 2 and w["tokens_per_s"] > 0
        counted = w["output_tokens"] + (w["prompt_tokens"] if w["counted"] == "prompt and output" else 0)
        assert w["tokens_per_s"] == pytest.approx(counted / w["seconds"], rel=0.05)
        assert f"{w['workload']} " in done.stdout
    profile = engine["workloads"][0]["profile"]
    assert profile["decode_steps"] > 0 and 0 < profile["device_busy_share"] <= 1
    events = json.loads((tmp_path / "trace-headline.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"schedule", "prepare", "launch", "wait", "postprocess"} <= names
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_bench_looks_for_all_that_it_needs_before_it_runs(tmp_path, monkeypatch, capsys):
    """The figures of the engines before a missing one, minutes of a GPU's time, were thrown away; those of all runs
    when the timeline could not be written."""
    ran = []
    monkeypatch.setattr(bench, "run_apart", lambda name, *_: ran.append(name))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit, match=r"^--engine: vllm not installed here\. Install"):
        bench.main(["--engine", "nanovllm", "transformers", "vllm", "--device", "cpu"])
    assert not ran
    with pytest.raises(SystemExit, match=r"^--engine vllm: vLLM cannot be imported here .* Install it in this"):
        bench.main(["--engine", "vllm"])
    with pytest.raises(SystemExit):
        bench.main(["--profile", str(tmp_path / "none" / "trace.json")])
    assert f"there is no directory {tmp_path / 'none'}" in capsys.readouterr().err


VLLM_STAND_IN = """
from types import SimpleNamespace as Object

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert ignore_eos and detokenize
        self.temperature, self.max_tokens = temperature, max_tokens

class LLM:
    def __init__(self, model, *, dtype, tensor_parallel_size, enforce_eager, max_model_len, max_num_seqs):
        assert (dtype, tensor_parallel_size, max_model_len, max_num_seqs) == ("auto", 1, 4096, 5)
        self.llm_engine = Object(model_config=Object(get_vocab_size=lambda: 1000, dtype="torch.float16"))

    def generate(self, prompts, sampling_params, *, use_tqdm):
        for prompt in prompts:
            assert list(prompt) == ["prompt_token_ids"] and max(prompt["prompt_token_ids"]) < 1000
        return [Object(outputs=[Object(token_ids=(7,) * params.max_tokens)]) for params in sampling_params]
"""


def test_bench_compares_engines_in_one_run(tmp_path, monkeypatch, capsys):
    """vLLM needs a GPU and a torch of its own: a stand-in has what bench.py uses of its interface (version 0.33)."""
    (tmp_path / "vllm.py").write_text(VLLM_STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the engines' processes
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bench.main(["--engine", "nanovllm", "vllm", "--workload", "single", "--scale", "32", "--max-num-seqs", "5"])
    report = report_of(capsys.readouterr().out)
    assert [engine["engine"] for engine in report["engines"]] == ["nanovllm", "vllm"]
    ours = report["engines"][0]["dtype"]  # by the processor; the JSON said "auto"
    assert ours in ("bfloat16", "float32") and report["dtype"] == f"{ours} / float16"
    for engine in report["engines"]:
        (figures,) = engine["workloads"]
        assert (figures["prompt_tokens"], figures["output_tokens"]) == (4, 16)


def test_bench_of_transformers(capsys):
    bench.main(["--engine", "transformers", "--workload", "headline", "--scale", "64", "--device", "cpu"])
    report = report_of(capsys.readouterr().out)
    (engine,) = report["engines"]
    assert report["dtype"] in ("bfloat16", "float32")
    assert engine["engine"] == "transformers" and engine["workloads"][0]["output_tokens"] > 0


def test_published_rows(capsys):
    """TensorRT-LLM's table: the requests of a row have equal lengths; options are its own, or what one asks for."""
    lengths = ((128, 128), (128, 2048), (500, 2000), (1000, 1000), (2048, 128), (2048, 2048), (128, 4096), (1000, 2000),
               (5000, 500), (20000, 2000), (8192, 1024), (1024, 8192))  # fmt: skip
    rows = {f"published-{i}-{o}": (i, o) for i, o in lengths}
    args = bench.parse_args(["--workload", "published", "single", "published-128-128"])
    assert (args.workload, args.max_num_seqs) == ([*rows, "single"], 1024)
    asked = bench.parse_args(["--workload", "published", "--max-num-seqs", "9"])
    assert (asked.max_num_seqs, asked.max_num_batched_tokens, asked.gpu_memory_utilization) == (9, 16_896, 0.95)
    everything = bench.parse_args(["--workload", "all"])
    assert everything.max_num_seqs is None and rows.keys().isdisjoint(everything.workload)
    for name, (num_in, num_out) in rows.items():
        workload = bench.WORKLOADS[name](8)
        assert workload.name == name and len(workload.prompts) > 16 and not workload.counts_prompts
        assert {*map(len, workload.prompts)} == {num_in // 8} and {*workload.max_tokens} == {num_out // 8}
        assert len({*map(tuple, workload.prompts)}) == len(workload.prompts)
    bench.main(["--workload", "published-500-2000", "--scale", "64", "--device", "cpu"])
    (engine,) = report_of(capsys.readouterr().out)["engines"]
    (figures,) = engine["workloads"]
    assert (figures["requests"], figures["prompt_tokens"], figures["output_tokens"]) == (46, 46 * 7, 46 * 31)


FORKS = """
import json, os, runpy, sys
import torch  # which each would import for seconds
for path, *argv in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.dup2(os.open(os.path.basename(path) + ".err", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv, sys.path[0] = [path, *argv], os.path.dirname(path)
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes that share imports are forked")
def test_unknown_flags_are_refused_and_benchmarks_say_that_they_need_a_gpu(tmp_path):
    """Those showed a traceback. Two did not find the library unless it was installed."""
    pytest.importorskip("triton")
    flags = [[str(ROOT / name), "--no-such-flag"] for name in ("example.py", "bench.py", "benchmarks/host_overhead.py")]
    needy = [[str(ROOT / "benchmarks" / f"{name}.py")] for name in ("attention", "kernels", "all_reduce")]
    assert run("-c", FORKS, json.dumps([*flags, *needy]), cwd=tmp_path).stdout.split() == ["2"] * 6
    for path, *argv in [*flags, *needy]:
        said = (tmp_path / f"{os.path.basename(path)}.err").read_text()
        assert re.search(argv[0] if argv else "needs (a|as many) CUDA device", said), said
        assert "Traceback" not in said


def test_host_overhead_runs(capsys):
    try:
        host_overhead.main(["--batch", "1", "8", "--steps", "20"])
    finally:
        gc.unfreeze()
    report = report_of(capsys.readouterr().out)
    assert [figures["steady"]["batch"] for figures in report["results"]] == [1, 8]
    assert all(figures["steady"]["step_us"] > 0 for figures in report["results"])


def test_headline_is_the_published_one():
    """Published figures hold for these prompts only: 142,827 tokens in, 133,966 out."""
    import random

    from benchmarks.workloads import headline

    workload = headline()
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    assert workload.prompts == prompts
    assert workload.max_tokens == [random.randint(100, 1024) for _ in range(256)]
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (142_827, 133_966)
    assert workload.redrawn(0, 151_936) == workload
    again = workload.redrawn(1, 151_936)
    assert list(map(len, again.prompts)) == list(map(len, prompts)) and again.prompts[0] != prompts[0]


def test_readme_commands_are_what_ci_runs():
    """The README's test command drifted from what CI ran, and stopped working on an empty machine."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in readme.splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    assert lines[0].endswith("example.py")
    assert lines[1].endswith("pytest -n 2")
    ci = ROOT / ".ci" / "run"
    assert lines[1] in ci.read_text(encoding="utf-8").splitlines()
    nightly = ROOT / ".ci" / "nightly"
    assert f"HISTORIES=all {lines[1].split(' && ')[-1]}" in nightly.read_text(encoding="utf-8").splitlines()
    assert os.access(ci, os.X_OK) and os.access(nightly, os.X_OK)


@pytest.mark.parametrize("options", [Config, SamplingParams])
def test_docstrings_describe_every_option(options):
    for option in fields(options):
        assert not option.init or f"\n        {option.name}: " in options.__doc__, option.name
