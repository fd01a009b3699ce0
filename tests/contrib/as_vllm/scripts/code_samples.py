"""Many samples of each program, cut at the strings that begin the next function; seeded."""

import sys

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], max_model_len=256, max_num_seqs=32, trust_remote_code=False, dtype="float32")
stops = ["\ndef ", "\nclass ", "\nprint", "<|endoftext|>"]


def sample(seed):
    params = SamplingParams(n=8, temperature=0.9, top_p=0.95, max_tokens=24, stop=stops, seed=seed)
    outputs = llm.generate(["<|im_start|>user\n", "count to 3"], params, use_tqdm=False)
    return [[completion.text for completion in output.outputs] for output in outputs]


first = sample(seed=7)
assert [len(texts) for texts in first] == [8, 8]
assert len(set(first[0])) > 1 and not any(stop in text for texts in first for text in texts for stop in stops)
assert sample(seed=7) == first and sample(seed=8) != first
single = SamplingParams(n=1, temperature=0.9, top_p=0.95, max_tokens=24, stop=stops, seed=7 + 3)
assert llm.generate(["<|im_start|>user\n"], single)[0].outputs[0].text == first[0][3], "sample i has seed + i"
