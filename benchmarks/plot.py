"""Draws a run of bench.py as bars, an SVG that follows the reader's light or dark theme.

    python bench.py --engine nanovllm vllm --workload all --json-only > run.json
    python benchmarks/plot.py run.json run.svg

Rates of different workloads have no common scale: the bars of each are drawn relative to its fastest engine.
docs/benchmark.json has the figures of the guide's table of one H200 in this form; they come from several runs.
"""

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

LEFT, LONGEST, RIGHT = 136, 400, 164  # pixels: names of workloads, the longest bar, what stands beside it
BAR, GAP, TOP = 15, 12, 44  # height of a bar, space between workloads, room for the title
COLORS = ("#2f81f7", "#8b949e", "#b7bdc4", "#d0d5da")  # by engine; the first stands out
STYLE = """text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600}.faint{opacity:.7}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"""


def draw(report: dict[str, Any]) -> str:
    """The SVG of bench.py's report: a group of bars for each workload of the first engine."""
    rates = {
        (engine["engine"], w["workload"]): (w["tokens_per_s"], w["counted"])
        for engine in report["engines"] for w in engine["workloads"]
    }  # fmt: skip
    engines = [engine["engine"] for engine in report["engines"]]
    parts, y = [text(0, 16, f"{report['model']}, {report['device']}: tokens per second", "title")], TOP
    for workload in (w["workload"] for w in report["engines"][0]["workloads"]):
        of_engines = {engine: rates[engine, workload] for engine in engines if (engine, workload) in rates}
        fastest = max(rate for rate, _ in of_engines.values())
        parts.append(text(0, y + 11, workload, "title"))
        (counted,) = {counted for _, counted in of_engines.values()}
        parts.append(text(0, y + 11 + BAR, f"({counted})", "faint"))
        for engine, (rate, _) in of_engines.items():
            length, color = LONGEST * rate / fastest, COLORS[engines.index(engine) % len(COLORS)]
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" rx="2" fill="{color}"/>')
            version = report["versions"].get(engine) or ""
            label = f"{rate:,.0f}  {engine} {version}".rstrip()
            parts.append(text(LEFT + length + 6, y + 11, label, "title" if engine == engines[0] else ""))
            y += BAR
        y += max(0, 2 - len(of_engines)) * BAR + GAP
    size = f'width="{LEFT + LONGEST + RIGHT}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {LEFT + LONGEST + RIGHT} {y}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def text(x: float, y: float, content: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(content)}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw a run of bench.py as bars.")
    parser.add_argument("run", type=Path, help="a file whose last line is bench.py's JSON; or JSON alone")
    parser.add_argument("svg", type=Path, help="the picture")
    args = parser.parse_args()
    written = args.run.read_text(encoding="utf-8")
    try:
        report = json.loads(written)
    except ValueError:
        report = json.loads(written.strip().splitlines()[-1])
    args.svg.write_text(draw(report), encoding="utf-8")
