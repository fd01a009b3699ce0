"""``nanovllm.contrib`` knows public names alone, and keeps the names that README and guide give."""

import ast
import re
from importlib import import_module

import pytest
from helpers import ROOT

PACKAGE = ROOT / "nanovllm"
PUBLIC = {"llm", "config", "sampling_params", "outputs", "errors", "validation", "contrib"}
FILES = sorted(path for path in (PACKAGE / "contrib").rglob("*.py") if "path" not in path.relative_to(PACKAGE).parts)


def imported(path):
    """Modules, and names of ``nanovllm`` itself, that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from [f"nanovllm.{a.name}" for a in node.names] if node.module == "nanovllm" else [node.module]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_it_uses_public_names_alone(path):
    parts = [name.split(".")[1] for name in imported(path) if name.startswith("nanovllm.")]
    private = {part for part in parts if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists()} - PUBLIC
    assert not private
    assert not re.findall(r"llm\._\w+", path.read_text(encoding="utf-8")), "attributes of an LLM that are its own"


@pytest.mark.parametrize(
    ("name", "attribute"),
    [("cli", "main"), ("as_vllm.modules", "install"), ("integrations.engine_thread", "EngineThread"),
     ("integrations.trl", "rollout_func")],
)  # fmt: skip
def test_names_of_the_guide(name, attribute):
    given = getattr(import_module(f"nanovllm.{name}"), attribute)
    assert given is getattr(import_module(f"nanovllm.contrib.{name}"), attribute)
