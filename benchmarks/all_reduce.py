"""All-reduce of a step's hidden states, bf16 [tokens, hidden]: NCCL against peer memory.

    python benchmarks/all_reduce.py [--ranks 2] [--hidden 4096]

Mean time of one all-reduce within a CUDA graph of many, on the slowest rank. Ends in one line of JSON. The constants
``MAX_BYTES``, ``BLOCK`` and ``NUM_WARPS`` of ``nanovllm/distributed/peer_memory.py`` come from here.
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
NUM_TOKENS = (1, 8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096)
SHAPES = ((256, 2), (256, 4), (512, 4), (1024, 4), (1024, 8), (2048, 8))  # 32-bit words of a program, its warps
REPEATS = 50


def time_us(function) -> float:
    """Microseconds of one call within a graph of REPEATS: the median of 5 replays."""
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
    from nanovllm.distributed import peer_memory
    from nanovllm.distributed.group import TPGroup

    peer_memory.MAX_BYTES[size] = NUM_TOKENS[-1] * hidden * 2
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    columns: dict[str, TPGroup] = {}

    def connect(name: str) -> None:
        path = os.path.join(directory, name.replace("/", "-"))
        os.makedirs(path, exist_ok=True)
        columns[name] = TPGroup.connect(rank, size, device, path, 60.0)
        columns[name].join()

    for peer_memory.BLOCK, peer_memory.NUM_WARPS in SHAPES:
        connect(f"{peer_memory.BLOCK}/{peer_memory.NUM_WARPS}")
    some = next(iter(columns.values()))
    columns = {"NCCL": TPGroup(rank, size, some.backend), **columns}
    results: dict[str, dict[int, float]] = {name: {} for name in columns}
    if rank == 0:
        peers = "connected" if some.peers else "NOT AVAILABLE: every column is NCCL"
        print(f"{size} ranks, bf16 [tokens, {hidden}]; us per all-reduce, by words/warps; peer memory {peers}")
        print("tokens".rjust(6), "KiB".rjust(6), *(name.rjust(9) for name in columns))
    with torch.inference_mode():
        for num_tokens in NUM_TOKENS:
            addends = [
                torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(r)).to(device, torch.bfloat16)
                for r in range(size)
            ]
            expected = torch.stack(addends).float().sum(0)
            cells = []
            for name, tp in columns.items():
                difference = (tp.all_reduce(addends[rank].clone()).float() - expected).abs().max().item()
                assert difference <= 0.05 * size, (name, num_tokens, difference)
                x = addends[rank].clone()
                us = torch.tensor([time_us(lambda x=x, tp=tp: tp.all_reduce(x))], device=device)
                results[name][num_tokens] = round(columns["NCCL"].all_gather(us).max().item(), 2)
                cells.append(f"{results[name][num_tokens]:9.2f}")
            if rank == 0:
                print(f"{num_tokens:6d} {num_tokens * hidden * 2 / 1024:6.0f}", *cells, flush=True)
    if rank == 0:
        print(json.dumps({"ranks": size, "hidden": hidden, "us": results}))
    torch.cuda.synchronize()
    os._exit(0)  # an orderly teardown of several groups in one process is not worth its code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    given = parser.parse_args()
    if torch.cuda.device_count() < given.ranks:
        parser.error(f"--ranks {given.ranks} needs as many CUDA devices; there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (given.ranks, given.hidden, directory), nprocs=given.ranks)
