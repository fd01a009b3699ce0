"""Microseconds of every kernel but attention and all-reduce, against the time its memory traffic takes.

Checks each operation against its twin first. Times are medians of CUDA graph replays; linear layers run over the
weights of many distinct layers, so that the L2 cache does not hold them.

    python benchmarks/kernels.py [--shape 0.6b|8b] [--int4] [--bandwidth 4.3e12]

Prints tables for people and, as the last line, one line of JSON: {"table/operation/size": microseconds}.
"""

import argparse
import itertools
import json
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanovllm import kernels
from nanovllm.kernels.linear.reference import QKVEpilogue, Weight
from nanovllm.sampling.penalties import PenaltyTable

TOKENS = [1, 8, 64, 256, 16384]
LINEAR_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 4096, 16384]
# hidden size, intermediate size, query heads, KV heads (of 128), layers kept in memory
SAMPLING = "masks", "penalties", "filters", "gumbel", "token_logprobs"
SHAPES = {"0.6b": (1024, 3072, 16, 8, 28), "8b": (4096, 12288, 32, 8, 8)}
HEAD_DIM, VOCAB_SIZE, EPS = 128, 151_936, 1e-6


def microseconds(run, copies=1, repeats=15):
    """Median time of one `run`, over replays of a CUDA graph of `copies` of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            run()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[repeats // 2] * 1e3 / copies


def randn(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def check(name, actual, expected, limit=1e-2):
    error = float((actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9))
    if not error < limit:  # NaN fails too
        raise SystemExit(f"{name}: relative error {error:.2e} against the twin")


def operations(device_type):
    """Those of layers and of sampling: kernels, or for "cpu" their references."""
    ops = kernels.select(device_type)
    sampling = (ops.beside(f"nanovllm.sampling.{name}") for name in SAMPLING)
    return SimpleNamespace(**vars(ops), **{name: value for module in sampling for name, value in vars(module).items()})


def element_wise(ops, twins, shape, num_tokens):
    """{operation: (run once, bytes that must move)} of the operations around the linear layers."""
    hidden, intermediate, num_heads, num_kv_heads, _ = shape
    num_all_heads = num_heads + 2 * num_kv_heads
    x, weight = randn(num_tokens, hidden), randn(hidden)
    gate_up = randn(num_tokens, 2 * intermediate)
    qkv = randn(num_tokens, num_all_heads * HEAD_DIM)
    positions = torch.randint(0, 4096, (num_tokens,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(num_tokens + 256, device="cuda")[:num_tokens].int()
    caches = randn(2, num_tokens // 256 + 2, 256, num_kv_heads, HEAD_DIM)
    twin_caches = caches.clone()
    epilogue = QKVEpilogue(
        randn(HEAD_DIM), randn(HEAD_DIM), EPS, torch.randn(4096, HEAD_DIM, device="cuda"), positions, slots, *caches,
        num_heads, num_kv_heads,
    )  # fmt: skip

    check("rms_norm", ops.rms_norm(x, weight, EPS), twins.rms_norm(x, weight, EPS))
    check("act_and_mul", ops.act_and_mul(gate_up), twins.act_and_mul(gate_up))
    twin_epilogue = epilogue._replace(k_cache=twin_caches[0], v_cache=twin_caches[1])
    expected = twins.norm_rope_store(qkv, *twin_epilogue)
    check("norm_rope_store", ops.norm_rope_store(qkv.clone(), *epilogue), expected)
    check("norm_rope_store, cache", caches, twin_caches)

    channel_bytes = 2 * num_tokens
    return {
        "rms_norm": (lambda: ops.rms_norm(x, weight, EPS), 2 * hidden * channel_bytes),
        "act_and_mul": (lambda: ops.act_and_mul(gate_up), 3 * intermediate * channel_bytes),
        "norm_rope_store": (
            lambda: ops.norm_rope_store(qkv, *epilogue), 2 * num_all_heads * HEAD_DIM * channel_bytes
        ),
    }  # fmt: skip


def make_sampling_state(num_requests, **values):
    """The same values for every request; the stop id 7 is masked where min_len exceeds the length, 5."""
    defaults = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, min_len=0, length=5)
    columns = {
        name: torch.full(
            (num_requests,), values.get(name, default), device="cuda",
            dtype=torch.float32 if isinstance(default, float) else torch.int32,
        )
        for name, default in defaults.items()
    }  # fmt: skip
    columns["seed"] = torch.randint(-(2**31), 2**31 - 1, (num_requests, 2), device="cuda", dtype=torch.int32)
    columns["stop_ids"] = torch.full((num_requests, 16), -1, device="cuda", dtype=torch.int32)
    columns["stop_ids"][:, 0] = 7
    return SimpleNamespace(**columns)


def sampling(ops, twins, batch_size):
    """{operation: (run once, bytes that must move)} of a batch of logits."""
    logits = randn(batch_size, VOCAB_SIZE, scale=3.0)
    req_indices = torch.arange(batch_size, device="cuda", dtype=torch.int32)
    states = {
        "no filter": make_sampling_state(batch_size),
        "top-k 50": make_sampling_state(batch_size, temperature=0.7, top_k=50),
        "top-p 0.9": make_sampling_state(batch_size, temperature=0.7, top_p=0.9),
        "top-k, top-p, min-p": make_sampling_state(batch_size, temperature=0.7, top_k=50, top_p=0.9, min_p=0.02),
        "greedy": make_sampling_state(batch_size, temperature=0.0),
    }
    table = {}
    for name, state in states.items():
        thresholds = ops.filter_thresholds(logits, req_indices, state)
        if batch_size <= 64:
            expected = twins.filter_thresholds(logits, req_indices, state)
            check(f"filter_thresholds, {name}", thresholds.clamp(min=-9), expected.clamp(min=-9))
            values, _ = ops.gumbel_argmax(logits, req_indices, state, thresholds)
            expected, _ = twins.gumbel_argmax(logits, req_indices, state, thresholds)
            check(f"gumbel_argmax, {name}", values, expected, 1e-5)

        def filter_(state=state):
            return ops.filter_thresholds(logits, req_indices, state)

        def draw(state=state, thresholds=thresholds):
            return ops.gumbel_argmax(logits, req_indices, state, thresholds)

        size = logits.numel() * 2
        if name != "greedy":
            table[f"filter_thresholds, {name}"] = (filter_, 0 if name == "no filter" else size)
        if name in ("greedy", "no filter"):
            table[f"gumbel_argmax, {'greedy' if name == 'greedy' else 'temperature'}"] = (draw, size)

    min_len = make_sampling_state(batch_size, min_len=9)
    masked, expected = logits.clone(), logits.clone()
    ops.mask_stop_ids(masked, req_indices, min_len)
    twins.mask_stop_ids(expected, req_indices, min_len)
    check("mask_stop_ids", masked.clamp(min=-99), expected.clamp(min=-99))
    table["mask_stop_ids"] = (lambda: ops.mask_stop_ids(masked, req_indices, min_len), batch_size * 66)
    block_tables = torch.randint(0, 99, (batch_size, 16), device="cuda", dtype=torch.int32)
    length = min_len.length
    table["decode_inputs"] = (
        lambda: ops.decode_inputs(req_indices, length, length, block_tables, 256), batch_size * 32
    )  # fmt: skip
    return table


def masks_and_penalties(ops, twins, batch_size, num_entries=1024):
    """{operation: (run once, bytes that must move)} of the steps that requests ask for; a table of `num_entries`."""
    logits = randn(batch_size, VOCAB_SIZE, scale=3.0)
    req_indices = torch.arange(batch_size, device="cuda", dtype=torch.int32)
    ones = torch.ones_like(req_indices)
    state = make_sampling_state(batch_size)
    state.is_masked, state.is_penalized, state.repetition_penalty = ones, ones, ones * 1.1
    state.frequency_penalty, state.presence_penalty = ones * 0.3, ones * 0.2
    token_mask = torch.randint(-(2**31), 2**31 - 1, (batch_size, VOCAB_SIZE // 32), device="cuda", dtype=torch.int32)
    ids = torch.randperm(VOCAB_SIZE, device="cuda")[: 2 * num_entries].int().repeat(batch_size, 1)
    table = PenaltyTable(ones * num_entries, ones * 4, ids, ids % 5 - 1, torch.zeros_like(ids, dtype=torch.float32))
    tokens, size = ones * 7, logits.numel() * 2
    if batch_size <= 64:
        masked, expected = logits.clone(), logits.clone()
        ops.apply_token_mask(masked, req_indices, state, token_mask)
        twins.apply_token_mask(expected, req_indices, state, token_mask)
        check("apply_token_mask", masked.clamp(min=-99), expected.clamp(min=-99))
        twin_table = PenaltyTable(*(getattr(table, field.name).clone() for field in fields(table)))
        expected = twins.apply_penalties(logits, req_indices, state, tokens, twin_table)
        check("apply_penalties", ops.apply_penalties(logits, req_indices, state, tokens, table), expected, 1e-5)
        for num_top in (0, 5, 20):
            actual, expected = (each.token_logprobs(logits, tokens, num_top) for each in (ops, twins))
            bits = [0, *range(2 + num_top, 2 + 2 * num_top)]  # of logprobs; between them are rank and ids
            check("token_logprobs", actual[:, 1 : 2 + num_top], expected[:, 1 : 2 + num_top])
            check("token_logprobs", actual[:, bits].view(torch.float32), expected[:, bits].view(torch.float32), 1e-5)
    masked = logits.clone()
    return {
        "apply_token_mask": (lambda: ops.apply_token_mask(masked, req_indices, state, token_mask), 2 * size),
        "apply_penalties": (lambda: ops.apply_penalties(logits, req_indices, state, tokens, table), 3 * size),
        **{
            f"token_logprobs, {k}": (lambda k=k: ops.token_logprobs(logits, tokens, k), size) for k in (0, 1, 5, 20)
        },
    }  # fmt: skip


def new_weight(num_features, num_channels, is_int4):
    """Of a standard deviation that keeps the size of x; integers have symmetric groups of 128."""
    if not is_int4:
        return Weight(randn(num_features, num_channels, scale=num_channels**-0.5))
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (num_features, num_channels // 8), device="cuda").int()
    scale = torch.full((num_features, num_channels // 128), num_channels**-0.5 / 4.6, device="cuda")
    return Weight(words, scale.bfloat16())


def layer_chains(ops, twins, shape, num_tokens, is_int4=False):
    """All layers but their attention, twice: with our fused linear layers, and with cuBLAS between separate kernels.

    With `is_int4` cuBLAS multiplies the dequantized weights.
    """
    hidden, intermediate, num_heads, num_kv_heads, num_layers = shape
    q_width = num_heads * HEAD_DIM
    qkv_width = q_width + 2 * num_kv_heads * HEAD_DIM
    layers = [
        (
            new_weight(qkv_width, hidden, is_int4), new_weight(hidden, q_width, is_int4),
            new_weight(2 * intermediate, hidden, is_int4), new_weight(hidden, intermediate, is_int4),
        )
        for _ in range(num_layers)
    ]  # fmt: skip
    plain = [[weight.dequantize(torch.bfloat16) for weight in layer] for layer in layers]
    norm_weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    start = randn(num_tokens, hidden)
    positions = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
    caches = torch.zeros(2, num_tokens, 1, num_kv_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    cos_sin = torch.randn(num_tokens, HEAD_DIM, device="cuda")
    epilogue = QKVEpilogue(
        norm_weight[:HEAD_DIM], norm_weight[:HEAD_DIM], EPS, cos_sin, positions, positions, *caches,
        num_heads, num_kv_heads,
    )  # fmt: skip

    def chain(ops):
        x = start.clone()  # fused_linear may overwrite its residual
        for qkv, o, gate_up, down in layers:
            q = ops.qkv_linear(x, qkv, None, norm_weight, EPS, epilogue)
            x = ops.fused_linear(q.flatten(1), o, residual=x, allow_split_k=True)
            hidden_states = ops.fused_linear(x, gate_up, norm_weight=norm_weight, eps=EPS, act_mul="silu")
            x = ops.fused_linear(hidden_states, down, residual=x, allow_split_k=True)
        return ops.rms_norm(x, norm_weight, EPS)

    def cublas():
        x = start.clone()
        for qkv, o, gate_up, down in plain:
            q = ops.norm_rope_store(F.linear(ops.rms_norm(x, norm_weight, EPS), qkv), *epilogue)
            torch.addmm(x, q.flatten(1), o.t(), out=x)
            hidden_states = ops.act_and_mul(F.linear(ops.rms_norm(x, norm_weight, EPS), gate_up))
            torch.addmm(x, hidden_states, down.t(), out=x)
        return ops.rms_norm(x, norm_weight, EPS)

    # Both against the twins, loosely: rounding differs at every step of a long chain.
    expected = chain(twins)
    check("chain", chain(ops), expected, 0.1)
    check("chain through cuBLAS", cublas(), expected, 0.1)
    halves = [half for layer in layers for weight in layer for half in (weight.data, weight.scale) if half is not None]
    num_bytes = sum(half.nbytes for half in halves) // num_layers
    return (lambda: chain(ops)), cublas, num_bytes, num_layers


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--int4", action="store_true", help="weights of 4-bit integers, groups of 128")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second of the device")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device")
    shape = SHAPES[options.shape]
    torch.manual_seed(0)
    ops, twins = operations("cuda"), operations("cpu")
    result = {}

    def line(table, name, size, time, num_bytes):
        limit = num_bytes / options.bandwidth * 1e6
        print(f"{name:<40}{size:>8}{time:>10.2f}{limit:>10.2f}", flush=True)
        result[f"{table}/{name}/{size}"] = round(time, 2)

    header = f"{'µs':<40}{'tokens':>8}{'measured':>10}{'limit':>10}"
    print(f"Qwen3-{options.shape} on {torch.cuda.get_device_name()}\n\n{header}")
    for num_tokens in TOKENS:
        for name, (run, num_bytes) in element_wise(ops, twins, shape, num_tokens).items():
            line("element-wise", name, num_tokens, microseconds(run, 20), num_bytes)
    print(f"\n{header}")
    for batch_size in (1, 8, 64, 256):
        table = sampling(ops, twins, batch_size) | masks_and_penalties(ops, twins, batch_size)
        for name, (run, num_bytes) in table.items():
            line("sampling", name, batch_size, microseconds(run, 4), num_bytes)
    print(f"\n{header}  (of one layer without attention)")
    for num_tokens in LINEAR_TOKENS:
        fused, cublas, num_bytes, num_layers = layer_chains(ops, twins, shape, num_tokens, options.int4)
        for name, run in (("products, fused", fused), ("products, cuBLAS and unfused", cublas)):
            line("products", name, num_tokens, microseconds(run) / num_layers, num_bytes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
