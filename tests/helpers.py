"""Shared by several test files: devices, prompts, the transformers oracle, and CUDA graphs emulated on the CPU."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.runner import model_runner
from nanovllm.runner.cuda_graphs import CUDAGraphs
from nanovllm.runner.prefill_graphs import PrefillInputs, PrefillSizes

ROOT = Path(__file__).resolve().parents[1]


def gpu_param(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


DEVICES = ["cpu", gpu_param("cuda")]


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **params})


def prompt_of(length, seed=0):
    """Random token ids without those of TINY's bos and eos."""
    return random.Random(f"{length} {seed}").choices(range(2, 512), k=length)


def tokens_of(outputs):
    return [output["token_ids"] for output in outputs]


def generate(llm, prompts, params):
    """Token ids of each completion."""
    return tokens_of(llm.generate(prompts, params, use_tqdm=False))


class Reference:
    """Qwen3 of transformers, the oracle."""

    def __init__(self, path, dtype=torch.float32, device="cpu"):
        from transformers import Qwen3ForCausalLM

        self.model = Qwen3ForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()

    @torch.inference_mode()
    def logits(self, *sequences):
        """After each token of equally long sequences: fp32 [len(sequences), L, V] on the CPU."""
        return self.model(torch.tensor(sequences, device=self.model.device)).logits.float().cpu()

    @torch.inference_mode()
    def greedy(self, prompt, num_tokens, held_back=(), until=0):
        """``num_tokens`` tokens, the first ``until`` of them without the ids ``held_back``."""
        tokens, cache, new = [], None, prompt
        while len(tokens) < num_tokens:
            out = self.model(torch.tensor([new]), past_key_values=cache)
            logits, cache = out.logits[0, -1], out.past_key_values
            if len(tokens) < until:
                logits[list(held_back)] = -torch.inf
            tokens.append(int(logits.argmax()))
            new = tokens[-1:]
        return tokens


def generate_with_logits(llm, prompts, max_tokens):
    """Greedy completions, and for each prompt the logits its tokens were chosen from, fp32 [max_tokens, V].

    Needs room for all prompts at once: then prompt i has request slot i. The hook needs a sampler called from Python,
    so no CUDA graph.
    """
    assert llm.config.max_num_seqs >= len(prompts) and llm.model_runner.graphs is None
    logits_at = {}

    def record(_, inputs):
        logits, requests = inputs[0].float().cpu(), inputs[1]
        req_indices, lengths = requests.req_indices.tolist(), requests.state.length.tolist()
        for req_idx, values in zip(req_indices, logits, strict=True):
            logits_at[req_idx, lengths[req_idx]] = values.clone()

    hook = llm.model_runner.sampler.register_forward_pre_hook(record)
    completions = generate(llm, prompts, greedy(max_tokens))
    hook.remove()
    assert len(logits_at) == len(prompts) * max_tokens
    return completions, [
        torch.stack([logits_at[i, len(prompt) + n] for n in range(max_tokens)]) for i, prompt in enumerate(prompts)
    ]


def record_calls(target, method):
    """The list of first arguments of ``target.method`` from now on."""
    calls, original = [], getattr(target, method)

    def recorded(*args):
        calls.append(args[0])
        return original(*args)

    setattr(target, method, recorded)
    return calls


def run_ahead(llm):
    """One step in flight, on the CPU too."""
    llm.model_runner.max_in_flight = 1
    return llm


class EagerGraphs(CUDAGraphs):
    """CUDA graphs without a GPU: a replay runs the captured function again, into the same output."""

    def __init__(self):
        self.sizes, self.captured = {}, {}

    def capture(self, kind, sizes, run):
        self.sizes[kind] = sizes
        for size in reversed(sizes):
            self.captured[kind, size] = run, run(size).clone()

    def replay(self, kind, size):
        size = self.padded_size(kind, size)
        run, output = self.captured[kind, size]
        return output.copy_(run(size))

    def output(self, kind, size):
        return self.captured[kind, self.padded_size(kind, size)][1]


def use_graphs_on_cpu(llm):
    """Pad decode batches and prefills to captured sizes, as with CUDA graphs."""
    runner = llm.model_runner
    runner.prefill_sizes = PrefillSizes.of(llm.config, SimpleNamespace(captures_prefill=True))
    runner.prefill_inputs = PrefillInputs(
        runner.prefill_sizes, runner.request_state.block_tables, llm.config.max_model_len
    )
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(model_runner, "CUDAGraphs", EagerGraphs)
        runner.capture_cudagraph()
    return llm
