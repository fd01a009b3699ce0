"""The laws of the house: packages without circles, a spine that names no feature, a reading path that only falls."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanovllm"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# The spine, and the words of features that may not occur in it. A feature that is renamed is added here, too.
SPINE = ("core.py", "engine/llm_engine.py", "engine/scheduler.py", "engine/block_manager.py", "runner/model_runner.py",
         "runner/inputs.py", "runner/request_state.py")  # fmt: skip
FEATURE_WORDS = re.compile(
    r"draft|specul|verify|snapshot|recurrent|state_moves|recurrent_rows|statemoves|staterows|cascade|shared_prefix|groups"
    r"|micro_batch|pooled|pooling|targets?\b|target_|scored|lora|fp8|mxfp4|beginning|prefix_cop|tails?\b|reserv"
    r"|missed_tokens|image|vision|pixel|int4|awq|gptq", re.I,
)  # fmt: skip
NAMED = 19  # lines of the spine that contain one of them: may fall, never rise
# The reading path, as tools/reading_path.py finds it: may fall; before its lines rise, CHANGELOG.md says why the spine
# grew. "walked": lines walked past, of functions that run. "touched": files of which any line runs.
PATH = {"files": 29, "lines": 4_797, "walked": 292, "touched": 51}
# The only files that import a feature, besides its own.
FACTORIES = {
    "engine/variants.py": ("engine.speculation", "engine.hybrid", "engine.prefix_copies", "engine.images",
                           "readouts.prompt_logprobs"),
    "runner/parts.py": ("runner.images", "runner.drafts", "runner.cascade", "runner.recurrent", "runner.prefix_copies",
                        "runner.readers.prompt_logprobs", "runner.readers.pooled_state"),
    "llm.py": ("verbs.scoring", "verbs.pooling"),
}
AROUND = ("contrib", "as_vllm", "integrations", "cli", "__main__")  # what stands around the engine
PUBLIC = {"nanovllm", "llm", "config", "sampling_params", "outputs", "errors", "validation", *AROUND}


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


def test_the_spine_names_no_feature():
    """A mechanism of a feature in these files is a seam that is missing."""
    named = [
        f"{name}:{i}: {line.strip()}" for name in SPINE
        for i, line in enumerate((PACKAGE / name).read_text(encoding="utf-8").splitlines(), 1)
        if FEATURE_WORDS.search(line)
    ]  # fmt: skip
    assert len(named) <= NAMED, "\n".join(named)


def test_only_factories_import_features():
    """Besides the feature's own files; so deleting these and a line of a factory takes the feature out."""
    features = {feature for listed in FACTORIES.values() for feature in listed}
    for path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        own = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for imported in (module.removeprefix("nanovllm.") for module in imports_of(path)):
            of = next((f for f in features if imported == f or imported.startswith(f + ".")), None)
            if of is None or own == of or own.startswith(of + "."):
                continue
            assert of in FACTORIES.get(name, ()) or of in OWN_PARTS.get(own, ()), f"{name} imports {imported}"


# The other side of a feature, which may import it.
OWN_PARTS = {
    "verbs.scoring": ("readouts.prompt_logprobs",),
    "verbs.pooling": ("runner.readers.pooled_state",),
    "engine.images.loading": ("runner.images",),
    "runner.readers.prompt_logprobs": ("readouts.prompt_logprobs",),
}


def test_what_stands_around_uses_public_names():
    for path in modules():
        top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if top in AROUND:
            private = {m for m in imports_of(path) if package_of(m).split(".")[0] not in PUBLIC}
            assert not private, f"{path.relative_to(PACKAGE)} imports {private}"


def test_the_table_of_modules_is_that_of_the_tree():
    """Each entry is there, and each package and module has one."""
    section = PAGE.split("## Modules")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = re.findall(r"`([\w/]+(?:\.py|/))`", " ".join(rows))
    assert all((PACKAGE / name).exists() for name in named), [name for name in named if not (PACKAGE / name).exists()]
    tops = {path.relative_to(PACKAGE).parts[0] for path in modules()} - {"__init__.py", "__main__.py"}
    assert tops <= {name.split("/")[0] for name in named}


@cache
def traced() -> dict:
    """The reading path and its figures, from the README's own call."""
    command = [sys.executable, str(ROOT / "tools" / "reading_path.py"), "--json"]
    return json.loads(subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout)


def test_the_page_lists_the_reading_path():
    """Each file that a call of ``generate`` with texts, new parameters and a progress bar meets, in this order.

    The trace was of a second call, of token ids with parameters that had been checked, so the page left out a fifth.
    """
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", PAGE.split("## An afternoon's reading")[1], re.M)
    assert [name for name, _ in rows] == traced()["path"], "python tools/reading_path.py --write"
    assert {name: int(lines) for name, lines in rows} == {name: lines_of(PACKAGE / name) for name, _ in rows}
    for text in ("{files} files of {lines:,} lines", "another {imported:,} lines"):
        assert text.format(**traced()["figures"]) in PAGE
    assert f"{traced()['figures']['lines']:,} lines" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("figure", PATH)
def test_the_reading_path_does_not_grow(figure):
    grew = "the spine grew, because" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert traced()["figures"][figure] <= PATH[figure] or (figure == "lines" and grew), traced()["figures"]


OTHERS_NAMES = {"tokenizers", "xxh64"}  # names of other libraries in the pages


@cache
def names_in_code() -> set[str]:
    """Every name and short string in the library, its tools and scripts, and their modules."""
    found: set[str] = set()
    for path in [*modules(), *ROOT.glob("*.py"), *(ROOT / "tools").glob("*.py")]:
        found |= {*path.relative_to(ROOT).with_suffix("").parts}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            values = (getattr(node, field, None) for field in ("name", "id", "attr", "arg", "value"))
            found |= {value for value in values if isinstance(value, str) and len(value) < 60}
    return found


@pytest.mark.parametrize("page", ["architecture", "features", "invariants"])
def test_pages_name_what_exists(page):
    """Files, classes, methods, functions and options in backticks; features.md named a method that was long gone."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    quoted = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    assert len(quoted) > 10
    for each in sorted(quoted):
        if re.fullmatch(r"[\w./-]+\.(py|md)|[\w./-]+/", each):
            is_there = any((folder / each).exists() for folder in (ROOT, PACKAGE, ROOT / "docs"))
            assert is_there or any(name.endswith(f"/{each}") for name in files), each
        elif re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", each):
            assert set(each.split("(")[0].split(".")) <= names_in_code() | OTHERS_NAMES, each


def test_features_count_their_lines():
    """A number of lines in a paragraph "Code" of features.md is that of the files before it, within a tenth."""
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    num_checked = 0
    for code in re.findall(r"- \*\*Code:\*\*(.*?)(?=\n- \*\*|\n\n)", text, re.DOTALL):
        before, number, _ = re.split(r"([\d,]+)\s+lines", code + " 0 lines", maxsplit=1)
        paths = {PACKAGE / each for each in re.findall(r"`([\w/]+/(?:\w+\.py)?)`", before)}
        paths = {path for path in paths if path.exists()}  # the rest are the project's
        count = sum(lines_of(file) for path in paths for file in ([path] if path.suffix else path.rglob("*.py")))
        if paths and number != "0":
            assert abs(count - int(number.replace(",", ""))) <= count / 10, (code, count)
            num_checked += 1
    assert num_checked > 20


@pytest.mark.parametrize("module", [
    "nanovllm", "nanovllm.engine.llm_engine", "nanovllm.runner.worker", "nanovllm.readouts.prompt_logprobs",
    "nanovllm.readouts.pooled_state",
])  # fmt: skip
def test_imports_no_torch(module):
    """The engine is numbers and text; and a worker sends heartbeats before it imports torch."""
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
