"""Public names of ``nanovllm.contrib.integrations``, a line each."""
