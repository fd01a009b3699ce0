"""Engines of a batch job: rows in, a record for each out.

One engine in this process; or several, each in a process on devices of its own. Then this process deals the rows out
and takes the records in.
"""

import json
import math
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import connection
from time import time
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.llm_engine import WINDOW
from nanovllm.errors import ConfigError, EngineError, NanoVLLMError, RequestError
from nanovllm.jobs.rows import Row, asked, error_record, record_of
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

ROWS_AHEAD = 128  # of each process, beyond what its engine takes
Emit = Callable[[dict[str, Any], tuple[int, int, int]], None]  # record; tokens of prompt, cached, generated


def complete(args: Any, rows: Iterator[Row], emit: Emit, rank: int = 0) -> None:
    """Feed the rows to one engine; ``emit`` a record for each as it is finished."""
    pending: dict[int, tuple[Row, SamplingParams]] = {}

    def feed() -> Iterator[tuple[Any, SamplingParams]]:
        index = 0
        for row in rows:
            try:
                prompt, template, params = asked(row, args)
                prompt = prompt if template is None else chat_prompt(llm, prompt, template)
            except RequestError as error:
                emit(error_record(row, error), (0, 0, 0))
            else:
                pending[index] = row, params
                index += 1
                yield prompt, params

    def refuse(index: int, error: RequestError) -> None:
        emit(error_record(pending.pop(index)[0], error), (0, 0, 0))

    with LLM(args.model, **args.engine, quiet=rank > 0) as llm, (
        metrics_written(llm, args.metrics, rank) if args.metrics else nullcontext()
    ):
        for output in llm.stream(feed(), on_error=refuse):
            row, params = pending.pop(output.index)
            num_generated = sum(len(o.token_ids) for o in output.outputs)
            failed = [o.stop_reason for o in output.outputs if o.finish_reason == "error"]
            if failed:
                record = error_record(row, RequestError(str(failed[0])))
            else:
                record = record_of(row, output, params, args.model or "demo")
            emit(record, (len(output.prompt_token_ids), output.num_cached_tokens, num_generated))


def chat_prompt(llm: LLM, messages: list[dict], template: dict[str, Any]) -> dict[str, Any]:
    """A conversation as a prompt whose text is encoded: the template has the special tokens."""
    text = llm.apply_chat_template(messages, **template)
    (token_ids,) = llm.tokenize([text], add_special_tokens=False)
    return {"prompt": text, "prompt_token_ids": token_ids}


@contextmanager
def metrics_written(llm: LLM, path: str, rank: int) -> Iterator[None]:
    """Append a line of the engine's metrics to the file every second, from the first moment to the last."""
    closing = threading.Event()

    def write_lines() -> None:
        is_last = False
        while not is_last:
            is_last = closing.is_set()
            line = {"time": round(time(), 3), "process": rank, "pid": os.getpid(), **llm.metrics()}
            with open(path, "ab", buffering=0) as file:  # several processes append to it, each whole lines
                file.write(json.dumps(line).encode() + b"\n")
            closing.wait(1.0)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_lines)
        try:
            yield
        finally:
            closing.set()
            writing.result()


# ---------------------------------------------------------------- several engines


def complete_in_processes(args: Any, rows: Iterator[Row], emit: Emit) -> None:
    """The same with ``args.data_parallel_size`` engines; each has as many rows as keep it busy."""
    context = multiprocessing.get_context("spawn")
    room = WINDOW * args.engine.get("max_num_seqs", Config.max_num_seqs) + ROWS_AHEAD
    pipes: dict[Any, float] = {}  # rows that each engine has, until it is done
    processes: dict[Any, Any] = {}
    try:
        for rank, devices in enumerate(split_devices(args)):
            pipe, theirs = context.Pipe()
            processes[pipe] = context.Process(target=_work, args=(theirs, args, rank, devices), name=f"engine {rank}")
            processes[pipe].start()
            theirs.close()
            pipes[pipe] = 0
        while pipes:
            while pipes[pipe := min(pipes, key=lambda x: pipes[x])] < room:
                row = next(rows, None)  # None: there are no more
                pipe.send(row)
                pipes[pipe] += 1 if row else math.inf
            for pipe in connection.wait(list(pipes)):  # type: ignore[assignment]
                message = pipe.recv()
                if message is None:
                    del pipes[pipe]
                elif isinstance(message, Exception):
                    raise message
                else:
                    emit(*message)
                    pipes[pipe] -= 1
    except (EOFError, ConnectionError):  # the engine of the pipe that was used last is gone
        processes[pipe].join(10)
        raise EngineError(f"{processes[pipe].name} ended with exit code {processes[pipe].exitcode}.") from None
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def split_devices(args: Any) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each process; None leaves it as it is."""
    import torch

    size, each = args.data_parallel_size, args.engine.get("tensor_parallel_size", 1)
    num_devices = torch.cuda.device_count()  # which does not initialise CUDA
    if not num_devices or args.engine.get("device") == "cpu":
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
            while True:
                rows.put(pipe.recv())
        except (EOFError, OSError):  # the parent is gone
            os._exit(1)

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    try:
        complete(args, iter(rows.get, None), lambda *message: pipe.send(message), rank)
        pipe.send(None)
    except Exception as error:
        pipe.send(error if isinstance(error, NanoVLLMError) else EngineError(f"engine {rank}: {error!r}"))
        receiver.join()  # until the parent kills this process: a pipe that ends with rows unread loses the error
