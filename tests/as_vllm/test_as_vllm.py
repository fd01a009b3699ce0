"""Scripts written for vLLM, one for each kind of use, run unmodified. They know vLLM's names only, and check what they get.

In ``scripts/``; each takes a model's path. Most run in one process, one after another.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from nanovllm.utils.checkpoint import DEMO_MODEL

HERE = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in (HERE / "scripts").glob("*.py"))


def run(*argv: str, **more) -> subprocess.CompletedProcess:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", *argv]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, **more)


@pytest.fixture(scope="module")
def errors():
    """Script -> its traceback, "" if it ran to the end."""
    done = run(str(HERE / "run_scripts.py"), str(DEMO_MODEL), *SCRIPTS)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["errors"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_runs(errors, script):
    assert not errors[script], errors[script]


FAKE_VLLM = "raise SystemExit('the installed vLLM was imported')"
WRITTEN_FOR_VLLM = """
import importlib.metadata, importlib.util, pickle, subprocess, sys
import vllm
from vllm import LLM, SamplingParams
from vllm.entrypoints.llm import LLM as same
assert same is LLM and importlib.util.find_spec("vllm") is not None
assert vllm.__version__ == importlib.metadata.version("vllm")
assert pickle.loads(pickle.dumps(SamplingParams(n=2))) == SamplingParams(2)
child = "import vllm; print(vllm.LLM.__module__)"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout)
print("ran as", __name__, "with", sys.argv[1:])
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_an_installed_vllm_is_not_imported(tmp_path, as_module):
    """Nor in a child process; and the script sees itself as the main program, with its own arguments."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    (tmp_path / "script.py").write_text(WRITTEN_FOR_VLLM)
    target = ["-m", "script"] if as_module else ["script.py"]
    done = run("-m", "nanovllm.as_vllm", *target, "--flag", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n\n") == ["nanovllm.as_vllm.llm", "ran as __main__ with ['--flag', 'x']\n"]


def test_import_of_vllm_is_light(tmp_path):
    """Evaluation harnesses import it whether they use it or not."""
    (tmp_path / "script.py").write_text(
        "import sys\nfrom vllm import LLM, EngineArgs, SamplingParams\nassert 'torch' not in sys.modules\n"
    )
    done = run("-m", "nanovllm.as_vllm", str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [([], "usage: python -m nanovllm.as_vllm script.py"), (["none.py"], "there is no script 'none.py'")],
)
def test_bad_command_lines(argv, said):
    done = run("-m", "nanovllm.as_vllm", *argv)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_every_name_of_the_module_tree_resolves():
    code = """
import importlib
from nanovllm.as_vllm import modules
modules.install()
for module, names in modules.MODULES.items():
    found = importlib.import_module(f"vllm.{module}".rstrip("."))
    for name in names.split():
        getattr(found, name)
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
