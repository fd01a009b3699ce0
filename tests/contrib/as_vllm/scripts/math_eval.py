"""A benchmark of sums: chat-formatted prompts, stop strings and ids together, sorted back by request id."""

import re
import sys

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], tensor_parallel_size=1, pipeline_parallel_size=1, trust_remote_code=True)
tokenizer = llm.get_tokenizer()
problems = {"What is 37 + 45?": 82, "what is 82 - 45?": 37, "what is 5 minus 12": -7, "2 + 3": 5}
prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
    for q in problems
]
params = SamplingParams(
    temperature=0, top_p=1, max_tokens=2048, n=1, stop=["</s>", "<|im_end|>", "<|endoftext|>"],
    stop_token_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>"), 0],
)  # fmt: skip
outputs = sorted(llm.generate(prompts, params), key=lambda output: int(output.request_id))
assert [output.prompt for output in outputs] == prompts
answers = [int(re.search(r"-?\d+", output.outputs[0].text).group()) for output in outputs]
assert answers == list(problems.values())
for output in outputs:
    completion = output.outputs[0]
    assert completion.finish_reason == "stop" and completion.stop_reason is None, "the end of text has no reason"
    assert completion.token_ids[-1] == tokenizer.eos_token_id and "<|im_end|>" not in completion.text
