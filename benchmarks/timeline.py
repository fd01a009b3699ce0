"""Where the time of a run goes: a timeline of the host's work and of the device's, step by step.

Owns the recording (by wrapping the methods of a live engine, so the engine carries no code for
it), the Chrome/Perfetto file and the summary. A step has three launches: of what has changed, of the forward pass
and of the sampling. A device span reaches from the event before a launch's first operation to the event after its last
one. All work runs in order on one stream, so a gap between two spans is time in which the device waited for the host.
"""

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from statistics import median
from time import perf_counter_ns
from typing import Any

HOST, DEVICE, IDLE = 0, 1, 2  # thread ids in the trace
THREADS = {HOST: "host", DEVICE: "device", IDLE: "device waits"}
LAUNCHES = ("write", "run_sampler")  # methods of the runner, beside the launchers' ``run``


@dataclass
class Span:
    """``start`` and ``end`` in microseconds since the recording began."""

    name: str
    start: float
    end: float

    @property
    def us(self) -> float:
        return self.end - self.start


@dataclass
class Step:
    """One batch."""

    kind: str  # "prefill" or "decode"
    num_tokens: int
    num_seqs: int
    spans: list[Span] = field(default_factory=list)  # the host's
    device: list[Span] = field(default_factory=list)  # of each launch
    events: list[Any] = field(default_factory=list)  # CUDA events around each launch

    def host_us(self, *names: str) -> float:
        return sum(span.us for span in self.spans if span.name in names)

    @property
    def device_us(self) -> float:
        return sum(span.us for span in self.device)


class Timeline:
    """Records the steps of an engine while ``recording()`` is open.

    Args:
        engine: an ``LLM``.
    """

    def __init__(self, engine: Any):
        import torch

        self.torch = torch
        self.engine = engine
        self.on_gpu = engine.model_runner.device.type == "cuda"
        self.steps: list[Step] = []
        self.loops: list[Span] = []  # one round of schedule, run, postprocess
        self._launching: Step | None = None  # whose launches are being issued
        self._last_wait: Span | None = None
        self._step_of_batch: dict[int, Step] = {}

    def _now(self) -> float:
        return (perf_counter_ns() - self._zero) / 1000

    @contextmanager
    def recording(self):
        """Wrap the engine's methods; restore them at the end."""
        from nanovllm.runner.model_runner import StepHandle

        engine = self.engine
        scheduler, runner = engine.scheduler, engine.model_runner
        wrapped = [
            (scheduler, "schedule", self._schedule(scheduler.schedule)),
            (runner, "forward", self._forward(runner.forward)),
            *((runner, name, self._launch(getattr(runner, name))) for name in LAUNCHES),
            *((launcher, "run", self._launch(launcher.run)) for launcher in runner.launchers),
            (runner, "sample", self._sample(runner.sample)),
            (scheduler, "postprocess", self._postprocess(scheduler.postprocess)),
            (engine, "advance", self._loop(engine.advance)),
        ]
        wait = StepHandle.wait
        self._zero = perf_counter_ns()
        if self.on_gpu:
            self.torch.cuda.synchronize()
            self._device_zero = self._event()
            self.torch.cuda.synchronize()
            self._device_offset = self._now()
        replaced = [(owner, name, vars(owner).get(name)) for owner, name, _ in wrapped]
        for owner, name, wrapper in wrapped:
            setattr(owner, name, wrapper)
        StepHandle.wait = self._wait(wait)  # type: ignore[method-assign]
        try:
            yield self
        finally:
            for owner, name, before in replaced:
                if before is None:
                    delattr(owner, name)  # the class has the method
                else:
                    setattr(owner, name, before)
            StepHandle.wait = wait  # type: ignore[method-assign]
            self._read_events()

    def _event(self) -> Any:
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # ------------------------------------------------------------ wrappers

    def _schedule(self, schedule):
        @wraps(schedule)
        def wrapper():
            start = self._now()
            batch = schedule()
            if batch is not None:
                kind = "prefill" if hasattr(batch, "starts") else "decode"
                num_seqs = len(batch.starts) if kind == "prefill" else len(batch.req_indices)
                step = Step(kind, batch.num_tokens, num_seqs)
                step.spans.append(Span("schedule", start, self._now()))
                self.steps.append(step)
                self._step_of_batch[id(batch)] = step
            return batch

        return wrapper

    def _forward(self, forward):
        @wraps(forward)
        def wrapper(batch):
            self._launching = step = self._step_of_batch[id(batch)]
            start = self._now()
            forward(batch)
            # from the batch to its inputs on the device, then the launch (on the CPU that is the computation)
            launch = next(span for span in step.spans if span.name == "launch")
            step.spans.append(Span("prepare", start, launch.start))

        return wrapper

    def _launch(self, launch):
        @wraps(launch)
        def wrapper(*args):
            step, self._last_wait = self._launching, None
            before = self._event() if self.on_gpu else None
            start = self._now()
            result = launch(*args)
            # with several ranks a prefill waits for the launch before
            span = Span("launch", self._last_wait.end if self._last_wait else start, self._now())
            step.spans.append(span)
            if self.on_gpu:
                step.events.append((before, self._event()))
            else:
                step.device.append(Span(f"{step.kind} {step.num_seqs}", span.start, span.end))
            return result

        return wrapper

    def _sample(self, sample):
        @wraps(sample)
        def wrapper(*args):
            handle = sample(*args)
            handle.timeline_step = self._launching
            return handle

        return wrapper

    def _wait(self, wait):
        def wrapper(handle):
            start = self._now()
            tokens = wait(handle)
            step = getattr(handle, "timeline_step", None)
            if step is not None:
                self._last_wait = Span("wait", start, self._now())
                step.spans.append(self._last_wait)
            return tokens

        return wrapper

    def _postprocess(self, postprocess):
        @wraps(postprocess)
        def wrapper(batch, token_ids):
            start = self._now()
            finished = postprocess(batch, token_ids)
            step = self._step_of_batch.pop(id(batch), None)
            if step is not None:  # not one that was in flight when the recording began
                step.spans.append(Span("postprocess", start, self._now()))
            return finished

        return wrapper

    def _loop(self, step):
        @wraps(step)
        def wrapper():
            start = self._now()
            result = step()
            self.loops.append(Span("step", start, self._now()))
            return result

        return wrapper

    def _read_events(self) -> None:
        if not self.on_gpu:
            return
        self.torch.cuda.synchronize()
        for step in self.steps:
            for events in step.events:
                start, end = (1000 * self._device_zero.elapsed_time(e) + self._device_offset for e in events)
                step.device.append(Span(f"{step.kind} {step.num_seqs}", start, end))
            step.events.clear()

    # ------------------------------------------------------------ results

    def _gaps(self) -> list[tuple[Step, Span]]:
        """(step, time the device waited before one of its launches)."""
        launched = [(step, span) for step in self.steps for span in step.device]
        return [
            (step, Span("waits", before.end, max(before.end, after.start)))
            for (_, before), (step, after) in pairwise(launched)
        ]

    def summary(self) -> dict[str, float]:
        """Shares of time and microseconds per step.

        ``steady`` are the decode steps that follow a decode step, with at least half the largest batch.
        Host microseconds exclude waits for the device, and on the CPU the computation.
        """
        decode = [step for step in self.steps if step.kind == "decode"]
        device = [span for step in self.steps for span in step.device]
        if not device:
            return {}
        busy, whole = sum(span.us for span in device), device[-1].end - device[0].start
        largest = max((step.num_seqs for step in decode), default=0)
        previous_kind = {id(b): a.kind for a, b in pairwise(self.steps)}
        full = [step for step in decode if 2 * step.num_seqs >= largest]
        steady = {id(step) for step in full if previous_kind.get(id(step)) == "decode"}
        steady_idle = sum(gap.us for step, gap in self._gaps() if id(step) in steady)
        steady_busy = sum(step.device_us for step in decode if id(step) in steady)
        figures = {
            "prefill_steps": len(self.steps) - len(decode),
            "decode_steps": len(decode),
            "device_busy_share": busy / whole if whole else 0.0,
            "steady_idle_share": steady_idle / (steady_idle + steady_busy) if steady_busy else 0.0,
            "prefill_device_ms": sum(step.device_us for step in self.steps if step.kind == "prefill") / 1000,
            "decode_device_ms": sum(step.device_us for step in decode) / 1000,
        }
        if decode:
            figures["decode_device_us_median"] = median(step.device_us for step in decode if step.device)
            for name in ("schedule", "prepare", "launch", "wait", "postprocess"):
                if self.on_gpu or name != "launch":
                    figures[f"host_{name}_us"] = sum(s.host_us(name) for s in decode) / len(decode)
            spent = sum(loop.us for loop in self.loops)
            inside = sum(span.us for step in self.steps for span in step.spans)
            figures["host_rest_us"] = (spent - inside) / max(1, len(self.loops))
            parts = ("schedule", "prepare", "launch", "postprocess", "rest")
            figures["host_per_decode_step_us"] = sum(figures.get(f"host_{name}_us", 0.0) for name in parts)
        return {name: round(value, 4) for name, value in figures.items()}

    def write(self, path: str) -> None:
        """Write the timeline for chrome://tracing or ui.perfetto.dev."""
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
            for tid, name in THREADS.items()
        ]

        def put(tid: int, span: Span, **args: Any) -> None:
            events.append({
                "name": span.name, "ph": "X", "pid": 0, "tid": tid,
                "ts": round(span.start, 3), "dur": round(span.us, 3), "args": args,
            })  # fmt: skip

        for number, step in enumerate(self.steps):
            args = {"step": number, "kind": step.kind, "tokens": step.num_tokens, "sequences": step.num_seqs}
            for span in step.spans:
                put(HOST, span, **args)
            for span in step.device:
                put(DEVICE, span, **args)
        for _, gap in self._gaps():
            if gap.us > 0:
                put(IDLE, gap)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
