"""Shared by several test files: devices, prompts, the transformers oracle, and CUDA graphs emulated on the CPU."""

import os
import random
import re
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm import RequestError, SamplingParams
from nanovllm.core import NewSequences, PrefillBatch, Sequence
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.messages.block_copies import BlockCopies
from nanovllm.readouts import merged
from nanovllm.runner import model_runner
from nanovllm.runner.cuda_graphs import CUDAGraphs
from nanovllm.runner.inputs import to_device
from nanovllm.runner.prefill_graphs import PrefillGraphs, PrefillSizes
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Sampled
from nanovllm.sampling.features import COLUMNS, Features, make_features
from nanovllm.sampling.sampler import Sampler
from nanovllm.validation import has_feature

ROOT = Path(__file__).resolve().parents[1]


def run_python(*argv, check=True, cwd=ROOT, timeout=300, **environment):
    """Run Python on the CPU, with this tree's nanovllm; returns the ended process, whose output is text."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *map(str, argv)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, done.stderr[-5000:]
    return done


def in_threads(*functions):
    """Run each in a thread of its own, all at once, to its end."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gpu_param(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


DEVICES = ["cpu", gpu_param("cuda")]
FEATURES = Features._fields


def needs(feature):
    """For a test that needs a feature which its file does not: the library may be tested without it."""
    return pytest.mark.skipif(not has_feature(feature), reason=f"this copy of nanovllm has no {feature}")


def optional(module, name):
    """A name of a module of a feature; None where this copy of the library lacks it."""
    return getattr(import_module(f"nanovllm.{module}"), name) if has_feature(module) else None


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **params})


def prompt_of(length, seed=0):
    """Random token ids without those of TINY's bos and eos."""
    return random.Random(f"{length} {seed}").choices(range(2, 512), k=length)


def all_gone(pids: list[int], limit_s: float = 10.0) -> bool:
    """Wait until none of the processes runs; False after the limit."""

    def is_there(pid: int) -> bool:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")  # an orphan nobody waits for stays as a zombie in some containers
            return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + limit_s
    while any(is_there(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def refuses(text, error=RequestError):
    """pytest.raises, where the message has the text."""
    return pytest.raises(error, match=re.escape(text))


def tokens_of(outputs):
    return [output["token_ids"] for output in outputs]


def run(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def generate(llm, prompts, params):
    """Token ids of each completion."""
    return tokens_of(run(llm, prompts, params))


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
    def greedy(self, prompt, num_tokens):
        tokens, cache, new = [], None, prompt
        while len(tokens) < num_tokens:
            out = self.model(torch.tensor([new]), past_key_values=cache)
            cache = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            new = tokens[-1:]
        return tokens


def first_stop(texts, stop, include=False, min_tokens=0):
    """(string, text, tokens) where a stop string is first complete; None without one. ``texts``: of 1, 2, ... tokens.

    Of strings that are completed at the same character it is the first in the list.
    """
    before = 0
    for num_tokens, text in enumerate(texts, 1):
        text = text.rstrip("\ufffd")  # an incomplete character at the end is not known yet
        starts = [text.find(string, max(0, before - len(string) + 1)) for string in stop]
        found = [(start + len(stop[i]), i) for i, start in enumerate(starts) if start >= 0]
        if found and num_tokens > min_tokens:
            end, i = min(found)
            return stop[i], text[: end if include else starts[i]], num_tokens
        before = len(text)
    return None


def generate_with_logits(llm, prompts, max_tokens):
    """Greedy completions, and for each prompt the logits its tokens were chosen from, fp32 [max_tokens, V].

    Needs room for all prompts at once: then prompt i has request slot i. They are recorded where Python draws, so no
    CUDA graph.
    """
    assert llm.config.max_num_seqs >= len(prompts) and llm.model_runner.graphs is None
    sampler, logits_at = llm.model_runner.sampler, {}
    draw = sampler.draw

    def record(logits, req_indices):
        lengths = sampler.state.length[req_indices.long()].tolist()
        for req_idx, length, values in zip(req_indices.tolist(), lengths, logits.values, strict=True):
            logits_at[req_idx, length] = values.float().cpu().clone()
        return draw(logits, req_indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "draw", record)
        completions = generate(llm, prompts, greedy(max_tokens))
    assert len(logits_at) == len(prompts) * max_tokens
    return completions, [
        torch.stack([logits_at[i, len(prompt) + n] for n in range(max_tokens)]) for i, prompt in enumerate(prompts)
    ]


def record_calls(target, method, argument=0):
    """The list of the first, or another, argument of ``target.method`` from now on."""
    calls, original = [], getattr(target, method)

    def recorded(*args):
        calls.append(args[argument])
        return original(*args)

    setattr(target, method, recorded)
    return calls


class OnUpdate:
    """A bar for ``use_tqdm`` that calls ``action`` when it moves, or when it first moves; ``options``: it was made
    with these."""

    def __init__(self, action=lambda: None, once=False):
        self.action, self.once = action, once

    def __call__(self, **options):
        self.options = options
        return self

    def update(self, _=0):
        action = self.action
        if self.once:
            self.action = lambda: None
        action()

    def refresh(self, *_, **__):
        """Shows nothing."""

    close = refresh


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

    def replay(self, kind, size, run=None):
        size = self.padded_size(kind, size)
        if run is not None and (kind, size) not in self.captured:
            self.captured[kind, size] = run, run(size).clone()
        run, output = self.captured[kind, size]
        return output.copy_(run(size))

    def output(self, kind, size):
        return self.captured[kind, self.padded_size(kind, size)][1]


def use_graphs_on_cpu(llm):
    """Pad decode batches and prefills to captured sizes, as with CUDA graphs."""
    runner = llm.model_runner
    sizes = PrefillSizes.of(llm.config, SimpleNamespace(captures_prefill=True))
    parts = [part for part in runner.parts if part.padded_lengths(1, 1)]
    tables = runner.request_state.block_tables
    runner.launchers.insert(-1, PrefillGraphs(sizes, tables, llm.config.max_model_len, parts))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(model_runner, "CUDAGraphs", EagerGraphs)
        runner.capture_cudagraph()
    return llm


def interpret_fp8_exactly(monkeypatch):
    """Triton's interpreter drops the carry of a mantissa that rounds up to e4m3, and keeps no NaN: convert by torch."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding):
        if not (target.is_fp8e4nv() and source.is_fp32()):
            return convert(data, source, target, rounding)
        values = torch.from_numpy(data.view("float32").copy())
        assert not (values.abs() > 448).any(), "only sm_89 and later saturate by themselves"
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


def running(prompt, req_idx=0, block_table=(), completion=(), seed=0, stop_ids=(), allowed_mask=None, **params):
    """A sequence with a request slot, as it is after a preemption if it has a completion."""
    seq = Sequence([*prompt, *completion], SamplingParams(**params), seed=seed, min_tokens_stop_ids=stop_ids)
    seq.num_prompt_tokens, seq.allowed_mask = len(prompt), allowed_mask
    seq.req_idx, seq.block_table = req_idx, list(block_table)
    return seq


def prefill_batch(*chunks, num_sampled=None, num_targets=(), prefix_copies=(), block_copies=()):
    """A batch that computes tokens [start, stop) of one sequence per chunk, all of them sampled or the first ones.

    Token ids are 100 * sequence + position, request slots 5, 4, ..., blocks of 4 tokens 10 * sequence and up.
    ``num_targets``: by sequence the first target and how many; their ids are those of the tokens, negative.
    """
    seqs = []
    for i, (_, stop) in enumerate(chunks):
        seqs.append(running([100 * i + n for n in range(stop)], 5 - i, range(10 * i, 10 * i - (-stop // 4))))
        seqs[-1].seq_id = i
        if i in num_targets:
            from nanovllm.readouts.prompt_logprobs import PromptLogprobs

            first, n = num_targets[i]
            targets = -np.arange(100 * i, 100 * i + n, dtype=np.int32) - first
            seqs[-1].readout = PromptLogprobs(targets, first, 0)
    starts, stops = np.array(chunks, np.int32).T
    parts = [(seq, start, stop) for seq, (start, stop) in zip(seqs, chunks, strict=True)]
    each, ids = np.arange(len(chunks), dtype=np.int32), np.arange(len(chunks))
    return PrefillBatch(
        5 - each[:num_sampled], ids[:num_sampled], each[:num_sampled], 5 - each, starts, stops,
        np.concatenate([seq.tokens(start, stop) for seq, start, stop in parts]), len(each[:num_sampled]),
        NewSequences.of(seqs), {BlockCopies: BlockCopies(list(prefix_copies), list(block_copies))},
        readouts=merged((seq.readout, seq.seq_id, start, stop) for seq, start, stop in parts),
    )  # fmt: skip


class Slots:
    """The request slots of one rank: request state and sampler, host and device side together."""

    def __init__(self, max_num_seqs, max_blocks=1, max_model_len=32, vocab_size=64, tp=SINGLE_RANK, processed=False):
        self.state = RequestState(max_num_seqs, max_blocks, torch.device("cpu"), COLUMNS)
        self.features = make_features(self.state, max_model_len, vocab_size, processed)
        self.sampler = Sampler(self.state, tp, self.features)
        self.arrays = {}

    def add(self, *seqs):
        """A batch admits these; once before each ``send``."""
        new = NewSequences.of(seqs)
        rows = np.zeros(len(seqs), self.state.row)
        self.sampler.add(new, rows, self.arrays)
        self.state.add(new, rows, self.arrays)

    def send(self):
        """What the host has set goes to the device. Returns the number of words of each array."""
        for indices in (values for name, values in self.arrays.items() if name.endswith("indices")):
            assert len(set(indices.tolist())) == len(indices)
        tensors = to_device(self.arrays, self.state.device)
        self.state.write(tensors)
        self.sampler.write(tensors)
        self.arrays = {}
        return {name: len(values) for name, values in tensors.items()}

    def num_top(self, *req_indices):
        """Alternatives that a batch with these request slots reports."""
        self.features.logprobs.begin(Sampled(np.array(req_indices, np.int32)), {})
        return self.features.logprobs.num_top

    def used(self, *req_indices):
        """Names of the features that a batch with these request slots uses."""
        used = self.sampler.used_by(np.array(req_indices, np.int32))
        return [name for name in FEATURES if getattr(self.features, name) in used]
