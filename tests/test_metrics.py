"""Counters against outputs, ``--metrics`` lines, and the page that ``nanovllm plot`` draws from them."""

import json
import re
import sys
import threading
from html.parser import HTMLParser

import pytest
from helpers import generate, greedy, prompt_of

from nanovllm import SamplingParams
from nanovllm.cli import main
from nanovllm.contrib.jobs import plot

TIMES = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")


def test_counters_are_what_outputs_say(make_llm):
    llm = make_llm()
    assert llm.metrics()["request_success"] == {"stop": 0, "length": 0, "abort": 0, "error": 0}
    shared = prompt_of(40)
    prompts = [shared, prompt_of(70), [*shared, 5], prompt_of(3)]  # the second is computed in chunks
    outputs = llm.generate(prompts[:2], greedy(6), use_tqdm=False)
    outputs += llm.generate(prompts[2:], greedy(4), use_tqdm=False)
    now = llm.metrics()
    assert now["prompt_tokens"] == now["prefix_cache_queries"] == sum(map(len, prompts))
    cached = sum(output.num_cached_tokens for output in outputs)
    assert now["prompt_tokens_cached"] == now["prefix_cache_hits"] == cached == 32
    assert now["generation_tokens"] == 2 * 6 + 2 * 4
    assert now["request_success"] == {"stop": 0, "length": 4, "abort": 0, "error": 0}
    assert (now["num_requests_running"], now["num_requests_waiting"], now["kv_cache_usage_perc"]) == (0, 0, 0)
    assert {now[name]["count"] for name in (*TIMES, "e2e_request_latency_seconds")} == {4}
    assert all(now[name]["sum"] > 0 for name in TIMES)
    assert sum(now[name]["sum"] for name in TIMES) == pytest.approx(now["e2e_request_latency_seconds"]["sum"])
    json.dumps(now)


def test_stop_abort_and_state_in_between(make_llm):
    llm = make_llm(max_num_seqs=2, num_kvcache_blocks=20)
    ids = [llm.add_request(prompt_of(20, seed), greedy(8)) for seed in range(3)]
    llm.step()
    now = llm.metrics()
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (2, 1)
    assert now["kv_cache_usage_perc"] == pytest.approx(4 / 20)  # blocks of 16
    llm.abort(ids[1])
    while not llm.is_finished():
        llm.step()
    (first, *_) = generate(llm, [prompt_of(20)], greedy(1))
    llm.generate([prompt_of(20)], greedy(5, stop_token_ids=first), use_tqdm=False)
    assert llm.metrics()["request_success"] == {"stop": 1, "length": 3, "abort": 1, "error": 0}


def test_preempted_sequences_are_counted_once(make_llm):
    llm = make_llm(max_num_seqs=4, num_kvcache_blocks=6)
    generate(llm, [prompt_of(17, seed) for seed in range(4)], greedy(40))
    now = llm.metrics()
    assert now["num_preemptions"] > 0
    assert now["prompt_tokens"] == now["prefix_cache_queries"] == 4 * 17 and now["generation_tokens"] == 4 * 40


def test_completions_of_one_prompt_and_scores(make_llm):
    llm = make_llm()
    llm.generate([prompt_of(20)], SamplingParams(n=3, max_tokens=5, ignore_eos=True), use_tqdm=False)
    now = llm.metrics()
    assert (now["prompt_tokens"], now["generation_tokens"]) == (20, 15)
    assert sum(now["request_success"].values()) == 1
    llm.score([prompt_of(30)])
    llm.generate([prompt_of(9)], SamplingParams(max_tokens=0), use_tqdm=False)  # nothing to compute
    now = llm.metrics()
    assert (now["prompt_tokens"], now["generation_tokens"]) == (20 + 29, 15)
    assert sum(now["request_success"].values()) == 3
    assert sum(now[name]["sum"] for name in TIMES) == pytest.approx(now["e2e_request_latency_seconds"]["sum"])


def test_any_thread_may_read(make_llm):
    llm = make_llm(max_num_seqs=4)
    seen, stop, errors = [], threading.Event(), []

    def read():
        try:
            while not stop.is_set():
                seen.append(llm.metrics())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    generate(llm, [prompt_of(20, seed) for seed in range(12)], greedy(12))
    stop.set()
    thread.join()
    assert not errors
    generated = [now["generation_tokens"] for now in seen]
    assert generated == sorted(generated) and len({*generated}) > 2
    assert all(0 <= now["kv_cache_usage_perc"] <= 1 and now["num_requests_running"] <= 4 for now in seen)


# ---------------------------------------------------------------- lines and page


def sample(time, pid=1, process=0, generated=0, prompts=0, cached=0, running=0, waiting=0, usage=0.0, done=0):
    return {
        "time": time, "pid": pid, "process": process, "generation_tokens": generated, "prompt_tokens": prompts,
        "prompt_tokens_cached": cached, "prefix_cache_queries": prompts, "prefix_cache_hits": cached,
        "num_preemptions": 1, "kv_cache_usage_perc": usage, "num_requests_running": running,
        "num_requests_waiting": waiting, "request_success": {"stop": done, "length": 0, "abort": 0, "error": 0},
    }  # fmt: skip


def write(path, samples):
    path.write_text("".join(json.dumps(x) + "\n" for x in samples))
    return path


@pytest.mark.parametrize("last_pid", [3, 1])
def test_rates_of_two_engines_and_a_resumed_job(tmp_path, last_pid):
    """Two engines at 100 tokens/s each for 20 s; an hour's rest; one at 50 tokens/s for 20 s. In a container it has the
    process id of one before: its counters were taken for that one's.
    """
    both = [sample(1000.0 + t, pid, pid, 100 * t, 10 * t, 5 * t, 8, 2, 0.5, t) for t in range(21) for pid in (1, 2)]
    later = [sample(5000.0 + t, last_pid, 0, 50 * t, 10 * t, 5 * t, 4, 0, 0.25, t) for t in range(21)]
    seconds, charts, totals = plot.read(write(tmp_path / "m.jsonl", both + later))
    assert seconds[-1] == pytest.approx(41)
    lines = {(title, name): line for title, _, chart in charts for name, line in chart.items()}
    at = [abs(seconds - t).argmin() for t in (10, 30)]
    assert lines["Generated tokens", "generated"][at] == pytest.approx([200, 50], rel=0.01)
    assert lines["Prompt tokens", "computed"][at] == pytest.approx([10, 5], rel=0.01)
    assert lines["Prompt tokens", "from cache"][at] == pytest.approx([10, 5], rel=0.01)
    assert lines["Sequences", "running"][at] == pytest.approx([16, 4])
    assert lines["Sequences", "waiting"][at] == pytest.approx([4, 0])
    assert lines["KV cache in use", "in use"][at] == pytest.approx([50, 25])
    assert lines["Prefix cache hits so far", "hits"][at] == pytest.approx([50, 50])
    assert totals == ("ran 0:00:41, 60 requests finished, 3 preemptions\n"
                      "5,000 tokens generated (122/s), 600 in prompts (50 % cached)")  # fmt: skip


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_page_needs_nothing_else(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    source = write(tmp_path / "a <b> $c^.jsonl", [sample(t, generated=30 * t, running=3) for t in range(300)])
    assert main(["plot", str(source), str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert not re.search(r"@import|url\((?!#)", text) and [tag for tag, _ in page.tags].count("svg") == 1
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "xlink:href")]
    assert links and all(value.startswith("#") for value in links)
    labels = {"per second", "at a time", "% of blocks", "% of prompt tokens", "running time, minutes", "from cache"}
    titles = {"nanovllm: a <b> $c^.jsonl", "ran 0:04:59, 0 requests finished, 1 preemptions", "Generated tokens"}
    assert labels | titles <= set(page.texts)


def test_png(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    source = write(tmp_path / "m.jsonl", [sample(t, generated=30 * t, running=3) for t in range(30)])
    assert main(["plot", str(source), str(tmp_path / "page.png")]) == 0
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_torn_lines_are_left_out(tmp_path, capsys):
    """A job that was killed may leave one, and the resumed job appended to it: the figures of hours were refused."""
    source = write(tmp_path / "m.jsonl", [sample(t, generated=30 * t) for t in range(6)])
    whole, lines = plot.read(source), source.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join(lines)[:-1])  # nothing is missing but the line's end
    assert plot.read(source)[2] == whole[2] and capsys.readouterr().err == ""
    for torn in (lines[1][:1], lines[1][:70]):
        # at the end; on a line of its own; as jobs left it that did not end it, before the sample at 3 s
        for parts in ([*lines, torn], [torn, b"\n", *lines], [*lines[:3], torn, *lines[3:]]):
            source.write_bytes(b"".join(parts))
            seconds, _, totals = plot.read(source)
            assert (seconds == whole[0]).all() and totals == whole[2]
            assert capsys.readouterr().err == f"{source}: lines that are not whole, and left out: 1.\n"
    source.write_bytes(b"".join([torn, b"\n", *lines, torn]))
    assert plot.read(source)[2] == whole[2] and ": 2.\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["time", "generation_tokens", "kv_cache_usage_perc", "request_success"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", "1e300", "-1", "1" + 400 * "0", "[" * 9999 + "]" * 9999])
def test_numbers_that_no_engine_writes(tmp_path, capsys, name, value):
    """They ended in tracebacks of numpy, datetime and matplotlib, or in an empty chart."""
    lines = [json.dumps({**sample(t), name: {"stop": 777} if name == "request_success" else 777}) for t in (1.0, 2.0)]
    source = tmp_path / "m.jsonl"
    source.write_text("\n".join([json.dumps(sample(0.0)), lines[0], lines[1].replace("777", value), ""]))
    assert main(["plot", str(source), str(tmp_path / "page.html")]) == 1
    assert "m.jsonl, line 3: not what --metrics writes: b'{" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_what_cannot_be_drawn(tmp_path, capsys, monkeypatch):
    good = write(tmp_path / "good.jsonl", [sample(1.0), sample(2.0)])
    bad = write(tmp_path / "bad.jsonl", [sample(1.0), {"x": 1}])
    one = write(tmp_path / "one.jsonl", [sample(1.0)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    def error(source, output):
        assert main(["plot", str(source), str(tmp_path / output)]) == 1
        return capsys.readouterr().err.removeprefix("nanovllm plot: error: ").replace(str(tmp_path), "")

    assert error(bad, "a.html") == "/bad.jsonl, line 2: not what --metrics writes: b'{\"x\": 1}'.\n"
    few = "/one.jsonl holds 1 moments; two at least are needed. Did the job run for a second?\n"
    assert error(one, "a.html") == few
    other = tmp_path / "other.jsonl"
    other.write_text('{\n"x": 1\n}\n')
    assert error(other, "a.html") == "/other.jsonl, line 2: not what --metrics writes: b'\"x\": 1'.\n"
    assert error(good, "a.pdf") == "OUT=/a.pdf must end in .html or .png.\n"
    page = tmp_path / "page.html"
    page.symlink_to(tmp_path / "metrics.html")
    same = "OUT=/page.html is METRICS, and would be overwritten; give another OUT.\n"
    assert error(tmp_path / "metrics.html", page.name) == same
    for output in ("a.html", "a.png"):
        assert error(good, output) == "plot needs matplotlib: pip install '.[plot]' in the checkout.\n"
    assert error(tmp_path / "none", "a.html") == "[Errno 2] No such file or directory: '/none'\n"
