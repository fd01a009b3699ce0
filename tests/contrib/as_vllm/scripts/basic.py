"""The first example of every tutorial: a few prompts, sampled."""

import sys

from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital of France is", "2 + 3"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model=sys.argv[1])
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")

assert [output.prompt for output in outputs] == prompts
assert all(0 < len(output.outputs[0].token_ids) <= 16 for output in outputs), "max_tokens is 16"
assert all(output.finished and output.outputs[0].finished() for output in outputs)
first = outputs[0]
assert first.prompt_logprobs is None and first.metrics is None and first.lora_request is None
assert first.outputs[0].logprobs is None and first.outputs[0].cumulative_logprob is None
assert isinstance(first.request_id, str) and first.num_cached_tokens == 0
assert sampling_params == SamplingParams(temperature=0.8, top_p=0.95), "the engine must not change it"
