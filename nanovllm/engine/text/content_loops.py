"""Reads from the syntax tree of a chat template whether it loops over the parts of a message's content.

Nothing is rendered. Imported with the first chat, because it imports jinja2.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

MESSAGES, MESSAGE, CONTENT = "messages", "message", "content"
# Filters whose result has the items of their input.
KEEPING = ("selectattr", "rejectattr", "select", "reject", "list", "reverse", "sort", "unique", "default", "d")
MAX_CALLS = 1000  # macro calls with different arguments that are followed
Value = frozenset[Any]  # MESSAGES, MESSAGE, CONTENT and macros: everything that an expression may stand for
UNKNOWN: Value = frozenset()


class Generation(Extension):
    """Parses ``{% generation %}``, by which templates mark the assistant's text for transformers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def loops_over_content(source: str) -> bool:
    """Whether a template loops over the content of a message; False where it cannot be parsed."""
    reader = Reader()
    with suppress(TemplateSyntaxError, RecursionError):  # rendering will report it
        reader.visit(Environment(extensions=["jinja2.ext.loopcontrols", Generation]).parse(source).body)
    return reader.has_loop


class Reader:
    """Follows ``messages`` through the statements of a template, in their order.

    A scope has the values of names; attributes of namespaces and of ``loop`` are names with a dot. An assignment in a
    branch of an ``if`` is one of several possible values afterwards. A macro is followed where it is called.

    Attributes:
        has_loop: a loop over CONTENT was seen.
    """

    def __init__(self) -> None:
        self.has_loop = False
        self._scopes: list[dict[str, Value]] = [{"messages": frozenset({MESSAGES})}]
        self._called: set[Any] = set()

    # ---------------------------------------------------------------- statements

    def visit(self, statements: Iterable[nodes.Node]) -> None:
        for node in statements:
            getattr(self, f"_visit_{type(node).__name__}", self._visit_any)(node)

    def _visit_within(self, scope: dict[str, Value], statements: Iterable[nodes.Node]) -> dict[str, Value]:
        """Visit statements in a scope of their own; returns the scope with their assignments."""
        self._scopes.append(scope)
        self.visit(statements)
        return self._scopes.pop()

    def _visit_any(self, node: nodes.Node) -> None:
        for child in node.iter_child_nodes():
            if isinstance(child, nodes.Expr):
                self._value(child)
            else:
                self.visit([child])

    def _visit_For(self, node: nodes.For) -> None:
        values = self._value(node.iter)
        self.has_loop |= CONTENT in values
        item = frozenset({MESSAGE}) if MESSAGES in values else UNKNOWN
        self._scopes.append({"loop.previtem": item, "loop.nextitem": item})
        self._assign(node.target, item)
        if node.test is not None:
            self._value(node.test)
        self.visit(node.body)
        self._scopes.pop()
        self._visit_within({}, node.else_)

    def _visit_If(self, node: nodes.If) -> None:
        branches = []
        for branch in (node, *node.elif_):
            self._value(branch.test)
            branches.append(self._visit_within({}, branch.body))
        branches.append(self._visit_within({}, node.else_))
        for name in {name for branch in branches for name in branch}:
            before = self._look_up(name)
            self._scopes[-1][name] = UNKNOWN.union(*(branch.get(name, before) for branch in branches))

    def _visit_Macro(self, node: nodes.Macro) -> None:
        self._scopes[-1][node.name] = frozenset({node})

    def _visit_Assign(self, node: nodes.Assign) -> None:
        given = node.node
        if isinstance(node.target, nodes.Tuple) and isinstance(given, nodes.Tuple):
            for target, value in zip(node.target.items, map(self._value, given.items), strict=False):
                self._assign(target, value)
            return
        self._assign(node.target, self._value(given))
        if isinstance(node.target, nodes.Name) and isinstance(given, nodes.Call):  # namespace(name=...)
            for argument in given.kwargs:
                self._scopes[0][f"{node.target.name}.{argument.key}"] = self._value(argument.value)

    def _visit_AssignBlock(self, node: nodes.AssignBlock) -> None:
        self._visit_within({}, node.body)
        self._assign(node.target, UNKNOWN)

    def _visit_With(self, node: nodes.With) -> None:
        values = [self._value(value) for value in node.values]
        self._scopes.append({})
        for target, value in zip(node.targets, values, strict=True):
            self._assign(target, value)
        self.visit(node.body)
        self._scopes.pop()

    def _assign(self, target: nodes.Node, value: Value) -> None:
        if isinstance(target, nodes.Name):
            self._scopes[-1][target.name] = value
        elif isinstance(target, nodes.NSRef):  # every scope sees it, also where it was not assigned yet
            name = f"{target.name}.{target.attr}"
            self._scopes[0][name] = self._look_up(name) | value
        elif isinstance(target, nodes.Tuple):
            for item in target.items:
                self._assign(item, UNKNOWN)

    # ---------------------------------------------------------------- expressions

    def _look_up(self, name: str) -> Value:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), UNKNOWN)

    def _value(self, node: nodes.Node) -> Value:
        """The value of an expression. Each part of it is read once: templates may nest them a hundred times."""
        if isinstance(node, nodes.Name):
            return self._look_up(node.name)
        if isinstance(node, nodes.Getattr):
            return self._item(node.node, node.attr)
        if isinstance(node, nodes.Getitem):
            if isinstance(node.arg, nodes.Slice):
                return self._value(node.node)
            return self._item(node.node, node.arg.value if isinstance(node.arg, nodes.Const) else 0)
        if isinstance(node, nodes.Call):
            return self._call(node)
        values = [(child, self._value(child)) for child in node.iter_child_nodes()]
        if isinstance(node, (nodes.CondExpr, nodes.BinExpr)):
            test = getattr(node, "test", None)
            return UNKNOWN.union(*(value for child, value in values if child is not test))
        if isinstance(node, nodes.Filter):
            filtered = next((value for child, value in values if child is node.node), UNKNOWN)
            if node.name in ("first", "last") and MESSAGES in filtered:
                return frozenset({MESSAGE})
            return filtered if node.name in KEEPING else UNKNOWN
        return UNKNOWN

    def _item(self, of: nodes.Node, key: Any) -> Value:
        """The value of an attribute or item."""
        values = self._value(of)
        found = self._look_up(f"{of.name}.{key}") if isinstance(of, nodes.Name) else UNKNOWN
        if MESSAGE in values and key == "content":
            found |= {CONTENT}
        if MESSAGES in values and isinstance(key, int):
            found |= {MESSAGE}
        return found

    def _call(self, node: nodes.Call) -> Value:
        arguments = [self._value(argument) for argument in node.args]
        keywords = {argument.key: self._value(argument.value) for argument in node.kwargs}
        called = node.node
        if isinstance(called, nodes.Getattr) and called.attr == "get" and node.args:
            return self._item(called.node, getattr(node.args[0], "value", None))
        for macro in self._value(called):
            if isinstance(macro, nodes.Macro):
                self._call_macro(macro, arguments, keywords)
        return UNKNOWN  # a macro's text, or a list of strings from ``split``

    def _call_macro(self, macro: nodes.Macro, arguments: list[Value], keywords: dict[str, Value]) -> None:
        names = [parameter.name for parameter in macro.args]
        given = dict.fromkeys(names, UNKNOWN) | dict(zip(names, arguments, strict=False)) | keywords
        key = macro, *given.items()
        if key not in self._called and len(self._called) < MAX_CALLS:
            self._called.add(key)
            outside, self._scopes = self._scopes, self._scopes[:1]
            self._visit_within(given, macro.body)
            self._scopes = outside
