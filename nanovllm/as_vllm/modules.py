"""Public name of ``nanovllm.contrib.as_vllm.modules``."""

from nanovllm.contrib.as_vllm.modules import install as install
