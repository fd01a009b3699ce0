"""A reranker: the log-probabilities of "yes" and "no" as the only tokens allowed."""

import math
import sys

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.inputs.data import TokensPrompt

model = LLM(
    model=sys.argv[1], tensor_parallel_size=max(1, torch.cuda.device_count() and 1), max_model_len=1000,
    enable_prefix_caching=True, gpu_memory_utilization=0.8,
)  # fmt: skip
tokenizer = model.get_tokenizer()
tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
true_token, false_token = (tokenizer(text, add_special_tokens=False).input_ids[0] for text in ("8", "3"))
params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, allowed_token_ids=[true_token, false_token])


def score(question):
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    (output,) = model.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
    assert output.outputs[0].token_ids[0] in (true_token, false_token)
    logits = output.outputs[0].logprobs[-1]
    true = logits[true_token].logprob if true_token in logits else -10
    false = logits[false_token].logprob if false_token in logits else -10
    return math.exp(true) / (math.exp(true) + math.exp(false))


assert score("What is 37 + 45?") > 0.9 and score("what is 82 - 45?") < 0.1
destroy_model_parallel()
