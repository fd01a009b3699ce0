"""``LLM``: the engine under its public name."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    __doc__ = LLMEngine.__doc__
