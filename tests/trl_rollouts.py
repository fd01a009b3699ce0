"""TRL's GRPOTrainer with rollouts by nanovllm, two steps on the demo model; test_grpo.py runs it in a subprocess.

Prints JSON for each run: its rewards, how far the weights moved, and the largest difference between the
log-probabilities of the rollouts and those that the trainer's model gives.
"""

import json
import os
import sys

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from nanovllm import LLM
from nanovllm.integrations.trl import rollout_func
from nanovllm.utils.checkpoint import DEMO_MODEL

TEMPERATURE = 0.8


def run(llm, prompts, sleep_level, directory):
    rollout, differences = rollout_func(llm, sleep_level), []

    def checked(prompts, trainer):
        out = rollout(prompts, trainer)
        assert llm.is_sleeping() and len(out["completion_ids"]) == len(prompts)
        for prompt, completion, logprobs in zip(*out.values(), strict=True):
            with torch.no_grad():
                logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
            differences.append((torch.tensor(logprobs) - expected).abs().max().item())
        return out

    args = GRPOConfig(
        output_dir=directory, per_device_train_batch_size=8, num_generations=4, max_completion_length=8, max_steps=2,
        learning_rate=3e-4, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
        temperature=TEMPERATURE, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(DEMO_MODEL), args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        rollout_func=checked,
    )  # fmt: skip
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    moved = (trainer.model.get_input_embeddings().weight - before).abs().max().item()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"rewards": rewards, "moved": moved, "difference": max(differences)}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sums = ["12 + 25 + 17", "28 + 7 + 19", "3 + 22 + 26", "14 + 15 + 29"]  # it cannot do them, so its answers differ
    chats = [[{"role": "user", "content": f"What is {numbers}?"}] for numbers in sums]
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64, "quiet": True}
    with LLM(logprobs_mode="processed_logprobs", **options) as llm:
        run(llm, chats, 1, sys.argv[1])
        run(llm, ["<|im_start|>user\n"] * 4, 2, sys.argv[1])
