"""Grammars of llguidance from structured-output parameters; ``token_masks.py`` compiles them.

Knows texts, no tokens. llguidance's own converters read schemas, expressions and EBNF; structural tags become Lark
here. Everything wrong with a source is a ValueError with the reason.
"""

import json
import re
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

from nanovllm.sampling_params import StructuredOutputsParams

# Allow every token that fits, not only the canonical one of a forced text.
START = '%llguidance {"no_forcing": true}\nstart: @given'
ANY_TEXT = "/(?s:.)*/"
# Bounded, because a model that is unsure what comes next emits whitespace as long as it may.
JSON_WHITESPACE = r"\n?[ \t]{0,20}"
# EBNF parts: a text, a set of characters, a comment, a line's end within a rule, any character, the first rule's name
# The time is linear: an unterminated text is taken to its line's end, lest each of its characters begin a search.
EBNF_PART = re.compile(
    r'"(?:[^"\\\n]|\\.)*"?|\[(?:[^\]\\\n]|\\.)*\]?|#[^\n]*|\r?\n(?!\s*[\w-]+\s*::=)|\.|(?<![\w-])root(?![\w-])'
)

MAX_INTEGER = 2**53  # llguidance reads every number of a schema as a float
NOT_KEPT = (
    "it holds the number {!s:.100}, which llguidance would change, as it reads numbers as floats. Allowed are whole "
    "numbers up to 2^53 = 9007199254740992, and decimals of 15 digits: round it, or leave it out"
)
# The value of a JSON schema's keyword: schemas by name, one schema or a list of them, or data for the reader alone.
# Other keywords hold data that counts.
INSIDE = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), "names"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "propertyNames",
                     "allOf", "anyOf", "oneOf", "not", "if", "then", "else"), "schema"),
    **dict.fromkeys(("default", "examples", "example"), "ignored"),
}  # fmt: skip


def to_grammar(params: StructuredOutputsParams) -> str:
    """The grammar of ``params``, as llguidance's matchers take it."""
    from llguidance import LLMatcher, grammar_from

    kind, source = params.kind, getattr(params, params.kind)
    whitespace = _whitespace(params)
    if kind in ("json", "json_object"):
        schema = _schema(source) if kind == "json" else '{"type": "object"}'
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=whitespace)
    elif kind == "regex":
        grammar = grammar_from("regex", _regex(source))
    elif kind == "choice":
        is_list = isinstance(source, (list, tuple)) and source and all(isinstance(text, str) for text in source)
        _expect(is_list, "it must be a non-empty list of strings")
        # one expression, because llguidance's converter makes rules, and more than 2,000 exceed its limit
        grammar = f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, source))}"
    elif kind == "grammar":
        grammar = _lark(source)
        if "%llguidance" in source:  # it has options of its own
            return grammar
    else:
        grammar = f"start: {_structural_tag(_object(source))}"
    given, *others = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": START}, {**given, "name": "given"}, *others]})


def _expect(condition: object, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _object(source: Any) -> dict:
    """A dictionary, or the text of one."""
    try:
        source = json.loads(source, parse_float=_as_written) if isinstance(source, str) else source
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    _expect(isinstance(source, dict), "it must be a JSON object, as text or as a dictionary")
    return source


def _as_written(text: str) -> float | Decimal:
    """A number with a point or an exponent: a float, but the decimal where no float prints as this."""
    try:
        exact = Decimal(text)
    except InvalidOperation:  # an exponent of 19 digits
        exact = Decimal("Infinity")
    return float(text) if exact == Decimal(repr(float(text))) and exact.is_finite() else exact


def _is_kept(x: Any) -> bool:
    """Whether llguidance writes the number that it reads: it divides the digits, as a float, by a power of ten."""
    if isinstance(x, Decimal) or not abs(x) <= MAX_INTEGER:  # true for NaN, too
        return False
    written = Decimal(repr(abs(x)))
    power = -int(written.as_tuple().exponent)
    return power <= 308 and float(written.scaleb(power)) / float(f"1e{power}") == abs(x)


def _schema(source: Any) -> str:
    """A JSON schema as text; a ValueError where llguidance would change its numbers."""
    schema = _object(source)
    left: list[tuple[Any, str]] = [(schema, "schema")]
    while left:
        value, kind = left.pop()
        is_object = isinstance(value, dict)
        pairs: Any = value.items() if is_object else enumerate(value)
        for key, item in pairs:
            inside = kind
            if is_object and kind in ("schema", "names"):
                inside = INSIDE.get(key, "data") if kind == "schema" else "schema"
            if isinstance(item, (dict, list)):
                left.append((item, inside))
            elif isinstance(item, (int, float, Decimal)) and not isinstance(item, bool) and not _is_kept(item):
                _expect(inside == "ignored", NOT_KEPT.format(item))
                value[key] = None
    return json.dumps(schema)


def _whitespace(params: StructuredOutputsParams) -> dict[str, Any]:
    """llguidance's options for the whitespace that ``params`` ask for."""
    compact, pattern = params.disable_any_whitespace, params.whitespace_pattern
    if not compact and pattern is None:
        return {"whitespace_pattern": JSON_WHITESPACE}
    is_json = params.kind in ("json", "json_object")
    _expect(is_json, "disable_any_whitespace and whitespace_pattern go with json or json_object")
    _expect(not compact or pattern is None, "give disable_any_whitespace or whitespace_pattern, not both")
    return {"whitespace_flexible": False} if compact else {"whitespace_pattern": pattern}


def _regex(pattern: Any) -> str:
    _expect(isinstance(pattern, str), "it must be text")
    _expect(re.fullmatch(r"(?:[^\\]|\\.)*", pattern, re.DOTALL), "its last backslash escapes nothing")
    return pattern


def _lark(source: Any) -> str:
    """A grammar in Lark's notation; or in EBNF, whose lines begin with a name and ``::=``, as Lark."""
    from llguidance import grammar_from

    _expect(isinstance(source, str), "it must be text")
    if not re.search(r"^[^\S\n]*[\w<>-]+\s*::=", source, re.MULTILINE):
        for found in re.finditer(r"%json\s*(?={)", source):
            with suppress(json.JSONDecodeError):  # llguidance reports it, unless it is part of a text
                _schema(json.JSONDecoder(parse_float=_as_written).raw_decode(source, found.end())[0])
        return source
    # llguidance's converter strips the zeros of \u00e9, and would take the letters that follow for its digits
    is_plain = re.fullmatch(r"(?:[^\\]|\\[^uU])*", source, re.DOTALL)
    _expect(is_plain, "it must hold the characters themselves in place of escapes with \\u and \\U")
    # The converter takes one rule per line. A rule that does not reach itself becomes one regular expression, which is
    # matched exactly; the first rule never does, so an extra first rule is added.
    plain = {"root": "root_rule", ".": "[\\x00-\U0010ffff]"}
    text = EBNF_PART.sub(
        lambda part: part[0] if part[0][0] in '"[' else plain.get(part[0], " "), re.sub(r"\n\s*\n", "\n", source)
    )
    names = re.findall(r"^\s*([\w-]+)\s*::=", text, re.MULTILINE)
    _expect("root_rule" in names, "it has no rule root ::= ...")
    _expect(len(names) == len(set(names)), "it defines a rule twice")
    return grammar_from("gbnf", f"{text}\nroot ::= root_rule")


def _structural_tag(source: dict) -> str:
    """xgrammar's structural tag, or vLLM's older one, {"structures": [...], "triggers": [...]}, as by ``_format``."""
    if "structures" in source:
        structures, kind = source["structures"], "json_schema"
        tags = [{**tag, "content": {"type": kind, kind: tag["schema"]}} for tag in structures]
        return _triggered_tags({"tags": tags, "triggers": source["triggers"]})
    _expect(isinstance(source.get("format"), dict), 'it has neither "format" nor "structures"')
    return _format(source["format"])


def _format(source: dict) -> str:
    """One format as an expression in Lark. Formats nest."""
    from llguidance import regex_to_lark

    kind = source.get("type")
    if kind == "const_string":
        return json.dumps(source["value"])
    if kind == "json_schema":
        return f"%json {_schema(source['json_schema'])}"
    if kind == "regex":
        return f"/{regex_to_lark(_regex(source['pattern']), '')}/"
    if kind == "grammar":
        return f"%lark {{\n{_lark(source['grammar'])}\n}}"
    if kind in ("sequence", "or"):
        return f"({(' ' if kind == 'sequence' else ' | ').join(map(_format, source['elements']))})"
    if kind == "tag":
        return _tag(source, source["begin"])
    if kind == "triggered_tags":
        return _triggered_tags(source)
    raise ValueError(
        f"format type {kind!r} is not supported; const_string, json_schema, regex, grammar, sequence, or, tag, "
        "triggered_tags and, within a tag, any_text are"
    )


def _text_until(ends: list[str]) -> str:
    """Any text up to the first of ``ends``."""
    return f"%lark {{\nstart[lazy]: {ANY_TEXT} ({' | '.join(map(json.dumps, ends))})\n}}"


def _tag(tag: dict, begin: str) -> str:
    """A tag with ``begin`` in place of its own."""
    ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
    if tag["content"].get("type") != "any_text":
        return f"{json.dumps(begin)} {_format(tag['content'])} ({' | '.join(map(json.dumps, ends))})"
    _expect(all(ends), "any_text needs a tag with an end")
    return f"{json.dumps(begin)} {_text_until(ends)}"


def _triggered_tags(source: dict) -> str:
    """Any text, in which each trigger begins a tag."""
    _expect(not source.get("excludes"), "excludes is not supported")
    _expect(source["tags"] and all(source["triggers"]), "it needs tags, and triggers that are not empty")
    at_once, after_text = [], []
    for tag in source["tags"]:
        begin = tag["begin"]
        triggers = [trigger for trigger in source["triggers"] if begin.startswith(trigger)]
        _expect(triggers, f"the tag {begin!r} begins with no trigger")
        trigger = min(triggers, key=len)  # the shortest is met first
        at_once.append(_tag(tag, begin))
        after_text.append(f"{_text_until([trigger])} {_tag(tag, begin[len(trigger) :])}")
    first, later = f"({' | '.join(at_once)})", f"({' | '.join(after_text)})"
    rest = "" if source.get("stop_after_first") else f"{later}* {ANY_TEXT}"
    if source.get("at_least_one"):
        return f"{first} {rest}"
    return rest or f"({later} | {ANY_TEXT})"
