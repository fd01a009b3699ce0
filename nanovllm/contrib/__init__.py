"""Clients of the public API: beam search, batch jobs, adapters for other libraries, scripts written for vLLM.

They import ``nanovllm``, ``llm``, ``config``, ``sampling_params``, ``outputs``, ``errors`` and ``validation`` alone.
The engine does not know them; ``LLM.beam_search`` calls the one that is a method there.
"""
