"""Budgets of thinking, with marks of the engine's own."""

import sys
from types import SimpleNamespace

import pytest
import torch
from vllm import LLM, EngineArgs, SamplingParams
from vllm.config import ReasoningConfig, StructuredOutputsConfig
from vllm.sampling_params import StructuredOutputsParams

MARKS = {"reasoning_start_str": " the", "reasoning_end_str": " So: done."}
llm = LLM(model=sys.argv[1], reasoning_config=ReasoningConfig(**MARKS, reasoning_parser="qwen3"))
tokenizer = llm.get_tokenizer()
for budget in (0, 3, None, -1):
    params = SamplingParams(temperature=0, max_tokens=30, thinking_token_budget=budget)
    assert params.clone() == params
    (output,) = llm.generate(["what is the"], params)
    thought, end, _ = output.outputs[0].text.partition(MARKS["reasoning_end_str"])
    assert bool(end) == (budget in (0, 3)) and (not end or len(tokenizer.encode(thought)) == budget)
# With a reasoning parser structured outputs begin behind the thinking, unless enable_in_reasoning.
yes = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(choice=["yes"]))
END = torch.tensor(tokenizer.encode(MARKS["reasoning_end_str"]))


def says_end(token_ids, logits):
    logits[END[len(token_ids) : len(token_ids) + 1]] += 99.0  # a masked one stays at -inf
    return logits


yes.logits_processors = [says_end]
for more, thinks in (
    ({"reasoning_parser": "qwen3"}, True), ({}, False),
    ({"structured_outputs_config": {"reasoning_parser": "qwen3"}}, True),
    ({"structured_outputs_config": StructuredOutputsConfig(reasoning_parser="qwen3", enable_in_reasoning=True)}, False),
):  # fmt: skip
    llm = LLM(model=sys.argv[1], reasoning_config=MARKS, **more)
    (output,) = llm.generate(["what is the"], yes)
    expected = MARKS["reasoning_end_str"] + "yes" if thinks else "yes"
    assert (output.outputs[0].text, output.outputs[0].content) == (expected, "yes")
    assert output.outputs[0].reasoning == ("" if thinks else None)
with pytest.raises(ValueError, match="reasoning_parser='qwen4' is not supported"):
    LLM(model=sys.argv[1], structured_outputs_config={"reasoning_parser": "qwen4"})
for wrong in (-2, 1.5, True):
    with pytest.raises(ValueError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=wrong)
for config in ({"reasoning_stop_str": "x"}, "x", SimpleNamespace(end="x")):
    with pytest.raises(ValueError, match=r"reasoning_config=.* is not supported; nanovllm reads reasoning_start_str"):
        EngineArgs(model=sys.argv[1], reasoning_config=config)
with pytest.raises(ValueError, match="reasoning_end_str=5 must be a non-empty string"):
    LLM(model=sys.argv[1], reasoning_config={"reasoning_end_str": 5})
