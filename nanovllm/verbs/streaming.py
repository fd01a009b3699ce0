"""``LLM.stream`` and ``submit``: outputs as they arrive, and futures."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import cached_property
from typing import Any, cast

from nanovllm.engine.callers import run
from nanovllm.engine.futures import RequestFuture, Submitted
from nanovllm.engine.guard import Guard
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.engine.stream import DeltaStream
from nanovllm.engine.text.prompts import NON_SEQUENCES, Prompt, is_one_prompt
from nanovllm.errors import RequestError, as_request_error
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


class Streaming(LLMEngine):
    """Yields outputs as they arrive, or returns futures of them."""

    def stream(self, prompts: Prompt | Iterable[Prompt | tuple[Prompt, SamplingParams]],
               sampling_params: SamplingParams | None = None, *,
               on_error: Callable[[int, RequestError], None] | None = None) -> Iterator[RequestOutput]:
        """Yield outputs as they arrive. Closed early (``break``, ``close()``), it aborts its own requests alone.

        Args:
            prompts: one prompt: yields new text and tokens as they arrive, with ``finished`` on the last output. Or an
                iterable of prompts or of pairs (prompt, parameters), which may be endless: yields each
                ``RequestOutput`` when it is finished; its ``index`` tells the prompt. Prompts are taken from it as
                there is room for them.
            sampling_params: parameters of prompts without their own.
            on_error: for an iterable: called with the index of a prompt that can never be served, and the reason;
                the others go on.

        Raises:
            RequestError: a prompt can never be served, and there is no ``on_error``; the others of this call are
                aborted.
        """
        self.require_ready()
        checked_params = self._inputs.checks.checked_params
        default = checked_params(self.get_default_sampling_params() if sampling_params is None else sampling_params)
        if is_one_prompt(prompts):
            with Guard(self):
                request = self._inputs.make(prompts, default, waits=True)  # type: ignore[arg-type]
            deltas: DeltaStream | None = None
            with closing(run(self, [request])) as steps:  # otherwise Python 3.12.3 leaves it open
                for _ in steps:
                    deltas = deltas or DeltaStream(request)  # its sequences are made by now
                    if (delta := deltas.delta()) is not None:
                        yield delta
            return
        if isinstance(prompts, NON_SEQUENCES) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts must be a prompt or an iterable of prompts, not {prompts!s:.100}.")

        def requests() -> Iterator[Request]:
            for index, item in enumerate(cast(Iterable[Any], prompts)):
                is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams)
                prompt, params = item if is_pair else (item, None)
                try:
                    request = self._inputs.make(prompt, default if params is None else checked_params(params), index)
                    self._inputs.make_completions(request)  # a failure in ``queue`` would fail every request
                except BaseException as error:
                    refused = as_request_error(error)
                    if on_error is None:
                        raise RequestError(f"prompt {index}: {refused}") from refused.__cause__
                    on_error(index, refused)
                else:
                    yield request

        with closing(run(self, [], requests())) as steps:
            for _, finished in steps:
                for request in finished:
                    yield request.output()

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestFuture:
        """Queue one prompt; return a ``concurrent.futures.Future`` of its ``RequestOutput``. It waits for no image.

        The engine has no thread of its own: the request advances whenever somebody steps the engine, by any method, or
        asks the future for its ``result()``; not by ``as_completed``, ``wait`` or asyncio alone. Its ``cancel()``
        aborts it. Like every method, this one is for one thread at a time; ``EngineThread`` is for others.

        Raises:
            RequestError: it can never be served; nothing was queued. If an image cannot be read, the output says so.
        """
        with Guard(self):
            request = self._make(prompt, sampling_params)
            self._inputs.make_completions(request)  # as in ``stream``
            future = self._submitted.futures[request.request_id] = RequestFuture(self, request)
            self.queue([request], self._submitted)
        return future

    def is_finished(self) -> bool:
        """Whether every queued request is reported, finished or dropped, and every future resolved; a surplus launch
        may still run.
        """
        return super().is_finished() and not any(
            caller.finished for caller in self._callers if isinstance(caller, Submitted)
        )

    @cached_property
    def _submitted(self) -> Submitted:
        self._callers.append(submitted := Submitted())
        return submitted
