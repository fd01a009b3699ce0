"""Times the attention kernels on one GPU, against those of flash-attn and torch, and checks that they agree.

    python benchmarks/attention.py             decode and prefill tables, then one line of JSON
    python benchmarks/attention.py --sweep     the decode and prefill kernels under many configurations

Each figure is the median over replays of a CUDA graph of several launches, each with keys and values of its own, 256 MB
and more together: as between the layers of a model, no launch finds its data in L2. Bandwidth counts the keys and
values of every sequence once, against 4.3 TB/s, the copy bandwidth of an H200; shared prefixes may exceed it. "pdl":
every launch may start before the previous one has ended.
"""

import argparse
import importlib.util
import inspect
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanovllm.kernels.attention import decode, prefill, reference

PEAK_BYTES_PER_S = 4.3e12
BLOCK_SIZE = 256
HEAD_SIZE = 128
COLD_BYTES = 256 << 20


def ragged(num_seqs: int, low: int, high: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high + 1, (num_seqs,), generator=generator).tolist()


# name: contexts, query heads, KV heads, leading tokens shared by all, head size if not HEAD_SIZE, window
DECODE_CASES: dict[str, tuple] = {
    "1 x 128": ([128], 16, 8, 0),
    "1 x 512": ([512], 16, 8, 0),
    "1 x 1024": ([1024], 16, 8, 0),
    "1 x 4096": ([4096], 16, 8, 0),
    "2 x 1024": ([1024] * 2, 16, 8, 0),
    "4 x 1024": ([1024] * 4, 16, 8, 0),
    "8 x 128": ([128] * 8, 16, 8, 0),
    "8 x 512": ([512] * 8, 16, 8, 0),
    "8 x 1024": ([1024] * 8, 16, 8, 0),
    "8 x 4096": ([4096] * 8, 16, 8, 0),
    "32 x 1024": ([1024] * 32, 16, 8, 0),
    "64 x 100..1500": (ragged(64, 100, 1500), 16, 8, 0),
    "256 x 100": ([100] * 256, 16, 8, 0),
    "256 x 800": ([800] * 256, 16, 8, 0),
    "256 x 100..1500": (ragged(256, 100, 1500), 16, 8, 0),
    "1 x 4000, 255 x 100": ([100] * 200 + [4000] + [100] * 55, 16, 8, 0),
    "1024 x 256": ([256] * 1024, 16, 8, 0),
    "512 x 1100, 1024 shared": ([1100] * 512, 16, 8, 1024),
    "256 x 100..1500, H=32": (ragged(256, 100, 1500), 32, 8, 0),
    "256 x 100..1500, K=2": (ragged(256, 100, 1500), 8, 2, 0),
    "8 x 1024, H=32": ([1024] * 8, 32, 8, 0),
    "1 x 512, H=32 K=4": ([512], 32, 4, 0),
    "8 x 1024, H=32 K=4": ([1024] * 8, 32, 4, 0),
    "256 x 100..1500, H=28 K=4": (ragged(256, 100, 1500), 28, 4, 0),
    "1 x 512, H=14 K=2 D=64": ([512], 14, 2, 0, 64),
    "256 x ..1500, H=14 K=2 D=64": (ragged(256, 100, 1500), 14, 2, 0, 64),
    "256 x ..1500, H=32 K=8 D=64": (ragged(256, 100, 1500), 32, 8, 0, 64),
    # Gemma 4 26B-A4B
    **{
        f"{num_seqs} x {context}, D={head_size}": ([context] * num_seqs, 16, num_kv_heads, 0, head_size, window)
        for head_size, num_kv_heads, window in ((256, 8, 1024), (512, 2, 0))
        for num_seqs in (1, 32)
        for context in (1024, 8192, 32_768)
    },
}


class DecodeCase:
    """Keys and values for several launches of one decode batch, in shuffled blocks."""

    def __init__(
        self,
        contexts: list[int],
        num_heads: int,
        num_kv_heads: int,
        shared: int,
        head_size: int = HEAD_SIZE,
        window: int = 0,
    ) -> None:
        self.num_kv_heads, self.head_size, self.scale, self.window = num_kv_heads, head_size, head_size**-0.5, window
        token_bytes = 2 * num_kv_heads * self.head_size * 2
        self.bytes = sum(min(context, window or context) for context in contexts) * token_bytes
        unique = (sum(contexts) - shared * (len(contexts) - 1)) * token_bytes if shared else self.bytes
        self.copies = max(2, min(256, -(-COLD_BYTES // unique)))
        owned = [-(-context // BLOCK_SIZE) for context in contexts]
        shared_blocks = shared // BLOCK_SIZE
        per_copy = sum(owned) - shared_blocks * (len(contexts) - 1)
        order = torch.randperm(per_copy * self.copies).to(torch.int32)
        shape = (per_copy * self.copies, BLOCK_SIZE, num_kv_heads, self.head_size)
        self.k = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.v = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        max_blocks = max(16, max(owned))
        self.tables = torch.zeros((self.copies, len(contexts), max_blocks), dtype=torch.int32)
        taken = 0
        for copy in self.tables:
            for i, blocks in enumerate(owned):
                first = shared_blocks if i else 0
                copy[i, :first] = copy[0, :first]
                copy[i, first:blocks] = order[taken : taken + blocks - first]
                taken += blocks - first
        self.tables = self.tables.cuda()
        self.req_indices = torch.arange(len(contexts), dtype=torch.int32, device="cuda")
        self.context_lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        width = (num_heads + 2 * num_kv_heads) * self.head_size
        packed = torch.randn(len(contexts), width, dtype=torch.bfloat16, device="cuda")
        self.q = packed[:, : num_heads * self.head_size].view(len(contexts), num_heads, self.head_size)

    def launch(self, copy: int, pdl: bool = False) -> torch.Tensor:
        args = (self.q, self.k, self.v, self.req_indices, self.context_lens, self.tables[copy], self.scale)
        return decode.paged_decode_attention(*args, self.tables.shape[2] * BLOCK_SIZE, pdl=pdl, window=self.window)

    def time_us(self, pdl: bool = False) -> float:
        return time_graph_us(lambda i: self.launch(i, pdl=pdl), self.copies)

    def time_flash_us(self) -> float:
        from flash_attn import flash_attn_with_kvcache

        def launch(i: int) -> None:
            flash_attn_with_kvcache(
                self.q.unsqueeze(1),
                self.k,
                self.v,
                cache_seqlens=self.context_lens,
                block_table=self.tables[i],
                softmax_scale=self.scale,
                causal=True,
                window_size=(self.window - 1, 0) if self.window else (-1, -1),
            )

        return time_graph_us(launch, self.copies)

    def check(self) -> float:
        """Largest difference from the plain twin in fp32."""
        paged = (self.k.float(), self.v.float(), self.req_indices, self.context_lens, self.tables[0])
        expected = reference.paged_decode_attention(
            self.q.float(), *paged, self.scale, self.tables.shape[2] * BLOCK_SIZE, window=self.window
        )
        return (self.launch(0).float() - expected).abs().max().item()


def time_graph_us(launch, copies: int, repeats: int = 9) -> float:
    """Microseconds per launch: launch(0) .. launch(copies - 1) captured once, replayed."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            launch(i)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / copies)
    return statistics.median(times)


def time_eager_us(launch, repeats: int = 15) -> float:
    """Microseconds per launch without a graph, for launches that cannot be captured; long kernels only."""
    for _ in range(3):
        launch()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events[:-1]:
        event.record()
        launch()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events))


def decode_table() -> dict:
    has_flash = importlib.util.find_spec("flash_attn") is not None
    results = {}
    columns = ("us", "pdl", "GB/s", "% peak", "flash us", "ratio", "error")
    print(f"{'decode (B x context)':28}" + "".join(f"{column:>9}" for column in columns))
    for name, spec in DECODE_CASES.items():
        case = DecodeCase(*spec)
        error = case.check()
        assert error < 0.02, f"{name}: differs from the reference by {error}"
        us, pdl_us = case.time_us(), case.time_us(pdl=True)
        flash_us = case.time_flash_us() if has_flash and case.head_size <= 256 else float("nan")
        peak = case.bytes / us * 1e6 / PEAK_BYTES_PER_S
        print(
            f"{name:28}{us:9.2f}{pdl_us:9.2f}{case.bytes / us / 1e3:9.0f}{100 * peak:9.1f}"
            f"{flash_us:9.2f}{flash_us / us:9.2f}{error:9.4f}"
        )
        results[name] = {"us": us, "pdl_us": pdl_us, "share_of_peak": peak}
        if flash_us == flash_us:
            results[name]["flash_attn_us"] = flash_us
        del case
        torch.cuda.empty_cache()
    return results


class PrefillCase:
    """S prompts with `new` tokens each after `prefix` cached ones: both contiguous and paged."""

    def __init__(
        self,
        num_seqs: int,
        new: int,
        prefix: int,
        num_heads: int = 16,
        num_kv_heads: int = 8,
        head_size: int = HEAD_SIZE,
        window: int = 0,
    ) -> None:
        self.head_size, self.scale, self.window = head_size, head_size**-0.5, window
        context = new + prefix
        self.num_seqs, self.new, self.context = num_seqs, new, context
        attended = sum(min(position + 1, window or context) for position in range(prefix, context))
        self.flops = 4 * num_heads * self.head_size * num_seqs * attended

        def randn(tokens: int, heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, self.head_size, dtype=torch.bfloat16, device="cuda")

        self.q = randn(num_seqs * new, num_heads)
        self.k, self.v = (randn(num_seqs * context, num_kv_heads) for _ in range(2))
        self.cu_q = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * new
        self.cu_k = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * context
        blocks = -(-context // BLOCK_SIZE)
        order = torch.randperm(num_seqs * blocks, device="cuda")
        self.tables = order.view(num_seqs, blocks).to(torch.int32)
        padded = (num_seqs, blocks * BLOCK_SIZE, num_kv_heads, self.head_size)
        shape = (num_seqs * blocks, BLOCK_SIZE, num_kv_heads, self.head_size)
        self.k_cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        self.v_cache = torch.zeros_like(self.k_cache)
        for cache, flat in ((self.k_cache, self.k), (self.v_cache, self.v)):
            whole = torch.zeros(padded, dtype=torch.bfloat16, device="cuda")
            whole[:, :context] = flat.view(num_seqs, context, num_kv_heads, self.head_size)
            cache[order] = whole.view(shape)
        self.req_indices = torch.arange(num_seqs, dtype=torch.int32, device="cuda")
        self.context_lens = torch.full((num_seqs,), context, dtype=torch.int32, device="cuda")

    def triton(self) -> torch.Tensor:
        paged = (self.k_cache, self.v_cache, self.cu_q, self.req_indices, self.context_lens, self.tables)
        return prefill.paged_prefill_attention(self.q, *paged, self.scale, self.new, self.window)

    def expected(self) -> torch.Tensor:
        """The plain twin in fp32."""
        lens = (self.cu_q, self.req_indices, self.context_lens, self.tables)
        q, k, v = self.q.float(), self.k_cache.float(), self.v_cache.float()
        return reference.paged_prefill_attention(q, k, v, *lens, self.scale, self.new, self.window)

    @property
    def flash_window(self) -> tuple[int, int]:
        return (self.window - 1, 0) if self.window else (-1, -1)

    def flash(self) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func

        lens = (self.cu_q, self.cu_k, self.new, self.context)
        options = {"softmax_scale": self.scale, "causal": True, "window_size": self.flash_window}
        return flash_attn_varlen_func(self.q, self.k, self.v, *lens, **options)

    def flash_paged(self) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func

        lens = (self.cu_q, self.cu_k, self.new, self.context)
        paged = {"block_table": self.tables, "softmax_scale": self.scale, "causal": True}
        return flash_attn_varlen_func(self.q, self.k_cache, self.v_cache, *lens, window_size=self.flash_window, **paged)

    def torch_varlen(self) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        lens = (self.cu_q, self.cu_k, self.new, self.context)
        kwargs = {"scale": self.scale, "window_size": (self.window - 1 if self.window else -1, 0)}
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch >= 2.12; before, implied by the shapes
            kwargs["enable_gqa"] = True
        return varlen_attn(self.q, self.k, self.v, *lens, **kwargs)

    def _sdpa(self, repeat: bool, backend=torch.nn.attention.SDPBackend.CUDNN_ATTENTION) -> torch.Tensor:
        # [S, H, n, D] views of the packed tensors: all sequences have the same length.
        q, k, v = (x.view(self.num_seqs, -1, *x.shape[1:]).transpose(1, 2) for x in (self.q, self.k, self.v))
        if repeat:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        with torch.nn.attention.sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=not repeat
            )
        return out.transpose(1, 2).reshape(self.q.shape)

    def cudnn_dense(self) -> torch.Tensor:
        return self._sdpa(repeat=False)

    def cudnn_dense_repeated(self) -> torch.Tensor:
        return self._sdpa(repeat=True)

    def efficient_dense_repeated(self) -> torch.Tensor:
        return self._sdpa(repeat=True, backend=torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION)

    def _cudnn_ragged(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lens = (self.cu_q, self.cu_k, self.new, self.context)
        forward = torch.ops.aten._cudnn_attention_forward
        return forward(self.q, k, v, None, *lens, False, 0.0, True, False, scale=self.scale)[0]

    def cudnn_ragged(self) -> torch.Tensor:
        return self._cudnn_ragged(self.k, self.v)

    def cudnn_ragged_repeated(self) -> torch.Tensor:
        group = self.q.shape[1] // self.k.shape[1]
        return self._cudnn_ragged(self.k.repeat_interleave(group, 1), self.v.repeat_interleave(group, 1))


PREFILL_CASES: dict[str, tuple] = {
    "8 x 2048": (8, 2048, 0),
    "32 x 512": (32, 512, 0),
    "64 x 64 after 1024": (64, 64, 1024),
    "4 x 512 after 2048": (4, 512, 2048),
    "16 x 2048, H=28 K=4": (16, 2048, 0, 28, 4),
    "16 x 2048, H=32 K=8 D=64": (16, 2048, 0, 32, 8, 64),
    "16 x 2048, D=256": (16, 2048, 0, 16, 8, 256),
    # Gemma 4 26B-A4B
    **{
        f"{num_seqs} x {new}, D={head_size}": (num_seqs, new, 0, 16, num_kv_heads, head_size, window)
        for head_size, num_kv_heads, window in ((256, 8, 1024), (512, 2, 0))
        for num_seqs, new in ((4, 2048), (1, 16_384))
    },
}


def prefill_table() -> dict:
    results = {}
    print(f"\n{'prefill (S x new)':26}{'path':24}{'us':>9}{'TFLOP/s':>9}{'error':>9}")
    for name, spec in PREFILL_CASES.items():
        case = PrefillCase(*spec)
        expected = case.expected()
        paths = ["triton", "flash", "flash_paged"]
        if spec[2] == 0:
            paths += ["torch_varlen"]
        if spec[2] == 0 and not case.window:
            paths += ["cudnn_dense", "cudnn_dense_repeated", "efficient_dense_repeated"]
            paths += ["cudnn_ragged", "cudnn_ragged_repeated"]
        for path in paths:
            launch = getattr(case, path)
            try:
                error = (launch().float() - expected).abs().max().item()
                us = time_eager_us(launch)
            except (ImportError, RuntimeError, TypeError, ValueError) as failure:
                print(f"{name:26}{path:24} {type(failure).__name__}: {str(failure).splitlines()[0][:110]}")
                continue
            print(f"{name:26}{path:24}{us:9.1f}{case.flops / us / 1e6:9.0f}{error:9.4f}")
            results[f"{name}: {path}"] = {"us": us, "tflops": case.flops / us / 1e6, "error": error}
    return results


def sweep_decode(shapes, programs, names) -> None:
    """Microseconds of each case by tile shape (columns) and programs per SM (rows)."""
    original = decode.decode_config
    for name in names:
        case = DecodeCase(*DECODE_CASES[name])
        floor_us = case.bytes / PEAK_BYTES_PER_S * 1e6
        print(f"\n{name}: us by block_n/warps/stages; floor {floor_us:.1f} us")
        print("programs/SM " + "".join(f"{'/'.join(map(str, shape)):>10}" for shape in shapes))
        for per_sm in programs:
            line = f"{per_sm:11d} "
            for shape in shapes:
                config = decode.DecodeConfig(*shape, per_sm)
                decode.decode_config = lambda *_, config=config: config
                try:
                    line += f"{case.time_us():10.2f}"
                except Exception as failure:  # a shape that does not fit is a result
                    line += f"{type(failure).__name__[:9]:>10}"
            print(line, flush=True)
        del case
        torch.cuda.empty_cache()
    decode.decode_config = original


def sweep_prefill(shapes) -> None:
    """Of the Triton kernel, with the sm_90 kernel switched off."""
    original, prefill_sm90 = prefill.prefill_config, prefill.prefill_sm90
    prefill.prefill_sm90 = None
    print("\nprefill TFLOP/s by block_m/block_n/warps/stages")
    for name, spec in PREFILL_CASES.items():
        case = PrefillCase(*spec)
        for shape in shapes:
            prefill.prefill_config = lambda *_, shape=shape: prefill.PrefillConfig(*shape)
            try:
                figure = f"{case.flops / time_eager_us(case.triton) / 1e6:.0f}"
            except Exception as failure:
                figure = type(failure).__name__
            print(f"{name:26}{'/'.join(map(str, shape)):16}{figure:>8}", flush=True)
    prefill.prefill_config, prefill.prefill_sm90 = original, prefill_sm90


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--sweep", action="store_true", help="try configurations instead")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if args.sweep:
        shapes = [(64, 2, 3), (64, 4, 3), (64, 4, 4), (32, 2, 3), (32, 2, 4), (128, 4, 2), (128, 4, 3)]
        large = ["256 x 100..1500", "1 x 4000, 255 x 100", "256 x 800", "1024 x 256"]
        sweep_decode(shapes, (1, 2, 3, 4, 8, 16), [*large, "512 x 1100, 1024 shared"])
        small = ["1 x 128", "1 x 512", "1 x 1024", "1 x 4096", "8 x 128", "8 x 1024", "8 x 4096", "32 x 1024"]
        sweep_decode(shapes, (1, 2, 3, 4), small)
        sweep_prefill([(128, 64, 8, 3), (128, 32, 4, 4), (64, 64, 4, 3), (64, 32, 4, 4)])
        return
    results = {"decode": decode_table(), "prefill": prefill_table()}
    print(json.dumps({"benchmark": "attention", "device": torch.cuda.get_device_name(), **results}))


if __name__ == "__main__":
    main()
