"""The reading path: what a reader of the README's call meets. Prints its figures and the table of docs/architecture.md.

    python tools/reading_path.py [--write | --walked | --json]

Traces ``generate`` of two texts, with new parameters and a progress bar, on the CPU and in all threads; kernels apart.
A file is on the path if ten of its lines run, or if it is an interface that these files subclass or receive.
``--write`` puts rows and figures into docs/architecture.md and README.md. ``--walked`` lists the lines that a reader
walks past: lines of traced functions that do not run.
"""

import argparse
import ast
import io
import json
import os
import re
import sys
import threading
from contextlib import redirect_stderr
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanovllm"
PAGE, README = ROOT / "docs" / "architecture.md", ROOT / "README.md"
INTERFACES = ("runner/part.py", "engine/admission.py", "readouts/__init__.py", "messages/__init__.py",
              "sampling/feature.py")  # fmt: skip
MIN_LINES = 10  # of a file, that run
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (\d+) \| (.*) \|$", re.M)


def trace() -> tuple[dict[str, set[int]], set[CodeType]]:
    """Run the call. Returns the lines of each file that ran, files in the order met, and the functions called."""
    sys.path.insert(0, str(ROOT))
    os.environ.update(OMP_NUM_THREADS="1", TQDM_DISABLE="0")
    from nanovllm import LLM, SamplingParams

    top, kernels = f"{PACKAGE}{os.sep}", f"{PACKAGE / 'kernels'}{os.sep}"
    ran: dict[str, set[int]] = {}
    codes: set[CodeType] = set()
    is_on = False

    def tracer(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not is_on or not name.startswith(top) or name.startswith(kernels):
            return None
        if event == "call":
            codes.add(frame.f_code)
        elif event == "line":
            ran.setdefault(name.removeprefix(top), set()).add(frame.f_lineno)
        return tracer

    threading.settrace(tracer)  # threads that start now are traced as soon as it is on
    llm = LLM(quiet=True, device="cpu")
    llm.generate(["count to 5"], SamplingParams(temperature=0.6, max_tokens=8), use_tqdm=False)
    with redirect_stderr(io.StringIO()):  # the progress bar
        is_on = True
        sys.settrace(tracer)
        llm.generate(["Hello, nanovllm.", "2 + 3"], SamplingParams(temperature=0.7, max_tokens=24))
        sys.settrace(None)
        is_on = False
    llm.exit()
    return ran, codes


def lines(*names: str) -> int:
    return sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in names)


def imports(name: str) -> set[str]:
    """Files of the library that a file imports, anywhere in it; kernels apart."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nanovllm":
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = {f"{'/'.join(module.split('.')[1:])}{end}" for module in found for end in (".py", "/__init__.py")}
    return {file for file in files if not file.startswith("kernels/") and (PACKAGE / file).is_file()}


def imported_by(path: list[str]) -> set[str]:
    """Files beside the path that its files import."""
    return {file for name in path for file in imports(name)} - {*path}


def path_of(ran: dict[str, set[int]]) -> list[str]:
    """The files of the path in the order met. An interface of which no line ran comes after its first importer."""
    path = [name for name, numbers in ran.items() if len(numbers) >= MIN_LINES or name in INTERFACES]
    for interface in INTERFACES:
        if interface not in path:
            first = next((i for i, name in enumerate(path) if interface in imports(name)), len(path) - 1)
            path.insert(first + 1, interface)
    return path


def walked_past(ran: dict[str, set[int]], codes: set[CodeType]) -> dict[str, list[int]]:
    """The lines of called functions that did not run, by file."""
    past: dict[str, set[int]] = {}
    for code in codes:
        name = Path(code.co_filename).relative_to(PACKAGE).as_posix()
        numbers = {line for *_, line in code.co_lines() if line and line != code.co_firstlineno}
        past.setdefault(name, set()).update(numbers - ran.get(name, set()))
    return {name: sorted(numbers) for name, numbers in past.items() if numbers}


def rows(path: list[str]) -> str:
    """The rows of the page. Who owns what is kept; of a new file it is the first line of its docstring."""
    owns = {name: text for name, _, text in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    for name in path:
        doc = ast.get_docstring(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))) or ""
        owns.setdefault(name, doc.split("\n")[0].rstrip("."))
    return "\n".join(f"| `{name}` | {lines(name)} | {owns[name]} |" for name in path)


def write(path: list[str]) -> None:
    """Replace the rows of docs/architecture.md, and the figures in both pages."""
    page = PAGE.read_text(encoding="utf-8")
    found = list(ROW.finditer(page))
    PAGE.write_text(page[: found[0].start()] + rows(path) + page[found[-1].end() :], encoding="utf-8")
    total, imported = f"{lines(*path):,}", f"{lines(*imported_by(path)):,}"
    for file, pattern, text in (
        (PAGE, r"\d+ files of [\d,]+ lines", f"{len(path)} files of {total} lines"),
        (PAGE, r"another [\d,]+ lines", f"another {imported} lines"),
        (README, r"[\d,]+ lines in all", f"{total} lines in all"),
        (README, r"another [\d,]+", f"another {imported}"),
    ):
        changed, times = re.subn(pattern, text, file.read_text(encoding="utf-8"))
        print(f"{file.name}: {text}" if times == 1 else f"{file.name} has {pattern!r} {times} times; left as it is")
        if times == 1:
            file.write_text(changed, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="The files that a reader of one generate meets.")
    for option in ("write", "walked", "json"):
        parser.add_argument(f"--{option}", action="store_true")
    args = parser.parse_args()
    if missing := [name for name in INTERFACES if not (PACKAGE / name).is_file()]:
        sys.exit(f"not there: {missing}; a file that was renamed is renamed in {Path(__file__).name}, too")
    ran, codes = trace()
    path, past = path_of(ran), walked_past(ran, codes)
    figures = {"files": len(path), "lines": lines(*path), "imported": lines(*imported_by(path)),
               "walked": sum(map(len, past.values())), "touched": len(ran)}  # fmt: skip
    if args.json:
        print(json.dumps({"path": path, "figures": figures}))
        return
    print(", ".join(f"{name}: {number:,}" for name, number in figures.items()))
    if args.walked:
        for name in sorted(past, key=lambda name: -len(past[name])):
            source = (PACKAGE / name).read_text(encoding="utf-8").splitlines()
            print(f"\n{name}", *(f"{line:5}  {source[line - 1]}" for line in past[name]), sep="\n")
    elif args.write:
        write(path)
    else:
        print(rows(path))


if __name__ == "__main__":
    main()
