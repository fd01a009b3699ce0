"""Jobs on a real Ray cluster of this machine, with actors, ranks and drivers killed; prints what came out as JSON.

    python tests/integrations/run_ray.py FOLDER
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ.update(
    RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_DATA_DISABLE_PROGRESS_BARS="1", HF_HUB_OFFLINE="1"
)

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from nanovllm import LLM, SamplingParams
from nanovllm.integrations import ray_data
from nanovllm.integrations.ray_data import Engine, ProcessorConfig, build_processor

NUM_ROWS = 2000
ENGINE = {"device": "cpu", "max_num_seqs": 64, "num_kvcache_blocks": 512, "kvcache_block_size": 32}
NO_TEXT = {**ENGINE, "skip_tokenizer_init": True}  # starts sooner
TOKENS = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}


def make_engine(log: str) -> type:
    """An engine that appends to a file: process id, CPU seconds, and the ids of the rows of each batch that is done."""

    class Recorded(Engine):
        def __init__(self, *args):
            super().__init__(*args)
            self.write("start")

        def write(self, *words):
            with open(log, "a") as file:
                file.write(" ".join(map(str, (os.getpid(), *words))) + "\n")

        async def __call__(self, table):
            table = await super().__call__(table)
            self.write("done", time.process_time(), *table["id"].to_pylist())
            return table

    return Recorded


class Job:
    """One job, and who kills what in the middle of it."""

    def __init__(self, folder: Path, name: str):
        self.log, self.out = folder / f"{name}.log", folder / name
        self.log.touch()
        ray_data.Engine = make_engine(str(self.log))

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()]

    def batches(self) -> list[list[str]]:
        return [words for words in self.lines() if words[1] == "done"]

    def run(self, dataset, processor, attack=None) -> dict:
        thread = threading.Thread(target=lambda: attack(self))
        begin = time.perf_counter()
        if attack is not None:
            thread.start()
        processor(dataset).write_parquet(str(self.out))
        if attack is not None:
            thread.join()
        return self.report(begin)

    def report(self, begin: float) -> dict:
        computed = [int(row) for words in self.batches() for row in words[3:]]
        return {
            # rows that skip postprocess have other columns
            "rows": [row for file in self.out.iterdir() for row in pq.read_table(file).to_pylist()],
            "engines": len({words[0] for words in self.lines()}),
            "starts": sum(words[1] == "start" for words in self.lines()),
            "computed": len(computed),
            "cpu_seconds": {words[0]: float(words[2]) for words in self.batches()},
            "seconds": round(time.perf_counter() - begin, 1),
        }


def wait_for(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_actor(job: Job) -> None:
    wait_for(lambda: len(job.batches()) >= 6)
    os.kill(int(job.batches()[-1][0]), signal.SIGKILL)


def kill_rank(job: Job) -> None:
    wait_for(lambda: len(job.batches()) >= 2)
    actor = job.batches()[-1][0]
    (rank,) = subprocess.check_output(["pgrep", "-P", actor, "-f", "spawn_main"], text=True).split()
    os.kill(int(rank), signal.SIGKILL)


def chat(row: dict) -> dict:
    return {"messages": [{"role": "user", "content": row["question"]}], "sampling_params": TOKENS}


def two_actors(folder: Path, source: str) -> dict:
    config = ProcessorConfig(engine_kwargs=ENGINE, concurrency=2, batch_size=32, max_concurrent_batches=4)
    processor = build_processor(config, chat, lambda row: {key: row[key] for key in ("id", "generated_text")})
    return Job(folder, "two_actors").run(ray.data.read_parquet(source), processor)


def seeded(i: int) -> dict:
    """Parameters that give each row tokens of its own, whichever engine computes them."""
    return {**TOKENS, "temperature": 3.0, "seed": i}


def no_text(**options) -> Callable:
    """A processor of token ids."""
    config = ProcessorConfig(**{"engine_kwargs": NO_TEXT, "batch_size": 32, "max_concurrent_batches": 2, **options})
    return build_processor(
        config,
        lambda row: {"sampling_params": seeded(row["id"])},
        lambda row: {key: row[key] for key in ("id", "generated_tokens")},
    )


def killed_actor(folder: Path, source: str) -> dict:
    processor = no_text(concurrency=2, max_concurrent_batches=4)
    return Job(folder, "killed_actor").run(ray.data.read_parquet(source), processor, kill_actor)


def two_ranks(folder: Path, source: str) -> dict:
    processor = no_text(engine_kwargs={**NO_TEXT, "tensor_parallel_size": 2})
    return Job(folder, "two_ranks").run(ray.data.read_parquet(source), processor, kill_rank)


def driver(folder: Path, source: str) -> None:
    """A job with a checkpoint, in a process of its own."""
    from ray.data.checkpoint import CheckpointConfig

    ray.init(address="auto", log_to_driver=False)
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(folder / "checkpoint"), delete_checkpoint_on_success=False
    )
    Job(folder, "killed_driver").run(ray.data.read_parquet(source), no_text())


def killed_driver(folder: Path, source: str) -> dict:
    begin, job = time.perf_counter(), Job(folder, "killed_driver")
    command = [sys.executable, __file__, str(folder), "driver", source]
    process = subprocess.Popen(command, stdout=sys.stderr)
    wait_for(lambda: job.out.exists() and len(list(job.out.iterdir())) >= 4)
    process.kill()
    process.wait()
    num_lines = len(job.lines())
    subprocess.run(command, stdout=sys.stderr, check=True)
    resumed = sum(len(words) - 3 for words in job.lines()[num_lines:] if words[1] == "done")
    return {**job.report(begin), "resumed": resumed}


def error_rows(folder: Path, _: str) -> dict:
    good, bad = {"max_tokens": 3, "temperature": 0}, {"max_tokens": -1}
    rows = [
        {"prompt": "2 + 3\n", "sampling_params": good},
        {"prompt": "", "sampling_params": good},
        {"prompt": "2 + 3\n", "sampling_params": bad},
        {"messages": [{"role": "user", "content": "2 + 3"}], "sampling_params": {**good, "logprobs": 1}},
        {"messages": [{"role": "assistant", "content": "I am"}], "sampling_params": good},
        {"tokenized_prompt": [5, 6, 7], "sampling_params": good},
        {"tokenized_prompt": [5, 10**6], "sampling_params": good},
        {"sampling_params": good},
        {"prompt": "2 + 3\n", "sampling_params": {"temprature": 0.0}},
    ]
    names = ("messages", "prompt", "tokenized_prompt", "sampling_params")
    table = pa.Table.from_pylist([{"id": i, **dict.fromkeys(names), **row} for i, row in enumerate(rows)])
    config = ProcessorConfig(engine_kwargs=ENGINE, batch_size=1, should_continue_on_error=True)
    processor = build_processor(config, None, lambda row: {k: v for k, v in row.items() if k not in names})
    return Job(folder, "error_rows").run(ray.data.from_arrow(table), processor)


def main(folder: Path) -> dict:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))
    from make_demo import ask

    rng = random.Random(0)
    questions = [f"{i}: {ask(rng)[0]}" for i in range(NUM_ROWS)]
    prompts = [[rng.randrange(3, 1024) for _ in range(8)] for _ in range(NUM_ROWS)]
    texts, ids, few = (str(folder / f"{name}.parquet") for name in ("texts", "ids", "few"))
    numbers = list(range(NUM_ROWS))
    pq.write_table(pa.table({"id": numbers, "question": questions}), texts)
    table = pa.table({"id": numbers, "tokenized_prompt": prompts})
    pq.write_table(table, ids)
    pq.write_table(table.slice(0, 400), few)
    with LLM(**ENGINE, quiet=True) as llm:
        chats, params = [chat({"question": question})["messages"] for question in questions], SamplingParams(**TOKENS)
        own = [SamplingParams(**seeded(i)) for i in numbers]
        report: dict = {
            "texts": [output["text"] for output in llm.chat(chats, params, use_tqdm=False)],
            "ids": [output["token_ids"] for output in llm.generate(prompts, own, use_tqdm=False)],
        }
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    jobs = (two_actors, texts), (killed_actor, ids), (two_ranks, few), (killed_driver, few), (error_rows, "")
    for job, source in jobs:
        name = job.__name__
        if len(sys.argv) < 3 or name in sys.argv[2:]:
            report[name] = job(folder, source)
            print(name, {key: value for key, value in report[name].items() if key != "rows"}, file=sys.stderr)
    ray.shutdown()
    return report


if __name__ == "__main__":
    if sys.argv[2:3] == ["driver"]:
        driver(Path(sys.argv[1]), sys.argv[3])
    else:
        with contextlib.redirect_stdout(sys.stderr):
            report = main(Path(sys.argv[1]))
        print(json.dumps(report))
