"""A progress bar of one's own, long prompts in a small engine, conversations as lists of parts."""

import sys

from tqdm import tqdm
from vllm import LLM, SamplingParams

bars = []


class Bar(tqdm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "disable": False})
        bars.append(self)


llm = LLM(model=sys.argv[1], max_num_seqs=2, max_num_batched_tokens=64, num_gpu_blocks_override=64, block_size=16)
outputs = llm.generate(["count " * 60] * 5, SamplingParams(temperature=0, max_tokens=4), use_tqdm=Bar)
assert len(outputs) == 5 and bars
parts = [{"role": "user", "content": [{"type": "text", "text": "2 + 3"}]}]
(output,) = llm.chat(parts, SamplingParams(temperature=0))
assert output.outputs[0].text == "5"
assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 64
