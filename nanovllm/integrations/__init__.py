"""Public names of ``nanovllm.contrib.integrations``."""
