"""Outputs that a script changes, copies and sends to another process."""

import copy
import dataclasses
import json
import pickle
import sys

from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

llm = LLM(model=sys.argv[1], max_logprobs=5)
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
