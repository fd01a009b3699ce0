"""Perplexity of texts given with their token ids; only each token's own log-probability."""

import sys

import numpy as np
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import destroy_model_parallel

llm = LLM(sys.argv[1], max_model_len=512, download_dir="/no/such/directory")
tokenizer = llm.get_tokenizer()
texts = ["The days are Monday, Tuesday, Wednesday, Thursday", "qzx vv Monday kkk Thursday"]
inputs = [{"prompt": text, "prompt_token_ids": tokenizer.encode(text)} for text in texts]
outputs = llm.generate(inputs, SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0.0), use_tqdm=False)
losses = []
for text, given, output in zip(texts, inputs, outputs, strict=True):
    assert output.prompt == text and output.prompt_token_ids == given["prompt_token_ids"]
    logprobs = output.prompt_logprobs[1:]
    assert all(len(at) == 1 for at in logprobs)
    values = [at[i].logprob for at, i in zip(logprobs, output.prompt_token_ids[1:], strict=True)]
    losses.append(-np.mean(values))
assert 0 < losses[0] < losses[1], losses
old = llm.generate(prompts=None, prompt_token_ids=[i["prompt_token_ids"] for i in inputs],
                   sampling_params=SamplingParams(prompt_logprobs=0, max_tokens=1, flat_logprobs=True))  # fmt: skip
assert old[0].prompt_logprobs.token_ids == inputs[0]["prompt_token_ids"][1:], "flat log-probabilities have columns"
position = inputs[0]["prompt_token_ids"][3]
assert old[0].prompt_logprobs[3][position].logprob == outputs[0].prompt_logprobs[3][position].logprob
destroy_model_parallel()
