"""Starts one runner per rank: rank 0's in the user's process, the others in worker processes.

Owns the start-up order, and the line that tells the user what was started. Imports torch inside functions only: workers
import this module before their first heartbeat.
"""

import ctypes
import logging
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from nanovllm.config import Config
from nanovllm.distributed.workers import Worker, Workers
from nanovllm.utils.cuda_context import start_cuda_context

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

LOGGER = logging.getLogger("nanovllm")
RUNNERS: weakref.WeakSet[Any] = weakref.WeakSet()


def start_runner(config: Config) -> "ModelRunner":
    """Rank 0's runner. With tensor_parallel_size > 1 all workers are ready when it returns.

    Raises:
        ConfigError: more ranks than devices; all workers are gone.
        WorkerError: a worker failed, died or stalled; all workers are gone.
    """
    size = config.tensor_parallel_size
    start_cuda_context(config, 0)
    workers = Workers(size, worker_main, config) if size > 1 else None  # they import torch at the same time
    try:
        from nanovllm.runner.device import describe
        from nanovllm.runner.kv_scales import warn_of_outliers
        from nanovllm.runner.start import connect, start_rank

        warn_of_outliers(config)
        if workers is None:
            runner = start_rank(config)
        else:
            with workers.guard():
                runner = start_rank(config, connect(config, workers), workers)
                workers.wait_for("ready")
    except BaseException:
        if workers is not None:
            workers.dismiss(kill=True)  # workers read no messages while they start
            workers.join()
            if workers.tp is not None:
                workers.tp.close()
        raise
    RUNNERS.add(runner)
    if not config.quiet:
        announce(describe(config, runner))
    return runner


def announce(line: str) -> None:
    """Log at INFO. Where nobody has configured logging, which then drops INFO, print to stderr instead."""
    if LOGGER.hasHandlers():
        LOGGER.info(line)
    elif LOGGER.level <= logging.INFO and sys.stderr is not None:  # with None it would print to stdout
        print(line, file=sys.stderr, flush=True)


def worker_main(worker: Worker, config: Config) -> None:
    """Worker process: connect, build this rank's runner, run steps until dismissed."""
    start_cuda_context(config, worker.rank)
    from nanovllm.runner.start import connect, start_rank

    runner = start_rank(config, connect(config, worker))
    worker.report("ready")
    runner.loop(worker)
    runner.exit()  # first completes the device's work, in which rank 0 may need this rank


def _keep_runners() -> None:
    """In a forked child, leak the inherited runners: one reference more than the interpreter drops at exit.

    CUDA handles do not survive a fork. The destructors of CUDA graphs would abort the child when it exits.
    """
    for runner in RUNNERS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runner))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_runners)
