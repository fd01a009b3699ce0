"""Public name of ``nanovllm.contrib.as_vllm``."""
