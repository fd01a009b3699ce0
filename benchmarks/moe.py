"""Microseconds of the experts' products by tokens, in 16 bits, FP8 and MXFP4, against the time their bytes take.

Times are medians of CUDA graph replays over the experts of several layers, so that the L2 cache does not hold them.

    python benchmarks/moe.py [--shape 30b-a3b] [--bandwidth 4.3e12]
    python benchmarks/moe.py --precision FP8 --sweep [--tokens 1 256]    # tilings, the fastest first
    python benchmarks/moe.py --shape gpt-oss-20b --precision MXFP4
"""

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernels import microseconds
from nanovllm.kernels.launch import parallel_compile
from nanovllm.kernels.linear.reference import Tokens, Weight
from nanovllm.kernels.moe import dispatch, gemv
from nanovllm.kernels.moe.gemv import RowsConfig
from nanovllm.kernels.moe.grouped_gemm import GroupedConfig, grouped_config, grouped_gemm
from nanovllm.kernels.moe.reference import Routing
from nanovllm.kernels.moe.unpack import padded
from nanovllm.quantization.fp8.numbers import E4M3

SHAPES = {  # hidden size, experts, intermediate size of an expert, experts of a token
    "30b-a3b": (2048, 128, 768, 8), "qwen3.6-35b-a3b": (2048, 256, 512, 8), "glm-4.5-air": (4096, 128, 1408, 8),
    "gpt-oss-20b": (2880, 32, 2880, 4), "gpt-oss-120b": (2880, 128, 2880, 4),
}  # fmt: skip
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384]
SWEPT_TOKENS = [8, 32, 128, 256, 1024, 8192]
GROUPS = {"16 bits": None, "FP8": 0, "FP8 blocks": 128, "MXFP4": 32}  # channels of a scale; 0: all
LAYERS = 6


def make_weight(num_experts, num_features, num_channels, group):
    shape = num_experts, num_features, num_channels
    if group == 32:  # as published the numbers would be about 0.02 in size
        data = torch.randint(0, 256, (*shape[:2], num_channels // 2), dtype=torch.uint8, device="cuda")
        return Weight(data, torch.full((num_experts, num_channels // 32, num_features), 120, dtype=torch.uint8).cuda())
    data = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=num_channels**-0.5)
    if group is None:
        return Weight(data)
    scale = torch.full((num_experts, num_features, num_channels // (group or num_channels)), 0.01, device="cuda")
    return Weight((data * 100).to(E4M3), scale)


class Products:
    """gate_up and down of some tokens with the experts of several layers, each chosen at random."""

    def __init__(self, shape, layers, num_tokens):
        hidden, self.num_experts, _, self.top_k = shape
        self.layers, self.num_rows = layers, num_tokens * self.top_k
        self.x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
        slots = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
        self.routes = [
            dispatch.route(torch.randn(num_tokens, self.num_experts, device="cuda"), None, Routing(self.top_k), slots)
            for _ in layers
        ]
        self.groups = [dispatch.group_rows(ids, self.num_experts) for ids, _ in self.routes]
        self.num_chosen = sum(ids.unique().numel() for ids, _ in self.routes) / len(layers)

    def config(self, gated, tokens):
        is_mxfp4 = self.layers[0][0].is_mxfp4
        return grouped_config(self.num_rows, self.num_experts, gated, tokens.scale is not None, is_mxfp4)

    def gate_up(self, config=None):
        for (weight, down), (ids, _), (rows, counts) in zip(self.layers, self.routes, self.groups, strict=True):
            if len(self.x) <= dispatch.MAX_TOKENS_GEMV:
                h = gemv.gate_up_rows(self.x, None, 0.0, weight, ids, "silu")
                continue
            x = dispatch.tokens_for(self.x, weight)
            num_units = padded(down.num_channels) if down.is_mxfp4 else down.num_channels
            h = torch.empty((self.num_rows, num_units), dtype=torch.bfloat16, device="cuda")
            grouped_gemm(config or self.config(True, x), x, weight, rows, counts, h, self.top_k, "silu")
        self.h = h

    def down(self, config=None):
        for (_, weight), (ids, shares), (rows, counts) in zip(self.layers, self.routes, self.groups, strict=True):
            if len(self.x) <= dispatch.MAX_TOKENS_GEMV:
                gemv.down_rows(self.h, weight, ids, shares, None)
                continue
            h = Tokens(self.h, self.h.dtype) if weight.is_mxfp4 else dispatch.tokens_for(self.h, weight)
            dtype = torch.float32 if len(self.x) <= dispatch.MAX_TOKENS_FP32 else torch.bfloat16
            parts = torch.empty((self.top_k, *self.x.shape), dtype=dtype, device="cuda")
            grouped_gemm(config or self.config(False, h), h, weight, rows, counts, parts, self.top_k, weights=shares)


def time_all(shape, layers, precision, bandwidth, tokens):
    for num_tokens in tokens:
        products = Products(shape, layers, num_tokens)
        for name, i in (("gate_up", 0), ("down", 1)):
            time = microseconds(getattr(products, name)) / LAYERS
            weight = layers[0][i]
            num_bytes = weight.data[0].nbytes + (weight.scale[0].nbytes if weight.is_mxfp4 else 0)
            limit = products.num_chosen * num_bytes / bandwidth * 1e6
            print(f"{precision:12}{name:10}{num_tokens:>8}{time:>10.1f}{limit:>10.1f}", flush=True)


def grouped_choices(products, gated, is_mxfp4):
    """Tiles for the mean number of rows of an expert that fit the shared memory and the registers."""
    mean = products.num_rows / products.num_experts
    sizes = [m for m in (16, 32, 64, 128) if (m <= max(16, 2 * mean) and mean <= 4 * m) or m == 128 < mean]
    widths, depths = ((128, 256) if gated else (64, 128, 256), (128,)) if is_mxfp4 else ((64, 128, 256), (64, 128))
    for tile in itertools.product(sizes, widths, depths, (4, 8), (2, 3, 4, 5, 6)):
        m, n, k, num_warps, num_stages = tile
        features = n * (2 if gated else 1)
        if is_mxfp4:  # tiles of the weights lie in registers
            num_bytes, fits = (2 * m + features / 2) * k * num_stages, m * features <= 4096 * num_warps <= 256 * n
        else:
            num_bytes, fits = (m + features) * k * num_stages, m * n <= 16384
        if num_bytes <= 220 << 10 and fits:
            yield GroupedConfig(*tile)


def sweep(shape, layers, bits, tokens):
    """Rows by themselves, by the features and vectors of a program's step; grouped rows, by tiles."""
    for num_tokens in tokens:
        products = Products(shape, layers, num_tokens)
        products.gate_up()
        for name, gated in (("gate_up", True), ("down", False)):
            run = getattr(products, name)
            if num_tokens <= dispatch.MAX_TOKENS_GEMV:
                sizes = itertools.product((1, 2, 4, 8), (32, 64, 128, 256, 512), (1, 2, 4, 8))
                choices = [size for size in sizes if 32 * size[2] <= size[1] <= 128 * size[2]]
            else:
                choices = list(grouped_choices(products, gated, bits == 4))
            plain = gemv.CONFIGS[bits]

            def attempt(choice, run=run, gated=gated, plain=plain):
                if isinstance(choice, GroupedConfig):
                    run(choice)
                else:
                    gemv.CONFIGS[bits] = RowsConfig(*choice, *plain[3:]) if gated else RowsConfig(*plain[:3], *choice)
                    run()

            with parallel_compile(torch.device("cuda", torch.cuda.current_device())):
                for choice in choices:
                    attempt(choice)
            found = sorted((microseconds(partial(attempt, choice)) / LAYERS, choice) for choice in choices)
            gemv.CONFIGS[bits] = plain
            for time, choice in found[:4]:
                print(f"{num_tokens} tokens, {name}: {time:.1f} {tuple(choice)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second of the device")
    parser.add_argument("--precision", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--sweep", action="store_true", help="tilings of the last --precision")
    parser.add_argument("--tokens", nargs="+", type=int, help="numbers of tokens")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device")
    torch.manual_seed(0)
    hidden, experts, units, _ = shape = SHAPES[options.shape]
    print(f"{options.shape} on {torch.cuda.get_device_name()}\n{'µs':22}{'tokens':>8}{'measured':>10}{'limit':>10}")
    for precision in options.precision[-1:] if options.sweep else options.precision:
        group = GROUPS[precision]
        if group and (hidden % group or units % group):
            print(f"{precision}: {hidden} channels and {units} units are no multiples of {group}")
            continue
        layers = [
            (make_weight(experts, 2 * units, hidden, group), make_weight(experts, hidden, units, group))
            for _ in range(LAYERS)
        ]
        if options.sweep:
            bits = {"16 bits": 16, "MXFP4": 4}.get(precision, 8)
            sweep(shape, layers, bits, options.tokens or [1, 4, *SWEPT_TOKENS])
        else:
            time_all(shape, layers, precision, options.bandwidth, options.tokens or TOKENS)


if __name__ == "__main__":
    main()
