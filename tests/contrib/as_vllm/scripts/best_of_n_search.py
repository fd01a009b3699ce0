"""Search over steps: copies of the parameters, a replaced chat template, the end of text known by its reason."""

import copy
import sys

from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], gpu_memory_utilization=0.5, enable_prefix_caching=True, seed=42, tensor_parallel_size=1)
params = SamplingParams(temperature=0.8, max_tokens=32, top_p=1.0, stop=[", "], include_stop_str_in_output=True, n=1)
tokenizer = llm.get_tokenizer()
tokenizer.chat_template = tokenizer.chat_template
text = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Count from 28 to 33."}], add_generation_prompt=True, tokenize=False
)
greedy = copy.deepcopy(params)
greedy.temperature = 0.0
steps = []
for _ in range(10):
    (output,) = llm.generate([text + "".join(steps)], greedy, use_tqdm=False)
    completion = output.outputs[0]
    steps.append(completion.text)
    if completion.stop_reason is None:
        break
assert completion.finish_reason == "stop"
assert steps == ["28, ", "29, ", "30, ", "31, ", "32, ", "33"], steps
assert params.temperature == 0.8
