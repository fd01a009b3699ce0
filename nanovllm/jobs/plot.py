"""``nanovllm plot``: what ``--metrics`` wrote, over time, as one HTML page that needs nothing else, or as a PNG."""

import html
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanovllm.errors import ConfigError

NUM_POINTS = 400  # of a line at most
LONGEST_GAP_S = 10.0  # a job that rested for longer was stopped and started again; the time between is left out
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 210, 56, 14, 12, 36  # of a chart and its margins


class Chart(NamedTuple):
    title: str
    unit: str  # of the vertical axis
    lines: dict[str, np.ndarray]  # float [len(seconds)], NaN where there is nothing
    limit: float | None = None  # of the axis


def run(args: Any) -> int:
    seconds, charts, facts = read(Path(args.metrics))
    output = Path(args.output)
    if output.suffix == ".png":
        write_png(output, seconds, charts)
    elif output.suffix == ".html":
        output.write_text(page(Path(args.metrics).name, seconds, charts, facts), encoding="utf-8")
    else:
        raise ConfigError(f"OUT={output} must end in .html or .png.")
    return 0


# ---------------------------------------------------------------- the numbers


def read(path: Path) -> tuple[np.ndarray, list[Chart], dict[str, str]]:
    """Seconds since the start, float [P]; the charts over them; and what is worth a line."""
    engines: defaultdict[Any, list] = defaultdict(list)
    started: Counter[int] = Counter()  # a job that goes on has a new process; in a container perhaps of the same id
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            sample = json.loads(line)
            pid = sample["pid"]
            before = engines[pid, started[pid]]
            if before and sample["prompt_tokens"] < before[-1][1]["prompt_tokens"]:
                started[pid] += 1
            engines[pid, started[pid]].append((sample["time"], sample))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}, line {number}: not what --metrics writes: {line[:60]!r}.") from None
    times = np.unique([time for samples in engines.values() for time, _ in samples])
    if len(times) < 2:
        raise ConfigError(f"{path} holds {len(times)} moments; two at least are needed. Did the job run for a second?")
    steps = np.diff(times, prepend=times[0])
    running_time = np.cumsum(np.where(steps > LONGEST_GAP_S, 1.0, steps))
    seconds = np.linspace(0, running_time[-1], min(NUM_POINTS, max(2, math.ceil(running_time[-1]))))

    def total(name: str, is_counter: bool = False) -> np.ndarray:
        """Of all engines; one that is gone keeps its counters."""
        result = np.zeros(len(seconds))
        for samples in engines.values():
            at = np.interp([time for time, _ in samples], times, running_time)
            values = [float(sample[name]) for _, sample in samples]
            result += np.interp(seconds, at, values, left=0.0, right=values[-1] if is_counter else 0.0)
        return result

    def rate(counter: np.ndarray) -> np.ndarray:
        return np.maximum(np.gradient(counter, seconds), 0)

    generated, prompted, cached = (
        total(name, is_counter=True) for name in ("generation_tokens", "prompt_tokens", "prompt_tokens_cached")
    )
    hits, queries = (total(f"prefix_cache_{name}", is_counter=True) for name in ("hits", "queries"))
    running, waiting = total("num_requests_running"), total("num_requests_waiting")
    lives = np.array([np.interp([s[0][0], s[-1][0]], times, running_time) for s in engines.values()])
    alive = ((lives[:, :1] <= seconds) & (seconds <= lives[:, 1:])).sum(0)
    hit_rate = np.divide(100 * hits, queries, out=np.full(len(seconds), np.nan), where=queries > 0)
    in_use = 100 * total("kv_cache_usage_perc") / np.maximum(alive, 1)
    charts = [
        Chart("Generated tokens", "per second", {"generated": rate(generated)}),
        Chart("Prompt tokens", "per second", {"computed": rate(prompted - cached), "from cache": rate(cached)}),
        Chart("Sequences", "at a time", {"running": running, "waiting": waiting}),
        Chart("KV cache in use", "% of blocks", {"in use": in_use}, 100),
        Chart("Prefix cache hits so far", "% of prompt tokens", {"hits": hit_rate}, 100),
    ]
    last = [samples[-1][1] for samples in engines.values()]
    num_requests = sum(sum(sample["request_success"].values()) for sample in last)
    facts = {
        "running time": clock(seconds[-1]), "requests finished": f"{num_requests:,}",
        "tokens generated": f"{generated[-1]:,.0f}", "per second, mean": f"{generated[-1] / seconds[-1]:,.0f}",
        "prompt tokens": f"{prompted[-1]:,.0f}", "of them cached": f"{100 * cached[-1] / max(prompted[-1], 1):.0f} %",
        "preemptions": f"{sum(sample['num_preemptions'] for sample in last):,}",
    }  # fmt: skip
    return seconds, charts, facts


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02} h"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


def ticks(top: float, number: int = 4) -> list[float]:
    """Round values from 0 to ``top`` or a little more."""
    raw = max(top, 1e-9) / number
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    return [step * i for i in range(math.ceil(top / step * 0.999) + 1)]


def time_axis(longest: float) -> tuple[str, float, list[float]]:
    """Unit, its seconds, and ticks in it."""
    unit, size = ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 180 else ("seconds", 1.0)
    return unit, size, [tick for tick in ticks(longest / size, 6) if tick * size <= longest * 1.001]


# ---------------------------------------------------------------- the page

STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1c1c1a; --dim: #6b6a65; --grid: #e4e3de;
        --line0: #2a78d6; --line1: #d2591f; }
@media (prefers-color-scheme: dark) {
  :root { --page: #1a1a19; --ink: #f3f2ee; --dim: #a3a29b; --grid: #353533; --line0: #5598e7; --line1: #ec8048; } }
body { margin: 24px auto; max-width: 1200px; padding: 0 16px; background: var(--page); color: var(--ink);
       font: 14px/1.4 system-ui, sans-serif; }
h1 { font-size: 18px; margin: 0 0 12px; } h2 { font-size: 14px; margin: 0; }
dl { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 0 0 20px; }
dt { color: var(--dim); font-size: 12px; } dd { margin: 0; font-size: 18px; font-variant-numeric: tabular-nums; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 24px; }
section > p { margin: 0; min-height: 20px; color: var(--dim); font-size: 12px; font-variant-numeric: tabular-nums; }
section > p span { margin-right: 14px; } section > p i { display: inline-block; width: 14px; height: 3px;
  margin-right: 5px; vertical-align: middle; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--dim); font-size: 11px; }
.grid { stroke: var(--grid); } .cursor { stroke: var(--dim); visibility: hidden; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line0 { stroke: var(--line0); } .line1 { stroke: var(--line1); stroke-dasharray: 5 4; }
i.line0 { background: var(--line0); } i.line1 { background: var(--line1); }
"""
# the pointer's moment, in all charts at once
SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent), svgs = [...document.querySelectorAll("svg")];
function show(event) {
  const box = event.currentTarget.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * data.width;
  const share = (x - data.left) / (data.right - data.left), last = data.seconds.length - 1;
  const i = Math.max(0, Math.min(last, Math.round(share * last)));
  svgs.forEach((svg, chart) => {
    const cursor = svg.querySelector(".cursor"), at = data.left + (data.right - data.left) * i / last;
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at); cursor.style.visibility = "visible";
    svg.parentNode.querySelectorAll("b").forEach((b, line) => {
      const y = data.charts[chart][line][i];
      b.textContent = y === null ? "" : " " + y.toLocaleString("en", {maximumFractionDigits: 1});
    });
  });
}
svgs.forEach(svg => svg.addEventListener("pointermove", show));
"""


def page(name: str, seconds: np.ndarray, charts: list[Chart], facts: dict[str, str]) -> str:
    values = [[[None if math.isnan(y) else round(y, 2) for y in line] for line in c.lines.values()] for c in charts]
    data = {"width": WIDTH, "left": LEFT, "right": WIDTH - RIGHT, "seconds": seconds.tolist(), "charts": values}
    listed = "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in facts.items())
    drawn = "\n".join(draw(chart, seconds) for chart in charts)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>nanovllm: {html.escape(name)}</title><style>{STYLE}</style>
<h1>nanovllm: {html.escape(name)}</h1><dl>{listed}</dl>
<main>
{drawn}
</main>
<script id="data" type="application/json">{json.dumps(data)}</script><script>{SCRIPT}</script></html>
"""


def draw(chart: Chart, seconds: np.ndarray) -> str:
    """A section with the chart as SVG."""
    highest = max((float(np.nanmax(line, initial=0)) for line in chart.lines.values()), default=0.0)
    y_ticks = ticks(chart.limit or highest or 1.0)
    unit, size, x_ticks = time_axis(float(seconds[-1]))
    xs = LEFT + (WIDTH - LEFT - RIGHT) * seconds / seconds[-1]
    base = HEIGHT - BOTTOM

    def y_of(value: Any) -> Any:
        return base - (base - TOP) * value / y_ticks[-1]

    parts = []
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')  # fmt: skip
    for tick in x_ticks:
        x = LEFT + (WIDTH - LEFT - RIGHT) * tick * size / seconds[-1]
        parts.append(f'<text x="{x:.1f}" y="{base + 15}" text-anchor="middle">{tick:,.6g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle">time, {unit}</text>')
    legend = ""
    for number, (name, line) in enumerate(chart.lines.items()):
        legend += f'<span><i class="line{number}"></i>{name}<b></b></span>'
        for run_of in np.split(np.arange(len(line)), np.flatnonzero(np.diff(np.isnan(line))) + 1):
            if not np.isnan(line[run_of[0]]):
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs[run_of], y_of(line[run_of]), strict=True))
                parts.append(f'<polyline class="line{number}" points="{points}"/>')
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{base}"/>')
    return (
        f"<section><h2>{chart.title}, {chart.unit}</h2><p>{legend}</p>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{chart.title}, {chart.unit}, over time">'
        f"{''.join(parts)}</svg></section>"
    )


def write_png(path: Path, seconds: np.ndarray, charts: list[Chart]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a .png needs matplotlib: pip install matplotlib; or write an .html page.") from None
    unit, size, _ = time_axis(float(seconds[-1]))
    figure = Figure(figsize=(8, 2.4 * len(charts)), layout="constrained")
    for axes, chart in zip(figure.subplots(len(charts), sharex=True), charts, strict=True):
        for name, line in chart.lines.items():
            axes.plot(seconds / size, line, label=name)
        axes.set(title=chart.title, ylabel=chart.unit, ylim=(0, chart.limit))
        axes.legend(loc="upper right")
    axes.set_xlabel(f"time, {unit}")
    figure.savefig(path, dpi=120)
