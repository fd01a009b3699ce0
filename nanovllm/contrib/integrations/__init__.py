"""Adapters from other libraries' interfaces to nanovllm; each needs the library it is named after."""
