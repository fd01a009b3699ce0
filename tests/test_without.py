"""The library stands without a feature that ``tools/without.py`` takes out; every such feature: ``.ci/nightly``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from histories import at_night, nightly


def without(feature, directory):
    """Take a feature out, run the smoke tests of the rest, and return the copy's directory."""
    done = run(ROOT / "tools" / "without.py", "--keep", feature, "tests/test_smoke.py", cwd=ROOT, directory=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def run(*command, cwd, directory):
    environment = {**os.environ, "TMPDIR": str(directory), "PYTHONPATH": ""}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("feature", "option"),
    [("vision", "language_model_only=True"),
     *at_night(("speculation", "speculative_config={'method': 'ngram'}"), ("hybrids", "num_state_snapshots=3"))],
)  # fmt: skip
def test_the_library_stands_without(feature, option, tmp_path):
    """Ruff, mypy and the tests of smoke pass on what is left, which refuses the feature's option by name."""
    copy = without(feature, tmp_path)
    refused = run("-c", f"from nanovllm import LLM; LLM({option}, device='cpu')", cwd=copy, directory=tmp_path)
    assert f"{option.partition('=')[0]}=" in refused.stderr and "which this copy of nanovllm lacks" in refused.stderr


@nightly
def test_the_library_stands_without_transformers_modules(tmp_path):
    """An architecture without a row is then an error that lists the rows."""
    copy = Path(without("transformers_backend", tmp_path))
    (copy / "config.json").write_text('{"architectures": ["Cohere2ForCausalLM"]}')
    code = "from nanovllm.models.config_reader import read_model_config; read_model_config('.')"
    refused = run("-c", code, cwd=copy, directory=tmp_path)
    assert "must be one of LlamaForCausalLM, " in refused.stderr
