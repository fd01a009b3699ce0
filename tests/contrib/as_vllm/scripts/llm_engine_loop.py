"""The engine loop: requests with names of their own, added and aborted while others run."""

import sys

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils import random_uuid

args = EngineArgs(model=sys.argv[1], max_num_seqs=4, disable_log_stats=True)
engine = LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
engine.add_request("aborted", "count to 100", SamplingParams(max_tokens=40, ignore_eos=True))
test_prompts = [
    ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
    ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=5, ignore_eos=True)),
]
names, finished, partial, aborted = [], {}, 0, []
while test_prompts or engine.has_unfinished_requests():
    if test_prompts:
        prompt, sampling_params = test_prompts.pop(0)
        names.append(f"request-{random_uuid()}")
        engine.add_request(names[-1], prompt, sampling_params)
    for output in engine.step():
        if output.request_id == "aborted":
            aborted.append(output.finished)
            if len(aborted) == 3:
                engine.abort_request(["aborted", "no such request"])
            continue
        assert isinstance(output, RequestOutput) and output.request_id in names
        if output.finished:
            assert output.request_id not in finished
            finished[output.request_id] = output
        else:
            partial += 1
            assert not all(completion.finished() for completion in output.outputs)

assert partial > 10, "unfinished requests are reported too"
assert set(finished) == set(names) and aborted == [False] * 3
a, b, c, d = (finished[name] for name in names)
assert len(a.prompt_logprobs) == len(a.prompt_token_ids) and a.prompt_logprobs[0] is None
assert len(a.outputs[0].logprobs) == len(a.outputs[0].token_ids)
assert [completion.index for completion in c.outputs] == [0, 1]
assert d.prompt is None and d.prompt_token_ids == [5, 6, 7] and len(d.outputs[0].token_ids) == 5
assert engine.get_num_unfinished_requests() == 0
engine.engine_core.shutdown()
