"""The README's and the guide's snippets run as they stand, offline: all but what needs a model of the hub, or Ray."""

import json
import re

from helpers import ROOT
from transformers import AutoModelForCausalLM

from benchmarks.plot import draw
from nanovllm.utils.checkpoint import DEMO_MODEL

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
SNIPPETS = [text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import ray" not in text]


def without_hub_models(snippet: str) -> str:
    """Without the paragraphs of the first snippet, and the lines of the others, that need a download."""
    paragraphs = [text for text in snippet.split("\n\n") if not re.search(r"^llm = LLM\(\"Qwen", text, re.MULTILINE)]
    return "\n".join(line for line in "\n".join(paragraphs).splitlines() if not re.match(r"LLM\(\"|qwen|params", line))


def test_the_first_snippet_begins_with_the_demo_model():
    """It needed a download, and offline it ended in a traceback."""
    assert SNIPPETS[0].index("LLM()") < SNIPPETS[0].index('LLM("')


def test_snippets(capsys):
    names: dict = {}
    for snippet in SNIPPETS:
        code = without_hub_models(snippet)
        assert "Qwen" not in code and (code or "LLM(" in snippet)
        exec(code, names)
    names["llm"].exit()
    out = capsys.readouterr().out
    assert out.startswith("I am the nanovllm demo model")
    output = names["output"]
    assert len(output.outputs) == 2 and len(output.outputs[0].logprobs[0]) in (3, 4)


def test_snippets_of_the_guide():
    names: dict = {"policy": AutoModelForCausalLM.from_pretrained(DEMO_MODEL)}
    snippets = [text for text in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "ray" not in text]
    assert len(snippets) == 8
    for snippet in snippets:
        exec(snippet, names)
    names["llm"].exit()
    assert len(names["outputs"][0].outputs) == 8
    assert len(names["embeddings"]) == len(names["scores"]) == 2
    assert names["metrics"]["generation_tokens"] > 0
    assert names["num_tokens"] < 0 and names["answer"].finished and len(names["texts"]) == 2


def test_links():
    """Files and headings that the README and the guide point to exist."""
    for text, folder in ((README, ROOT), (GUIDE, ROOT / "docs")):
        for target, heading in re.findall(r"\]\(([\w./-]+)(?:#([\w-]+))?\)", text):
            titles = re.findall(r"(?m)^#+ (.*)", (folder / target).read_text(encoding="utf-8"))
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not heading or heading in anchors, f"{target}#{heading}"


def test_the_picture_has_the_tables_figures():
    folder = ROOT / "docs"
    report = json.loads((folder / "benchmark.json").read_text())
    assert draw(report) == (folder / "benchmark.svg").read_text(encoding="utf-8")
    rows = {row[1]: row[2] for row in re.finditer(r"(?m)^\| \*\*(\w+)\*\*: [^|]*\|(.*)\|$", GUIDE)}
    for place, engine in enumerate(report["engines"]):
        for workload in engine["workloads"]:
            cell = rows[workload["workload"]].split("|")[place]
            assert re.match(rf" {workload['tokens_per_s']:,}[–, ]", cell)


def test_the_first_table_is_an_excerpt():
    """The first screen's figures are those of the large table, in its order."""
    rows = [row.split("|")[2:-1] for row in re.findall(r"(?m)^\|.*\| [\d.–]+ \|$", README)]
    excerpt, large = rows[:4], rows[4:]
    assert len(large) >= 10 and [row for row in large if row in excerpt] == excerpt


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 230
