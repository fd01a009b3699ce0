"""Grammars and bad words: what they let through is what was asked for, and nothing that was asked for is held back."""

import itertools
import json
import random
import re
import sys
import time
from contextlib import suppress
from http import HTTPStatus
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, run_python
from transformers import AutoTokenizer

from nanovllm import RequestError, SamplingParams
from nanovllm.core import Sequence
from nanovllm.engine.structured_outputs import token_masks
from nanovllm.engine.structured_outputs.grammars import to_grammar
from nanovllm.engine.structured_outputs.token_masks import BadWords, GrammarCompiler, mask_of, mask_of_all
from nanovllm.engine.text.detokenizer import decode_completion
from nanovllm.engine.token_processor import TokenProcessors
from nanovllm.sampling_params import StructuredOutputsParams as Params

VOCAB, EOS = 1024, [2, 0]


class Model:
    """As pydantic's."""

    model_json_schema = __repr__ = lambda self: "Model()"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "nanovllm/assets/demo")


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB, EOS)


@pytest.fixture(scope="module")
def spelled(tokenizer):
    """The bytes of each token that is not special, one letter a byte, as byte-level BPE writes them."""
    special = set(tokenizer.all_special_ids) | {1}
    return {i: tokenizer.convert_ids_to_tokens(i) for i in range(VOCAB) if i not in special}


def new_mask(vocab_size=VOCAB):
    return np.full(-(-vocab_size // 32), 0x5A5A5A5A, np.int32)


def allowed_by(grammar, compiler, vocab_size=VOCAB):
    bitmask = new_mask(vocab_size)
    compiler.fill({0: grammar}, bitmask[None])
    return ids_of(bitmask)


def ids_of(bitmask):
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


def walk(grammar, compiler, rng, hurry=()):
    """Token ids drawn uniformly to the end of the text; half the time among those in ``hurry``, if any is allowed."""
    ids = []
    while not (allowed := allowed_by(grammar, compiler)) <= set(EOS):
        soon = sorted(allowed & {*hurry, *EOS})
        choice = rng.choice(soon if soon and rng.random() < 0.5 else sorted(allowed))
        grammar.accept(choice)
        ids.append(choice)
        assert len(ids) < 2_000
        if choice in EOS:
            ids.pop()
    assert allowed == set(EOS) and allowed_by(grammar, compiler) == set(EOS)
    return ids


def texts_of(params, compiler, tokenizer, count=25, hurry=()):
    hurry = {tokenizer.convert_tokens_to_ids(token) for token in hurry}
    for seed in range(count):
        yield tokenizer.decode(walk(compiler.compile(params), compiler, random.Random(seed), hurry))


def verdict(params, text, compiler, tokenizer):
    """Says "yes": the text may end here; "begun": it may go on only; "no"."""
    grammar = compiler.compile(params)
    for token_id in tokenizer.encode(text):
        if token_id not in allowed_by(grammar, compiler):
            return "no"
        grammar.accept(token_id)
    return "yes" if set(EOS) <= allowed_by(grammar, compiler) else "begun"


# Random walks


def is_person(x):
    return (
        isinstance(x, dict)
        and {"name", "age", "tags"} <= x.keys() <= {"name", "age", "tags", "kind", "home"}
        and isinstance(x["name"], str) and len(x["name"]) <= 8
        and isinstance(x["age"], int) and 0 <= x["age"] <= 150
        and isinstance(x["tags"], list) and 1 <= len(x["tags"]) <= 3
        and all(tag is None or isinstance(tag, bool) for tag in x["tags"])
        and x.get("kind", "é") in ("a/b", "é")
        and re.fullmatch("[0-9]{5}", x.get("home", {"zip": "12345"})["zip"])
    )  # fmt: skip


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": ["boolean", "null"]}, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["a/b", "é"]},
        "home": {"$ref": "#/$defs/home"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
JSON_ENDS = ('"', "}", "]")


@pytest.mark.parametrize("source", [PERSON, json.dumps(PERSON)], ids=["dict", "text"])
def test_json_schema(source, compiler, tokenizer):
    seen = {tuple(json.loads(text)) for text in texts_of(Params(json=source), compiler, tokenizer, hurry=JSON_ENDS)
            if is_person(json.loads(text)) or pytest.fail(text)}  # fmt: skip
    assert len(seen) > 1  # with and without the optional properties


def test_json_object(compiler, tokenizer):
    texts = list(texts_of(Params(json_object=True), compiler, tokenizer, hurry=JSON_ENDS))
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert any(json.loads(text) for text in texts)


@pytest.mark.parametrize(
    "pattern", [r"[a-z]{2,5}(/|\\)\d?", "(ab|a)(c|bcd)*", r"x?\n/[/é]{1,2}\.", "(?i)yes|no", "", r"^[^\n]{3}$"]
)
def test_regex(pattern, compiler, tokenizer):
    texts = set(texts_of(Params(regex=pattern), compiler, tokenizer, 10))
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(texts) > 1 or not pattern


def test_choice(compiler, tokenizer):
    choices = ["a", "ab", 'x/"\n\\é', "(", ".*", "日本"]
    assert set(texts_of(Params(choice=choices), compiler, tokenizer, 60)) == set(choices)


ARITHMETIC = """
# sums of products
root   ::= term (("+" | "-") term)*
term   ::= factor (
    ("*" | "/") factor
)*
factor ::= [0-9]+ | "(" root ")"   # recursion
"""


def test_recursive_grammar(compiler, tokenizer):
    texts = list(texts_of(Params(grammar=ARITHMETIC), compiler, tokenizer, hurry="0)"))
    assert any("(" in text for text in texts)
    for text in texts:
        number, before = text, None
        while number != before:
            number, before = re.sub(r"\(\d+([-+*/]\d+)*\)", "7", number), number
        assert re.fullmatch(r"\d+([-+*/]\d+)*", number), text


# Against brute force


def nested(depth):
    """The language of ``"(" root ")" | "ab" root? "c" | ""``, to a depth."""
    inner = nested(depth - 1) if depth else []
    return ["", "abc", *(f"({text})" for text in inner), *(f"ab{text}c" for text in inner)]


LANGUAGES = {
    "choice": (Params(choice=["one", "only", "on", "two é"]), ["one", "only", "on", "two é"]),
    "regex": (
        Params(regex="(a|b){1,2}(in|i)?"),
        [a + b for n in (1, 2) for a in map("".join, itertools.product("ab", repeat=n)) for b in ("", "in", "i")],
    ),
    "json": (
        Params(json={"enum": [1, 12, "the"]}, disable_any_whitespace=True),
        ["1", "12", '"the"'],
    ),
    "ebnf": (Params(grammar='root ::= w "l" | [x-z]{2}\nw ::= "al"? | [a]{2,}'),
             ["l", "all", *("a" * n + "l" for n in range(2, 30)), *map("".join, itertools.product("xyz", repeat=2))]),
    "recursive": (Params(grammar='root ::= "(" root ")" | "ab" root? "c" | ""'), nested(10)),
}  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_are_those_of_brute_force(name, compiler, tokenizer, spelled):
    """A token is allowed exactly if the text goes on to be one of the language; end-of-sequence if it is one."""
    params, language = LANGUAGES[name]
    language = {"".join(tokenizer.convert_ids_to_tokens(tokenizer.encode(text))) for text in language}
    prefixes = {text[:i] for text in language for i in range(len(text) + 1)}
    limit = 9 if name in ("ebnf", "recursive") else 99  # letters within which the language is complete
    for seed in range(20):
        grammar, rng, text = compiler.compile(params), random.Random(seed), ""
        while len(text) < limit:
            expected = {i for i, letters in spelled.items() if text + letters in prefixes}
            expected |= set(EOS) if text in language else set()
            assert allowed_by(grammar, compiler) == expected, text
            if expected <= set(EOS):
                break
            choice = rng.choice(sorted(expected - set(EOS)))
            grammar.accept(choice)
            text += spelled[choice]


# Which texts they take

SPACED, MANY = '{ "a" : [1,\n2] }', [f"item {i:04}" for i in range(3_000)]
PLAIN = {
    "json": (Params(json_object=True), {SPACED: "yes"}),
    "json, dense": (Params(json_object=True, disable_any_whitespace=True), {SPACED: "no", '{"a":[1,2]}': "yes"}),
    "json, a space": (Params(json_object=True, whitespace_pattern=" ?"), {'{"a": [1, 2]}': "yes", '{"a":  1}': "no"}),
    # llguidance's own grammar of choices met its limit at 2,000
    "many choices": (Params(choice=MANY), {"item 2999": "yes", "item 3000": "no"}),
}  # fmt: skip
GRAMMARS = {
    "lines": ('root ::= "if"\r\n  | [a-z] d # comment\r\nd ::=\n [0-9]\n\n',
              {"if": "yes", "i7": "yes", "i": "begun", "7": "no"}),
    "escapes": (
        r'root ::= "\x41é\"\n" [^\]a-c\x2d]{2,3} .',
        {'Aé"\nxyz': "yes", 'Aé"\nxy\n': "yes", 'Aé"\nxb': "no", 'Aé"\nx-': "no", 'Aé"\nxyzzz': "no"},
    ),
    "names": ("root ::= a-B_1 | Ab\na-B_1 ::= \"x\" root\nAb ::= 'y'".replace("'", '"'), {"xxy": "yes", "xx": "begun"}),
    "empty": ('root ::= "a" b\nb ::= | "b" b', {"a": "yes", "abb": "yes", "": "begun"}),
    "left recursion": ('root ::= root "a" | "b"', {"baa": "yes", "a": "no"}),
    "regular parts match exactly": ('root ::= w "x"\nw ::= [a-z]*', {"abcx": "yes", "x": "yes", "xa": "begun"}),
    "sets": ("root ::= [^a] [-z] [a-] [b^] [.*]", {"b--^*": "yes", "azab.": "no", "bzab.": "yes"}),
    "comments": ('# root ::= "x"\nroot ::= "#" # or\n  # perhaps\n  | ["#]\n', {"#": "yes", '"': "yes", "x": "no"}),
    "Lark with EBNF in a text": (
        'start: name " ::= " name // root ::= name\nname: /[a-z]+/ | "<" name " ::=>" | /r ::= x/\n',
        {"a ::= b": "yes", "<x ::=> ::= r ::= x": "yes", "a = b": "no"},
    ),
    "late root": ('  # words\r\n\tword\n ::= "a"\r\nroot\t::= word+', {"aa": "yes", "": "begun"}),
    "Lark": ('start: "a" | b\nb: "(" start ")"', {"((a))": "yes", "(a": "begun"}),
}


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAGS = [
    {"type": "tag", "begin": "<f=a>", "content": INTEGER, "end": "</f>"},
    {"type": "tag", "begin": "<f=b>", "content": {"type": "any_text"}, "end": ["</f>", "!"]},
]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
ONE, TWO = "<f=a>1</f>", "<f=a>1</f> so <f=b>any</x></f>"
TAG_CASES = {
    "triggered": (TRIGGERED, {"hi <f": "yes", "hi <f=": "begun", "<f=c": "no", ONE: "yes", f"hi {TWO}.": "yes",
                              "<f=a>x": "no", "<f=b>any!": "yes", "<f=b>any": "begun"}),
    "at least one": ({**TRIGGERED, "at_least_one": True}, {"hi": "no", "": "begun", f"{TWO}.": "yes"}),
    "first only": ({**TRIGGERED, "stop_after_first": True}, {"hi": "yes", f"hi {ONE}": "yes", f"{ONE}.": "no"}),
    "exactly one": ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, {"hi": "no", ONE: "yes", TWO: "no"}),
    "nested": (
        {"type": "sequence", "elements": [
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
            {"type": "or", "elements": [
                {"type": "regex", "pattern": "a+"},
                {"type": "grammar", "grammar": 'root ::= "(" root ")" | "b"'},
                {"type": "const_string", "value": "/C"},
            ]},
        ]},
        {"<t>hm</t>aa": "yes", "<t></t>((b))": "yes", "<t>x</t>/C": "yes", "<t>x</t>": "begun", "aa": "no"},
    ),
}  # fmt: skip


OLDER = {
    "structures": [{"begin": f"<f={kind}>", "schema": {"type": kind}, "end": "</f>"} for kind in ("integer", "null")],
    "triggers": ["<f="],
}
VERDICTS = PLAIN | {
    **{f"grammar: {name}": (Params(grammar=text), verdicts) for name, (text, verdicts) in GRAMMARS.items()},
    **{f"tag: {name}": (Params(structural_tag=json.dumps({"type": "structural_tag", "format": source})), verdicts)
       for name, (source, verdicts) in TAG_CASES.items()},
    "tag of the older form": (Params(structural_tag=json.dumps(OLDER)), {
        "hi": "yes", "<f=integer>12</f><f=null>null</f> ok": "yes", "<f=null>1": "no",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_which_texts_are_taken(name, compiler, tokenizer):
    params, expected = VERDICTS[name]
    assert {text: verdict(params, text, compiler, tokenizer) for text in expected} == expected


# Grammars as they go on


def test_the_end(compiler, tokenizer):
    """Both end-of-sequence tokens, exactly where the text may end; then nothing else, and nothing counts."""
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    for last in (b, 0):
        grammar = compiler.compile(Params(regex="ab?"))
        assert not allowed_by(grammar, compiler) & {*EOS, b}
        grammar.accept(a)
        assert allowed_by(grammar, compiler) == {b, *EOS}
        grammar.accept(last)
        assert allowed_by(grammar, compiler) == set(EOS)
        for _ in range(3):
            grammar.accept(2)
            assert allowed_by(grammar, compiler) == set(EOS)


def test_token_that_was_not_allowed(compiler):
    with pytest.raises(RequestError, match=r"cannot be followed further: .* doesn't satisfy the grammar"):
        compiler.compile(Params(regex="abc")).accept(5)


def test_dead_end(compiler, tokenizer):
    """Lark lets one write what nothing matches; found where the text gets there. It has a batch mate, which goes on."""
    grammar = compiler.compile(Params(grammar='start: "a" /[^\\x{0}-\\x{10ffff}]/'))
    grammar.accept(tokenizer.encode("a")[0])
    mate, words = compiler.compile(Params(regex="[a-z]*")), np.stack([new_mask(), new_mask()])
    for _ in range(2):
        with pytest.raises(RequestError, match=r" cannot be followed further: it matches no text$"):
            compiler.fill({0: grammar, 1: mate}, words)
    assert (words[1] == mask_of(allowed_by(mate, compiler), VOCAB)).all()


def test_limit_of_llguidance(compiler, tokenizer):
    """It was taken for a token that the grammar forbids: an AssertionError that ended the whole call."""
    grammar = compiler.compile(Params(grammar='start: a\na: a a | a a a | a a a a | a a a a a | "a"'))
    letter = tokenizer.convert_tokens_to_ids("a")
    with pytest.raises(RequestError, match=r"cannot be followed further: .* items; max is 2000;"):
        for _ in range(500):
            grammar.accept(letter)


def test_compiled_copies_are_independent(compiler, tokenizer):
    params = Params(choice=["abc", "xyz"])
    first = compiler.compile(params)
    start = allowed_by(first, compiler)
    first.accept(tokenizer.encode("xyz")[0])
    second, after = compiler.compile(params), allowed_by(first, compiler)
    assert allowed_by(second, compiler) == start != after
    second.accept(tokenizer.encode("abc")[0])
    assert allowed_by(first, compiler) == after != allowed_by(second, compiler)
    assert allowed_by(compiler.compile(params), compiler) == start


def test_cache_keeps_the_last_used(tokenizer, monkeypatch):
    monkeypatch.setattr(token_masks, "MAX_CACHED_GRAMMARS", 2)
    compiler, compiled = GrammarCompiler(tokenizer, VOCAB, EOS), []
    compiler.compile(Params(regex="a"))
    library = compiler._llguidance

    class Counting:
        def LLMatcher(self, *args, **options):
            compiled.append(args[1])
            return library.LLMatcher(*args, **options)

    compiler._llguidance = Counting()
    for pattern in "ababcab":
        compiler.compile(Params(regex=pattern))
    lark = [json.loads(grammar)["grammars"][1]["lark_grammar"] for grammar in compiled]
    assert lark == [f"start: /{pattern}/" for pattern in "bcab"]


def test_properties_come_in_the_schemas_order(compiler, tokenizer):
    """The order is part of what is compiled: it must be part of what is cached."""
    types = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    for names in ("ab", "ba"):
        schema = {"type": "object", "properties": {name: types[name] for name in names}, "required": list(names)}
        text = json.dumps(dict.fromkeys(names, 1))
        assert verdict(Params(json=schema), text, compiler, tokenizer) == "yes"


@pytest.mark.parametrize("vocab_size", [1100, 1000, 999])
def test_vocabulary_of_another_size(vocab_size, tokenizer, compiler):
    """The model's may be padded, or lack ids that the tokenizer has: neither kind is ever allowed."""
    other = GrammarCompiler(tokenizer, vocab_size, EOS)
    for params in (Params(regex="(?s:.*)"), Params(json_object=True)):
        expected = {i for i in allowed_by(compiler.compile(params), compiler) if i < vocab_size}
        grammars = {i: other.compile(params) for i in range(3)}
        words = np.full((3, -(-vocab_size // 32)), -1, np.int32)
        other.fill(grammars, words)
        assert allowed_by(grammars[0], other, vocab_size) == expected
        assert (words == words[0]).all() and (words[0] & ~mask_of(expected, vocab_size) == 0).all()


def test_rows_are_filled_for_their_grammars(compiler):
    """Others of the bitmask are left as they are."""
    grammars = {0: compiler.compile(Params(regex="[a-z]*")), 2: compiler.compile(Params(json_object=True))}
    for chosen in (grammars, {2: grammars[2]}):
        bitmask = np.full((4, 32), 0x3C3C3C3C, np.int32)
        compiler.fill(chosen, bitmask)
        for i, row in enumerate(bitmask):
            expected = allowed_by(chosen[i], compiler) if i in chosen else ids_of(np.full(32, 0x3C3C3C3C, np.int32))
            assert ids_of(row) == expected


def bad_words_of(sequences, vocab_size=VOCAB):
    """Of token ids; a word is spelled as the numbers of its tokens."""
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [int(i) for i in text.split()])
    return BadWords(tokenizer, [" ".join(map(str, ids)) for ids in sequences], vocab_size)


def not_forbidden_by(bad_words, vocab_size=VOCAB):
    bitmask = mask_of_all(vocab_size)
    bad_words.apply(bitmask)
    return ids_of(bitmask)


def test_bad_words_against_a_plain_reference():
    rng = random.Random(0)
    words = [rng.choices(range(6), k=rng.randint(1, 4)) for _ in range(6)]
    words = [word for word in words if len(word) > 1 or word == [5]] + [[5]]
    bad_words, output, held_back = bad_words_of(words, 70), [], 0
    for _ in range(300):
        banned = {word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1]}
        assert not_forbidden_by(bad_words, 70) == set(range(70)) - banned
        held_back += len(banned) > 1
        output.append(rng.choice([i for i in range(6) if i not in banned]))
        bad_words.accept(output[-1])
    assert held_back > 20


def prepends_spaces():
    """As Llama 2's: a text is encoded behind a space, which the decoder strips."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    names = ["<unk>", "<s>", "</s>", *byte_tokens, "▁", "i", "n", "f", "in", "▁in", "▁inf"]
    merges = [("i", "n"), ("▁", "in"), ("▁in", "f")]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def test_tokenizers_that_prepend_a_space():
    """Of choices with a space came texts without; a bad word was allowed by the tokens that follow no space."""
    tokenizer = prepends_spaces()
    size, find = len(tokenizer), tokenizer.convert_tokens_to_ids
    compiler = GrammarCompiler(tokenizer, size, [2])
    for choices in ([" in", " inf"], ["in", " in"], ["  in"], ["inf", "é"]):
        texts = set()
        for seed in range(30):
            grammar, ids, rng = compiler.compile(Params(choice=choices)), [], random.Random(seed)
            while (allowed := allowed_by(grammar, compiler, size)) > {2} or not allowed & {2}:
                ids.append(rng.choice(sorted(allowed)))
                if ids[-1] == 2:
                    break
                grammar.accept(ids[-1])
            texts.add(decode_completion(tokenizer, ids, True))
        assert texts == set(choices)
    bad_words = BadWords(tokenizer, ["inf"], size)
    assert find("▁inf") not in not_forbidden_by(bad_words, size) >= {find("f"), find("in")}
    bad_words.accept(find("in"))
    assert find("f") not in not_forbidden_by(bad_words, size)
    assert not not_forbidden_by(BadWords(tokenizer, [" in"], size), size) & {find("in"), find("▁in")}


def test_bad_words_of_tokens_that_the_model_lacks():
    """Its last ids are less than the tokenizer's: the word cannot be generated. It was an IndexError."""
    for far in (70, 95, 96, 5_000_000):
        bad_words = bad_words_of([[far], [3, far], [far, 3], [4], [3, 5]], 70)
        bad_words.accept(3)
        assert not_forbidden_by(bad_words, 70) == set(range(70)) - {4, 5}


def walked(tokenizer, regex, allowed, bad, *token_ids):
    """What may follow ``token_ids`` under a regex and bad words; all tokens but ``allowed`` are bad words."""
    marks = {"reasoning_start_str": None, "reasoning_end_str": None}
    config = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB), **marks)
    processors = TokenProcessors(config, SimpleNamespace(tokenizer=tokenizer), tuple(EOS))
    processor = processors.make(Sequence([5], SamplingParams(structured_outputs=Params(regex=regex))))
    processor.bad_words = bad_words_of([*([i] for i in range(VOCAB) if i not in allowed), *bad])
    for token_id in token_ids:
        assert not processor.update(token_id, None)
    (row,), failed = processors.masks([processor])
    assert not failed
    return ids_of(row)


def test_grammar_and_bad_words_compose(tokenizer):
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    expected = {(): {b, c}, (b,): set(EOS), (c,): {c}, (c, c): set(EOS)}  # end-of-sequence tokens are bad words, too
    assert {ids: walked(tokenizer, "[abc]c?", (a, b, c), [[a], [b, c]], *ids) for ids in expected} == expected


def test_bad_words_that_leave_nothing(tokenizer):
    """The text ends where it is complete. Elsewhere it ended, too, and looked like any other answer."""
    a, c = (tokenizer.encode(letter)[0] for letter in "ac")
    assert walked(tokenizer, "ab", (c,), []) == walked(tokenizer, "ab", (a,), [], a) == set()
    assert walked(tokenizer, "ab?", (a,), [], a) == walked(tokenizer, "ab", (c,), [], 2) == set(EOS)


def test_mask_of():
    words = mask_of([0, 31, 32, 69], 70)
    assert words.dtype == np.int32 and words.tolist() == [1 - 2**31, 1, 1 << 5]
    for token_id in (70, -1):
        with pytest.raises(RequestError, match=f"token id {token_id} must be >= 0 and below the vocabulary's size, 70"):
            mask_of([3, token_id], 70)


def test_tokens_of_bad_words(tokenizer):
    """Of a word as it begins a text and as it follows a space."""
    def forbidden(*words):
        return set(range(VOCAB)) - not_forbidden_by(BadWords(tokenizer, words, VOCAB))

    plain, spaced = (tokenizer.encode(text)[0] for text in ("a", " a"))
    assert plain != spaced and forbidden("a", " a") == forbidden("a") == {plain, spaced}
    assert forbidden() == set() and tokenizer.encode("\n")[0] in forbidden("\n")
    with pytest.raises(RequestError, match="SamplingParams: bad_words='' has no tokens"):
        forbidden("word", "")


# Errors

NOT_GRAMMARS = {
    'root ::= "a" |\n b': "Rule 'b' not found",
    'start ::= "a"': "it has no rule root ::= ...",
    "root ::= ((": "Expected ')' at line ",
    'root ::= "a"\n )': "Expected name at line 1, 'root_rule ::= \"a\"  ' ^ ')",
    "root ::= [b-a]": "invalid character class range, the start must be <= the end",
    "root ::= []": "error: unclosed character class",
    r'root ::= "\q"': "Invalid escape sequence \\q at line 1",
    r'root ::= "\u00e9ab"': r"it must hold the characters themselves in place of escapes with \u and \U",
    'root ::= * "a"': "Expected name at line 1, 'root_rule ::= ' ^ '* ",
    'root ::= "a"\nroot ::= "b"': "it defines a rule twice",
    'start: "a" c': 'unknown name: "c"',
    "start: start": "it matches no text",
}
ERRORS = [
    *((Params(grammar=grammar), error) for grammar, error in NOT_GRAMMARS.items()),
    (Params(json="{"), "it is not JSON: Expecting property name"),
    (Params(json="[1]"), "it must be a JSON object, as text or as a dictionary"),
    (Params(json={"type": {1}}), "it is malformed (TypeError: Object of type set is not JSON serializable)"),
    (Params(json=Model), "JSON has no form for <class 'test_structured.Model'>; give its .model_json_schema()"),
    (Params(json={"enum": [Model()]}), "JSON has no form for Model(); give its .model_json_schema()"),
    (Params(regex=re.compile("a+")), "JSON has no form for re.compile('a+'); give its .pattern"),
    (Params(choice=["a", HTTPStatus.OK]), "it must be a non-empty list of strings"),
    (Params(choice=HTTPStatus), "<enum 'HTTPStatus'>; give pydantic.TypeAdapter(HTTPStatus).json_schema()"),
    (Params(json={"type": "strin"}), "Invalid type: strin"),
    (Params(json={"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
    (Params(json={"type": "string", "format": "foo"}), "Unknown format: foo"),
    (Params(json={"enum": []}), "Unsatisfiable schema: anyOf is empty"),
    (Params(json_object=True, whitespace_pattern="("), "regex parse error:\n    (\n    ^\nerror: unclosed group"),
    (Params(json_object=True, whitespace_pattern=" ", disable_any_whitespace=True),
     "give disable_any_whitespace or whitespace_pattern, not both"),
    (Params(regex="a", disable_any_whitespace=True),
     "disable_any_whitespace and whitespace_pattern go with json or json_object"),
    (Params(regex="("), 'invalid regex "(" (in regex): regex parse error:\n    (\n    ^\nerror: unclosed group'),
    (Params(regex="a(?=b)"), "look-around, including look-ahead and look-behind, is not supported"),
    (Params(regex="a\\"), "its last backslash escapes nothing"),
    (Params(regex="\udcff"), r"it holds '\udcff', a lone surrogate, which no text has"),
    (Params(json={"enum": [["a\ud83d\ude00"]]}), r"it holds '\ud83d', a lone surrogate, which no text has"),
    (Params(json_object=True, whitespace_pattern="\ud800"), r"it holds '\ud800', a lone surrogate"),
    (Params(choice=[]), "it must be a non-empty list of strings"),
    (Params(choice=["a", 1]), "it must be a non-empty list of strings"),
    (Params(choice=["\udcff"]), r"it holds '\udcff', a lone surrogate"),
    (Params(structural_tag="{}"), 'it has neither "format" nor "structures"'),
    (Params(structural_tag='{"format": {"type": "token"}}'), "format type 'token' is not supported; const_string, "),
    (Params(structural_tag='{"format": {"type": "tag"}}'), "it is malformed (KeyError: 'begin')"),
    (Params(structural_tag=json.dumps({"format": {**TRIGGERED, "triggers": ["<f=a"]}})),
     "the tag '<f=b>' begins with no trigger"),
]  # fmt: skip


@pytest.mark.parametrize("params, error", ERRORS, ids=[f"{params.kind} {i}" for i, (params, _) in enumerate(ERRORS)])
def test_errors(params, error, compiler):
    with pytest.raises(RequestError) as raised:
        compiler.compile(params)
    text = str(raised.value)
    given = f"StructuredOutputsParams: {params.kind}={getattr(params, params.kind)!r:.200} cannot be used: "
    assert text.startswith(given)
    assert error in text[len(given) :] and "<state>" not in text
    assert " | " not in text.replace(given, "")  # the Lark that llguidance quotes may not be the user's


NOT_KEPT = [
    '{"const": -9007199254740994.0}', '{"const": [{"default": 1e999}]}', '{"enum": ["a", 12345678901234567890123]}',
    '{"maximum": -Infinity}', '{"exclusiveMinimum": NaN}', '{"multipleOf": 1e17}', '{"minLength": 9007199254740993}',
    '{"const": 0.12345678901234567891}', '{"enum": [1000000000000000.5]}', '{"const": -9223372036854775808}',
    '{"maximum": 7.777522467438323e-08}', '{"const": 1e-99999999999999999999}', '{"enum": [2e99999999999999999999]}',
]  # fmt: skip


def test_numbers_that_llguidance_would_change(compiler, tokenizer):
    """They came out rounded, or as null, and -2^63 ended the process; numbers that nothing reads do not count."""
    tag = {"type": "tag", "begin": "<", "end": ">"}
    for leaf in NOT_KEPT:
        schema = f'{{"$defs": {{"x": {leaf}}}, "items": {{"properties": {{"default": {leaf}}}}}, "type": "array"}}'
        nested = json.dumps({"format": {**tag, "content": {"type": "json_schema", "json_schema": "SCHEMA"}}})
        for params in (Params(json=leaf), Params(json=json.loads(schema)), Params(grammar=f"start: %json {schema}"),
                       Params(structural_tag=nested.replace('"SCHEMA"', schema))):  # fmt: skip
            if isinstance(params.json, dict) and ("0.1234" in leaf or "e-99" in leaf):  # a float already
                continue
            with pytest.raises(RequestError, match=r"it holds the number .*Allowed are whole numbers up to 2\^53"):
                compiler.compile(params)
        unread = json.loads(f'{{"const": 7, "default": {{"a": [{leaf}]}}, "examples": [{leaf}]}}')
        assert verdict(Params(json=unread), "7", compiler, tokenizer) == "yes"
    for text in ("9007199254740992", "-9007199254740991", "0.1", "0.30000000000000004", "-123456.75", "0.0000001"):
        assert verdict(Params(json=f'{{"enum": [[{text}]]}}'), f"[{text}]", compiler, tokenizer) == "yes"


FILLINGS = ["\n", "\r\n", " \n\t", "[", '\\"', '"', "# x\n", "a ", "a\n", "-", '"b" |', "(", "::="]


def test_long_grammars_take_linear_time():
    """The time of our regular expressions grew with the square of a run of line ends: minutes for 100 KB."""
    for filling in FILLINGS:
        times = []
        for size in (10_000, 160_000):
            start = time.process_time()
            with suppress(ValueError):
                to_grammar(Params(grammar='root ::= "a" ' + filling * (size // len(filling))))
            times.append(time.process_time() - start)
        assert times[1] < 60 * times[0] + 0.2, (filling, times)  # of the square: 256 times as long


def test_a_schema_that_is_too_deep(compiler):
    """The error that should show it was itself a RecursionError."""
    schema: dict = {}
    for _ in range(5_000):
        schema = {"not": schema}
    with pytest.raises(RequestError, match=r"json=\.\.\. cannot be used: it is malformed \(RecursionError: "):
        compiler.compile(Params(json=schema))


CHAINS = {  # the grammar of a chain of names
    "lark": lambda n: dict(grammar="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(n)) + f'r{n}: "x"'),
    "terminals": lambda n: dict(
        grammar="start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(n)) + f'A{n}: "x"'
    ),
    **{kind: lambda n, link=link: dict(json={
        "$defs": {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(n)} | {f"a{n}": {"type": "null"}},
        "$ref": "#/$defs/a0",
    }) for kind, link in {
        "ref": lambda ref: ref, "items": lambda ref: {"items": ref}, "choice": lambda ref: {"anyOf": [ref, False]},
        "property": lambda ref: {"properties": {"b": ref}},
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize("kind", CHAINS)
def test_chains_of_names(kind, compiler, monkeypatch):
    """llguidance follows them by recursion: its stack's overflow ended the process, and so a job at every restart."""
    for length in (1_500, 10_000):
        with suppress(RequestError):  # some exceed a limit of llguidance
            compiler.compile(Params(**CHAINS[kind](length)))
    monkeypatch.setattr(token_masks, "LONGEST", 5_000)
    with pytest.raises(RequestError, match=r"cannot be used: it has [\d,]+ bytes; at most 5,000 are read"):
        compiler.compile(Params(**CHAINS[kind](500)))


def test_a_grammar_that_takes_too_long(compiler, monkeypatch):
    """Names that llguidance's converter of EBNF, in Python, follows in quadratic time."""
    rules = "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(2_000))
    monkeypatch.setattr(token_masks, "SECONDS", 0.2)
    with pytest.raises(RequestError, match=r"cannot be used: it takes more than 0\.2 s to read"):
        compiler.compile(Params(grammar=f'root ::= r0\n{rules}r2000 ::= "x"'))


def test_engines_that_cannot(tokenizer, monkeypatch):
    params = Params(regex="a")

    def error_of(tokenizer, eos=EOS):
        with pytest.raises(RequestError) as raised:
            GrammarCompiler(tokenizer, VOCAB, eos).compile(params)
        return str(raised.value)

    needs = "SamplingParams: structured_outputs needs "
    assert error_of(None) == f"{needs}a tokenizer, but the engine was made with skip_tokenizer_init=True."
    assert error_of("slow") == f"{needs}a fast tokenizer (tokenizer.json), not str."
    for eos in ([], [VOCAB + 5]):
        assert error_of(tokenizer, eos) == f"{needs}an end-of-sequence token, which the model does not have."
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert re.fullmatch(
        re.escape(needs) + r"llguidance \(.*\): pip install '\.\[structured\]' in the checkout\.", error_of(tokenizer)
    )


def test_llguidance_is_imported_on_first_use():
    code = "import sys, nanovllm.engine.structured_outputs.token_masks as s; s.GrammarCompiler(None, 8, [1]); " \
        "sys.exit(bool({'torch', 'transformers', 'llguidance'} & set(sys.modules)))"  # fmt: skip
    run_python("-c", code)
