"""Budgets of thinking, with marks of the engine's own."""

import sys
from types import SimpleNamespace

import pytest
from vllm import LLM, EngineArgs, SamplingParams
from vllm.config import ReasoningConfig

MARKS = {"reasoning_start_str": " the", "reasoning_end_str": " So: done."}
llm = LLM(model=sys.argv[1], reasoning_config=ReasoningConfig(**MARKS, reasoning_parser="qwen3"))
tokenizer = llm.get_tokenizer()
for budget in (0, 3, None, -1):
    params = SamplingParams(temperature=0, max_tokens=30, thinking_token_budget=budget)
    assert params.clone() == params
    (output,) = llm.generate(["what is the"], params)
    thought, end, _ = output.outputs[0].text.partition(MARKS["reasoning_end_str"])
    assert bool(end) == (budget in (0, 3)) and (not end or len(tokenizer.encode(thought)) == budget)
for wrong in (-2, 1.5, True):
    with pytest.raises(ValueError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=wrong)
for config in ({"reasoning_stop_str": "x"}, "x", SimpleNamespace(end="x")):
    with pytest.raises(ValueError, match=r"reasoning_config=.* is not supported; nanovllm reads reasoning_start_str"):
        EngineArgs(model=sys.argv[1], reasoning_config=config)
with pytest.raises(ValueError, match="reasoning_end_str=5 must be a non-empty string"):
    LLM(model=sys.argv[1], reasoning_config={"reasoning_end_str": 5})
