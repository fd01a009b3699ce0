"""What the host spends per decode step, measured without a GPU.

    python benchmarks/host_overhead.py [--batch 1 64 256 1024] [--steps 400]

The real engine loop (schedule, prepare the inputs, postprocess) runs one launch ahead, as on a GPU; only
the launches themselves are stand-ins that return random token ids at once. Two cases:

    steady   the batch neither grows nor shrinks; each sequence gets a new block every 256 steps
    churn    lengths are drawn from a range, and as many requests wait as run: sequences finish and others take
             their request slots. Reported: its decode steps, their extra cost per changed sequence (new block or
             finished), and its prefills per new sequence.

Times are CPU time of the loop's thread, so other work on the machine does not count; the steady step's wall time is
printed too.
Ends with one line of JSON. ``--target`` makes it fail where a decode step of either case is above 150 us + 1 us per
changed sequence.
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

VOCAB_SIZE = 151_936
PARTS = ("schedule", "prepare", "postprocess")
STEP_US, CHANGED_US = 150, 1  # the target


class ReturnsAtOnce:
    """Stands in for the launches of a ``ModelRunner``: every request slot gets another token id."""

    def __init__(self, runner: Any, seed: int = 0):
        self.runner, self.sampled_tokens = runner, runner.request_state.sampled_tokens.numpy()
        shape = self.sampled_tokens.shape
        self.token_ids = np.random.default_rng(seed).integers(1000, VOCAB_SIZE, shape, dtype=np.int32)
        runner.write, runner.run_sampler = lambda batch, tensors: None, self.run_sampler
        for launcher in runner.launchers:
            launcher.run = lambda step: (None, None)

    def run_sampler(self, masks: None = None) -> tuple:
        self.runner._computed = None
        self.token_ids ^= 1
        self.sampled_tokens[:] = self.token_ids
        return None, None


def make_engine(batch: int, directory: str) -> Any:
    """An engine of ``batch`` sequences with a minimal model."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "eos_token_id": 0,
    }  # fmt: skip
    Path(directory, "config.json").write_text(json.dumps(config))
    from nanovllm import LLM

    llm = LLM(
        directory,
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        max_num_seqs=batch,
        max_num_batched_tokens=65536,
        max_model_len=4096,
        num_kvcache_blocks=batch * 16,
    )
    ReturnsAtOnce(llm.model_runner)
    llm.model_runner.max_in_flight = 1
    return llm


def add_requests(llm: Any, number: int, prompt: tuple[int, int], output: tuple[int, int], seed: int = 0) -> None:
    from nanovllm import SamplingParams

    rng, ids = Random(seed), np.random.default_rng(seed)
    for _ in range(number):
        tokens = ids.integers(1000, VOCAB_SIZE, rng.randint(*prompt)).tolist()
        llm.add_request(tokens, SamplingParams(temperature=0.6, max_tokens=rng.randint(*output), ignore_eos=True))


class Changes:
    """Counts the sequences that entered, grew or finished; ``scheduled`` is the latest batch."""

    def __init__(self, llm: Any):
        self.entered = self.changed = 0
        self.scheduled: Any = None
        schedule, postprocess = llm.scheduler.schedule, llm.scheduler.postprocess

        def counting_schedule():
            self.scheduled = batch = schedule()
            self.changed += len(getattr(batch, "new_blocks", ()))
            self.entered += len(getattr(batch, "new", ()))
            return batch

        def counting_postprocess(batch, token_ids):
            finished = postprocess(batch, token_ids)
            self.changed += len(finished)
            return finished

        llm.scheduler.schedule, llm.scheduler.postprocess = counting_schedule, counting_postprocess


def steady(batch: int, num_steps: int) -> dict[str, float]:
    """Microseconds per decode step of a constant batch (mean), and of its parts (median)."""
    from benchmarks.timeline import Timeline

    with tempfile.TemporaryDirectory() as directory, make_engine(batch, directory) as llm:
        prompt = (100, 1024) if batch < 1024 else (50, 256)
        add_requests(llm, batch, prompt, (2 * num_steps + 100, 2 * num_steps + 100))
        while llm.scheduler.waiting:
            llm.advance()
        for _ in range(20):
            llm.advance()
        changes = Changes(llm)
        start, wall_start = thread_time(), perf_counter()
        for _ in range(num_steps):
            llm.advance()
        step_us = (thread_time() - start) * 1e6 / num_steps
        wall_us = (perf_counter() - wall_start) * 1e6 / num_steps
        changed = changes.changed / num_steps
        with Timeline(llm).recording() as timeline:  # the parts, in further steps
            for _ in range(num_steps):
                llm.advance()
        us = {part: median(step.host_us(part) for step in timeline.steps) for part in PARTS}
    return {
        "batch": batch,
        "step_us": round(step_us, 1),
        "wall_us": round(wall_us, 1),
        "token_us": round(step_us / batch, 3),
        "changed_per_step": round(changed, 2),
        "target_us": target_us(changed),
        **{f"{part}_us": round(us[part], 1) for part in PARTS},
    }


def churn(batch: int, step_us: float) -> dict[str, float]:
    """Requests that come and go: microseconds per decode step, per changed sequence beyond a steady step, per entry."""
    from nanovllm.core import DecodeBatch

    decode_us, prefill_us, steps, changed = 0.0, 0.0, 0, 0
    with tempfile.TemporaryDirectory() as directory, make_engine(batch, directory) as llm:
        add_requests(llm, 2 * batch, (100, 400), (100, 400))
        while llm.scheduler.table.free_req_indices:
            llm.advance()
        changes = Changes(llm)
        while not llm.scheduler.is_finished() or llm._in_flight:
            before, start = changes.changed, thread_time()
            llm.advance()
            spent_us = (thread_time() - start) * 1e6
            if isinstance(changes.scheduled, DecodeBatch):
                decode_us += spent_us
                steps += 1
                changed += changes.changed - before
            else:
                prefill_us += spent_us
    return {
        "batch": batch,
        "step_us": round(decode_us / steps, 1),
        "changed_per_step": round(changed / steps, 2),
        "target_us": target_us(changed / steps),
        "changed_us": round(max(0.0, decode_us - steps * step_us) / max(1, changed), 2),
        "entered_us": round(prefill_us / changes.entered, 1),
    }


def target_us(changed_per_step: float) -> float:
    return round(STEP_US + CHANGED_US * changed_per_step, 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Microseconds of host time per decode step, without a GPU.")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--target", action="store_true", help="exit with 1 where a step is above the target")
    args = parser.parse_args(argv)

    gc.freeze()
    results, met = [], True
    print(f"{'batch':>6}{'us/step':>10}{'wall us':>9}{'us/token':>10}{'target':>8}"
          + "".join(f"{part:>13}" for part in PARTS)
          + f"{'churn us/step':>15}{'target':>8}{'us/change':>11}{'us/entry':>10}")  # fmt: skip
    for batch in args.batch:
        even = min((steady(batch, args.steps) for _ in range(2)), key=lambda figures: figures["step_us"])
        moving = churn(batch, even["step_us"])
        met &= even["step_us"] <= even["target_us"] and moving["step_us"] <= moving["target_us"]
        print(f"{batch:>6}{even['step_us']:>10.1f}{even['wall_us']:>9.1f}{even['token_us']:>10.3f}{even['target_us']:>8.1f}"
              + "".join(f"{even[f'{part}_us']:>13.1f}" for part in PARTS)
              + f"{moving['step_us']:>15.1f}{moving['target_us']:>8.1f}{moving['changed_us']:>11.2f}"
              + f"{moving['entered_us']:>10.1f}")  # fmt: skip
        results.append({"steady": even, "churn": moving})
    print(json.dumps({"benchmark": "host_overhead", "results": results}))
    if args.target and not met:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
