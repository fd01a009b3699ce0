"""What a text must be, as a grammar in Lark's notation (llguidance's dialect of it), which ``structured.py`` compiles.

Knows texts, no tokens. Sources: JSON schemas, regular expressions, choices, EBNF as xgrammar and llama.cpp write it
(``root ::= ...``), Lark itself, and structural tags. Everything wrong with a source is a ValueError with the reason.

A *terminal* (upper case) is matched as one regular expression, a *rule* (lower case) may contain itself.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, ClassVar

from nanovllm.sampling_params import StructuredOutputsParams

HEADER = '%llguidance {"no_forcing": true}'  # allow every token that fits, not only the canonical one of a forced text
ANY_TEXT = "/(?s:.)*/"
# Bounded: a model that is unsure what comes next goes on with whitespace, as long as it may.
JSON_WHITESPACE = r"\n?[ \t]{0,20}"
JSON_OBJECT = {"type": "object"}


def to_lark(params: StructuredOutputsParams) -> str:
    """The grammar of ``params``.

    Raises:
        ValueError: it has an error that shows before compilation; the text says which.
    """
    kind, source = params.kind, getattr(params, params.kind)
    options = _whitespace(params)
    if kind == "grammar":
        _expect(isinstance(source, str), "it must be text")
        if "::=" not in source:  # Lark
            return source if "%llguidance" in source else f"{HEADER}\n{source}"
    lark = Lark()
    if kind == "json":
        start = _json(source, options)
    elif kind == "json_object":
        start = _json(JSON_OBJECT, options)
    elif kind == "regex":
        start = lark.terminal(_regex(source))
    elif kind == "choice":
        _expect(isinstance(source, (list, tuple)) and source, "it must be a non-empty list of strings")
        _expect(all(isinstance(text, str) for text in source), "it must be a non-empty list of strings")
        start = lark.terminal(" | ".join(map(literal, dict.fromkeys(source))))
    elif kind == "grammar":
        start = Ebnf(source, lark).start
    else:
        start = _structural_tag(_object(source), lark)
    return lark.text(start)


class Lark:
    """The terminals and rules of one grammar as they are made."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # definition -> terminal
        self._lines: list[str] = []

    def terminal(self, expression: str) -> str:
        """Its name; equal definitions share one."""
        if expression not in self._names:
            self._names[expression] = f"T{len(self._names)}"
            self._lines.append(f"{self._names[expression]}: {expression}")
        return self._names[expression]

    def rule(self, expression: str, name: str = "", lazy: bool = False) -> str:
        """Its name. A lazy one ends where it first can, the others where they last can."""
        name = name or self.new_name()
        self._lines.append(f"{name}{'[lazy]' * lazy}: {expression}")
        return name

    def new_name(self) -> str:
        self._lines.append("")  # reserve the number
        return f"r{len(self._lines)}"

    def text(self, start: str) -> str:
        return "\n".join([HEADER, f"start: {start}", *filter(None, self._lines), ""])


def literal(text: str) -> str:
    """A text as Lark's regular expression."""
    _expect(not re.search("[\ud800-\udfff]", text), f"{text!r} cannot be encoded as UTF-8")
    return f"/{''.join(map(_escape, text))}/" if text else '""'


def _escape(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def _expect(condition: object, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _object(source: Any) -> dict:
    """A dictionary, or the text of one."""
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except ValueError as error:
            raise ValueError(f"it is not JSON: {error}") from None
    _expect(isinstance(source, dict), "it must be a JSON object, as text or as a dictionary")
    return source


def _whitespace(params: StructuredOutputsParams) -> dict[str, Any]:
    """llguidance's options for the whitespace that ``params`` ask for."""
    compact, pattern = params.disable_any_whitespace, params.whitespace_pattern
    is_json = params.kind in ("json", "json_object")
    if not compact and pattern is None:
        return {"whitespace_pattern": JSON_WHITESPACE} if is_json else {}
    _expect(is_json, "disable_any_whitespace and whitespace_pattern go with json or json_object")
    _expect(not compact or pattern is None, "give disable_any_whitespace or whitespace_pattern, not both")
    return {"whitespace_flexible": False} if compact else {"whitespace_pattern": pattern}


def _json(schema: Any, options: dict[str, Any]) -> str:
    schema = _object(schema)
    if options:
        schema = {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}}
    try:
        return f"%json {json.dumps(schema, allow_nan=False)}"
    except TypeError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def _regex(pattern: Any) -> str:
    _expect(isinstance(pattern, str), "it must be text")
    _expect(not re.search("[\ud800-\udfff]", pattern), "it cannot be encoded as UTF-8")
    _expect(re.fullmatch(r"(?:[^\\]|\\.)*", pattern, re.DOTALL), "its last backslash escapes nothing")
    # Lark ends an expression at a slash or a line's end
    fitting = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
    pattern = re.sub(r"\\.|[/\n\r]", lambda match: fitting.get(match[0], match[0]), pattern, flags=re.DOTALL)
    return f"/{pattern}/" if pattern else '""'


class Ebnf:
    """An EBNF grammar: ``name ::= "text" [a-z]* (a | b)? other{1,3} . # comment``, beginning at ``root``.

    Rules that do not reach themselves become terminals, so a grammar without recursion is one regular expression and
    matched exactly. In the others each longest run of regular parts is a terminal and, as with any lexer, matched as
    far as it goes: no text outside the grammar comes of it, but ``r ::= [a-z]* "x" r | "y"`` never gets to its "y".

    Nodes: ("regex", Lark's expression), ("rule", name), ("seq", nodes), ("or", nodes), ("repeat", node, times).
    """

    TOKEN = re.compile(
        r"""(?P<skip>\s+|\#[^\n]*)
        | (?P<define>[\w-]+)\s*::=
        | (?P<rule>[\w-]+)
        | "(?P<text>(?:[^"\\\n]|\\.)*)"
        | \[(?P<set>\^?(?:[^\]\\\n]|\\.)*)\]
        | (?P<times>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
        | (?P<mark>[()|.])""",
        re.VERBOSE,
    )
    CHAR = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
    ESCAPES: ClassVar = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}

    def __init__(self, source: str, lark: Lark):
        self._source, self._lark = source, lark
        self._tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(source):
            token = self.TOKEN.match(source, at)
            if token is None:
                raise self._error(at, f"unexpected {source[at]!r}")
            kind = str(token.lastgroup)
            if kind != "skip":
                self._tokens.append((kind, token[kind], at))
            at = token.end()
        self._tokens.append(("end", "the end", at))
        self._rules = self._parse()
        self._check()
        self._regular = self._closure(lambda node, known: self._uses(node) <= known)
        self._names = {name: lark.new_name() for name in self._rules}
        for name in self._regular:  # uses come before their users
            self._names[name] = lark.terminal(self._terminal(self._rules[name]))
        for name in self._rules.keys() - self._regular.keys():
            lark.rule(self._rule(self._rules[name]), self._names[name])
        self.start = self._names["root"]

    def _error(self, at: int, reason: str) -> ValueError:
        before = self._source[:at]
        return ValueError(f"line {before.count(chr(10)) + 1}, column {at - before.rfind(chr(10))}: {reason}")

    # Text to nodes. A rule ends where the next is defined.

    def _parse(self) -> dict[str, tuple]:
        rules: dict[str, tuple] = {}
        self._next = 0
        while self._peek() != "end":
            kind, name, at = self._take()
            if kind != "define":
                raise self._error(at, f"expected a rule (name ::= ...), not {name!r}")
            if name in rules:
                raise self._error(at, f"rule {name!r} is defined twice")
            rules[name] = self._alternatives()
        return rules

    def _peek(self) -> str:
        """The kind of the next token; a mark is its own kind."""
        kind, text, _ = self._tokens[self._next]
        return text if kind == "mark" else kind

    def _take(self) -> tuple[str, str, int]:
        self._next += 1
        return self._tokens[self._next - 1]

    def _alternatives(self) -> tuple:
        nodes = [self._sequence()]
        while self._peek() == "|":
            self._take()
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else ("or", nodes)

    def _sequence(self) -> tuple:
        nodes: list[tuple] = []
        while self._peek() not in ("|", ")", "define", "end"):
            kind, text, at = self._take()
            if kind == "times":
                if not nodes:
                    raise self._error(at, f"nothing before {text!r} to repeat")
                nodes[-1] = ("repeat", nodes[-1], re.sub(r"\s", "", text))
            elif text == "(" and kind == "mark":
                nodes.append(self._alternatives())
                if self._peek() != ")":
                    _, found, at = self._take()
                    raise self._error(at, f"expected ')', not {found!r}")
                self._take()
            elif kind == "rule":
                nodes.append(("rule", text))
            else:
                nodes.append(("regex", self._characters(kind, text, at)))
        return nodes[0] if len(nodes) == 1 else ("seq", nodes)

    def _characters(self, kind: str, text: str, at: int) -> str:
        if kind == "mark":  # "."
            return "/(?s:.)/"
        negated = kind == "set" and text.startswith("^")
        chars: list[str] = []
        is_dash: list[bool] = []  # an unescaped "-"
        for match in self.CHAR.finditer(text[negated:]):
            code = match[1] or match[2] or match[3]
            if code:
                if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) <= 0xDFFF:
                    raise self._error(at, f"{match[0]} is no character")
                chars.append(chr(int(code, 16)))
            elif match[4] is not None:
                if match[4].isalnum() and match[4] not in self.ESCAPES:
                    raise self._error(at, f"unknown escape \\{match[4]}")
                chars.append(self.ESCAPES.get(match[4], match[4]))
            else:
                chars.append(match[5])
            is_dash.append(match[5] == "-")
        if kind == "text":
            return literal("".join(chars))
        if not chars:
            raise self._error(at, "the set of characters is empty")
        parts = []
        while chars:
            if len(chars) > 2 and is_dash[1]:
                if chars[0] > chars[2]:
                    raise self._error(at, f"the range {chars[0]}-{chars[2]} is empty")
                parts.append(f"{_escape(chars[0])}-{_escape(chars[2])}")
                del chars[:3], is_dash[:3]
            else:
                parts.append(_escape(chars[0]))
                del chars[0], is_dash[0]
        return f"/[{'^' * negated}{''.join(parts)}]/"

    # Which rules are what

    def _check(self) -> None:
        _expect("root" in self._rules, "it has no rule root ::= ...")
        for name, node in self._rules.items():
            for used in self._uses(node) - self._rules.keys():
                raise ValueError(f"rule {name!r} uses {used!r}, which is not defined")
        endless = self._rules.keys() - self._closure(self._ends).keys()
        _expect(not endless, f"rule {min(endless, default='')!r} has no text that ends")

    def _uses(self, node: tuple) -> set[str]:
        if node[0] == "rule":
            return {node[1]}
        return set().union(*map(self._uses, self._children(node)))

    @staticmethod
    def _children(node: tuple) -> Iterable[tuple]:
        return {"seq": node[1], "or": node[1], "repeat": node[1:2]}.get(node[0], ())

    def _ends(self, node: tuple, known: set[str]) -> bool:
        """Some text of the node needs only the rules ``known``."""
        if node[0] == "repeat" and re.match(r"[*?]|\{0[,}]", node[2]):
            return True
        return (any if node[0] == "or" else all)(
            [self._ends(child, known) for child in self._children(node)] or [node[0] != "rule" or node[1] in known]
        )

    def _closure(self, holds) -> dict[str, None]:
        """The rules for which ``holds(node, rules found so far)``, in the order found."""
        found: dict[str, None] = {}
        while new := [n for n, node in self._rules.items() if n not in found and holds(node, found.keys())]:
            found.update(dict.fromkeys(new))
        return found

    # Nodes to Lark

    def _terminal(self, node: tuple) -> str:
        kind = node[0]
        if kind == "regex":
            return node[1]
        if kind == "rule":
            return self._names[node[1]]
        if kind == "repeat":
            return f"({self._terminal(node[1])}){node[2]}"
        if kind == "or":
            return "(" + " | ".join(map(self._terminal, node[1])) + ")"
        return " ".join(map(self._terminal, node[1])) or '""'

    def _rule(self, node: tuple) -> str:
        if node[0] == "rule":
            return self._names[node[1]]
        if self._uses(node) <= self._regular.keys():
            return self._lark.terminal(self._terminal(node))
        if node[0] == "repeat":
            return f"({self._rule(node[1])}){node[2]}"
        if node[0] == "or":
            return "(" + " | ".join(map(self._rule, node[1])) + ")"
        parts: list[str] = []
        run: list[tuple] = []
        for child in (*node[1], None):
            if child is not None and self._uses(child) <= self._regular.keys():
                run.append(child)
                continue
            if run:
                parts.append(self._lark.terminal(self._terminal(("seq", run))))
                run = []
            if child is not None:
                parts.append(self._rule(child))
        return " ".join(parts)


def _structural_tag(source: dict, lark: Lark) -> str:
    """xgrammar's structural tag, or vLLM's older one, {"structures": [...], "triggers": [...]}."""
    if "structures" not in source:
        _expect(isinstance(source.get("format"), dict), 'it has neither "format" nor "structures"')
        return _format(source["format"], lark)
    tags = [
        {"begin": tag["begin"], "content": {"type": "json_schema", "json_schema": tag["schema"]}, "end": tag["end"]}
        for tag in source["structures"]
    ]
    return _triggered_tags(tags, source["triggers"], lark)


def _format(source: dict, lark: Lark) -> str:
    """One format as a Lark expression; formats nest."""

    def each(elements: Iterable[dict], separator: str) -> str:
        return f"({separator.join(_format(element, lark) for element in elements)})"

    kind = source.get("type")
    if kind == "const_string":
        return lark.terminal(literal(source["value"]))
    if kind == "json_schema":
        return _json(source["json_schema"], {})
    if kind == "regex":
        return lark.terminal(_regex(source["pattern"]))
    if kind == "grammar":
        return Ebnf(source["grammar"], lark).start
    if kind == "sequence":
        return each(source["elements"], " ")
    if kind == "or":
        return each(source["elements"], " | ")
    if kind == "tag":
        return f"{lark.terminal(literal(source['begin']))} {_content(source, lark)}"
    if kind == "triggered_tags":
        _expect(not source.get("excludes"), "excludes is not supported")
        once, some = bool(source.get("stop_after_first")), bool(source.get("at_least_one"))
        return _triggered_tags(source["tags"], source["triggers"], lark, some, once)
    raise ValueError(
        f"format type {kind!r} is not supported; const_string, json_schema, regex, grammar, sequence, or, tag, "
        "triggered_tags and, within a tag, any_text are"
    )


def _content(tag: dict, lark: Lark) -> str:
    """A tag after its begin."""
    ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
    end = lark.terminal(" | ".join(map(literal, ends)))
    if tag["content"].get("type") != "any_text":
        return f"{_format(tag['content'], lark)} {end}"
    _expect(all(ends), "any_text needs a tag with an end")
    return lark.rule(f"{ANY_TEXT} {end}", lazy=True)


def _triggered_tags(tags: list[dict], triggers: list[str], lark: Lark, some: bool = False, once: bool = False) -> str:
    """Any text, in which each trigger begins a tag; ``some``: begins with a tag; ``once``: ends after the first."""
    _expect(tags and triggers, "it needs tags and triggers")
    free, bound = [], []  # tags after text, tags at the very start
    for trigger in triggers:
        _expect(isinstance(trigger, str) and trigger, "a trigger must be a non-empty string")
        rests = [
            f"{lark.terminal(literal(tag['begin'][len(trigger):]))} {_content(tag, lark)}"
            for tag in tags if tag["begin"].startswith(trigger)
        ]  # fmt: skip
        _expect(rests, f"no tag begins with the trigger {trigger!r}")
        rest = lark.rule(" | ".join(rests))
        head = lark.rule(f"{ANY_TEXT} {lark.terminal(literal(trigger))}", lazy=True)
        free.append(f"{head} {rest}")
        bound.append(f"{lark.terminal(literal(trigger))} {rest}")
    for tag in tags:
        _expect(tag["begin"].startswith(tuple(triggers)), f"the tag {tag['begin']!r} begins with no trigger")
    anywhere, first = lark.rule(" | ".join(free)), lark.rule(" | ".join(bound))
    triggered = " | ".join(map(literal, triggers))
    tail = lark.terminal(f"~({ANY_TEXT} ({triggered}) {ANY_TEXT})")
    if once:
        return first if some else f"({anywhere} | {tail})"
    return f"({f'{first} ' * some}({anywhere})* {tail})"
