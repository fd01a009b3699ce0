"""Log-probabilities: order, ranks, sums, text; and outputs that a script changes, copies, sends to another process."""

import copy
import dataclasses
import json
import math
import pickle
import sys
from itertools import pairwise

import pytest
from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams
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

named = SamplingParams(temperature=0, max_tokens=3, logprobs=2, logprob_token_ids=[7, 9])
(output,) = llm.generate(["2 + 3"], named)
assert all({7, 9} < at.keys() and len(at) <= 3 for at in output.outputs[0].logprobs)
(output,) = llm.generate(["2 + 3"], SamplingParams(max_tokens=3, logprob_token_ids=[]))
assert output.outputs[0].logprobs is None
for wrong in ({"logprob_token_ids": [7, 9], "logprobs": 3}, {"logprob_token_ids": list(range(129))}):
    with pytest.raises(ValueError, match=r"logprob_token_ids|logprobs=3"):
        SamplingParams(**wrong)

params = SamplingParams(n=2, temperature=0.5, max_tokens=8, logprobs=2, stop="<never>", include_stop_str_in_output=True)
(output,) = llm.generate(["spell banana"], params)
assert isinstance(output, RequestOutput) and isinstance(output.outputs[0], CompletionOutput)
output.outputs[0].text += " (edited)"
output.outputs[0].finish_reason = "answered"
output.outputs = output.outputs[:1]
again = pickle.loads(pickle.dumps(output))
assert again.outputs[0].text.endswith(" (edited)") and again.outputs[0].logprobs == output.outputs[0].logprobs
as_dict = dataclasses.asdict(again.outputs[0])
assert {"index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason"} <= set(as_dict)
json.dumps({"text": as_dict["text"], "ids": list(as_dict["token_ids"]), "sum": as_dict["cumulative_logprob"]})
assert copy.deepcopy(params) == params.clone() == params
edited = copy.deepcopy(params)
edited.temperature = 0.0
assert params.temperature == 0.5
