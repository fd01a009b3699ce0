"""The progress bar of ``generate``: finished requests, and the throughput of prefill and decode."""

from time import perf_counter

from tqdm import tqdm

from nanovllm.engine.scheduler import Batch, PrefillBatch


class Progress:
    """A tqdm bar; with ``enabled=False`` every call does nothing."""

    def __init__(self, num_requests: int, enabled: bool):
        self._bar = tqdm(total=num_requests, desc="Generating", dynamic_ncols=True, disable=not enabled)
        self._enabled = enabled
        self._tokens = {"Prefill": 0, "Decode": 0}
        self._seconds = {"Prefill": 0.0, "Decode": 0.0}
        self._last = self._shown = perf_counter()

    def update(self, batch: Batch | None, num_finished: int) -> None:
        """A step has processed ``batch``; the time since the last one counts for its kind."""
        if self._enabled and batch is not None:
            now = perf_counter()
            kind = "Prefill" if isinstance(batch, PrefillBatch) else "Decode"
            self._tokens[kind] += batch.num_tokens
            self._seconds[kind] += now - self._last
            self._last = now
            if now - self._shown > self._bar.mininterval:
                self._shown = now
                self._show_throughput()
        self._bar.update(num_finished)

    def _show_throughput(self) -> None:
        rates = {kind: f"{n / (self._seconds[kind] or 1):.0f}tok/s" for kind, n in self._tokens.items()}
        self._bar.set_postfix(rates, refresh=False)

    def close(self) -> None:
        if self._enabled:
            self._show_throughput()
        self._bar.close()
