"""The progress bar of a call: finished requests, and tokens with the throughput of prefill and decode."""

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar

from tqdm import tqdm

TERMINAL_INTERVAL_S = 0.1
LOG_INTERVAL_S = 10.0  # long, because a log file keeps every state of the bar


class Progress:
    """A bar of ``num_requests``; between finished requests its tokens move.

    Args:
        num_requests: the bar's total.
        use_tqdm: a callable makes the bar in tqdm's place: called with tqdm's keywords ``total``, ``desc`` and
            ``dynamic_ncols``, it returns an object with ``update``, ``refresh``, ``close`` and a ``postfix`` to set.
        desc: the word before the bar.
    """

    _is_first_step: ClassVar[bool] = True  # the process's first step allocates and initialises: its time says nothing

    def __init__(self, num_requests: int, use_tqdm: bool | Callable[..., Any], desc: str = "Generating"):
        is_off = getattr(sys.stderr, "closed", sys.stderr is None)  # closed in services, or by 2>&-; tqdm writes there
        in_terminal = not is_off and sys.stderr.isatty()
        self._interval_s = TERMINAL_INTERVAL_S if in_terminal or "ipykernel" in sys.modules else LOG_INTERVAL_S
        options = {"total": num_requests, "desc": desc, "dynamic_ncols": True}
        own = {"mininterval": self._interval_s, "disable": is_off}
        self._bar: Any = use_tqdm(**options) if callable(use_tqdm) else tqdm(**options, **own)
        self._tokens = {"prefill": 0, "decode": 0}
        self._timed_tokens = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._last = self._shown = perf_counter()

    def update(self, num_tokens: int, num_finished: int) -> None:
        """A step has processed tokens, counted as by ``LLM.step``; the time since the last counts for its kind."""
        now = perf_counter()
        if num_tokens:
            kind = "prefill" if num_tokens > 0 else "decode"
            self._tokens[kind] += abs(num_tokens)
            if not Progress._is_first_step:
                self._timed_tokens[kind] += abs(num_tokens)
                self._seconds[kind] += now - self._last
            Progress._is_first_step = False
            self._last = now
        if num_finished:
            self._bar.update(num_finished)
        if now - self._shown > self._interval_s:
            self._shown = now
            self._count_tokens()
            self._bar.refresh()

    def _count_tokens(self) -> None:
        shown = []
        for kind, num_tokens in self._tokens.items():
            rate = f" ({self._timed_tokens[kind] / self._seconds[kind]:,.0f}/s)" if self._seconds[kind] else ""
            shown.append(f"{kind} {num_tokens:,} tok{rate}")
        self._bar.postfix = ", ".join(shown)

    def close(self) -> None:
        self._count_tokens()
        self._bar.close()
