"""Counters of one engine, under vLLM's names.

A decode step pays one addition, in ``Scheduler.postprocess``. The rest is counted when a sequence enters or a request
finishes, or is looked up when somebody reads. Reading takes no lock: any thread may read while the engine runs.
"""

from collections.abc import Iterable
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

from nanovllm.core import Sequence

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler

# times of a finished request, in seconds: waiting for a place, to its first token, to its last, and all three
TIMES = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
         "e2e_request_latency_seconds")  # fmt: skip


class Metrics:
    """The counters, which ``read`` explains."""

    def __init__(self) -> None:
        self.generation_tokens = 0  # the scheduler adds to it at every step
        self.prompt_tokens = self.prompt_tokens_cached = 0
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.request_success = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._num_timed = 0
        self._seconds = dict.fromkeys(TIMES, 0.0)

    def entered(self, seq: Sequence, is_first: bool) -> None:
        """A sequence was given a place for the first time; ``is_first`` of its request."""
        seq.entered_at = perf_counter()
        if is_first:
            self.prompt_tokens += seq.num_prompt_tokens
            self.prompt_tokens_cached += seq.num_cached_tokens

    def looked_up(self, seq: Sequence) -> None:
        """The prefix cache was asked for a new sequence's prompt."""
        self.prefix_cache_queries += seq.num_prompt_tokens
        self.prefix_cache_hits += seq.num_cached_tokens

    def prefilled(self, seqs: Iterable[Sequence]) -> None:
        """A prefill of these has run."""
        now = perf_counter()
        for seq in seqs:
            if seq.num_completion_tokens <= 1:  # else it was preempted before
                seq.prefilled_at = now  # for a chunked prompt, the last chunk counts

    def finished(self, seq: Sequence) -> None:
        """The request of this first sequence is complete."""
        assert seq.finish_reason is not None
        self.request_success[seq.finish_reason] += 1
        now = perf_counter()
        if not seq.entered_at:  # it had nothing to compute
            seq.entered_at = seq.prefilled_at = now
        self._num_timed += 1
        moments = [seq.arrived_at, seq.entered_at, seq.prefilled_at or now, now]
        seconds = [end - begin for begin, end in pairwise(moments)]
        for name, value in zip(TIMES, [*seconds, sum(seconds)], strict=True):
            self._seconds[name] += value

    def aborted(self, num_requests: int) -> None:
        self.request_success["abort"] += num_requests

    def read(self, scheduler: "Scheduler", num_not_queued: int = 0) -> dict[str, Any]:
        """Totals since the engine was made, and its state now. Times are sums over ``count`` finished requests.

        ``num_not_queued``: sequences that wait, and that the scheduler does not know yet.
        """
        blocks = scheduler.block_manager
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_cached": self.prompt_tokens_cached,
            "generation_tokens": self.generation_tokens,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            "num_preemptions": scheduler.num_preemptions,
            "kv_cache_usage_perc": 1 - blocks.num_available / len(blocks.blocks),
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting) + num_not_queued,
            "request_success": dict(self.request_success),
            **scheduler.counters(),
            **{name: {"count": self._num_timed, "sum": total} for name, total in self._seconds.items()},
        }
