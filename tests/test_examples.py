"""Each of examples/*.py runs as its reader runs it, on the demo model. Those that start no processes share one.

The others run at night; a commit tests their subjects in tests/contrib.
"""

import ast
import json
import re
import sys
from importlib.util import find_spec
from itertools import chain

import pytest
from helpers import ROOT, run_python
from histories import at_night

# what the output must hold, and the module of the extra that the example needs
EXPECTED = {
    "chat": (r"user:      2 \+ 3\nassistant: 5\n", None),
    "streaming": (r"tiny language model(.|\n)*prompt 11: 11 \+ 3 = 14\b", None),
    "json_schema": (
        r"-> +42\n.*-> +'Paris'\n.*-> +\{'city': '(Paris|Rome|Oslo)', 'is_capital': (True|False)\}\n", "llguidance",
    ),
    "best_of_n": (r"best: c-a-t\n", None),
    "beam_search": (r"(\s*-?\d+\.\d{3}  .*\n){4}", None),
    "logits_processor": (r"without: I am the nanovllm .*\nwith:    I am the nanovllm .*language", None),
    "lora": (r"adapter: five two seven eight\nbase:    5 2 7 8\n", "peft"),
    "score": (r"answer: Paris\n", None),
    "batch_job": (r"taken up again; 120 rows, 120 different\n.*'text': '17'(.|\n)*KiB of HTML", "matplotlib"),
    "ray_data": (r"\b40 rows, 40 right answers", "ray"),
    "evaluation": (r"exact match on sums: 1\.000", "lm_eval"),
}  # fmt: skip
OTHERS = {"grpo", "ocr"}  # run by test_grpo and test_vision_clients
ALONE = ("batch_job", "evaluation", "ray_data")


def test_every_example_is_run():
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names == {*EXPECTED, *OTHERS}


def test_headers_for_uv():
    """``uv run examples/x.py`` installs the packages of the script's header (PEP 723): each that it imports."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*chain(project["dependencies"], *project["optional-dependencies"].values()), "nanovllm", "peft"}

    def names(requirements):
        for name, extras in (re.match(r"([\w-]+)(?:\[(.*?)\])?", requirement).groups() for requirement in requirements):
            yield name.replace("-", "_")
            if name == "nanovllm":
                more = [project["optional-dependencies"][extra] for extra in (extras or "").split(",") if extra]
                yield from names(sum(more, project["dependencies"]))

    for path in (*(ROOT / "examples").glob("*.py"), ROOT / "example.py"):
        text = path.read_text()
        lines = re.match(r'# /// script\n((?:# .*\n)+)# ///\n"""', text)[1]
        header = tomllib.loads(re.sub("^# ", "", lines, flags=re.M))
        assert header["requires-python"] == project["requires-python"], path
        assert (path.parent / header["tool"]["uv"]["sources"]["nanovllm"]["path"]).resolve() == ROOT
        assert {*header["dependencies"]} <= known, f"{path}: other versions than pyproject.toml's"
        nodes, there = list(ast.walk(ast.parse(text))), {*names(header["dependencies"])}
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        missing = {name.partition(".")[0] for name in imported} - there - sys.stdlib_module_names
        assert not missing, f"{path} imports {missing}"


def test_no_text_names_a_package_of_an_index():
    """Error texts and headers named nanovllm's extras as if an index had them, where a stranger could publish them. A
    header may name nanovllm, whose path it gives (see above): uv asks no index then.
    """
    extras = re.findall(r"(?m)^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text().partition("optional-dep")[2])
    assert {"structured", "vision", "parquet", "remote", "plot", "ray", "eval", "flash-attn"} <= {*extras}
    folders = ("nanovllm", "examples", "docs", "tests", "tools", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    installed = set()
    for path in (*paths, *ROOT.glob("*.py"), ROOT / "README.md"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"nanovllm\[\w|install '?nanovllm", text), path
        installed |= {*re.findall(r"pip install '\.\[([\w-]+)\]'", text)}
    assert installed - {"name"} <= {*extras} and {"structured", "vision", "parquet", "plot", "ray"} <= installed


def test_together():
    names = [name for name, (_, extra) in EXPECTED.items() if name not in ALONE and (not extra or find_spec(extra))]
    assert len(names) >= 5
    done = json.loads(run_python("tests/run_scripts.py", "examples", *names).stdout.splitlines()[-1])
    for name in names:
        assert not done[name]["error"], done[name]["error"]
        assert re.search(EXPECTED[name][0], done[name]["output"].strip() + "\n", re.M), f"{name}: {done[name]}"


@pytest.mark.parametrize("name", at_night(*ALONE))
def test_example(name):
    pattern, extra = EXPECTED[name]
    if extra is not None:
        pytest.importorskip(extra, reason=f"examples/{name}.py needs the extra that has {extra}")
    out = run_python(f"examples/{name}.py", RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0").stdout
    assert re.search(pattern, out.strip() + "\n"), json.dumps(out)
