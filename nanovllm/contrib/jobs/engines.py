"""Engines of a batch job: rows in, a record for each out.

One engine in this process; or several, each in a process on devices of its own, which reads its share of the rows.
"""

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from itertools import chain
from multiprocessing import connection
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.contrib.jobs.files import Input
from nanovllm.contrib.jobs.rows import Row, error_record, is_incomplete, record_of, request_of
from nanovllm.errors import ConfigError, EngineError, NanoVLLMError, as_request_error
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger("nanovllm")
ROWS_PER_SLOT = 2  # rows that wait or run in an engine; enough to keep every step full
# records with counts: prompt, cached and generated tokens; 1 for an incomplete structured output
Records = Generator[tuple[dict[str, Any], tuple[int, ...]]]


def complete(args: Any, rows: Iterator[Row], rank: int = 0) -> Records:
    """Feed the rows to one engine as it has room; yield the record of each as it is finished."""
    room = ROWS_PER_SLOT * args.engine.get("max_num_seqs", Config.max_num_seqs)
    pending: dict[Future[RequestOutput], tuple[Row, SamplingParams]] = {}
    done: deque[Future[RequestOutput]] = deque()
    metrics = Metrics(args.metrics, rank)
    with LLM(args.model, **args.engine, quiet=rank > 0) as llm:
        metrics.write(llm)
        for row in chain(rows, [None]):  # None: there are no more
            if row is not None:
                try:
                    prompt, template, params = request_of(row, args)
                    if template is not None:
                        (prompt,) = llm.chat_prompts([prompt], params, **template)
                    future = llm.submit(prompt, params)
                except BaseException as error:
                    yield error_record(row, as_request_error(error)), (0, 0, 0)
                    continue
                pending[future] = row, params
                future.add_done_callback(done.append)
            while len(pending) >= room or (row is None and pending):
                llm.step()
                metrics.write(llm, every_s=1.0)
                while done:
                    future = done.popleft()
                    of_row, params = pending.pop(future)
                    try:
                        output = future.result()
                        record = record_of(of_row, output, params, args.model or "demo")
                        incomplete = record["error"] is None and is_incomplete(output, params, llm.eos_token_ids)
                    except BaseException as error:  # its text, or its log-probabilities
                        yield error_record(of_row, as_request_error(error)), (0, 0, 0)
                        continue
                    num_generated = sum(len(o.token_ids) for o in output.outputs)
                    num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
                    yield record, (num_prompt, num_cached, num_generated, int(incomplete))
        metrics.write(llm)


class Metrics:
    """Lines of an engine's metrics, appended to the file, if there is one. A full disk ends them, not the job."""

    def __init__(self, path: str | None, rank: int):
        self._path, self._rank, self._written_at = path, rank, 0.0

    def write(self, llm: LLM, every_s: float = 0.0) -> None:
        if self._path is None or time.time() - self._written_at < every_s:
            return
        self._written_at = time.time()
        line = {"time": round(self._written_at, 3), "process": self._rank, "pid": os.getpid(), **llm.metrics()}
        try:
            with open(self._path, "ab", buffering=0) as file:  # several processes append to it, each whole lines
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            logger.warning("--metrics %s: %s. No more metrics are written.", self._path, error.strerror or error)
            self._path = None


# ---------------------------------------------------------------- several engines


def complete_in_processes(args: Any, source: Input, todo: np.ndarray) -> Records:
    """The same with ``args.data_parallel_size`` engines."""
    context = multiprocessing.get_context("spawn")
    # rows are dealt out at random, for every eighth of them may be a long one
    dealt = np.random.default_rng(0).permutation(np.flatnonzero(todo))
    processes: dict[Any, Any] = {}  # by the pipe that its records come from
    try:
        for rank, devices in enumerate(devices_of_processes(args)):
            share = np.zeros_like(todo)
            share[dealt[rank :: args.data_parallel_size]] = True
            pipe, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(theirs, args, source, share, rank, devices),
                                      name=f"engine {rank}")  # fmt: skip
            process.start()
            processes[pipe] = process
            theirs.close()
        running = dict(processes)
        while running:
            pipes: list[Any] = connection.wait(list(running))
            for pipe in pipes:
                try:
                    message = pipe.recv()
                except EOFError:
                    process = running.pop(pipe)
                    process.join()
                    message = EngineError(f"{process.name} ended with exit code {process.exitcode}.")
                    if process.exitcode == 0:
                        continue
                if isinstance(message, Exception):
                    raise message
                yield message
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def devices_of_processes(args: Any) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each process; None leaves it as it is."""
    import torch

    size, each = args.data_parallel_size, args.engine.get("tensor_parallel_size", 1)
    num_devices = torch.cuda.device_count()  # does not initialise CUDA
    if not num_devices or args.engine.get("device") == "cpu":
        return [None] * size
    if num_devices < size * each:
        raise ConfigError(
            f"--data-parallel-size {size} with {each} GPU(s) each needs {size * each} GPUs; {num_devices} are visible."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices)))).split(",")
    return [",".join(visible[rank * each : (rank + 1) * each]) for rank in range(size)]


def _work(pipe: Any, args: Any, source: Input, share: np.ndarray, rank: int, devices: str | None) -> None:
    """A process with one engine."""

    def end_with_parent() -> None:  # whatever ended it: the next job needs the devices
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=end_with_parent, daemon=True).start()
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        for message in complete(args, source.rows_to_do(share), rank):
            pipe.send(message)
    except Exception as error:
        pipe.send(error if isinstance(error, NanoVLLMError) else EngineError(f"engine {rank}: {error!r}"))
