"""Entry point of the command ``nanovllm``."""

from nanovllm.contrib.cli import main as main
