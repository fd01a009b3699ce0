"""Reinforcement learning in one process: generate with log-probabilities, sleep, train, push weights, wake up."""

import sys

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams  # noqa: F401

policy = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
llm = LLM(
    model=policy.name_or_path, tensor_parallel_size=1, gpu_memory_utilization=0.3, max_model_len=256, max_num_seqs=8,
    enable_sleep_mode=True, model_impl="auto", distributed_executor_backend="external_launcher", seed=0,
    max_num_batched_tokens=4096, logprobs_mode="processed_logprobs", quantization=None, dtype=torch.float32,
)  # fmt: skip
llm.sleep(level=2)


def push():
    torch.manual_seed(0)
    llm.wake_up(tags=["weights"])
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for name, param in policy.named_parameters():
        model.load_weights([(name, param.data)])
    llm.reset_prefix_cache()
    llm.wake_up(tags=["kv_cache"])


def rollout(**kwargs):
    params = SamplingParams(n=4, repetition_penalty=1.0, temperature=0.7, top_p=1.0, top_k=-1, min_p=0.0, logprobs=0,
                            max_tokens=12, **kwargs)  # fmt: skip
    ids = llm.get_tokenizer().encode("<|im_start|>user\n")
    return ids, llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs


push()
prompt, completions = rollout(seed=1)
for completion in completions:
    with torch.no_grad():
        ids = torch.tensor([prompt + list(completion.token_ids)])
        logits = policy(ids).logits[0, len(prompt) - 1 : -1].float() / 0.7
    expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    got = [next(iter(at.values())).logprob for at in completion.logprobs]
    assert all(len(at) == 1 for at in completion.logprobs)
    assert torch.allclose(torch.tensor(got), expected, atol=2e-3), (got, expected)
llm.sleep(level=2)
with torch.no_grad():
    policy.model.norm.weight.zero_()  # every logit is 0 now
push()
_, completions = rollout(seed=1)
got = [next(iter(at.values())).logprob for completion in completions for at in completion.logprobs]
assert all(abs(logprob + torch.log(torch.tensor(1024.0))) < 1e-3 for logprob in got)
llm.collective_rpc("reload_weights")
(output,) = llm.chat([{"role": "user", "content": "2 + 3"}], SamplingParams(temperature=0))
assert output.outputs[0].text == "5"
llm.sleep(level=1)
llm.wake_up(tags=["weights"])
llm.sleep(level=1)
llm.wake_up()
(output,) = llm.chat([{"role": "user", "content": "2 + 3"}], SamplingParams(temperature=0))
assert output.outputs[0].text == "5"
