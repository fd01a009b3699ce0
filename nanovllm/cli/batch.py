"""``nanovllm batch``: complete every row of a file, exactly once however often the job is stopped.

The job reads the input twice: for the ids, then for the rows that are not done. An engine takes rows as it has room,
so a million of them need no more memory than a thousand. With several engines each is a process of its own; this one
deals the rows out, and is the only one that writes.
"""

import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import cycle, islice
from multiprocessing import connection
from pathlib import Path
from time import perf_counter, time
from typing import Any

import json
import numpy as np
from tqdm import tqdm

from nanovllm.cli.files import EverySecond, Input, RunFile, fingerprint, output_at, todo_rows
from nanovllm.cli.rows import Row, asked, error_record, hash_of, key_of, ready, record_of
from nanovllm.config import Config
from nanovllm.errors import ConfigError, EngineError, NanoVLLMError, RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import read_generation_config, resolve_model

CHUNK = 64  # rows that are encoded at a time
# options of the engine that change nothing but speed and memory: a job may go on with others
FREE = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size", "enforce_eager",
        "kvcache_block_size", "num_kvcache_blocks", "device", "attention_backend", "enable_prefix_caching",
        "trust_remote_code")  # fmt: skip
Emit = Callable[[dict[str, Any], tuple[int, int, int]], None]  # record; tokens of prompt, cached, completion


def run(args: Any) -> int:
    output_path, k, n = Path(args.output), 0, 1
    if args.shard:
        match = re.fullmatch(r"(\d+)/(\d+)", args.shard)
        k, n = map(int, match.groups()) if match else (0, 0)
        if not k < n:
            raise ConfigError(f"--shard {args.shard}: it must be K/N, with K from 0 to N - 1, such as 0/4.")
        output_path = output_path.with_name(f"{output_path.stem}-{k}-of-{n}{output_path.suffix}")
    model_path = Path(resolve_model(args.model, args.engine.get("revision")))
    defaults = {} if args.engine.get("generation_config") == "vllm" else read_generation_config(str(model_path))
    args.base_params = SamplingParams(**ready({**defaults, **args.sampling}))
    if args.data_parallel_size < 1:
        raise ConfigError(f"--data-parallel-size {args.data_parallel_size}: it must be at least 1.")
    rows = Input(Path(args.input))
    if output_path.resolve().parent == Path(args.input).resolve() or output_path.resolve() == Path(args.input).resolve():
        raise ConfigError(f"OUT={output_path} is, or lies in, the input.")
    hashes, all_integers = scan_ids(rows, args)
    run_file = RunFile(output_path)
    output = output_at(output_path)
    if args.overwrite:
        output.clear()
    facts = {
        "model": args.model or "the demo model",
        "contents of the model": fingerprint(sorted([*model_path.glob("*.json"), *model_path.glob("*.safetensors")]), 1 << 20),
        "rows of the input": len(hashes), "contents of the input": rows.fingerprint(),
        "id_column": args.id_column, "prompt_column": args.prompt_column, "messages_column": args.messages_column,
        "chat": args.chat, "chat_template_kwargs": args.chat_template_kwargs,
        **{name: value for name, value in args.engine.items() if name not in FREE}, **args.sampling,
    }  # fmt: skip
    facts = json.loads(json.dumps(facts))  # as it will be read
    check_facts(run_file.read(), facts, output)
    run_file.write(facts)
    done, num_errors = output.scan(args.retry_errors)
    todo = todo_rows(hashes, done)
    todo[np.arange(len(todo)) % n != k] = False
    job = Job(output, len(range(k, len(todo), n)), int(todo.sum()), num_errors)
    if not job.num_todo:
        return job.summary()
    selected = (
        Row(key_of(index, values, args.id_column), values)
        for index, values in enumerate(rows.rows()) if todo[index]
    )  # fmt: skip
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    output.open(all_integers)
    try:
        (complete if args.data_parallel_size == 1 else complete_in_processes)(args, selected, job.emit)
    except KeyboardInterrupt:
        print("\nstopped.", end=" ", file=sys.stderr)
        return 130
    finally:
        output.close()
        job.bar.close()
        if job.num_done < job.num_todo:
            print(f"{job.num_rows - job.num_todo + job.num_done:,} of {job.num_rows:,} rows are in {output_path}; "
                  "the same command goes on.", file=sys.stderr)  # fmt: skip
    return job.summary()


def check_facts(before: dict[str, Any] | None, now: dict[str, Any], output: Any) -> None:
    """Refuse to go on with something else than what the output was begun with."""
    path = output.path
    if not output.is_begun():
        return
    if before is None:
        raise ConfigError(f"{path} exists and is not of a batch job; give another OUT, or --overwrite.")
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names == ["model"]:  # the same under another name
        names = []
    if names:
        lines = [f"  {name}: {before.get(name)!r:.200} then, {now.get(name)!r:.200} now" for name in names]
        raise ConfigError(
            f"{path} was begun with something else:\n" + "\n".join(lines)
            + "\nGo on with the former, or give another OUT, or --overwrite."
        )  # fmt: skip


def scan_ids(rows: Input, args: Any) -> tuple[array, bool]:
    """A hash of every row's id, and whether all ids are 64-bit integers. Finds out which column has the ids."""
    hashes, all_integers = array("Q"), True
    for index, values in enumerate(rows.rows()):
        if index == 0 and args.id_column is None and isinstance(values, dict) and "body" not in values:
            args.id_column = next((name for name in ("custom_id", "id") if name in values), None)
        key = key_of(index, values, args.id_column)
        all_integers &= isinstance(key, int) and -(2**63) <= key < 2**63
        hashes.append(hash_of(key))
    if not hashes:
        raise ConfigError(f"IN={args.input} holds no rows.")
    column = np.frombuffer(hashes, np.uint64)
    order = np.argsort(column, kind="stable")
    again = np.flatnonzero(column[order][1:] == column[order][:-1])
    if len(again):
        first, second = sorted(order[again[0] : again[0] + 2].tolist())
        key = key_of(second, next(islice(rows.rows(), second, None)), args.id_column)
        raise ConfigError(
            f"IN={args.input}: rows {first} and {second} (from 0) have the same id {key!r}; ids must be unique. "
            f"{len(again):,} rows repeat an id."
        )
    return hashes, all_integers


class Job:
    """Counts what is done, shows it, and writes it."""

    def __init__(self, output: Any, num_rows: int, num_todo: int, num_errors: int):
        self.output, self.num_rows, self.num_todo = output, num_rows, num_todo
        self.num_errors, self.num_done = num_errors, 0
        self.tokens = [0, 0, 0]
        self.started = perf_counter()
        in_terminal = sys.stderr.isatty()
        self.bar = tqdm(total=num_rows, initial=num_rows - num_todo, unit=" rows", dynamic_ncols=True,
                        mininterval=0.2 if in_terminal else 10, disable=not num_todo)  # fmt: skip

    def emit(self, record: dict[str, Any], tokens: tuple[int, int, int]) -> None:
        self.output.append(record)
        self.num_done += 1
        self.num_errors += record["error"] is not None
        self.tokens = [a + b for a, b in zip(self.tokens, tokens, strict=True)]
        self.bar.set_postfix_str(f"{self.tokens[2] / (perf_counter() - self.started):,.0f} tok/s", refresh=False)
        self.bar.update()

    def summary(self) -> int:
        seconds, (prompt, cached, generated) = perf_counter() - self.started, self.tokens
        print(
            f"{self.num_rows:,} rows in {self.output.path}: {self.num_done:,} now, {self.num_rows - self.num_todo:,} "
            f"before; {self.num_errors:,} of them errors. {seconds:,.1f} s, {self.num_done / seconds:,.1f} rows/s, "
            f"{generated:,} tokens generated ({generated / seconds:,.0f}/s), {prompt:,} in prompts ({cached:,} cached).",
            file=sys.stderr,
        )
        return 3 if self.num_errors else 0


def complete(args: Any, rows: Iterable[Row], emit: Emit, rank: int = 0) -> None:
    """Feed the rows to one engine; ``emit`` a record for each as it is finished."""
    from nanovllm import LLM

    rows, pending = iter(rows), {}
    with LLM(args.model, **args.engine, quiet=rank > 0) as llm:
        ticker = EverySecond(metrics_writer(llm, Path(args.metrics), rank)) if args.metrics else None

        def feed() -> Iterator[tuple[Any, SamplingParams]]:
            number = 0
            while chunk := list(islice(rows, CHUNK)):
                for row, prompt, params in encoded(llm, chunk, args, emit):
                    pending[number] = row, params
                    number += 1
                    yield prompt, params

        def refuse(index: int, error: RequestError) -> None:
            emit(error_record(pending.pop(index)[0], error), (0, 0, 0))

        for output in llm.stream(feed(), on_error=refuse):
            row, params = pending.pop(output.index)
            record = record_of(row, output, params, args.model or "demo")
            num_generated = sum(len(o.token_ids) for o in output.outputs)
            emit(record, (len(output.prompt_token_ids), output.num_cached_tokens, num_generated))
        if ticker is not None:
            ticker.close()


def encoded(llm: Any, chunk: list[Row], args: Any, emit: Emit) -> Iterator[tuple[Row, Any, SamplingParams]]:
    """Rows with their prompts as token ids, the texts of a chunk encoded together."""
    texts: dict[bool, list] = {True: [], False: []}  # by whether it is a chat: the template has the special tokens
    asked_for: list[tuple[Row, Any, SamplingParams]] = []
    for row in chunk:
        try:
            prompt, template, params = asked(row, args)
            if template is not None:
                prompt = llm._tokenizer.apply_chat_template(prompt, **template)
            if isinstance(prompt, str):
                prompt.encode()
                texts[template is not None].append(prompt := {"prompt": prompt})
            asked_for.append((row, prompt, params))
        except UnicodeEncodeError as error:
            emit(error_record(row, RequestError(f"the text cannot be encoded as UTF-8: {error}")), (0, 0, 0))
        except RequestError as error:
            emit(error_record(row, error), (0, 0, 0))
    for is_chat, prompts in texts.items():
        ids = llm._tokenizer.encode([p["prompt"] for p in prompts], add_special_tokens=not is_chat)
        for prompt, token_ids in zip(prompts, ids, strict=True):
            prompt["prompt_token_ids"] = token_ids
    yield from asked_for


def metrics_writer(llm: Any, path: Path, rank: int) -> Callable[[], None]:
    def write() -> None:
        line = {"time": round(time(), 3), "process": rank, "pid": os.getpid(), **llm.metrics()}
        with path.open("ab", buffering=0) as file:  # several processes append to it, each whole lines
            file.write(json.dumps(line).encode() + b"\n")

    write()
    return write


# ---------------------------------------------------------------- several engines


def complete_in_processes(args: Any, rows: Iterable[Row], emit: Emit) -> None:
    """The same with ``args.data_parallel_size`` engines; each has as many rows as keep it busy."""
    context = multiprocessing.get_context("spawn")
    room = 2 * args.engine.get("max_num_seqs", Config.max_num_seqs) + 2 * CHUNK  # what it runs and waits for, and more
    pipes: dict[Any, int] = {}  # rows that each engine has
    processes: dict[Any, Any] = {}
    try:
        for rank, devices in enumerate(split_devices(args)):
            pipe, theirs = context.Pipe()
            processes[pipe] = context.Process(target=_work, args=(theirs, args, rank, devices), name=f"engine {rank}")
            processes[pipe].start()
            theirs.close()
            pipes[pipe] = 0
        rows, turn, is_exhausted = iter(rows), cycle(list(pipes)), False
        while pipes:
            while not is_exhausted and any(count < room for count in pipes.values()):
                pipe = next(x for x in turn if pipes[x] < room)
                row = next(rows, None)
                if row is not None:
                    pipe.send(row)
                    pipes[pipe] += 1
                else:
                    is_exhausted = True
                    for pipe in pipes:
                        pipe.send(None)
            for pipe in connection.wait(list(pipes)):
                try:
                    message = pipe.recv()
                except EOFError:
                    processes[pipe].join(10)
                    name, code = processes[pipe].name, processes[pipe].exitcode
                    raise EngineError(f"{name} ended with exit code {code}.") from None
                if isinstance(message, Exception):
                    raise message
                if message is None:
                    del pipes[pipe]
                    continue
                emit(*message)
                pipes[pipe] -= 1
    finally:
        for pipe, process in processes.items():
            pipe.close()  # it leaves when it reads the end
        for process in processes.values():
            process.join(10)
            process.kill()


def split_devices(args: Any) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each process; None leaves it as it is."""
    import torch

    size, each = args.data_parallel_size, args.engine.get("tensor_parallel_size", 1)
    num_devices = 0 if args.engine.get("device") == "cpu" else torch.cuda.device_count()
    if not num_devices:
        return [None] * size
    if num_devices < size * each:
        raise ConfigError(
            f"--data-parallel-size {size} with {each} GPU(s) each needs {size * each} GPUs; {num_devices} are visible."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices)))).split(",")
    return [",".join(visible[rank * each : (rank + 1) * each]) for rank in range(size)]


def _work(pipe: Any, args: Any, rank: int, devices: str | None) -> None:
    """A process with one engine: rows come in, records go out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    rows: queue.SimpleQueue = queue.SimpleQueue()

    def receive() -> None:  # always, so that neither side waits for the other to read
        try:
            while (row := pipe.recv()) is not None:
                rows.put(row)
            rows.put(None)
            pipe.recv()
        except (EOFError, OSError):  # the parent is done, or gone
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    try:
        complete(args, iter(rows.get, None), lambda *message: pipe.send(message), rank)
        pipe.send(None)
    except Exception as error:
        pipe.send(error if isinstance(error, NanoVLLMError) else EngineError(f"engine {rank}: {error!r}"))
    threading.Event().wait()  # the end comes through the pipe
