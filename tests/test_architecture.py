"""What docs/architecture.md promises: imports point one way, and the engine's numbers need no torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanovllm"
# from the bottom up; a module may import from its own floor and from those below
FLOORS = [
    ["errors", "validation", "models.families"],
    ["models"],  # its table
    ["models.rope", "models.quantization_config"],
    ["sampling_params", "outputs", "utils.gc_pause", "utils.exclusive"],
    ["utils.checkpoint"],
    ["models.config"],
    ["config"],
    ["kernels", "utils.compile_server"],
    ["utils.head_start"],
    ["distributed"],
    ["layers"],
    ["models.moe", "models.decoder", "models.loader"],
    ["engine.sequence", "engine.waiting", "engine.block_manager", "engine.metrics", "engine.scheduler",
     "engine.prompts", "engine.detokenizer", "engine.grammars", "engine.chat_template", "engine.fast_tokenizer"],
    ["engine.tokenizer", "engine.structured", "engine.watch"],
    ["runner.request_state", "runner.sampling_tables", "runner.prefix_groups", "runner.step", "runner.device",
     "runner.prefill_graphs", "runner.prepare"],
    ["runner"],
    ["engine.progress", "engine.request", "engine.futures", "engine.input_processor", "engine.output_processor",
     "engine.beam_search", "engine.stream", "engine.llm_engine"],
    ["llm"],
    ["jobs"],
    ["cli"],
    ["__main__"],
    ["as_vllm", "integrations"],
]


def floor_of(module: str) -> int:
    """``module`` without the package's name; the longest matching entry decides."""
    matches = [
        (len(name), floor) for floor, names in enumerate(FLOORS) for name in names
        if module == name or module.startswith(name + ".")
    ]  # fmt: skip
    assert matches, f"{module} has no floor"
    return max(matches)[1]


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it but under TYPE_CHECKING."""
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
    return {name.removeprefix("nanovllm.") for name in found if name.startswith("nanovllm.")}


def test_imports_point_down():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "__init__.py":
            continue
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for name in imports_of(path):
            assert floor_of(name) <= floor_of(module), f"{module} imports {name}, which stands above it"


@pytest.mark.parametrize("module", ["nanovllm", "nanovllm.engine.llm_engine", "nanovllm.runner.worker"])
def test_imports_no_torch(module):
    """The engine is numbers and text; and a worker sends heartbeats before it imports torch."""
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_file_is_long():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, path


def test_the_reading_path_exists_and_fits_an_afternoon():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## An afternoon's reading")[1].split("\n## ")[0]
    files = [PACKAGE / name for name in re.findall(r"`([\w/]+\.py)`", section.split("Appendices")[0])]
    assert len(files) >= 15
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 3_000
