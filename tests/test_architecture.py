"""What docs/architecture.md promises: packages without circles and within budgets, a reading path, a true table."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanovllm"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Lines of Python that a package may have. To raise one is a decision of its own: first look for a concept to remove.
BUDGETS = {
    "contrib.as_vllm": 1_450,
    "contrib.beam_search": 175,
    "contrib.cli": 115,
    "contrib.integrations": 455,
    "contrib.jobs": 950,
    "core": 425,
    "distributed": 865,
    "engine": 4_175,
    "kernels": 7_760,
    "layers": 1_010,
    "models": 2_375,
    "runner": 2_540,
    "sampling": 910,
    "utils": 225,
    "other modules": 1_345,
}
PATH_LINES = 3_890  # the reading path
PATH_AND_IMPORTS_LINES = 10_365  # and what its files import directly, kernels apart


@cache
def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def modules() -> list[Path]:
    """The library's files, without the stand-in for vLLM's package."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "path" not in path.relative_to(PACKAGE).parts]


def package_of(name: str) -> str:
    """The package, or module at the top, that "nanovllm.NAME" is in; of ``contrib`` the part, a client of its own."""
    top, *rest = name.removeprefix("nanovllm.").split(".")
    return ".".join([top, *rest[:1]]) if top == "contrib" else top


def imports_of(path: Path) -> set[str]:
    """Modules of the library that a file imports, anywhere in it but under TYPE_CHECKING."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    package = ("nanovllm", *path.relative_to(PACKAGE).parts[:-1])
    skipped = {
        id(node) for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                is_module = (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
                found.add(name if is_module else source)
    return {name for name in found if name.startswith("nanovllm.")}


def test_no_circle_between_packages():
    arrows: dict[str, set[str]] = {}
    for path in modules():
        if path.parent == PACKAGE and path.name == "__init__.py":
            continue  # the package itself gives names out
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        arrows.setdefault(package_of(module), set()).update(map(package_of, imports_of(path)))
    left = {package: targets - {package} for package, targets in arrows.items()}
    while left:  # take away what imports nothing that is left
        bottom = {package for package, targets in left.items() if not targets & left.keys()}
        assert bottom, f"a circle among {sorted(left)}: { {p: sorted(t & left.keys()) for p, t in left.items()} }"
        left = {package: targets for package, targets in left.items() if package not in bottom}


def test_budgets():
    found = dict.fromkeys(BUDGETS, 0)
    for path in modules():
        package = package_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        found[package if package in found else "other modules"] += lines_of(path)
    over = {package: f"{found[package]} of {budget}" for package, budget in BUDGETS.items() if found[package] > budget}
    assert not over, over


def test_the_table_of_modules_is_that_of_the_tree():
    """Each entry is there, and each package and module has one."""
    section = PAGE.split("## Modules")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = re.findall(r"`([\w/]+(?:\.py|/))`", " ".join(rows))
    assert all((PACKAGE / name).exists() for name in named), [name for name in named if not (PACKAGE / name).exists()]
    tops = {path.relative_to(PACKAGE).parts[0] for path in modules()} - {"__init__.py", "__main__.py"}
    assert tops <= {name.split("/")[0] for name in named}


def test_the_reading_path_is_as_long_as_it_says():
    section = PAGE.split("## An afternoon's reading")[1].split("\n## ")[0].split("Appendices")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", section, re.M)
    files = {PACKAGE / name: int(lines) for name, lines in rows}
    assert len(files) >= 15
    assert {path.name: lines_of(path) for path in files} == {path.name: lines for path, lines in files.items()}
    total = sum(files.values())
    assert f"{total:,} lines" in section and f"{total:,} lines" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert total <= PATH_LINES
    imported = [ROOT / name.replace(".", "/") for path in files for name in imports_of(path)]
    beside = {p.with_suffix(".py") if p.with_suffix(".py").exists() else p / "__init__.py" for p in imported}
    beside = {path for path in beside if "kernels" not in path.parts}
    assert sum(map(lines_of, beside | files.keys())) <= PATH_AND_IMPORTS_LINES


@pytest.mark.parametrize("module", [
    "nanovllm", "nanovllm.engine.llm_engine", "nanovllm.runner.worker", "nanovllm.readouts.prompt_logprobs",
    "nanovllm.readouts.pooled_state",
])  # fmt: skip
def test_imports_no_torch(module):
    """The engine is numbers and text; and a worker sends heartbeats before it imports torch."""
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
