"""CUDA graphs of forward passes and of sampling: one launch by the host instead of hundreds.

Owns the captured sizes and their graphs. A batch is padded to the next captured size; the padding request slot stores
nothing and attends nothing.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable

import torch

DECODE, SAMPLE = "decode", "sample"  # kinds of graphs of decode steps; (kind, rows) with several rows of a sequence


def decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then steps of 16 to 256 and of 32 beyond, up to ``max_num_seqs``."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class CUDAGraphs:
    """Graphs by (kind, size), all in one memory pool. Outputs keep their address and are overwritten by replays."""

    def __init__(self):
        self.sizes: dict[Hashable, list[int]] = {}
        self._graphs: dict[tuple[Hashable, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, kind: Hashable, sizes: list[int], run: Callable[[int], torch.Tensor]) -> None:
        """Capture ``run(size)`` for each size, ascending; its inputs must be tensors that keep their address.

        Every size was warmed up before: lazy module loading and cuBLAS heuristics are illegal during capture.
        """
        self.sizes[kind] = sizes
        for size in reversed(sizes):  # the largest first: the others reuse its memory
            self._capture(kind, size, run)
        torch.cuda.synchronize()

    def _capture(self, kind: Hashable, size: int, run: Callable[[int], torch.Tensor]) -> None:
        graph = torch.cuda.CUDAGraph()
        # thread_local: another engine of the process may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run(size)
        self._graphs[kind, size] = graph, output

    def padded_size(self, kind: Hashable, size: int) -> int:
        sizes = self.sizes[kind]
        return sizes[bisect_left(sizes, size)]

    def replay(self, kind: Hashable, size: int, run: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Launch the graph; the result is its output, [padded size, ...]. With ``run`` it may be captured first."""
        size = self.padded_size(kind, size)
        if run is not None and (kind, size) not in self._graphs:  # takes some 30 ms
            self._capture(kind, size, run)
        graph, output = self._graphs[kind, size]
        graph.replay()
        return output

    def output(self, kind: Hashable, size: int) -> torch.Tensor:
        """The tensor that ``replay(kind, size)`` writes."""
        return self._graphs[kind, self.padded_size(kind, size)][1]
