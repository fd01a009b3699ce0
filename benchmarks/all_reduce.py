"""Times the sum over ranks of a decode step's hidden states: NCCL against memory that the GPUs read directly.

    python benchmarks/all_reduce.py [--ranks 2] [--hidden 4096]

Each figure is the mean time of one all-reduce in a CUDA graph of many, the slowest rank's. Ends in one line of JSON.
The constants ``PEER_SUM_BYTES`` and ``LANES`` of ``nanovllm/layers/parallel.py`` come from here.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
SHAPES = ((8, 1024), (16, 2048), (32, 2048), (32, 4096), (64, 2048), (64, 4096), (128, 4096))  # programs, block
REPEATS = 50


def time_us(function) -> float:
    """Microseconds of one call within a graph of REPEATS."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            function()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / REPEATS)
    return sorted(times)[2]


def run(rank: int, size: int, hidden: int, directory: str) -> None:
    from nanovllm.layers import parallel

    largest = ROWS[-1] * hidden * 2
    parallel.PEER_SUM_BYTES[size] = largest
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    columns: dict[str, parallel.TPGroup] = {}
    for programs, block in SHAPES:
        parallel.LANES = ((largest, programs, block),)
        path = os.path.join(directory, f"{programs}-{block}")
        columns[f"{programs}x{block}"] = parallel.TPGroup.connect(rank, size, device, path, 60.0)
    some = next(iter(columns.values()))
    columns = {"NCCL": parallel.TPGroup(rank, size, some.backend), **columns}
    results: dict[str, dict[int, float]] = {name: {} for name in columns}
    if rank == 0:
        print(f"{size} ranks, bf16 [rows, {hidden}]; us per all-reduce, by programs x block; {some.peers}")
        print("rows".rjust(5), "KiB".rjust(6), *(name.rjust(9) for name in columns))
    with torch.inference_mode():
        for rows in ROWS:
            parts = [
                torch.randn(rows, hidden, generator=torch.Generator().manual_seed(r)).to(device, torch.bfloat16)
                for r in range(size)
            ]
            expected = torch.stack(parts).float().sum(0)
            cells = []
            for name, group in columns.items():
                difference = (group.all_reduce(parts[rank].clone()).float() - expected).abs().max().item()
                assert difference <= 0.05 * size, (name, rows, difference)
                x = parts[rank].clone()
                us = torch.tensor([time_us(lambda x=x, group=group: group.all_reduce(x))], device=device)
                results[name][rows] = round(columns["NCCL"].all_gather(us).max().item(), 2)
                cells.append(f"{results[name][rows]:9.2f}")
            if rank == 0:
                print(f"{rows:5d} {rows * hidden * 2 / 1024:6.0f}", *cells, flush=True)
    if rank == 0:
        print(json.dumps({"ranks": size, "hidden": hidden, "us": results}))
    torch.cuda.synchronize()
    os._exit(0)  # groups that share a process are not worth an orderly end


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (given.ranks, given.hidden, directory), nprocs=given.ranks)
