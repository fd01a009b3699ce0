"""``nanovllm plot METRICS OUT``: the lines of ``batch --metrics`` over time, as one HTML page or as a PNG."""

import html
import io
import json
import sys
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.errors import ConfigError

NUM_POINTS = 400  # points in a line
LONGEST_GAP_S = 10.0  # a job that rested for longer was stopped and started again; the time between is left out
STATES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "alive")
COUNTERS = ("generation_tokens", "prompt_tokens", "prompt_tokens_cached", "prefix_cache_hits", "prefix_cache_queries",
            "num_preemptions", "requests")  # fmt: skip
LARGEST = 1e15  # number in a line: whole ones are exact up to it
Chart = tuple[str, str, dict[str, np.ndarray]]  # title; unit; lines, float [P], NaN where there is nothing


def run(args: Any) -> int:
    source, output = Path(args.metrics), Path(args.output)
    if output.suffix not in (".html", ".png"):
        raise ConfigError(f"OUT={output} must end in .html or .png.")
    if output.resolve() == source.resolve():
        raise ConfigError(f"OUT={output} is METRICS, and would be overwritten; give another OUT.")
    seconds, charts, totals = read(source)
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot needs matplotlib: pip install '.[plot]' in the checkout.") from None
    unit, size = ("hours", 3600) if seconds[-1] > 7200 else ("minutes", 60) if seconds[-1] > 180 else ("seconds", 1)
    figure = Figure(figsize=(9, 2.2 * len(charts)), layout="constrained")
    figure.suptitle(f"nanovllm: {source.name}\n{totals}", fontsize="medium", parse_math=False)
    for axes, (title, label, lines) in zip(figure.subplots(len(charts), sharex=True), charts, strict=True):
        for (name, line), style in zip(lines.items(), ("-", "--"), strict=False):
            axes.plot(seconds / size, line, style, label=name, clip_on=False, zorder=3)  # over the frame
        axes.set_title(title, loc="left")
        axes.set(ylabel=label, xlim=(0, seconds[-1] / size), ylim=(0, 105 if label[0] == "%" else None))
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=2, frameon=False)
    axes.set_xlabel(f"running time, {unit}")
    if output.suffix == ".png":
        figure.savefig(output, dpi=120)
        return 0
    with matplotlib.rc_context({"svg.fonttype": "none"}), io.StringIO() as file:  # texts stay texts
        figure.savefig(file, format="svg", metadata={"Date": None})
        svg = file.getvalue()
    head = f'<!doctype html><meta charset="utf-8"><title>nanovllm: {html.escape(source.name)}</title>'
    output.write_text(f"{head}\n{svg[svg.index('<svg') :]}", encoding="utf-8")
    return 0


def read(path: Path) -> tuple[np.ndarray, list[Chart], str]:
    """Seconds that the job ran, float [P]; the charts over them; the totals in two lines."""
    samples = samples_of_processes(path)
    times = np.unique([sample[0] for of_process in samples for sample in of_process])
    if len(times) < 2:
        raise ConfigError(f"{path} holds {len(times)} moments; two at least are needed. Did the job run for a second?")
    steps = np.diff(times, prepend=times[0])
    running_time = np.cumsum(np.where(steps > LONGEST_GAP_S, 1.0, steps))
    seconds = np.linspace(0, running_time[-1], NUM_POINTS)
    sums = np.zeros((len(STATES) + len(COUNTERS), NUM_POINTS))  # sums over all engines
    for of_process in samples:
        moments, *values = table = np.array(of_process).T
        counters = table[1 + len(STATES) :]
        changes = np.diff(counters, prepend=0)
        is_new = (changes < 0).any(0)  # an engine in a process of the same id, as containers have
        counters[:] = np.cumsum(np.where(is_new, counters, changes), axis=1)
        at = np.interp(moments, times, running_time)
        for i, line in enumerate(values):  # counters outlive their engine
            sums[i] += np.interp(seconds, at, line, left=0, right=0 if i < len(STATES) else None)
    running, waiting, usage, alive, generated, prompted, cached, hits, queries, preempted, finished = sums
    hit_rate = np.divide(100 * hits, queries, out=np.full(NUM_POINTS, np.nan), where=queries > 0)
    computed, reused = np.gradient(prompted - cached, seconds), np.gradient(cached, seconds)
    charts = [
        ("Generated tokens", "per second", {"generated": np.gradient(generated, seconds)}),
        ("Prompt tokens", "per second", {"computed": computed, "from cache": reused}),
        ("Sequences", "at a time", {"running": running, "waiting": waiting}),
        ("KV cache in use", "% of blocks", {"in use": 100 * usage / np.maximum(alive, 1)}),
        ("Prefix cache hits so far", "% of prompt tokens", {"hits": hit_rate}),
    ]
    totals = (
        f"ran {timedelta(seconds=round(seconds[-1]))}, {finished[-1]:,.0f} requests finished, {preempted[-1]:,.0f} "
        f"preemptions\n{generated[-1]:,.0f} tokens generated ({generated[-1] / seconds[-1]:,.0f}/s), "
        f"{prompted[-1]:,.0f} in prompts ({100 * cached[-1] / max(prompted[-1], 1):.0f} % cached)"
    )
    return seconds, charts, totals


def samples_of_processes(path: Path) -> list[list[list[float]]]:
    """The lines of each process: time, states, counters."""
    samples, num_torn = defaultdict[int, list](list), 0
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            sample = json.loads(line)
            sample.update(alive=1, requests=sum(sample["request_success"].values()))
            numbers = [float(sample[name]) for name in ("time", *STATES, *COUNTERS)]
            if not all(0 <= x <= LARGEST for x in numbers):  # nor NaN
                raise ValueError
            samples[sample["pid"]].append([round(numbers[0], 3), *numbers[1:]])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if line[:1] not in (b"{", b"") or not isinstance(error, json.JSONDecodeError):
                raise ConfigError(f"{path}, line {number}: not what --metrics writes: {line[:60]!r}.") from None
            num_torn += 1  # by a kill or a full disk
    if num_torn:
        print(f"{path}: lines that are not whole, and left out: {num_torn}.", file=sys.stderr)
    return list(samples.values())
