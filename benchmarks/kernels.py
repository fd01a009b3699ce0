"""Microseconds of every kernel but attention on the GPU at hand, against what its bytes need.

Checks each operation against its plain twin first. Times are medians of CUDA graph replays; matrix products run
over the weights of 28 distinct layers, so that the cache does not hold them.

    python benchmarks/kernels.py [--shape 0.6b|8b] [--bandwidth 4.3e12]

Prints tables for people and, as the last line, one line of JSON: {"table/row/size": microseconds}.
"""

import argparse
import itertools
import json

import torch
import torch.nn.functional as F

from nanovllm.kernels import activation, inputs, linear, norm, reference, rope_store, sample
from nanovllm.kernels import thresholds as filters

TOKENS = [1, 8, 64, 256, 16384]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 4096, 16384]
# hidden size, intermediate size, query heads, KV heads (of 128), layers kept in memory
SHAPES = {"0.6b": (1024, 3072, 16, 8, 28), "8b": (4096, 12288, 32, 8, 8)}
HEAD_DIM, VOCAB_SIZE, EPS = 128, 151_936, 1e-6


def microseconds(run, copies=1, repeats=15):
    """Median time of a replay of a graph of so many copies of `run`, for one of them."""
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
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return times[repeats // 2] * 1e3 / copies


def randn(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def check(name, actual, expected, limit=1e-2):
    error = float((actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9))
    if not error < limit:  # NaN fails too
        raise SystemExit(f"{name}: relative error {error:.2e} against the twin")


def element_wise(shape, num_tokens):
    """{operation: (run once, bytes that must move)} for the operations around the matrix products."""
    hidden, intermediate, num_heads, num_kv_heads, _ = shape
    x, weight = randn(num_tokens, hidden), randn(hidden)
    gate_up = randn(num_tokens, 2 * intermediate)
    num_all = num_heads + 2 * num_kv_heads
    qkv = randn(num_tokens, num_all * HEAD_DIM)
    q_weight, k_weight = randn(HEAD_DIM), randn(HEAD_DIM)
    cos_sin = torch.randn(4096, HEAD_DIM, device="cuda")
    positions = torch.randint(0, 4096, (num_tokens,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(num_tokens + 256, device="cuda")[:num_tokens].int()
    caches = [randn(num_tokens // 256 + 2, 256, num_kv_heads, HEAD_DIM) for _ in range(4)]
    rope_arguments = (q_weight, k_weight, EPS, cos_sin, positions, slots)
    heads = (num_heads, num_kv_heads)

    check("rms_norm", norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    check("silu_and_mul", activation.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    expected = (*reference.norm_rope_store(qkv, *rope_arguments, *caches[:2], *heads), *caches[:2])
    caches[2].copy_(caches[0]), caches[3].copy_(caches[1])
    actual = (*rope_store.norm_rope_store(qkv.clone(), *rope_arguments, *caches[2:], *heads), *caches[2:])
    for a, e in zip(actual, expected, strict=True):
        check("norm_rope_store", a, e)

    kv_width = num_kv_heads * HEAD_DIM
    k, v = qkv[:, -2 * kv_width : -kv_width], qkv[:, -kv_width:]
    k, v = (t.unflatten(1, (num_kv_heads, HEAD_DIM)) for t in (k, v))
    row = 2 * num_tokens  # bytes of one channel
    return {
        "rms_norm": (lambda: norm.rms_norm(x, weight, EPS), 2 * hidden * row),
        "silu_and_mul": (lambda: activation.silu_and_mul(gate_up), 3 * intermediate * row),
        "norm_rope_store": (
            lambda: rope_store.norm_rope_store(qkv, *rope_arguments, *caches[:2], *heads),
            (2 * (num_heads + 2 * num_kv_heads) + num_kv_heads) * HEAD_DIM * row,
        ),
        "store_kvcache": (lambda: rope_store.store_kvcache(k, v, *caches[:2], slots), 4 * kv_width * row),
    }


def make_columns(num_rows, **values):
    defaults = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, min_length=0, length=5)
    columns = {
        name: torch.full(
            (num_rows,), values.get(name, default), device="cuda",
            dtype=torch.float32 if isinstance(default, float) else torch.int32,
        )
        for name, default in defaults.items()
    }  # fmt: skip
    columns["seed"] = torch.randint(-(2**31), 2**31 - 1, (num_rows, 2), device="cuda", dtype=torch.int32)
    columns["forbidden"] = torch.full((num_rows, 16), -1, device="cuda", dtype=torch.int32)
    return reference.SamplingState(**columns)


def sampling(batch_size):
    """{operation: (run once, bytes that must move)} for a batch of logits."""
    logits = randn(batch_size, VOCAB_SIZE, scale=3.0)
    rows = torch.arange(batch_size, device="cuda", dtype=torch.int32)
    kinds = {
        "no filter": make_columns(batch_size),
        "top-k 50": make_columns(batch_size, temperature=0.7, top_k=50),
        "top-p 0.9": make_columns(batch_size, temperature=0.7, top_p=0.9),
        "top-k, top-p, min-p": make_columns(batch_size, temperature=0.7, top_k=50, top_p=0.9, min_p=0.02),
        "greedy": make_columns(batch_size, temperature=0.0),
    }
    table = {}
    for name, columns in kinds.items():
        thresholds = filters.filter_thresholds(logits, rows, columns)
        if batch_size <= 64:
            expected = reference.filter_thresholds(logits, rows, columns)
            check(f"thresholds, {name}", thresholds.clamp(min=-9), expected.clamp(min=-9))
            values, _ = sample.sample(logits, rows, columns, thresholds)
            check(f"sample, {name}", values, reference.sample(logits, rows, columns, thresholds)[0], 1e-5)

        def filter_(columns=columns):
            return filters.filter_thresholds(logits, rows, columns)

        def draw(columns=columns, thresholds=thresholds):
            return sample.sample(logits, rows, columns, thresholds)

        size = logits.numel() * 2
        if name != "greedy":
            table[f"filter_thresholds, {name}"] = (filter_, 0 if name == "no filter" else size)
        if name in ("greedy", "no filter"):
            table[f"sample, {'greedy' if name == 'greedy' else 'temperature'}"] = (draw, size)
    block_tables = torch.randint(0, 99, (batch_size, 16), device="cuda", dtype=torch.int32)
    length = columns.length
    table["decode_inputs"] = (
        lambda: inputs.decode_inputs(rows, length, length, block_tables, 256), batch_size * 32
    )  # fmt: skip
    return table


def layer_chains(shape, num_tokens):
    """Two runs of all layers but their attention: with our products and what they take along, and with cuBLAS's."""
    hidden, intermediate, num_heads, num_kv_heads, num_layers = shape
    q_width = num_heads * HEAD_DIM
    qkv_width = q_width + 2 * num_kv_heads * HEAD_DIM
    layers = [
        (
            randn(qkv_width, hidden, scale=hidden**-0.5),
            randn(hidden, q_width, scale=q_width**-0.5),
            randn(2 * intermediate, hidden, scale=hidden**-0.5),
            randn(hidden, intermediate, scale=intermediate**-0.5),
        )
        for _ in range(num_layers)
    ]
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    start = randn(num_tokens, hidden)
    positions = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
    caches = torch.zeros(2, num_tokens, 1, num_kv_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    cos_sin = torch.randn(num_tokens, HEAD_DIM, device="cuda")
    heads = reference.QKVEpilogue(
        weight[:HEAD_DIM], weight[:HEAD_DIM], EPS, cos_sin, positions, positions, *caches, num_heads, num_kv_heads
    )

    def chain(ops, norms):
        x = start.clone()  # fused_linear may write over its residual
        for qkv_weight, o_weight, gate_up_weight, down_weight in layers:
            q, _, _ = ops.qkv_linear(x, qkv_weight, None, weight, EPS, heads, pages_only=True)
            x = ops.fused_linear(q.flatten(1), o_weight, residual=x, allow_split_k=True)
            hidden_states = ops.fused_linear(x, gate_up_weight, norm_weight=weight, eps=EPS, silu_mul=True)
            x = ops.fused_linear(hidden_states, down_weight, residual=x, allow_split_k=True)
        return norms.rms_norm(x, weight, EPS)

    def cublas():
        x = start.clone()
        for qkv_weight, o_weight, gate_up_weight, down_weight in layers:
            qkv = F.linear(norm.rms_norm(x, weight, EPS), qkv_weight)
            rope_store.norm_rope_store(qkv, *heads)
            torch.addmm(x, qkv[:, :q_width], o_weight.t(), out=x)
            hidden_states = activation.silu_and_mul(F.linear(norm.rms_norm(x, weight, EPS), gate_up_weight))
            torch.addmm(x, hidden_states, down_weight.t(), out=x)
        return norm.rms_norm(x, weight, EPS)

    # Both against the twin, loosely: rounding differs at every step of a long chain.
    expected = chain(reference, reference)
    check("chain", chain(linear, norm), expected, 0.1)
    check("chain through cuBLAS", cublas(), expected, 0.1)
    num_bytes = sum(w.numel() * 2 for layer in layers for w in layer) // num_layers
    return (lambda: chain(linear, norm)), cublas, num_bytes, num_layers


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second of the device")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    torch.manual_seed(0)
    result = {}

    def line(
        table,
        name,
        size,
        time,
        num_bytes,
    ):
        limit = num_bytes / options.bandwidth * 1e6
        print(f"{name:<40}{size:>8}{time:>10.2f}{limit:>10.2f}", flush=True)
        result[f"{table}/{name}/{size}"] = round(time, 2)

    header = f"{'µs':<40}{'tokens':>8}{'measured':>10}{'limit':>10}"
    print(f"Qwen3-{options.shape} on {torch.cuda.get_device_name()}\n\n{header}")
    for num_tokens in TOKENS:
        for name, (run, num_bytes) in element_wise(shape, num_tokens).items():
            line("element-wise", name, num_tokens, microseconds(run, 20), num_bytes)
    print(f"\n{header}")
    for batch_size in (1, 8, 64, 256):
        for name, (run, num_bytes) in sampling(batch_size).items():
            line("sampling", name, batch_size, microseconds(run, 4), num_bytes)
    print(f"\n{header}  (of one layer without attention)")
    for num_tokens in BATCHES:
        fused, cublas, num_bytes, num_layers = layer_chains(shape, num_tokens)
        for name, run in (("products, fused", fused), ("products, cuBLAS and unfused", cublas)):
            line("products", name, num_tokens, microseconds(run) / num_layers, num_bytes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
