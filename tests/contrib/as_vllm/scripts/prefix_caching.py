"""Automatic prefix caching: the same answers with and without, and what was cached."""

import sys

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prefix = "You are an expert school principal, skilled in managing staff and students. " * 12
questions = ["Who are you?", "2 + 3", "spell banana"]
prompts = [f"<|im_start|>user\n{prefix}{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions]
sampling_params = SamplingParams(temperature=0.0)

regular = LLM(model=sys.argv[1], gpu_memory_utilization=0.4, enable_prefix_caching=False)
expected = [output.outputs[0].text for output in regular.generate(prompts, sampling_params)]
del regular
cleanup_dist_env_and_memory()

cached = LLM(model=sys.argv[1], enable_prefix_caching=True, gpu_memory_utilization=0.4)
cached.generate(prompts[0], sampling_params)
outputs = cached.generate(prompts, sampling_params)
assert [output.outputs[0].text for output in outputs] == expected
assert all(output.num_cached_tokens >= 256 for output in outputs)
assert cached.reset_prefix_cache()
(output,) = cached.generate(prompts[0], sampling_params)
assert output.num_cached_tokens == 0
