"""The library stands without a feature that ``tools/without.py`` takes out; every such feature: ``.ci/nightly``."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT
from histories import at_night


@pytest.mark.parametrize(
    ("feature", "option"),
    [("vision", "language_model_only=True"),
     *at_night(("speculation", "speculative_config={'method': 'ngram'}"), ("hybrids", "num_state_snapshots=3"))],
)  # fmt: skip
def test_the_library_stands_without(feature, option, tmp_path):
    """Ruff, mypy and the tests of smoke pass on what is left, which refuses the feature's option by name."""

    def run(*command, cwd):
        environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": ""}
        return subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)

    done = run(ROOT / "tools" / "without.py", "--keep", feature, "tests/test_smoke.py", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    refused = run("-c", f"from nanovllm import LLM; LLM({option}, device='cpu')", cwd=done.stdout.splitlines()[-1])
    assert f"{option.partition('=')[0]}=" in refused.stderr and "which this copy of nanovllm lacks" in refused.stderr
