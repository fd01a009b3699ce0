"""Names with an underscore are used by their own class, its bases and its subclasses alone.

``python tests/test_privates.py`` lists all other uses.
"""

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Uses that are left: may fall, never rise.
LIBRARY: dict[str, int] = {}
TESTS = 124
OF_NAMED_TUPLES = ("_replace", "_asdict", "_fields", "_make", "_field_defaults")  # public, whatever their names say
BY_NAME = ("getattr", "setattr", "delattr", "hasattr")  # also as methods: monkeypatch.setattr


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def targets(node: ast.stmt) -> set[str]:
    """Names that a statement in a class or a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    assigned = getattr(node, "targets", [getattr(node, "target", node)])
    return {
        each.id for target in assigned if isinstance(node, (ast.Assign, ast.AnnAssign))
        for each in ast.walk(target) if isinstance(each, ast.Name)
    }  # fmt: skip


class Names(ast.NodeVisitor):
    """What one module defines in its classes, and its uses of private names on anything but ``self``."""

    def __init__(self, source: str):
        tree = ast.parse(source)
        self.own = set().union(*map(targets, tree.body))  # of the module
        self.defined: dict[str, set[str]] = defaultdict(set)  # class -> names
        self.bases: dict[str, set[str]] = defaultdict(set)  # class -> names of its bases
        self.uses: list[tuple[int, str, tuple[str, ...]]] = []  # line, name, classes around it
        self.around: list[str] = []
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            self.bases[node.name].add(getattr(base, "attr", getattr(base, "id", "")))
        self.defined[node.name].update(*map(targets, node.body))
        self.around.append(node.name)
        self.generic_visit(node)
        self.around.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.see(node.value, node.attr, node.lineno)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function in BY_NAME and len(node.args) > 1:
            self.see(node.args[0], getattr(node.args[1], "value", None), node.lineno)
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.see(node, alias.name, node.lineno)

    def see(self, value: ast.AST, name: object, line: int) -> None:
        if not is_private(name):
            return
        function = value.func if isinstance(value, ast.Call) else None
        if getattr(value, "id", None) in ("self", "cls") or getattr(function, "id", None) == "super":
            if self.around:
                self.defined[self.around[-1]].add(name)
        else:
            self.uses.append((line, name, tuple(self.around)))


def from_elsewhere(modules: dict[str, Names], library: dict[str, Names]) -> list[tuple[str, int, str]]:
    """Module, line and name of each use of a library's private name outside its class, its bases and subclasses."""
    known = {name for names in library.values() for each in (names.own, *names.defined.values()) for name in each}
    bases, defined = defaultdict(set), defaultdict(set)
    for names in (*library.values(), *modules.values()):
        for cls, found in names.bases.items():
            bases[cls] |= found
        for cls, found in names.defined.items():
            defined[cls] |= found

    @cache
    def above(cls: str) -> frozenset[str]:
        """The class and its bases."""
        return frozenset({cls}.union(*(above(base) for base in bases.get(cls, ()) if base != cls)))

    @cache
    def allowed(cls: str) -> set[str]:
        """Names of a class, its bases and mixins, and its subclasses with theirs."""
        family = {each for other in (cls, *bases) if cls in above(other) for each in above(other)}
        return {name for each in family for name in defined[each]}

    return [
        (path, line, name) for path, names in modules.items() for line, name, around in names.uses
        if name in known and not any(name in allowed(cls) for cls in around)
    ]  # fmt: skip


@cache
def modules_in(folder: str) -> dict[str, Names]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT / folder).as_posix(): Names(path.read_text(encoding="utf-8")) for path in paths}


def found_in(folder: str) -> list[tuple[str, int, str]]:
    return from_elsewhere(modules_in(folder), modules_in("nanovllm"))


EXAMPLE = """
class Base:
    _limit: int = 0
    def __eq__(self, other): return self._size == other._size
class Other(Base):
    def grow(self, base): self._size = base._size + super()._size + base._limit
class Mixin:
    def each(self, other): return other._state
class Whole(Mixin, Base):
    def __init__(self): self._state = (self._size, x._replace(a=1), torch._C)
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(base): return base._size", [1]),
        ("from nanovllm.core import _helper\nmodule._helper()", [1, 2]),
        ("class Third:\n    def f(self): return self.whole._state", [2]),
        ("class Third(Whole):\n    def f(self): return self.whole._state + self._size", []),
        ("class Third:\n    def f(self, third): self._size = third._size", []),
        ("getattr(x, '_size')\nmonkeypatch.setattr(x, '_state', 1)\nsetattr(x, 'size', 1)", [1, 2]),
        ("os._exit(1)\nx._replace(a=1)\nx.__dict__\ntorch._C", []),
    ],
)
def test_the_law_finds(source, expected):
    library = {"core.py": Names(EXAMPLE + "def _helper(): pass")}
    assert not from_elsewhere(library, library)
    assert [line for _, line, _ in from_elsewhere({"x.py": Names(source)}, library)] == expected


def test_private_names_in_the_library():
    found = found_in("nanovllm")
    too_many = Counter(path for path, *_ in found) - Counter(LIBRARY)
    assert not too_many, [each for each in found if each[0] in too_many]


def test_private_names_in_the_tests():
    found = found_in("tests")
    assert len(found) <= TESTS, Counter(path for path, *_ in found).most_common()


if __name__ == "__main__":
    for folder in ("nanovllm", "tests"):
        print(*(f"{folder}/{path}:{line}: {name}" for path, line, name in found_in(folder)), sep="\n")
