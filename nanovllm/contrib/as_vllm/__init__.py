"""nanovllm under vLLM's names: ``python -m nanovllm.as_vllm script.py`` runs a script written for vLLM.

Adapters from vLLM's offline interface to nanovllm's. The rest of nanovllm does not know them, and they import no vLLM.

    modules   the module tree that scripts import, put in place of vLLM's
    llm       LLM and LLMEngine; the forms of prompts, and arguments that are refused
    async_llm  AsyncLLM, an LLMEngine for the tasks of asyncio loops
    metrics   the engine's counters, as get_metrics returns them
    sampling  SamplingParams, structured outputs, flat log-probabilities
    processors  logits processors of the engine's
    options   engine keywords: passed on, or accepted at values that change nothing; from them to a running engine, and
              the configuration that scripts read
    worker    what code that reaches into a worker finds: the model, its weights, sleep
    helpers   small functions and types of vLLM's modules

A value that nanovllm cannot honour is an error that names it. No value is ignored, unless it cannot change an output.
"""
