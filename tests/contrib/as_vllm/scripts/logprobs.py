"""Log-probabilities of what was generated: order, ranks, sums, text."""

import math
import sys
from itertools import pairwise

import pytest
from vllm import LLM, SamplingParams
from vllm.logprobs import Logprob

llm = LLM(model=sys.argv[1], max_logprobs=10)
tokenizer = llm.get_tokenizer()
(output,) = llm.generate(["2 + 3"], SamplingParams(temperature=1.2, max_tokens=12, logprobs=5, seed=5, ignore_eos=True))
completion = output.outputs[0]
assert len(completion.logprobs) == len(completion.token_ids) == 12
for token_id, at in zip(completion.token_ids, completion.logprobs, strict=True):
    assert next(iter(at)) == token_id and 5 <= len(at) <= 6
    assert all(isinstance(x, Logprob) for x in at.values())
    top = sorted(at.values(), key=lambda x: x.rank)[:5]
    assert [x.rank for x in top] == [1, 2, 3, 4, 5]
    assert all(a.logprob >= b.logprob for a, b in pairwise(top))
    assert sum(math.exp(x.logprob) for x in at.values()) < 1 + 1e-4
    if "\ufffd" not in tokenizer.decode([token_id]):
        assert at[token_id].decoded_token == tokenizer.decode([token_id])
total = sum(at[i].logprob for i, at in zip(completion.token_ids, completion.logprobs, strict=True))
assert math.isclose(completion.cumulative_logprob, total, abs_tol=1e-3)
with pytest.raises(ValueError, match="10"):
    llm.generate(["2 + 3"], SamplingParams(logprobs=11))
(output,) = llm.generate(["2 + 3"], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=True))
assert output.prompt_logprobs[0] is None and len(output.outputs[0].logprobs[0]) == 1
