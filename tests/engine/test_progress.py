"""The progress bar: what it counts, who makes it, and how much of it a log file keeps."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
from helpers import needs

from nanovllm import SamplingParams
from nanovllm.engine import progress as progress_module
from nanovllm.engine.progress import Progress


class Bar:
    """The whole interface that a bar needs: what vLLM asks of one, too."""

    def __init__(self, total, desc, dynamic_ncols):
        self.total, self.n, self.postfix, self.shown, self.closed = total, 0, None, [], False
        self.desc = desc

    def update(self, n):
        self.n += n

    def refresh(self):
        self.shown.append((self.n, self.postfix))

    def close(self):
        self.closed = True


def prefill(num_tokens: int) -> int:
    return num_tokens


def decode(num_seqs: int) -> int:
    return -num_seqs


@pytest.fixture
def clock(monkeypatch):
    """The time, set by hand; steps of this process are not its first."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_module, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(Progress, "_is_first_step", False)
    return clock


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)


def run(clock, progress, *steps):
    """steps: (seconds, batch, requests finished by it)."""
    for seconds, batch, num_finished in steps:
        clock.now += seconds
        progress.update(batch, num_finished)


def made_bar(progress):
    return progress._bar


def test_one_long_request_moves(clock, terminal):
    """The bar stood at 0 % until the first request was finished."""
    progress = Progress(1, Bar)
    bar = made_bar(progress)
    assert (bar.total, bar.n) == (1, 0)
    run(clock, progress, (0.5, prefill(2000), 0), *[(0.05, decode(1), 0)] * 100)
    assert len(bar.shown) > 30 and {n for n, _ in bar.shown} == {0}
    assert bar.shown[0][1] == "prefill 2,000 tok (4,000/s), decode 0 tok"
    assert len({postfix for _, postfix in bar.shown}) == len(bar.shown)
    run(clock, progress, (0.05, decode(1), 1))
    progress.close()
    assert (bar.n, bar.closed) == (1, True)
    assert bar.postfix == "prefill 2,000 tok (4,000/s), decode 101 tok (20/s)"


def test_the_first_step_of_a_process_is_not_timed(clock, terminal, monkeypatch):
    """It allocates and initialises: "Prefill=20tok/s" on the first call said nothing."""
    monkeypatch.setattr(Progress, "_is_first_step", True)
    progress = Progress(2, Bar)
    run(clock, progress, (9.0, prefill(10), 0), (1.0, decode(2), 0))
    progress.close()
    assert made_bar(progress).postfix == "prefill 10 tok, decode 2 tok (2/s)"
    progress = Progress(2, Bar)
    run(clock, progress, (1.0, prefill(10), 0))
    progress.close()
    assert made_bar(progress).postfix == "prefill 10 tok (10/s), decode 0 tok"


def test_a_log_file_is_not_flooded(clock, capsys, monkeypatch):
    """A minute of steps; tqdm alone writes ten states a second while requests finish."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    progress = Progress(600, True)
    run(clock, progress, *[(0.1, decode(8), 1)] * 600)
    progress.close()
    out, err = capsys.readouterr()
    states = err.split("\r")
    assert out == "" and len(states) < 12
    assert re.match(r"Generating: 100%.* 600/600 .*prefill 0 tok, decode 4,800 tok \(80/s\)\]", states[-1])


@pytest.mark.parametrize("where", ["terminal", "notebook"])
def test_a_bar_that_somebody_watches(clock, where, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: where == "terminal", raising=False)
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    if where == "terminal":
        monkeypatch.delitem(sys.modules, "ipykernel")
    progress = Progress(1, Bar)
    run(clock, progress, *[(0.06, decode(1), 0)] * 20)
    assert len(made_bar(progress).shown) == 10


@pytest.mark.parametrize("use_tqdm", [False, None, 0])
def test_no_bar(use_tqdm, make_llm, capsys):
    llm = make_llm()
    capsys.readouterr()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=use_tqdm)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_without_stderr(stderr, make_llm, capsys, monkeypatch):
    """tqdm wrote to it, and the call ended in an AttributeError."""
    llm = make_llm()
    capsys.readouterr()
    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr and closed)
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=True)
    assert len(output["token_ids"]) == 2 and capsys.readouterr() == ("", "")


def test_generate_without_a_terminal(make_llm, capsys):
    """No step, no bar that jumps past its end, nothing on stdout."""
    llm = make_llm()
    llm.generate([], use_tqdm=True)
    llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=True)
    out, err = capsys.readouterr()
    assert out == "" and "3/3" in err.splitlines()[-1] and "prefill 9 tok" in err and "decode 3 tok" in err


@pytest.mark.parametrize(
    ("name", "desc"),
    [
        ("generate", "Generating"), pytest.param("embed", "Embedding", marks=needs("verbs.pooling")),
        pytest.param("score", "Scoring", marks=needs("verbs.scoring")),
    ],
)  # fmt: skip
def test_every_verb_has_a_bar(name, desc, make_llm, capsys):
    """use_tqdm=callable showed the built-in bar; only generate had one unless it was asked for; and for no prompts."""
    bars = []

    def make_bar(**options):
        bars.append(Bar(**options))
        return bars[-1]

    llm, prompts = make_llm(), [[1, 2, 3]] * 3
    verb = getattr(llm, name)
    capsys.readouterr()
    verb(prompts, use_tqdm=make_bar)
    (bar,) = bars
    assert (bar.total, bar.n, bar.closed, bar.desc) == (3, 3, True, desc)
    assert verb([]) == verb([], use_tqdm=make_bar) == [] and len(bars) == 1
    verb(prompts, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    verb(prompts)
    assert re.search(rf"\r{desc}: 100%.* 3/3 .*prefill \d tok", capsys.readouterr().err)
