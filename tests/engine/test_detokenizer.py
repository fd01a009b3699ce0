"""Incremental detokenization and stop strings, against decoding the whole completion after every token."""

import random

import pytest
from helpers import first_stop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.engine.text.detokenizer import (
    REPLACEMENT,
    IncrementalDetokenizer,
    decode,
    decode_completion,
    decode_tokens,
)
from nanovllm.engine.text.stop_strings import StopStrings
from nanovllm.utils.checkpoint import DEMO_MODEL

WORDS = ["the", " the", "a", "b", "ab", "ba", " ", "  ", "\n", "\n\n", ".", "Question", ":"]
PIECES = [*WORDS, "é", "中文", "文", "🙂", "🙂a"]
SPECIAL = ["<s>", "</s>"]


def fast(model, decoder=None, added=(), **options):
    """A tokenizer with special tokens; tokens that are ``added`` are plain text."""
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(token) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **options)


def in_alphabet(text):
    """As byte-level tokenizers write it: a character for each byte."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def by_bytes(tokenizer, text):
    return tokenizer.convert_tokens_to_ids(list(in_alphabet(text)))


def byte_level():
    """All bytes, the pieces, halves of characters, special tokens, and added tokens that are plain text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces = list(map(in_alphabet, PIECES))
    halves = [piece[i:] for piece in pieces for i in (1, 2)] + [piece[:-1] for piece in pieces]
    names = dict.fromkeys([*sorted(alphabet), *pieces, *filter(None, halves)])
    model = models.BPE({name: i for i, name in enumerate(names)}, [])
    return fast(model, decoders.ByteLevel(), ("<think>", "plain text é", "ü"))


def sentencepiece():
    """Leading space stripped, byte tokens for what is not in the vocabulary: as Llama 2 and Gemma."""
    byte_tokens, pieces = [f"<0x{byte:02X}>" for byte in range(256)], [piece.replace(" ", "▁") for piece in PIECES]
    names = dict.fromkeys(["<unk>", *SPECIAL, *byte_tokens, "▁", *pieces])
    model = models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return fast(model, decoders.Sequence(steps), unk_token="<unk>")


def metaspace():
    names = ["<unk>", "▁", "▁b", *(piece.replace(" ", "▁") for piece in PIECES)]
    model = models.Unigram([(name, -1.0) for name in dict.fromkeys(names)], unk_id=0)
    return fast(model, decoders.Metaspace(), unk_token="<unk>")


def words():
    """No decoder: tokens are joined by spaces."""
    return fast(models.WordLevel({name: i for i, name in enumerate(dict.fromkeys(PIECES))}, unk_token="a"))


def in_python():
    """Written in Python: no ``backend_tokenizer``, spaces between special tokens. A token is a byte."""
    class Bytes(PreTrainedTokenizer):
        vocab_size = 256

        def get_vocab(self):
            return {chr(i): i for i in range(256)} | self.added_tokens_encoder

        def _convert_id_to_token(self, index):
            return chr(index)

        def _convert_token_to_id(self, token):
            return ord(token)

        def convert_tokens_to_string(self, tokens):
            return "".join(tokens).encode("latin-1").decode("utf-8", "replace").removeprefix(" ")

    return Bytes(bos_token="<s>", eos_token="</s>")


def demo():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module", params=[byte_level, sentencepiece, metaspace, words, in_python, demo])
def tokenizer(request):
    return request.param()


def random_ids(tokenizer, rng, length):
    """Some ids often, so that strings are met again; special ones and, for a model's padding, unknown ones, too."""
    unknown = [] if getattr(tokenizer, "backend_tokenizer", None) is None else [len(tokenizer) + 3]
    few = rng.sample(range(len(tokenizer)), min(12, len(tokenizer)))
    ids = [*range(len(tokenizer)), *few * 30, *tokenizer.all_special_ids * 5, *unknown]
    return rng.choices(ids, k=length)


def complete(text):
    """Without the character at the end that may not be complete."""
    return text.rstrip(REPLACEMENT)


# ---------------------------------------------------------------- incremental detokenization


@pytest.mark.parametrize("skip", [True, False])
def test_text_is_that_of_the_whole_list(tokenizer, skip):
    rng = random.Random(0)
    for length in [0, 1, 2, 3, 5, 9, 40, 40, 300, 300] * 2:
        ids, spaces = random_ids(tokenizer, rng, length), rng.random() < 0.5
        detokenizer = IncrementalDetokenizer(tokenizer, skip, spaces)
        given = ""
        for at, token_id in enumerate(ids, 1):
            given += detokenizer.feed(token_id)
            so_far = decode_completion(tokenizer, ids[:at], skip, spaces)
            assert given == so_far[: len(given)]
            assert complete(given + detokenizer.held()) == complete(so_far)
        whole = tokenizer.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces)
        assert decode(tokenizer, ids, skip, spaces) == whole
        whole = decode_completion(tokenizer, ids, skip, spaces)
        assert complete(given + detokenizer.held()) == complete(whole)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace, demo])
def test_a_completion_is_the_text_behind_its_prompt(make):
    """Decoders of Llama 2's kind strip a text's first space; a completion lost one of its indentation."""
    tokenizer, rng = make(), random.Random(5)
    (a,) = tokenizer.encode("a", add_special_tokens=False)[-1:]
    space = tokenizer.encode("▁the" if make in (sentencepiece, metaspace) else " the", add_special_tokens=False)
    for _ in range(50):
        ids = [*space * rng.randint(0, 1), *random_ids(tokenizer, rng, 6)]
        behind = decode(tokenizer, [a, *ids], False)
        assert decode_completion(tokenizer, ids, False) == behind[len(decode(tokenizer, [a])) :]


def fed(tokenizer, ids):
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.feed(i) for i in ids], detokenizer.held()


def test_bad_bytes():
    tokenizer, rng = byte_level(), random.Random(1)
    likely = tokenizer.convert_tokens_to_ids([chr(byte) for byte in (0xE4, 0xF0, 0xF4, 0xC3, 0xEE, 0xAE, 0xB8)])
    for _ in range(300):
        ids = rng.choices([*range(256), *likely * 60], k=12)  # the alphabet comes first
        ids += by_bytes(tokenizer, "a")  # ends an incomplete character
        assert "".join(fed(tokenizer, ids)[0]) == tokenizer.decode(ids)


def test_a_character_appears_when_it_is_complete():
    tokenizer = byte_level()
    ids = by_bytes(tokenizer, "a🙂é")
    assert fed(tokenizer, ids) == (["a", "", "", "", "🙂", "", "é"], "")
    assert fed(tokenizer, [*ids[:3], *ids[:1]]) == (["a", "", "", REPLACEMENT + "a"], "")


def test_byte_tokens_are_certain_when_their_run_ends():
    """One bad byte makes replacement characters of the whole run, so of its text none is given out before."""
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "中".encode()])
    a, bad = tokenizer.convert_tokens_to_ids(["a", "<0xFF>"])
    assert fed(tokenizer, [a, *ids, a]) == (["a", "", "", "", "中a"], "")
    assert fed(tokenizer, ids) == (["", "", ""], "中")
    assert fed(tokenizer, [*ids, bad]) == ([""] * 4, "")
    assert fed(tokenizer, [*ids, bad, a]) == ([*[""] * 4, REPLACEMENT * 4 + "a"], "")


def test_a_decoder_that_changes_text_before_the_token():
    """``DecodeStream`` raises, here at ".", and at every token after it; the engine's step would have failed."""
    model = models.WordLevel({"a": 0, " ": 1, ".": 2}, unk_token="a")
    tokenizer = fast(model, decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")]))
    assert tokenizer.backend_tokenizer.decode([0, 1, 2, 0]) == "a.a"
    assert fed(tokenizer, [0, 1, 2, 0, 0]) == (["a", " ", "", "a", "a"], "")


@pytest.mark.parametrize("make", [byte_level, sentencepiece, in_python])
def test_long_runs_of_special_tokens_are_not_decoded(make, monkeypatch):
    """A model that ignores its end-of-sequence token repeats it: each decoded all before it again."""
    tokenizer, rng = make(), random.Random(2)
    with_text = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    first, second = rng.choices(with_text, k=50), rng.choices(with_text, k=50)
    second[0] = tokenizer.convert_tokens_to_ids({byte_level: "Ġthe", sentencepiece: "▁the", in_python: " "}[make])
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(map(detokenizer.feed, first))
    with monkeypatch.context() as patch:
        patch.setattr(detokenizer, "_stream", None, raising=False)  # not asked
        patch.setattr(detokenizer, "_pending_text", None)
        assert not any(map(detokenizer.feed, tokenizer.all_special_ids * 500))
    text += "".join(map(detokenizer.feed, second)) + detokenizer.held()
    assert complete(text) == complete(decode_completion(tokenizer, first + second))


def test_decode_tokens(tokenizer):
    ids = [*range(len(tokenizer)), 5, 5]
    expected = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    found = decode_tokens(tokenizer, ids)
    assert [token.text for token in found] == ["" if REPLACEMENT in text else text for text in expected]
    assert all(token.raw == token.text.encode() for token in found if token.text)


def test_decode_tokens_by_hand():
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids(["</s>", "Ġthe", chr(0xE4), "plain text é"])
    assert decode_tokens(tokenizer, ids) == [
        ("</s>", b"</s>"), (" the", b" the"), ("", b"\xe4"), ("plain text é", "plain text é".encode())
    ]  # fmt: skip


def test_bytes_of_tokens():
    """A token that holds a part of a character had no bytes."""
    text = "".join(map(chr, range(1, 0x800))) + "中文🙂"
    names = dict(zip(text.encode(), in_alphabet(text), strict=True)), {b: f"<0x{b:02X}>" for b in range(33, 256)}
    assert len(names[0]) > 220  # UTF-8 has not all
    for tokenizer, name_of in zip((byte_level(), sentencepiece()), names, strict=True):
        tokens = decode_tokens(tokenizer, tokenizer.convert_tokens_to_ids(list(name_of.values())))
        assert tokens == [(chr(byte) if byte < 128 else "", bytes([byte])) for byte in name_of]


# ---------------------------------------------------------------- stop strings


def search(tokenizer, ids, stop, include=False, min_tokens=0, skip=True):
    """What ``first_stop`` gives."""
    params = SamplingParams(
        stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens, skip_special_tokens=skip
    )
    strings = StopStrings(tokenizer, params)
    found = ((strings.update(token_id), n) for n, token_id in enumerate(ids, 1))
    return next(((*result, n) for result, n in found if result is not None), None)


def test_stop_strings_are_found_as_by_the_naive_search(tokenizer):
    rng, num_found = random.Random(3), 0
    for _ in range(600):
        ids, skip = random_ids(tokenizer, rng, rng.choice([5, 20, 60])), rng.random() < 0.7
        # pieces of the text itself, so that most are found; across tokens, from inside of one, multi-byte characters
        text = decode_completion(tokenizer, ids, skip)
        stop = []
        while len(stop) < rng.choice([1, 2, 4]):
            at, size = rng.randrange(max(1, len(text) - 2)), rng.choice([1, 2, 3, 6])
            stop.append(text[at : at + size].replace(REPLACEMENT, "a") or "x")
        include, min_tokens = rng.random() < 0.5, rng.choice([0, 0, 3, 10])
        found = search(tokenizer, ids, stop, include, min_tokens, skip)
        texts = (decode_completion(tokenizer, ids[:n], skip) for n in range(1, len(ids) + 1))
        assert found == first_stop(texts, stop, include, min_tokens), (ids, stop)
        num_found += found is not None
    assert 100 < num_found < 590


@pytest.mark.parametrize(
    "text, stop, kept, kept_with, reason",
    [
        ("a: b\n\nc", ["\n\n"], "a: b", "a: b\n\n", "\n\n"),  # over two tokens
        ("abc", ["bc", "b"], "a", "ab", "b"),  # b is complete first
        ("abc", ["c", "abc"], "ab", "abc", "c"),  # both end here: order of the list
        ("abc", ["abc", "c"], "", "abc", "abc"),
        ("abab", ["ba"], "a", "aba", "ba"),
        ("aaaa", ["aaa"], "", "aaa", "aaa"),
        ("abc", ["abcd", "d"], None, None, None),
    ],
)
def test_stop_strings_by_hand(text, stop, kept, kept_with, reason):
    tokenizer = byte_level()
    for include, expected in ((False, kept), (True, kept_with)):
        found = search(tokenizer, by_bytes(tokenizer, text), stop, include)
        assert found == (None if reason is None else (reason, expected, found[2]))


def test_byte_tokens_complete_a_string_within_their_run():
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["a", *(f"<0x{byte:02X}>" for byte in "中文".encode())])
    assert search(tokenizer, ids, ["中"], include=True) == ("中", "a中", 4)


def test_replacement_character_as_a_stop_string():
    tokenizer = byte_level()
    bad = tokenizer.get_vocab()[chr(0xFF)]
    ids = [*by_bytes(tokenizer, "a"), bad, *by_bytes(tokenizer, "b")]
    for stop in (REPLACEMENT, REPLACEMENT + "b"):
        assert search(tokenizer, ids, [stop]) == (stop, "a", 3)


def test_a_long_text_is_kept_whole():
    """Only its end is searched."""
    tokenizer = byte_level()
    ids = by_bytes(tokenizer, "abc é" * 500 + "stop")
    assert search(tokenizer, ids, ["stop", "c é."]) == ("stop", "abc é" * 500, len(ids))
