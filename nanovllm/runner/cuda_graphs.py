"""Decode steps and short prefills as CUDA graphs: one launch by the host instead of hundreds.

Owns the captured sizes and their graphs. A batch is padded to the next captured size; the padding
reads the null row, which stores nothing and attends nothing.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch


class CudaGraphs:
    """Graphs of ``step(num_rows, max_context) -> result``, all sharing one memory pool.

    Args:
        step: reads its inputs from, and writes its results to, tensors that stay where they are. It has run with each
            size before, as all do in ``compile_kernels``: what libraries load or choose, they cannot while capturing.
        sizes: the batch sizes to capture, ascending.
        max_context: most tokens a row may attend.
    """

    def __init__(self, step: Callable[[int, int], torch.Tensor], sizes: list[int], max_context: int):
        self.captured_sizes = sizes
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.captured_sizes):  # the largest first, so that the others fit in its memory
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = step(size, max_context)
            self.graphs[size] = graph, result
        torch.cuda.synchronize()

    @staticmethod
    def sizes(max_num_seqs: int) -> list[int]:
        """1, 2, 4, 8, then steps of 16 to 256 and of 32 beyond, up to ``max_num_seqs``."""
        sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, max_num_seqs, 32)]
        return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]

    def replay(self, num_rows: int) -> torch.Tensor:
        """Launch the graph for ``num_rows`` rows; its result, [>= num_rows, ...], is overwritten by the next."""
        graph, result = self.graphs[self.size_of(num_rows)]
        graph.replay()
        return result

    def result(self, num_rows: int) -> torch.Tensor:
        """Where ``replay(num_rows)`` leaves its result."""
        return self.graphs[self.size_of(num_rows)][1]

    def size_of(self, num_rows: int) -> int:
        """The captured size that ``num_rows`` rows are padded to."""
        return self.captured_sizes[bisect_left(self.captured_sizes, num_rows)]
