"""vLLM's asynchronous engine: an ``LLMEngine`` on an ``EngineThread``, for the tasks of asyncio loops.

Owns the queue of each task, which receives the outputs of its request as they grow.
"""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from nanovllm.contrib.as_vllm.llm import LLM, OF_THE_WORKER, refuse
from nanovllm.contrib.as_vllm.sampling import RequestOutputKind
from nanovllm.errors import EngineError
from nanovllm.integrations.engine_thread import EngineThread
from nanovllm.outputs import PoolingRequestOutput, RequestOutput

AWAITED = (*OF_THE_WORKER, "add_lora", "remove_lora", "list_loras", "reset_prefix_cache", "reset_mm_cache",
           "start_profile", "stop_profile", "do_log_stats", "get_model_config")  # fmt: skip
READ = ("vllm_config", "model_config", "cache_config", "scheduler_config", "parallel_config", "tokenizer",
        "get_num_unfinished_requests")  # fmt: skip


class AsyncLLM:
    """vLLM's ``AsyncLLM``, or ``AsyncLLMEngine``. Methods of ``LLMEngine`` in ``AWAITED`` are coroutines here.

    Args:
        model, **keywords: of ``LLMEngine``, whose errors it raises.

    Attributes:
        is_running: it was not shut down.
    """

    def __init__(self, model: str, **keywords: Any):
        self._thread = EngineThread(model, make=TaskEngine, **keywords)
        self._engine = self._thread.llm
        self.is_running = True

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> "AsyncLLM":
        return cls(**vars(engine_args))

    def __getattr__(self, name: str) -> Any:
        if name in AWAITED:
            return partial(self._run, getattr(self._engine, name))
        if name in READ:
            return getattr(self._engine, name)
        raise AttributeError(f"nanovllm's stand-in for vLLM's {type(self).__name__} has no {name!r}.")

    async def _run(self, call: Callable, *args: Any, **keywords: Any) -> Any:
        return await asyncio.wrap_future(self._thread.call(call, *args, **keywords))

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, lora_request: Any = None,
                       **others: Any) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as they grow, in its ``output_kind``; a late task gets the newest one.

        The request is aborted when the generator is closed or cancelled; the generator ends after ``abort``.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
            EngineError: a step failed, or the engine was shut down.
        """
        refuse("generate", **others)
        queue: asyncio.Queue = asyncio.Queue()
        inbox = asyncio.get_running_loop(), queue
        are_parts = getattr(sampling_params, "output_kind", None) is RequestOutputKind.DELTA
        try:
            await self._run(self._engine.enter, inbox, request_id, prompt, sampling_params, lora_request)
            output = None
            while output is None or not output.finished:
                output = await queue.get()
                while not (are_parts or queue.empty()):
                    output = queue.get_nowait()
                if output is None:
                    return
                if isinstance(output, BaseException):
                    raise output
                yield output
        finally:
            self._thread.call(self._engine.leave, inbox, request_id)  # after ``enter``, which may be running still

    async def encode(self, prompt: Any, pooling_params: Any, request_id: str,
                     **others: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield ``LLM.encode`` of one prompt, between the steps of other requests."""
        (output,) = await self._run(self._engine.encode, [prompt], pooling_params, use_tqdm=False, **others)
        output.request_id = request_id  # type: ignore[assignment]
        yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; unknown or finished ids are ignored."""
        await self._run(self._engine.end, [request_id] if isinstance(request_id, str) else list(request_id), None)

    async def check_health(self) -> None:
        """Raise EngineError after ``shutdown``."""
        if not self.is_running:
            raise EngineError("the engine was shut down.")

    def get_tokenizer(self) -> Any:
        """Lend the tokenizer, for use at once as in vLLM 0.33, or to be awaited as in versions before."""
        tokenizer = self._engine.get_tokenizer()
        kind = type(tokenizer)
        if tokenizer is None:  # skip_tokenizer_init
            return None

        def wait(_: Any) -> Generator[None, None, Any]:
            yield from ()
            return tokenizer

        lent = copy.copy(tokenizer)
        lent.__class__ = type(kind.__name__, (kind,), {"__await__": wait, "__module__": kind.__module__})
        return lent

    def shutdown(self, timeout: float | None = None) -> None:
        """Free the device's memory; unfinished requests end with an EngineError."""
        self.is_running = False
        self._thread.exit()


class TaskEngine(LLM):
    """vLLM's engine, whose step sends outputs and errors to the tasks that wait for them.

    Args:
        model, **keywords: of ``LLM``.
    """

    def __init__(self, model: str, **keywords: Any):
        super().__init__(model, **keywords)
        self._inboxes: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue]] = {}  # by id of unfinished requests

    def enter(self, inbox: Any, request_id: str, prompt: Any, params: Any, lora_request: Any) -> None:
        """Add a request, whose outputs go to the inbox."""
        self.add_request(request_id, prompt, params, lora_request=lora_request)
        self._inboxes[request_id] = inbox

    def leave(self, inbox: Any, request_id: str) -> None:
        """Abort the request unless it is finished, or was rejected because another one has its name."""
        if self._inboxes.get(request_id) is inbox:
            self.end([request_id], None)

    def end(self, request_ids: list[str], error: BaseException | None) -> None:
        """Abort requests; their generators raise the error, or end."""
        for request_id in request_ids:
            if request_id in self._inboxes:
                self._send(request_id, error)
        self.abort_request(request_ids)

    def step(self) -> list[RequestOutput]:
        """Send the outputs of a step; returns none."""
        try:
            for output in super().step():
                self._send(output.request_id, output)
        except BaseException as error:  # concerns a request whose adapter cannot be read; otherwise all requests
            of = [request_id for request_id in self._inboxes if not self.is_unfinished(request_id)]
            self.end(of or list(self._inboxes), error)
        return []

    def is_finished(self) -> bool:
        return not self.has_unfinished_requests()

    def exit(self) -> None:
        """Free the device's memory; unfinished requests end with an EngineError."""
        try:
            self.end(list(self._inboxes), EngineError("the engine was shut down."))
        finally:
            self.shutdown()

    def _send(self, request_id: str, output: RequestOutput | BaseException | None) -> None:
        loop, queue = self._inboxes[request_id]
        if not isinstance(output, RequestOutput) or output.finished:
            del self._inboxes[request_id]
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(queue.put_nowait, output)
