"""Each of examples/*.py runs as its reader runs it, on the demo model."""

import json
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

# what the output must hold, and the module of the extra that the example needs
EXPECTED = {
    "chat": (r"user:      2 \+ 3\nassistant: 5\n", None),
    "streaming": (r"tiny language model(.|\n)*prompt 11: 11 \+ 3 = 14\b", None),
    "json_schema": (r"^\{'city': '(Paris|Rome|Oslo)', 'is_capital': (True|False)\}$", "llguidance"),
    "best_of_n": (r"best: c-a-t\n", None),
    "beam_search": (r"(\s*-?\d+\.\d{3}  .*\n){4}", None),
    "score": (r"answer: Paris\n", None),
    "batch_job": (r"taken up again; 400 rows, 400 different\none of them: .*'text': '17'(.|\n)*KiB of HTML", None),
    "ray_data": (r"200 rows, 200 right answers", "ray"),
    "evaluation": (r"exact match on sums: 1\.000", "lm_eval"),
}  # fmt: skip
OTHERS = {"grpo"}  # run by test_grpo


def run(name):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled",
           "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip
    return subprocess.run([sys.executable, f"examples/{name}.py"], cwd=ROOT, env=env, capture_output=True, text=True,
                          timeout=300)  # fmt: skip


def test_every_example_is_run():
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names == {*EXPECTED, *OTHERS}


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name):
    pattern, extra = EXPECTED[name]
    if extra is not None:
        pytest.importorskip(extra, reason=f"examples/{name}.py needs the extra that has {extra}")
    done = run(name)
    assert done.returncode == 0, done.stderr
    assert re.search(pattern, done.stdout.strip() + "\n"), json.dumps(done.stdout)
