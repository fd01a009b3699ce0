"""Callers of the engine: a ``generate``, a ``stream``, all uses of ``add_request``, all uses of ``submit``.

Owns the way of a caller's requests into the engine, a window at a time, and back. Several callers share one engine; a
caller that leaves early aborts its own requests and no others.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from nanovllm.engine.guard import Guard, abandon
from nanovllm.engine.progress import Progress
from nanovllm.errors import EngineError

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.request import Request

T = TypeVar("T")
WINDOW = 2  # in units of max_num_seqs: sequences of a call that wait or run; enough to keep every step full
FIRST = 256  # sequences that a call makes before its first step; making them takes 2 ms
DROPPED = "these requests were dropped, because a step of this engine failed or was interrupted."


@dataclass(eq=False)
class Caller:
    """One who waits for requests.

    Attributes:
        unfinished: requests by id.
        finished: requests that the caller has not yet taken.
        num_queued: sequences that load, wait or run.
        detokenize: make texts in the background, as sequences finish.
        is_dropped: the engine had to drop its requests.
    """

    unfinished: dict[int, "Request"] = field(default_factory=dict)
    finished: deque["Request"] = field(default_factory=deque)
    num_queued: int = 0
    detokenize: bool = True
    is_dropped: bool = False

    def take(self) -> list["Request"]:
        """The requests that are finished and were not yet taken; EngineError if some were dropped."""
        if self.is_dropped:
            self.is_dropped = False
            raise EngineError(DROPPED)
        finished = list(self.finished)
        self.finished.clear()
        return finished

    def drop(self) -> None:
        """The engine has dropped its requests."""
        self.is_dropped, self.num_queued = True, 0
        self.unfinished.clear()

    def refuse(self, request: "Request", reason: str) -> None:
        """A request was aborted or dropped; the engine is usable again."""

    def between_steps(self, engine: "LLMEngine", is_idle: bool) -> None:
        """Called while the device works, or with ``is_idle`` while it has nothing to do."""


def run(engine: "LLMEngine", known: list["Request"],
        more: Iterable["Request"] = ()) -> Generator[tuple[int, list["Request"]], None, None]:
    """Run requests, a window of them at a time. Closed early, it aborts its own requests and no others.

    Args:
        known: count as waiting, and can be aborted, before their turn comes. The list is emptied, so that requests can
            be freed one by one.
        more: requests after these, made when they are asked for.

    Yields:
        After each step the number of tokens taken in, and the requests of this call that are finished now.
    """
    caller, window = Caller(), WINDOW * engine.config.max_num_seqs
    room = min(FIRST, window)
    try:
        with Guard(engine):
            engine.register(known, caller)
            engine.scheduler.admission.num_expected = sum(request.params.n for request in known)
        known.reverse()
        in_turn = (known.pop() for _ in range(len(known)))
        feed = chain(filter(lambda request: request.request_id in caller.unfinished, in_turn), more)  # keeps no request
        is_fed = False  # whether all its prompts are queued
        while True:
            with Guard(engine):
                if not is_fed and room > caller.num_queued:
                    following, is_fed = taken(feed, room - caller.num_queued)
                    if following:
                        engine.require_ready()
                        engine.queue(following, caller)
                    del following  # or this lot's finished requests and their images stay until the next lot
                room = min(2 * room, window)  # while the device works on one lot, the next is twice as large
                if is_fed and not caller.unfinished and not caller.finished and not caller.is_dropped:
                    return
                # no step if a request is finished already, because it had nothing to compute
                num_tokens = 0 if caller.finished or caller.is_dropped else engine.advance()
            yield num_tokens, caller.take() if caller.finished or caller.is_dropped else []
    finally:
        abandon(engine, list(caller.unfinished.values()))


def taken(requests: Iterator["Request"], num_seqs: int) -> tuple[list["Request"], bool]:
    """The next requests, until they have this number of sequences; and whether these are all."""
    found: list[Request] = []
    for request in requests:
        found.append(request)
        num_seqs -= request.params.n
        if num_seqs <= 0:
            return found, False
    return found, True


def collect(engine: "LLMEngine", requests: list["Request"], result: Callable[["Request"], T],
            use_tqdm: bool | Callable = False, more: Iterable = (), num_more: int = 0, desc: str = "") -> list[T]:
    """``result`` of each request; most are made while the device works on the others, once their text is there.

    ``more``: ``num_more`` requests of one completion after these, which are made while the device works, too.
    """
    number, results, finished = len(requests) + num_more, dict[int, T](), deque["Request"]()
    total = sum(request.params.n for request in requests) + num_more
    progress = Progress(total, use_tqdm, desc) if use_tqdm and total else None
    try:
        for num_tokens, ended in run(engine, requests, more):
            if progress is not None:
                progress.update(num_tokens, sum(len(request.completions) for request in ended))
            finished.extend(ended)
            while finished and finished[0].has_text:
                first = finished.popleft()
                results[first.index] = result(first)
    finally:
        if progress is not None:
            progress.close()  # the user's progress bar may raise
    results |= {request.index: result(request) for request in finished}
    if len(results) < number:
        raise EngineError(f"{number - len(results)} of the {number} requests of this call were aborted.")
    return [results[index] for index in range(number)]
