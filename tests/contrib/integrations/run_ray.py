"""Jobs on a real Ray cluster of this machine, with actors, ranks and drivers killed; prints what came out as JSON.

    python tests/contrib/integrations/run_ray.py FOLDER [JOB...]    # all jobs, unless some are named
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
from nanovllm.contrib.integrations import ray_data
from nanovllm.integrations.ray_data import Engine, ProcessorConfig, build_processor

NUM_ROWS, FEW = 2000, 320
ENGINE = {"device": "cpu", "dtype": "float32", "max_num_seqs": 128, "num_kvcache_blocks": 512, "kvcache_block_size": 32}
NO_TEXT = {**ENGINE, "skip_tokenizer_init": True}  # starts sooner


def make_engine(log: str) -> type:
    """An engine that appends to a file: process id, and the ids of the rows of each batch that is done."""

    class Recorded(Engine):
        def __init__(self, *args):
            super().__init__(*args)
            self.write("start")

        def write(self, *words):
            with open(log, "a") as file:
                file.write(" ".join(map(str, (os.getpid(), *words))) + "\n")

        async def __call__(self, table):
            table = await super().__call__(table)
            self.write("done", *table["id"].to_pylist())
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
        if attack is not None:
            thread.start()
        processor(dataset).write_parquet(str(self.out))
        if attack is not None:
            thread.join()
        computed = [int(row) for words in self.batches() for row in words[2:]]
        return {
            # rows that skip postprocess have other columns
            "rows": [row for file in self.out.iterdir() for row in pq.read_table(file).to_pylist()],
            "engines": len({words[0] for words in self.lines()}),
            "computed": len(computed),
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


def seeded(i: int) -> dict:
    """Parameters that give each row tokens of its own, whichever engine computes them."""
    return {"temperature": 3.0, "seed": i, "max_tokens": 2, "ignore_eos": True}


def processor(*columns: str, **options) -> Callable:
    """Of token ids to ``columns``. Engines leave the CPUs to Ray's tasks."""
    config = ProcessorConfig(
        **{"engine_kwargs": NO_TEXT, "batch_size": 32, "max_concurrent_batches": 2, "num_cpus": 0.1, **options}
    )
    return build_processor(
        config,
        lambda row: {"sampling_params": seeded(row["id"])},
        lambda row: {key: row[key] for key in ("id", "generated_tokens", *columns)},
    )


def alone(_: Path, all_rows: str, __: str) -> dict:
    """The results of one engine, without Ray."""
    prompts = pq.read_table(all_rows)["tokenized_prompt"].to_pylist()
    params = [SamplingParams(**seeded(i)) for i in range(len(prompts))]
    with LLM(**ENGINE, quiet=True) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return {name: [output[name] for output in outputs] for name in ("text", "token_ids")}


def two_actors(folder: Path, all_rows: str, _: str) -> dict:
    run = processor("generated_text", engine_kwargs=ENGINE, concurrency=2, max_concurrent_batches=4)
    return Job(folder, "two_actors").run(ray.data.read_parquet(all_rows), run, kill_actor)


def two_ranks(folder: Path, _: str, few: str) -> dict:
    run = processor(engine_kwargs={**NO_TEXT, "tensor_parallel_size": 2})
    return Job(folder, "two_ranks").run(ray.data.read_parquet(few), run, kill_rank)


@contextlib.contextmanager
def checkpoint(folder: Path):
    """Ray writes down which rows are done, and jobs skip them."""
    from ray.data.checkpoint import CheckpointConfig

    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(folder / "checkpoint"), delete_checkpoint_on_success=False
    )
    yield
    context.checkpoint_config = None


def driver(folder: Path, few: str, address: str) -> None:
    """A job with a checkpoint, in a process of its own."""
    ray.init(address=address, log_to_driver=False)
    with checkpoint(folder):
        Job(folder, "killed_driver").run(ray.data.read_parquet(few), processor())


def killed_driver(folder: Path, _: str, few: str) -> dict:
    """The second driver is this process."""
    job = Job(folder, "killed_driver")
    address = ray.get_runtime_context().gcs_address  # "auto" might be the cluster of another test
    process = subprocess.Popen([sys.executable, __file__, str(folder), "driver", few, address], stdout=sys.stderr)
    wait_for(lambda: job.out.exists() and len(list(job.out.iterdir())) >= 4)
    process.kill()
    process.wait()
    num_lines = len(job.lines())
    with checkpoint(folder):
        report = job.run(ray.data.read_parquet(few), processor())
    resumed = sum(len(words) - 2 for words in job.lines()[num_lines:] if words[1] == "done")
    return {**report, "resumed": resumed}


def error_rows(folder: Path, *_: str) -> dict:
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
        {"messages": [{"role": "user", "content": "2"}], "chat_template_kwargs": {"conversation": "x"}},
        {"prompt": "2 + 3\n", "sampling_params": {"structured_outputs": {"json": {"const": None}}}},
    ]
    names = ("messages", "prompt", "tokenized_prompt", "sampling_params", "chat_template_kwargs")
    table = pa.Table.from_pylist([{"id": i, **dict.fromkeys(names), **row} for i, row in enumerate(rows)])
    config = ProcessorConfig(engine_kwargs=ENGINE, batch_size=1, num_cpus=0.1, should_continue_on_error=True)
    run = build_processor(config, None, lambda row: {k: v for k, v in row.items() if k not in names})
    return Job(folder, "error_rows").run(ray.data.from_arrow(table), run)


def main(folder: Path) -> dict:
    rng, numbers = random.Random(0), list(range(NUM_ROWS))
    prompts = [[rng.randrange(3, 1024) for _ in range(8)] for _ in numbers]
    all_rows, few = (str(folder / f"{name}.parquet") for name in ("all", "few"))
    table = pa.table({"id": numbers, "tokenized_prompt": prompts})
    pq.write_table(table, all_rows)
    pq.write_table(table.slice(0, FEW), few)
    report: dict = {}
    # Processes to import modules in are what costs: few CPUs for few tasks at once. A resumed job holds two for good.
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    # or, on a busy machine, the first of two actors has done all rows before the second has started
    ray.data.DataContext.get_current().wait_for_min_actors_s = 120
    for job in (alone, two_actors, two_ranks, killed_driver, error_rows):
        name = job.__name__
        if len(sys.argv) < 3 or name in sys.argv[2:]:
            report[name] = job(folder, all_rows, few)
            numbers = {key: value for key, value in report[name].items() if not isinstance(value, list)}
            print(name, numbers, file=sys.stderr)
    ray.shutdown()
    return report


if __name__ == "__main__":
    if sys.argv[2:3] == ["driver"]:
        driver(Path(sys.argv[1]), *sys.argv[3:])
    else:
        with contextlib.redirect_stdout(sys.stderr):
            report = main(Path(sys.argv[1]))
        print(json.dumps(report))
