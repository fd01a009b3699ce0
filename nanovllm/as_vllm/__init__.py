"""Public names of ``nanovllm.contrib.as_vllm``, a line each."""
