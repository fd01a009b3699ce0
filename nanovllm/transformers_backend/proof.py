"""The proof of a start: a model of transformers gives its own numbers here, or is refused by name.

Three comparisons, each blind where the others see. *Modules*: every exchanged linear layer and norm, on random inputs.
*Attention calls*: each one on the q, k, v that transformers gives it, on scores sharp enough to show a wrong scale or
softcap, and on a long context with one dominating key on either side of its window's edge. No rounding accumulates, so
bf16 hides no fault. *Batches*: logits of two packed, chunked and paged prompts, against each prompt alone; and whether
a prompt depends on its neighbour.

T tokens, H query heads, K KV heads, D head size, BS tokens of a block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.layers.attention import Attention
from nanovllm.layers.context import Context
from nanovllm.quantization.fp8.numbers import E4M3
from nanovllm.transformers_backend.config import refusal
from nanovllm.transformers_backend.interface import RECORDED, Call, Mask, Recorder
from nanovllm.transformers_backend.layers import MLP, NUM_PLAIN, Experts, Linear, Norm
from nanovllm.transformers_backend.model import TransformersCausalLM
from nanovllm.transformers_backend.rotation import random_inputs

NUM_TOKENS = 1, 19  # inputs of exchanged modules; a product of one token runs other kernels
CHUNKS = ((0, 9, 0, 15), (9, 21, 15, 16), (21, 22, 16, 17), (22, 23, 0, 0))  # start and stop in each prompt
SHARPNESS = 3.0  # standard deviation of random scores: a scale 10 % off moves the weights by a fifth
REACH = 9  # keys past a window's edge
MAX_UNWINDOWED = 2048  # tokens of the longest context where no window limits it
# Largest relative differences, fp32 and 16 bits. One rounding to bf16 is 0.004; a fault of a call is 0.05 and more.
MODULES, CALLS = (1e-4, 0.01), (1e-3, 0.02)
FP8_MODULES = 0.06  # inputs are rounded to e4m3, too
PACKED_MODULES = 2  # times the tolerance: kernels round a group's zero and scale differently from PyTorch
# Batches accumulate rounding: as much as one prompt's own, times a factor, within limits. A wrong computation is off by
# about 1.
ROUNDING, BATCHES, MAX_BATCHES, NUM_BATCHES = 3, (2e-4, 0.05), 0.5, 3
NEIGHBOURS = 1e-4, 0.05  # change of a prompt's logits with its neighbour: other tiles, other experts' rounding


def prove(model: TransformersCausalLM, block_size: int, captures: bool = False, rehearses: bool = False) -> None:
    """Compare a loaded model with transformers' own numbers; the KV cache is not there yet.

    Args:
        captures: a CUDA graph will capture decode steps, so none may wait for the device.
        rehearses: launch everything and compare nothing: kernels only compile.

    Raises:
        CheckpointError: they differ.
    """
    findings = Findings(model.name, rehearses)
    caches = [(layer.k_cache, layer.v_cache) for layer in model.attentions]
    try:
        prove_modules(model, findings)
        prove_rotations(model, findings)
        proof = CallProof(model, block_size, findings)
        model.logits(model.prompts(model.unrotated.device)[0], RECORDED, proof.recorder)
        findings.check()
        prove_batches(model, block_size, findings, captures)
    finally:
        for layer, kv in zip(model.attentions, caches, strict=True):
            layer.attach_cache(*kv)


class Findings:
    """Differences that are still on the device, each with its limit: to read them one by one would take a second."""

    def __init__(self, name: str, rehearses: bool):
        self.rehearses, self._name = rehearses, name
        self._found: list[tuple[torch.Tensor, str]] = []  # in parts of the limit

    def add(self, difference: torch.Tensor, limit: float, what: str) -> None:
        self._found.append((difference / limit, what))

    def check(self) -> None:
        """Raises CheckpointError for the first difference above its limit."""
        found, self._found = self._found, []
        shares = torch.stack([share for share, _ in found]).tolist() if found else []
        for share, (_, what) in zip(shares, found, strict=True):
            if share > 1 and not self.rehearses:
                raise refusal(self._name, f"{what} (by {share:.2g} times the tolerance)")


def is_wide(dtype: torch.dtype) -> bool:
    return dtype.itemsize > 2


def dtype_of(model: TransformersCausalLM) -> torch.dtype:
    """The dtype that the model computes in."""
    return model.model.get_input_embeddings().weight.dtype


def row_differences(given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Differences of rows [T, N] in parts of the expected rows' norm, fp32 [T]; NaN counts as a large one."""
    given, expected = given.float(), expected.float()
    return ((given - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-20)).nan_to_num(nan=1e9, posinf=1e9)


def prove_modules(model: TransformersCausalLM, findings: Findings) -> None:
    """Compare each exchanged MLP, linear layer and norm with plain PyTorch, or with the module that it replaced."""
    dtype, device = dtype_of(model), model.unrotated.device
    generator = torch.Generator(device).manual_seed(0)
    for name, module in model.model.named_modules():
        if not isinstance(module, (MLP, Experts, Linear, Norm)):
            continue
        size = module.in_features if isinstance(module, Linear) else module.size
        dtypes = {param.dtype for param in module.parameters()}
        limit = MODULES[not is_wide(dtype)]
        limit = FP8_MODULES if E4M3 in dtypes else PACKED_MODULES * limit if torch.int32 in dtypes else limit
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, size, generator=generator, device=device).to(dtype)
            args: tuple[torch.Tensor, ...] = (x,)
            if isinstance(module, Experts):
                num_experts = min(NUM_PLAIN, len(module.down_proj))
                scores = torch.rand(num_tokens, num_experts, generator=generator, device=device)
                weights, ids = scores.topk(min(2, num_experts))
                args += ids + module.first_plain, weights.to(dtype)
            difference = row_differences(module(*args), module.plain(*args)).max()
            findings.add(difference, limit, f"{name} differs from transformers' own module")


def prove_rotations(model: TransformersCausalLM, findings: Findings) -> None:
    """Compare each exchanged rotary embedding with transformers' function in fp32."""
    limit = MODULES[not is_wide(dtype_of(model))]
    for rotation in model.model.rotations:
        for head_dim in sorted({call.key_dim for call in model.calls}):
            tensors = random_inputs(head_dim, dtype_of(model), model.unrotated.device)
            expected = rotation.theirs(*(x.float() for x in tensors))
            for given, wanted in zip(rotation(*tensors), expected, strict=True):
                difference = row_differences(given, wanted).max()
                findings.add(difference, limit, "the rotary embedding differs from transformers' own")


class CallProof:
    """Compares each attention call with transformers' function in fp32, as ``recorder`` meets them."""

    def __init__(self, model: TransformersCausalLM, block_size: int, findings: Findings):
        self._model, self._layers, self._block_size = model, iter(model.attentions), block_size
        self._findings, self._num_calls = findings, 0
        self.recorder = Recorder(model.name, model.config.max_model_len, self.compare)
        self._dtype, self._device = dtype_of(model), model.unrotated.device
        self._longest = max(map(self._length, model.calls))
        num_blocks = -(-self._longest // block_size)
        self._blocks = torch.randperm(num_blocks, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
        self._blocks = self._blocks.to(self._device, torch.int32)
        layer = model.attentions[0]
        shape = 2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim
        self._cache = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._expected: dict[Any, list[tuple[str, Any, torch.Tensor]]] = {}  # by the call, without its module

    def _length(self, call: Call) -> int:
        """Tokens of the long context of a call."""
        longest = self._model.config.max_model_len
        return min(longest, call.window + REACH if call.window else MAX_UNWINDOWED)

    def compare(self, call: Call, mask: Mask, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                out: torch.Tensor, sinks: torch.Tensor | None, serve: Any) -> None:
        """``serve``: transformers' function of q, k, v and an additive mask."""
        layer, limit = next(self._layers), CALLS[not is_wide(self._dtype)]
        layer.attach_cache(*self._cache)
        kind = type(call.module), *call[1:]
        if sinks is not None or kind not in self._expected:
            self._expected[kind] = list(self._made(call, mask, serve))
        for what, tensors, expected in [("its own q, k, v", (query, key, value), out), *self._expected[kind]]:
            given = self._attend(layer, tensors, sinks)
            place = f"attention of {type(call.module).__name__} (call {self._num_calls})"
            what = f"{place} differs from transformers' own with {what}"
            self._findings.add(head_difference(given, expected), limit, what)
        self._num_calls += 1

    def _made(self, call: Call, mask: Mask, serve: Any) -> Any:
        """Yield inputs that show faults: their name, q, k, v [1, heads, T, D], and transformers' result."""
        T = mask.additive.shape[-1]
        sharp = max(SHARPNESS, call.softcap)
        size = (sharp / (call.scale * call.key_dim**0.5)) ** 0.5
        for what, num_queries in (("sharp scores", T), ("sharp scores of one query", 1)):
            q, k, v = self._random(call, num_queries, T)
            tensors = q * size, k * size, v
            yield what, tensors, serve(*tensors, mask.additive[:, :, -num_queries:])
        n = self._length(call)
        allowed = mask.allowed(torch.tensor([[n - 1]], device=self._device), torch.arange(n, device=self._device)[None])
        row = torch.zeros(1, 1, 1, n, device=self._device).masked_fill_(~allowed, torch.finfo(torch.float32).min)
        for distance in (call.window - 1, call.window) if call.window else (n - 1,):
            q, k, v = self._random(call, 1, n)
            q = q[:, :1].expand_as(q)  # one direction for all heads: the key dominates in each
            place = n - 1 - distance
            k = k * 0.1
            k[:, :, place] = q[:, :1, 0] * (20 / (call.scale * q[0, 0].float().square().sum())).to(q)
            v[:, :, place] = 4.0
            yield f"a dominating key {distance} tokens before", (q, k, v), serve(q, k, v, row)

    def _random(self, call: Call, num_queries: int, num_keys: int) -> list[torch.Tensor]:
        generator = torch.Generator(self._device).manual_seed(num_keys)
        shapes = ((call.num_heads, num_queries, call.key_dim), (call.num_kv_heads, num_keys, call.key_dim),
                  (call.num_kv_heads, num_keys, call.value_dim))  # fmt: skip
        return [torch.randn(1, *each, generator=generator, device=self._device).to(self._dtype) for each in shapes]

    def _attend(self, layer: Attention, tensors: tuple[torch.Tensor, ...],
                sinks: torch.Tensor | None) -> torch.Tensor:
        """This library's attention of the last tokens in one paged sequence, as a step runs it -> [T, H, D]."""
        q, k, v = (x[0].transpose(0, 1) for x in tensors)
        stored = len(k) - len(q)
        run = partial(self._model.attend, layer, sinks=sinks)
        if stored:
            run(q[:0], k[:stored], v[:stored], context=self._context(0, stored))
        return run(q, k[stored:], v[stored:], context=self._context(stored, len(k)))

    def _context(self, start: int, stop: int) -> Context:
        positions = torch.arange(start, stop, device=self._device)
        slots = self._blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        ends = torch.tensor([0, stop - start, stop], dtype=torch.int32, device=self._device)
        is_decode = stop - start == 1
        return Context(
            positions.int(), slots.int(), ends[:1], ends[2:], self._blocks[None], stop,
            None if is_decode else ends[:2], None if is_decode else ends[::2].contiguous(), stop - start,
        )  # fmt: skip


def head_difference(given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest difference of [T, H, D] and [1, T, H, D], in parts of the head's largest result."""
    expected = expected[0].float()
    size = expected.norm(dim=-1).amax(0).clamp(min=1e-20)  # [H]
    difference = (given.float() - expected).norm(dim=-1).amax(0) / size
    return difference.nan_to_num(nan=1e9, posinf=1e9).max()


def prove_batches(model: TransformersCausalLM, block_size: int, findings: Findings, captures: bool) -> None:
    """Compare logits of packed prompts with transformers' eager attention; one prompt may not depend on the other.

    In 16 bits another prompt gets a chance: rounding may send a token to another expert.
    """
    dtype, device = dtype_of(model), model.unrotated.device
    for layer in model.attentions:
        shape = 2, 2 * max(2, -(-32 // block_size)), block_size, layer.num_kv_heads, layer.head_dim
        layer.attach_cache(*torch.zeros(shape, dtype=dtype, device=device))
    for seed in range(NUM_BATCHES):
        prompts = model.prompts(device, seed)
        theirs = [model.logits(ids, "eager") for ids in prompts]
        recorded = model.logits(prompts[0], RECORDED, Recorder(model.name, model.config.max_model_len))
        given = in_chunks(model, prompts, block_size, captures)
        rounding = float(centred(recorded, theirs[0]).max())
        limit = min(max(ROUNDING * rounding, BATCHES[not is_wide(dtype)]), MAX_BATCHES)
        difference = torch.stack([centred(*each).median() for each in zip(given, theirs, strict=True)]).max()
        if difference <= limit or is_wide(dtype) or findings.rehearses:
            break
    why = "it may mix the tokens of a batch, or keep states besides keys and values"
    findings.add(difference, limit, f"logits of a packed batch differ from transformers' own; {why}")
    others = [prompts[0], prompts[1].flip(0)]
    first = in_chunks(model, others, block_size, num_chunks=1)[0]
    moved = centred(first, given[0][: len(first)]).median()
    findings.add(moved, NEIGHBOURS[not is_wide(dtype)], "a prompt's logits change with another one in its batch")
    findings.check()


def centred(given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Differences of rows of logits [T, V], in parts of their deviation from the mean: [T]."""
    mean = expected.mean(-1, keepdim=True)
    return row_differences(given - mean, expected - mean)


def in_chunks(model: TransformersCausalLM, prompts: list[torch.Tensor], block_size: int,
              captures: bool = False, num_chunks: int = len(CHUNKS)) -> list[torch.Tensor]:
    """Logits of two prompts, fp32 [T, V] each: both packed, chunk by chunk, decoded at last."""
    device, given = prompts[0].device, [list[torch.Tensor](), list[torch.Tensor]()]
    half = max(2, -(-32 // block_size))
    table = torch.stack([torch.arange(2 * half - 1, half - 1, -1), torch.arange(half)]).to(device, torch.int32)
    for chunk in CHUNKS[:num_chunks]:
        parts = [(i, chunk[2 * i], chunk[2 * i + 1]) for i in (0, 1) if chunk[2 * i] < chunk[2 * i + 1]]
        ids, context = packed(prompts, parts, table, block_size)
        what = "a packed batch fails"
        if captures:
            what += ", or waits for the device, which enforce_eager=True allows"
        with model.refusing(what), refusing_waits(captures and not context.is_prefill):
            logits = model.compute_logits(model(ids, context)).float()
        logits = torch.cat(model.tp.all_gather(logits).unbind(), -1)
        lengths = [stop - start for _, start, stop in parts]
        for (i, _, _), rows in zip(parts, logits.split(lengths), strict=True):
            given[i].append(rows)
    return [torch.cat(rows) for rows in given]


@contextmanager
def refusing_waits(refuses: bool) -> Iterator[None]:
    """A wait for the device raises RuntimeError, if ``refuses``: a CUDA graph could not capture it."""
    if not refuses:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def packed(prompts: list[torch.Tensor], parts: list[tuple[int, int, int]], table: torch.Tensor,
           block_size: int) -> tuple[torch.Tensor, Context]:
    """Packed tokens start .. stop of prompts, (i, start, stop) each; one token of each is a decode step."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=table.device)

    places = [(i, place) for i, start, stop in parts for place in range(start, stop)]
    tokens = torch.stack([prompts[i][place] for i, place in places]).int()
    slots = [int(table[i, place // block_size]) * block_size + place % block_size for i, place in places]
    lengths, contexts = [stop - start for _, start, stop in parts], [stop for _, _, stop in parts]
    cu_q, cu_k = (F.pad(ints(each).cumsum(0), (1, 0)).int() for each in (lengths, contexts))
    is_decode = max(lengths) == 1
    return tokens, Context(
        ints([place for _, place in places]), ints(slots), ints([i for i, _, _ in parts]), ints(contexts), table,
        max(contexts), None if is_decode else cu_q, None if is_decode else cu_k, max(lengths),
    )  # fmt: skip
