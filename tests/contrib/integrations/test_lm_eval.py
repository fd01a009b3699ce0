"""lm-evaluation-harness: its own ``hf`` model and ours on the same tasks. In one subprocess, for its imports warn.

Twenty seconds.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import run_python

needs_harness = pytest.mark.skipif(
    not all(map(find_spec, ("lm_eval", "accelerate"))),
    reason="needs lm-evaluation-harness and, for its hf model, accelerate: pip install '.[eval]' accelerate",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return json.loads(run_python(Path(__file__).with_name("run_lm_eval.py"), tmp_path_factory.mktemp("tasks")).stdout)


@needs_harness
def test_equal_metrics(report):
    hf, ours = report["hf"]["results"], report["nanovllm"]["results"]
    for task in ("demo_choice", "demo_chat", "demo_text"):
        assert hf[task] == ours[task]
    assert 0 < hf["demo_choice"]["acc,none"] < 1 and 0 < hf["demo_chat"]["exact_match,none"] < 1
    assert ours["demo_perplexity"] == pytest.approx(hf["demo_perplexity"], rel=1e-6)


@needs_harness
def test_equal_log_likelihoods(report):
    for row, own in zip(*(report[model]["samples"]["demo_choice"] for model in ("hf", "nanovllm")), strict=True):
        for ((expected, greedy),), ((logprob, own_greedy),) in zip(row, own, strict=True):
            assert abs(expected - logprob) <= 1e-4 and greedy == own_greedy
    # the last document has seven windows; hf adds up its log-probabilities in float32
    assert report["num_tokens"] > 6 * 512
    rows = zip(*(report[model]["samples"]["demo_perplexity"] for model in ("hf", "nanovllm")), strict=True)
    assert all(own[0][0] == pytest.approx(row[0][0], rel=1e-6) for row, own in rows)


@needs_harness
@pytest.mark.parametrize("task", ["demo_chat", "demo_text"])
def test_equal_texts(report, task):
    texts = [text for ((text,),) in report["nanovllm"]["samples"][task]]
    assert texts == [text for ((text,),) in report["hf"]["samples"][task]]
    assert len(set(texts)) > 10


@needs_harness
def test_special_token_as_stop_string(report):
    """The text that stop strings look at has no special tokens; hf stops at them all the same."""
    hf, ours = report["special_stop"]
    assert ours == hf and ours[0] == "5"


@needs_harness
def test_a_request_that_fails_ends_the_run(report):
    """The harness has no rows for errors, and would count an empty answer as a wrong one."""
    assert [re.match(r"request \d: .*NaN", text) is not None for text in report["failures"]] == [True, True]


@needs_harness
def test_command_line(report):
    assert 0 < report["command_line"]["acc,none"] < 1 and report["command_line"]["sample_len"] == 10


@pytest.mark.skipif(bool(find_spec("lm_eval")), reason="lm-evaluation-harness is installed")
def test_without_the_harness():
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[eval\]' in the checkout"):
        import nanovllm.integrations.lm_eval  # noqa: F401
