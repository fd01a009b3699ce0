"""Figures of ``nanovllm batch``: on the demo model and a CPU, or of page images.

    python benchmarks/batch_job.py rate [--rows 2000 --engines 2] beside plain processes and Ray on the same rows
    python benchmarks/batch_job.py kills [--rows 2000 --kills 20] SIGKILL at random moments: rows lost and repeated
    python benchmarks/batch_job.py memory [--rows 1000000]        a stub in the engine's place
    python benchmarks/batch_job.py pages [--jobs 7:cold 256:warm] page images, from process start to the last row

Each ends with one line of JSON.
"""

import argparse
import json
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
SEQS = 128
JOBS = [f"{num_pages}:{kernels}" for num_pages in (7, 256, 2000) for kernels in ("cold", "warm")]


def write_rows(path: Path, num_rows: int, longest: int = 256, seeded: bool = False) -> None:
    """Questions with answers of lognormal lengths, from 8 to ``longest`` tokens; ``seeded``: each has its own seed."""
    rng = random.Random(0)
    with path.open("w") as file:
        for i in range(num_rows):
            length = int(min(longest, max(8, rng.lognormvariate(4.0, 0.8))))
            row = {"id": f"q{i}", "prompt": f"{i} + {rng.randint(0, 99)}"}
            params = {"max_tokens": length, "ignore_eos": True, **({"seed": i} if seeded else {})}
            file.write(json.dumps({**row, "sampling_params": params}) + "\n")


def command(*paths: Any, options: tuple = ("--temperature", "0.8")) -> list[str]:
    return [sys.executable, "-m", "nanovllm", "batch", *map(str, paths), "--device", "cpu",
            "--max-num-seqs", str(SEQS), *options]  # fmt: skip


def timed(argv: list[str], **env: str) -> dict[str, float]:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, env=ENV | env, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(argv)} failed:\n{done.stderr[-2000:]}")
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 1), "cpu_s": round(cpu, 1)}


GENERATE = """
import json, sys
from nanovllm import LLM, SamplingParams
rows = [json.loads(line) for line in open(sys.argv[1])]
params = [SamplingParams(temperature=0.8, **row["sampling_params"]) for row in rows]
llm = LLM(device="cpu", max_num_seqs=int(sys.argv[3]), quiet=True)
outputs = llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
json.dump({row["id"]: output["text"] for row, output in zip(rows, outputs)}, open(sys.argv[2], "w"))
"""


RAY = """
import json, os, pathlib, sys, threading, time
import ray
from nanovllm.integrations.ray_data import ProcessorConfig, build_processor

source, out, seqs, engines = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
seconds, ended = {}, threading.Event()

def watch():  # CPU-seconds of the actors, which end with the job
    while not ended.wait(0.2):
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if (path / "cmdline").read_bytes().startswith(b"ray::MapWorker"):
                    fields = (path / "stat").read_text().rpartition(")")[2].split()
                    seconds[path.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            except OSError:
                pass

threading.Thread(target=watch, daemon=True).start()
ray.init(include_dashboard=False, log_to_driver=False, num_cpus=engines + 1)
config = ProcessorConfig(engine_kwargs={"device": "cpu", "max_num_seqs": seqs, "quiet": True}, concurrency=engines,
                         num_cpus=1)
before = lambda row: {"prompt": row["prompt"], "sampling_params": {"temperature": 0.8, **row["sampling_params"]}}
start = time.perf_counter()
rows = build_processor(config, before)(ray.data.read_json(source)).take_all()
wall = time.perf_counter() - start
ended.set()
json.dump({row["id"]: row["generated_text"] for row in rows}, open(out, "w"))
print(json.dumps({"wall_s": round(wall, 1), "cpu_s": round(sum(seconds.values()), 1)}))
"""


def rate(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The same rows by ``nanovllm batch``, by plain processes with a share of the rows each, and by Ray's actors.

    Wall and CPU seconds include imports and starts (Ray: the wall seconds of the pipeline, the actors' CPU-seconds).
    """
    source, num_engines = directory / "in.jsonl", args.engines
    write_rows(source, args.rows, seeded=True)
    report: dict[str, Any] = {"rows": args.rows, "engines": num_engines}
    options = ("--temperature", "0.8", "--metrics", str(directory / "metrics.jsonl"))
    options += ("--data-parallel-size", str(num_engines)) if num_engines > 1 else ()
    report["batch"] = timed(command(source, directory / "out.jsonl", options=options))
    answers, shares = [directory / f"answers-{i}.json" for i in range(num_engines)], []
    lines = source.read_text().splitlines()
    for i, path in enumerate(answers):
        share = directory / f"in-{i}.jsonl"
        share.write_text("\n".join(lines[i::num_engines]))
        shares.append(shlex.join([sys.executable, "-c", GENERATE, str(share), str(path), str(SEQS)]))
    report["processes"] = timed(["sh", "-c", " & ".join(shares) + " & wait"])
    by_ray = directory / "ray.json"
    done = subprocess.run([sys.executable, "-c", RAY, str(source), str(by_ray), str(SEQS), str(num_engines)],
                          env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    texts = {}
    if done.returncode == 0:  # Ray is installed
        report["ray"] = json.loads(done.stdout.splitlines()[-1])
        texts["ray"] = json.loads(by_ray.read_text())
    records = [json.loads(line) for line in (directory / "out.jsonl").open()]
    texts["batch"] = {record["custom_id"]: record["text"] for record in records}
    report["tokens"] = sum(record["completion_tokens"] for record in records)
    expected = {key: text for path in answers for key, text in json.loads(path.read_text()).items()}
    for name in ("batch", "processes", "ray"):
        if name in report:
            report[name]["rows_per_s"] = round(args.rows / report[name]["wall_s"], 1)
        if name in texts:
            report[name]["equal_texts"] = sum(texts[name].get(key) == text for key, text in expected.items())
    return report


def kills(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Half of the kills come at any time from the start on, half when some rows have been written."""
    write_rows(directory / "in.jsonl", args.rows, longest=args.longest)
    out, rng = directory / "out.jsonl", random.Random(args.seed)
    argv = command(directory / "in.jsonl", out)
    num_kills, torn, at_start = 0, 0, 0
    while num_kills < args.kills:
        size = out.stat().st_size if out.exists() else 0
        with subprocess.Popen(argv, env=ENV, stderr=subprocess.DEVNULL) as process:
            if num_kills % 2:
                while process.poll() is None and (not out.exists() or out.stat().st_size <= size):
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, args.longest_life))
            else:
                time.sleep(rng.uniform(0.1, args.longest_start))
            if process.poll() is not None:
                break
            process.kill()
        num_kills += 1
        content = out.read_bytes() if out.exists() else b""
        torn += not content.endswith(b"\n") and len(content) > 0
        at_start += len(content) == size
        print(f"kill {num_kills}: {content.count(bytes([10]))} rows", flush=True)
    whole = subprocess.run(argv, env=ENV, stderr=subprocess.PIPE, text=True)
    ids = [json.loads(line)["custom_id"] for line in out.open()]
    reference = directory / "reference.jsonl"
    subprocess.run(command(directory / "in.jsonl", reference), env=ENV, stderr=subprocess.DEVNULL, check=True)
    expected = {record["custom_id"]: record["text"] for record in map(json.loads, reference.open())}
    texts = {record["custom_id"]: record["text"] for record in map(json.loads, out.open())}
    return {
        "rows": args.rows, "kills": num_kills, "kills_before_a_new_row": at_start, "torn_last_lines": torn,
        "exit_status": whole.returncode, "lost": args.rows - len(set(ids)), "repeated": len(ids) - len(set(ids)),
        "texts_equal_to_an_unbroken_run": sum(texts[key] == expected[key] for key in expected),
    }  # fmt: skip


STUB = """
import sys
from nanovllm.cli import main
from nanovllm.contrib.jobs import engines
def stub(args, rows, rank=0):
    for row in rows:
        engines.request_of(row, args)
        yield {"custom_id": row.key, "text": "a stub", "error": None}, (3, 0, 2)
engines.complete = stub
import resource
status = main(["batch", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def memory(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    report: dict[str, Any] = {"rows": args.rows}
    for num_rows in (1000, args.rows):
        source, out = directory / f"{num_rows}.jsonl", directory / f"{num_rows}-out.jsonl"
        write_rows(source, num_rows)
        for name in ("run", "again, all done"):
            start = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", STUB, str(source), str(out)], env=ENV, check=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
            seconds = round(time.perf_counter() - start, 1)
            report[f"{num_rows} rows, {name}"] = {"rss_mib": int(done.stdout), "wall_s": seconds}
    return report


def write_checkpoint(directory: Path, size: str) -> None:
    """Write a model with a tower: random weights, and a tokenizer of a token for each character and each other id."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

    from benchmarks.workloads import write_model

    directory.mkdir()
    config = AutoConfig.from_pretrained(write_model(directory, size))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    given = {token_id: token for token, token_id in special_tokens(config).items()}
    characters = map(chr, range(32, 127))
    names = [given.get(i) or next(characters, f"<{i}>") for i in range(config.get_text_config().vocab_size)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(given.values()))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def special_tokens(config: Any) -> dict[str, int]:
    """The tokens of an image in a prompt, in their order."""
    names = {"vision_start": "<|vision_start|>", "image": "<|image_pad|>", "vision_end": "<|vision_end|>"}
    given = {token: getattr(config, f"{name}_token_id", None) for name, token in names.items()}
    return {token: token_id for token, token_id in given.items() if token_id is not None}


def pages(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Jobs of JPEG pages of 1,280 x 1,700 pixels, from the start of the process to the last row.

    ``cold``: with an empty cache of compiled kernels; ``warm``: with the cache that an earlier job left.
    """
    from transformers import AutoConfig

    from benchmarks.workloads import page

    jobs = [(int(rows), kernels) for rows, _, kernels in (job.partition(":") for job in args.jobs)]
    if jobs[0][1] != "cold" or any(kernels not in ("cold", "warm") for _, kernels in jobs):
        raise SystemExit(f"--jobs {' '.join(args.jobs)}: each is N:cold or N:warm, and the first is cold.")
    (directory / "pages").mkdir()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:  # one of them holds the GPU till its end
        written = None if args.model else processes.submit(write_checkpoint, directory / "model", args.size)
        images = processes.map(partial(page, scale=args.scale), range(max(rows for rows, _ in jobs)), chunksize=8)
        for i, data in enumerate(images):
            (directory / "pages" / f"{i}.jpg").write_bytes(data)
        if written is not None:
            written.result()
    model = args.model or directory / "model"
    # a token for each character of the text
    prompt = "".join(special_tokens(AutoConfig.from_pretrained(model))) + "Copy the text of this page here."
    report: dict[str, Any] = {"model": args.model or args.size}
    for rows, kernels in jobs:
        if kernels == "cold":
            shutil.rmtree(directory / "kernels", ignore_errors=True)
        source, out = directory / "in.jsonl", directory / f"{rows}-{kernels}.jsonl"
        lines = [json.dumps({"id": i, "prompt": prompt, "image": f"pages/{i}.jpg"}) for i in range(rows)]
        source.write_text("\n".join(lines))
        start = time.time()
        figures = timed([sys.executable, "-m", "nanovllm", "batch", str(source), str(out), "--model", str(model),
                         "--max-tokens", str(args.longest), "--ignore-eos", "--temperature", "0.6"],
                        TRITON_CACHE_DIR=str(directory / "kernels"))  # fmt: skip
        last_row_s = out.stat().st_mtime - start
        records = [json.loads(line) for line in out.read_text().splitlines()]
        figures |= {"last_row_s": round(last_row_s, 1), "pages_per_s": round(rows / last_row_s, 2)}
        figures["complete_rows"] = sum(record.get("completion_tokens") == args.longest for record in records)
        report[f"{rows} pages, {kernels} kernels"] = figures
        print(f"{rows} pages, {kernels} kernels: {figures}", flush=True)
    return report


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Figures of nanovllm batch.")
    parser.add_argument("what", choices=["rate", "kills", "memory", "pages"])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--engines", type=int, default=1, help="rate: processes, or actors")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, help="tokens of the longest answer: kills 48; of each: pages 256")
    parser.add_argument("--longest-start", type=float, default=10.0, help="kills: seconds")
    parser.add_argument("--longest-life", type=float, default=2.0, help="kills: seconds after the first new row")
    parser.add_argument("--jobs", nargs="+", metavar="N:cold|N:warm", default=JOBS, help="pages: number and kernels")
    parser.add_argument("--size", default="qwen2.5-vl-7b", help="pages: shape of the model, with random weights")
    parser.add_argument("--model", help="pages: a directory in place of --size")
    parser.add_argument("--scale", type=int, default=1, help="pages: 1/N of their width and height")
    args = parser.parse_args(argv)
    args.rows = args.rows or (1_000_000 if args.what == "memory" else 2000)
    args.longest = args.longest or (256 if args.what == "pages" else 48)
    with tempfile.TemporaryDirectory() as directory:
        report = {"rate": rate, "kills": kills, "memory": memory, "pages": pages}[args.what](args, Path(directory))
    print(json.dumps({"benchmark": f"batch_job {args.what}", **report}))


if __name__ == "__main__":
    main()
