"""On ``PYTHONPATH`` of child processes of ``nanovllm.as_vllm``: there too, ``import vllm`` finds nanovllm."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[5]))  # nanovllm need not be installed

from nanovllm.contrib.as_vllm.modules import install

install()
