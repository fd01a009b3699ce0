"""``python -m nanovllm``: the command ``nanovllm``."""

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
