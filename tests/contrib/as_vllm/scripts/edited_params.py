"""One SamplingParams edited between tasks; ranks of prompt tokens; all in lists of token prompts."""

import sys

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.tokenizers import get_tokenizer

llm = LLM(
    model=sys.argv[1], gpu_memory_utilization=0.9, dtype="bfloat16", tensor_parallel_size=1, pipeline_parallel_size=1,
    data_parallel_size=1, enforce_eager=True, swap_space=4, seed=1234, max_num_seqs=128, max_num_batched_tokens=2048,
    revision="main",
)  # fmt: skip
tokenizer = get_tokenizer(sys.argv[1], tokenizer_mode="auto", trust_remote_code=False)
params = SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.0, repetition_penalty=1.0)
ids = tokenizer("<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n5<|im_end|>").input_ids
prompts = [TokensPrompt(prompt_token_ids=ids)] * 2

params.n, params.max_tokens, params.stop, params.logprobs = 3, 5, ["7"], 1
for output in llm.generate(prompts=prompts, sampling_params=params, use_tqdm=True):
    assert len(output.outputs) == 3
    assert all(len(completion.logprobs) == len(completion.token_ids) for completion in output.outputs)

params.temperature, params.max_tokens = 0, 3
texts = [completion.text for completion in llm.generate(prompts[:1], params)[0].outputs]
assert len(texts) == 3 and len(set(texts)) == 1, "greedy samples are equal, not refused"

params.n, params.temperature, params.prompt_logprobs, params.max_tokens = 1, 0, 1, 1
params.stop, params.detokenize = None, False
for output in llm.generate(prompts=prompts, sampling_params=params):
    at = output.prompt_logprobs[-2]
    assert next(iter(at)) == ids[-2] and at[ids[-2]].rank == 1
    assert all(1 <= len(at) <= 2 for at in output.prompt_logprobs[1:])
assert llm.llm_engine.model_config.max_seq_len_to_capture == 4096
destroy_model_parallel()
del llm.llm_engine.model_executor
destroy_distributed_environment()
