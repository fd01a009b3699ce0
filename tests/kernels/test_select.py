"""The choice between Triton's kernels and their twins."""

import subprocess
import sys

CODE = """
import sys
sys.modules["triton"] = None  # its import fails
from nanovllm import ConfigError, kernels
kernels.select("cpu")
try:
    kernels.select("cuda")
except ConfigError as error:
    print(error)
"""


def test_cuda_without_triton():
    done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.stdout.startswith("a CUDA device needs Triton, which cannot be imported (")
    assert done.stdout.endswith("(on Windows triton-windows), or use device='cpu'.\n")
