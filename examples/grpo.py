# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""A whole GRPO loop (arXiv:2402.03300): nanovllm samples, transformers trains, on one device or on a CPU.

The demo model learns to answer without digits, which about half of its answers have: ``python examples/grpo.py``
takes half a minute on a laptop. Another model: ``--model M --prompt P``.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.utils.checkpoint import DEMO_MODEL


def reward(text: str) -> float:
    return float(not any(char.isdigit() for char in text))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model by GRPO to complete a prompt without digits.")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="directory or hub id; default: the demo model")
    parser.add_argument("--prompt", default="<|im_start|>user\n")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, default=64, help="completions in each step, the group")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)
    llm = LLM(args.model, gpu_memory_utilization=0.5, max_model_len=512, seed=args.seed, dtype="float32")
    params = SamplingParams(n=args.samples, temperature=1.0, max_tokens=args.max_tokens, logprobs=0)

    for step in range(args.steps):
        (output,) = llm.generate(args.prompt, params, use_tqdm=False)
        rewards = torch.tensor([reward(completion.text) for completion in output.outputs])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)

        ids, mask, sampled = pack(output, device)
        logits = policy(ids).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # of each token given those before it
        difference = ((logprobs - sampled).abs() * mask).max().item()  # the engine's weights are the policy's
        ratio = (logprobs - sampled).exp()
        loss = -(ratio * advantages.to(device)[:, None] * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

        llm.update_weights(policy.named_parameters())
        print(f"step {step + 1:2}  reward {rewards.mean():.3f}  max |logprob - trainer's| {difference:.1e}", flush=True)
    llm.exit()


def pack(output, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Completions padded on the right: token ids [N, L]; and of the tokens from the second on, [N, L - 1]: whether they
    were sampled, and with which log-probability.
    """
    num_prompt, N = len(output.prompt_token_ids), len(output.outputs)
    length = num_prompt + max(len(completion.token_ids) for completion in output.outputs)
    ids = torch.zeros(N, length, dtype=torch.long)
    mask, logprobs = torch.zeros(N, length - 1), torch.zeros(N, length - 1)
    for row, completion in enumerate(output.outputs):
        tokens = completion.token_ids
        ids[row, : num_prompt + len(tokens)] = torch.tensor(output.prompt_token_ids + tokens)
        generated = slice(num_prompt - 1, num_prompt - 1 + len(tokens))
        mask[row, generated] = 1.0
        values = [at[token].logprob for at, token in zip(completion.logprobs, tokens, strict=True)]
        logprobs[row, generated] = torch.tensor(values)
    return ids.to(device), mask.to(device), logprobs.to(device)


if __name__ == "__main__":
    main()
