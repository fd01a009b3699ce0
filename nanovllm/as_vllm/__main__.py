"""Runs ``python -m nanovllm.as_vllm``."""

import sys

from nanovllm.contrib.as_vllm.__main__ import main

main(sys.argv[1:])
