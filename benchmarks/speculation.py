"""Speculation by lookup: how much faster it is where drafts are right, and what it costs where there are none.

    python benchmarks/speculation.py                 # on a GPU: 8B, 8B with FP8 weights, 0.6B; four minutes
    python benchmarks/speculation.py --host          # microseconds of host time per step, without a GPU
    python benchmarks/speculation.py --cpu MODEL     # a pretrained model on the CPU: copying code, free text

On the GPU, weights are random in the published shapes, so the continuation is made one that repeats the prompt: what
attention and MLP add to the residual is scaled down to a thousandth, and the LM head is the embedding. Then each token
is followed by itself, whatever the batch and the rounding; the model computes all that it always does. A stand-in for
the proposer looks up as always, and then drafts that token with a wrong one in a given place, so each step accepts
exactly as many tokens as the case says. Without the stand-in, prompts of random tokens are sampled at temperature 0.6
from the untouched weights: nothing ever matches.

Plain and speculating runs take turns on one engine. Prints a table, and ends with one line of JSON.
"""

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.workloads import headline, single, write_model

PROMPT, OUTPUT = 512, 256  # tokens of a sequence where drafts are right
# tokens a step, that is one more than are accepted; drafted tokens
CASES = [(3, 3), (4, 7)]
TOKEN = 2000  # that every step without a draft samples: a word, and no end-of-sequence token
FUNCTION = '''def moving_average(values, window):
    """The mean of the last values at each place."""
    if window < 1:
        raise ValueError("window must be positive")
    result = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
            result.append(total / window)
        else:
            result.append(total / (index + 1))
    return result
# end of the function
'''


def rate(llm: Any, prompts: list, params: Any) -> float:
    """Generated tokens per second."""
    start = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = perf_counter() - start
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs) / seconds


def turns(llm: Any, runs: int, run: Any) -> tuple[float, float]:
    """Medians of the rates without and with speculation, which take turns."""
    speculator, rates = llm.scheduler.speculator, ([], [])
    propose = speculator.propose
    for turn in range(runs):
        for with_drafts in (False, True):
            speculator.propose = propose if with_drafts else lambda *_: None
            llm.reset_prefix_cache()
            rates[with_drafts].append(run(turn))
    return median(rates[0]), median(rates[1])


def repeat_tokens(model: Any) -> None:
    """Each token is followed by itself."""
    import torch

    with torch.inference_mode():
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                scale = getattr(linear, "weight_scale", None)
                (linear.weight if scale is None else scale).mul_(1e-3)
        if model.lm_head.weight is not model.model.embed_tokens.weight:
            model.lm_head.weight.copy_(model.model.embed_tokens.weight)


class Scripted:
    """Drafts the last token over and over, with another one in place ``num_right``; looks up all the same."""

    def __init__(self, speculator: Any, num_right: int, length: int):
        self.lookup, self.num_right, self.length = type(speculator)._draft.__get__(speculator), num_right, length
        speculator._draft = self

    def __call__(self, seq: Any, room: int) -> tuple:
        _, lookup, _ = self.lookup(seq, room)
        lookup.awaits = False
        draft = np.full(min(self.length, room), seq.tokens(seq.num_tokens - 1, seq.num_tokens)[0], np.int32)
        draft[self.num_right :] ^= 1
        return draft, lookup, float(min(self.num_right, room))


def right_drafts(llm: Any, size: str, batches: list[int], show: Any) -> None:
    from nanovllm import SamplingParams

    repeat_tokens(llm.model_runner.model)
    llm.model_runner.synchronize()
    speculator, rng = llm.scheduler.speculator, Random(7)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    for batch in batches:
        prompts = [[rng.randint(3, 10_000) for _ in range(PROMPT)] for _ in range(batch)]
        for tokens, length in CASES:
            Scripted(speculator, tokens - 1, length)
            before = llm.metrics()
            plain, fast = turns(llm, 3, lambda _, prompts=prompts: rate(llm, prompts, params))
            after = llm.metrics()
            drafts, accepted = (after[f"spec_decode_num_{x}"] - before[f"spec_decode_num_{x}"]
                                for x in ("drafts", "accepted_tokens"))  # fmt: skip
            each = f"{1 + accepted / max(1, drafts):.2f} tokens a step, {length} drafted"
            show(size, f"{batch} sequences, {each}", plain, fast)
    del speculator._draft


def no_drafts(llm: Any, size: str, show: Any, with_headline: bool) -> None:
    from nanovllm import SamplingParams

    def run(workload: Any) -> float:
        params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]
        return rate(llm, workload.prompts, params)

    vocab = llm.config.model_config.vocab_size
    show(size, "single, no match", *turns(llm, 5, lambda turn: run(single().redrawn(turn, vocab))))
    if with_headline:
        show(size, "headline, no match", *turns(llm, 2, lambda turn: run(headline().redrawn(turn, vocab))))


def on_gpu(runs: list[tuple[str, dict, list[int]]]) -> list[dict]:
    from nanovllm import LLM

    results: list[dict] = []

    def show(size: str, case: str, plain: float, fast: float) -> None:
        print(f"{size:<9}{case:<46}{plain:>12,.0f}{fast:>12,.0f}{fast / plain:>8.3f}", flush=True)
        results.append({"model": size, "case": case, "plain": plain, "speculating": fast, "ratio": fast / plain})

    print(f"{'model':<9}{'case':<46}{'plain tok/s':>12}{'drafts':>12}{'ratio':>8}")
    for size, options, batches in runs:
        with tempfile.TemporaryDirectory() as directory:
            write_model(directory, size)
            options = {"load_format": "dummy", "skip_tokenizer_init": True, "quiet": True, **options}
            with LLM(directory, speculative_config={"method": "ngram"}, **options) as llm:
                name = size + " FP8" * ("quantization" in options)
                if "quantization" not in options:
                    rate(llm, [[5] * 64], None)  # the first requests
                    no_drafts(llm, name, show, with_headline=size == "0.6b")
                right_drafts(llm, name, batches, show)
        gc.collect()
    return results


def host(batch: int = 8, num_steps: int = 300, length: int = 3) -> dict[str, float]:
    """Microseconds of the loop's thread per step that verifies drafts of ``batch`` sequences, all right, found by the
    real lookup; the launches are stand-ins that return at once."""
    from benchmarks import host_overhead
    from nanovllm import LLM, SamplingParams

    class Agrees(host_overhead.ReturnsAtOnce):
        num_steps = 0

        def run_sampler(self, masks: None = None) -> tuple:
            batch, launcher = self.runner._computed.step.batch, self.runner._computed.launcher
            if getattr(batch, "drafts", None) is None:
                return super().run_sampler(masks)
            self.num_steps += 1
            self.runner._computed = None
            rows = launcher.rows_on_host(batch)
            drafts = np.where(batch.drafts < 0, TOKEN, batch.drafts)
            self.sampled_tokens[rows[:, :-1]] = drafts
            self.sampled_tokens[rows[:, -1]] = drafts[:, 0]
            return None, None

    with tempfile.TemporaryDirectory() as directory:
        host_overhead.make_engine(1, directory).exit()  # the config of its model
        with LLM(directory, load_format="dummy", skip_tokenizer_init=True, device="cpu", quiet=True, max_num_seqs=16,
                 max_model_len=4096, num_kvcache_blocks=16 * 16,
                 speculative_config={"method": "ngram", "num_speculative_tokens": length,
                                     "adaptive": False}) as llm:  # fmt: skip
            # else it would decode plainly in turn, as launches that return at once gain nothing
            sampler = Agrees(llm.model_runner)
            sampler.sampled_tokens.fill(TOKEN)
            llm.model_runner.max_in_flight = 1
            params = SamplingParams(temperature=0.6, max_tokens=4096 - 700, ignore_eos=True)
            # a prompt that repeats every four tokens, as the sampled ones do
            for i in range(batch):
                llm.add_request([1000 + 10 * i + j for j in range(4)] * 150, params)
            while sampler.num_steps < 20:
                llm.advance()
            first, start = sampler.num_steps, thread_time()
            while sampler.num_steps < first + num_steps:
                llm.advance()
            step_us = (thread_time() - start) * 1e6 / num_steps
            metrics = llm.metrics()
    accepted = metrics["spec_decode_num_accepted_tokens"] / metrics["spec_decode_num_drafts"]
    print(f"host: {step_us:.0f} us per step that verifies {batch} drafts, {accepted:.2f} tokens of each accepted")
    return {"batch": batch, "step_us": step_us, "accepted": accepted}


def on_cpu(model: str, runs: int) -> list[dict]:
    """A pretrained chat model: greedy, one sequence."""
    from nanovllm import LLM, SamplingParams

    tasks = {
        "copying a function": f"Repeat this code exactly, without any change.\n```python\n{FUNCTION}```",
        "free text": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    }
    results = []
    with LLM(model, device="cpu", quiet=True, max_model_len=1024, speculative_config={"method": "ngram"}) as llm:
        params = SamplingParams(temperature=0, max_tokens=200)
        for name, task in tasks.items():
            prompt = llm.apply_chat_template([{"role": "user", "content": task}])
            rate(llm, [prompt], params)
            before = llm.metrics()
            plain, fast = turns(llm, runs, lambda _, prompt=prompt: rate(llm, [prompt], params))
            after = llm.metrics()
            drafts, accepted = (after[f"spec_decode_num_{x}"] - before[f"spec_decode_num_{x}"]
                                for x in ("drafts", "accepted_tokens"))  # fmt: skip
            counts = f"{drafts} drafts, {accepted} tokens accepted"
            print(f"{name:<20}{plain:>8.1f}{fast:>8.1f} tok/s{fast / plain:>8.2f}   {counts}", flush=True)
            results.append({"case": name, "plain": plain, "speculating": fast, "ratio": fast / plain})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", action="store_true", help="host time per step, without a GPU")
    parser.add_argument("--cpu", metavar="MODEL", help="a pretrained chat model, on the CPU")
    parser.add_argument("--runs", type=int, default=3, help="of each kind, with --cpu")
    args = parser.parse_args()
    results: dict[str, Any] = {"benchmark": "speculation"}
    if args.host:
        results["host"] = host()
    elif args.cpu:
        results["cpu"] = on_cpu(args.cpu, args.runs)
    else:
        runs = [("8b", {}, [1, 4, 8]), ("8b", {"quantization": "fp8"}, [1]), ("0.6b", {}, [1, 8])]
        results |= {"gpu": on_gpu(runs), "host": host()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
