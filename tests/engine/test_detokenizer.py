"""Incremental detokenization and stop strings, against decoding the whole completion after every token."""

import random

import numpy as np
import pytest

from nanovllm.engine.detokenizer import (
    REPLACEMENT,
    IncrementalDetokenizer,
    StopCandidates,
    StopChecker,
    decode,
    decode_tokens,
)
from nanovllm.utils.checkpoint import DEMO_MODEL

WORDS = ["the", " the", "a", "b", "ab", "ba", " ", "  ", "\n", "\n\n", ".", "Question", ":"]
PIECES = [*WORDS, "é", "中文", "文", "🙂", "🙂a"]
SPECIAL = ["<s>", "</s>"]


def fast(tokenizer, **options):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def in_alphabet(text):
    """As byte-level tokenizers write it: a character for each byte."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def by_bytes(tokenizer, text):
    return tokenizer.convert_tokens_to_ids(list(in_alphabet(text)))


def byte_level():
    """All bytes, the pieces, halves of characters, special tokens, and added tokens that are plain text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces = list(map(in_alphabet, PIECES))
    halves = [piece[i:] for piece in pieces for i in (1, 2)] + [piece[:-1] for piece in pieces]
    names = dict.fromkeys([*sorted(alphabet), *pieces, *filter(None, halves)])
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("plain text é"), AddedToken("ü")])
    return fast(tokenizer, eos_token="</s>")


def sentencepiece():
    """Leading space stripped, byte tokens for what is not in the vocabulary: as Llama 2 and Gemma."""
    from tokenizers import Tokenizer, decoders, models

    byte_tokens, pieces = [f"<0x{byte:02X}>" for byte in range(256)], [piece.replace(" ", "▁") for piece in PIECES]
    names = dict.fromkeys(["<unk>", *SPECIAL, *byte_tokens, "▁", *pieces])
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return fast(tokenizer, eos_token="</s>", unk_token="<unk>")


def metaspace():
    from tokenizers import Tokenizer, decoders, models

    names = ["<unk>", "▁", "▁b", *(piece.replace(" ", "▁") for piece in PIECES)]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in dict.fromkeys(names)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return fast(tokenizer, eos_token="</s>", unk_token="<unk>")


def words():
    """No decoder: tokens are joined by spaces."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(dict.fromkeys(PIECES))}, unk_token="a"))
    tokenizer.add_special_tokens(SPECIAL)
    return fast(tokenizer, eos_token="</s>")


def in_python():
    """Written in Python: no ``backend_tokenizer``, spaces between special tokens. A token is a byte."""
    from transformers import PreTrainedTokenizer

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
    from transformers import AutoTokenizer

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
    for length in [0, 1, 2, 3, 5, 9, 40, 40, 300, 300] * 4:
        ids, spaces = random_ids(tokenizer, rng, length), rng.random() < 0.5
        detokenizer = IncrementalDetokenizer(tokenizer, skip, spaces)
        at, given = 0, ""
        while at < length:
            size = rng.choice([1, 1, 1, 2, 7])
            given += detokenizer.feed(ids[at : at + size])
            at += size
            so_far = decode(tokenizer, ids[:at], skip, spaces)
            assert detokenizer.text == given == so_far[: len(given)]
            assert complete(detokenizer.text_now) == complete(so_far)
        whole = tokenizer.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces)
        assert decode(tokenizer, ids, skip, spaces) == whole
        assert complete(detokenizer.text_now) == complete(whole)


def test_bad_bytes():
    """Python's replacement characters are those of Rust: one for each maximal beginning of a character."""
    tokenizer, rng = byte_level(), random.Random(1)
    likely = tokenizer.convert_tokens_to_ids([chr(byte) for byte in (0xE4, 0xF0, 0xF4, 0xC3, 0xEE, 0xAE, 0xB8)])
    for _ in range(300):
        ids = rng.choices([*range(256), *likely * 60], k=12)  # the alphabet comes first
        ids += by_bytes(tokenizer, "a")  # ends an incomplete character
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert "".join(detokenizer.feed([i]) for i in ids) == tokenizer.decode(ids)


def test_a_character_appears_when_it_is_complete():
    tokenizer = byte_level()
    ids = by_bytes(tokenizer, "a🙂é")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.feed([i]) for i in ids] == ["a", "", "", "", "🙂", "", "é"]
    assert detokenizer.text == detokenizer.text_now == "a🙂é"
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.feed(ids[:3]) == "a" and detokenizer.feed(ids[:1]) == REPLACEMENT + "a"


def test_byte_tokens_are_certain_when_their_run_ends():
    """One bad byte makes replacement characters of the whole run, so of its text none is given out before."""
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "中".encode()])
    a, bad = tokenizer.convert_tokens_to_ids(["a", "<0xFF>"])
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.feed([i]) for i in [a, *ids, a]] == ["a", "", "", "", "中a"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.feed(ids) == "" and detokenizer.text_now == "中"
    assert detokenizer.feed([bad]) == "" and detokenizer.text_now == ""
    assert detokenizer.feed([a]) == REPLACEMENT * 4 + "a"


@pytest.mark.parametrize("make", [sentencepiece, in_python])
def test_window_stays_short(make):
    """Also of tokens that have no text: special ones are left out, or every token would decode all of them again."""
    tokenizer, rng = make(), random.Random(2)
    detokenizer = IncrementalDetokenizer(tokenizer)
    with_text = [i for i in range(len(tokenizer)) if i not in detokenizer.tokens.byte_ids]
    unknown = [len(tokenizer) + 3] if make is sentencepiece else []
    nothing = [*tokenizer.all_special_ids, *unknown] * 500
    first, second = rng.choices(with_text, k=500), rng.choices(with_text, k=500)
    second[0] = tokenizer.convert_tokens_to_ids(" " if make is in_python else "▁the")
    ids = first + nothing + second
    longest, decoded = 0, detokenizer.tokens.decode
    try:
        def decode_short(ids):
            nonlocal longest
            longest = max(longest, len(ids))
            return decoded(ids)

        detokenizer.tokens.decode = decode_short
        for i in ids:
            detokenizer.feed([i])
    finally:
        del detokenizer.tokens.decode
    assert 10 < longest < 50
    assert complete(detokenizer.text_now) == complete(tokenizer.decode(ids, skip_special_tokens=True))


def test_decode_tokens(tokenizer):
    ids = [*range(len(tokenizer)), 5, 5]
    expected = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    assert decode_tokens(tokenizer, ids) == ["" if text.endswith(REPLACEMENT) else text for text in expected]


def test_decode_tokens_by_hand():
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids(["</s>", "Ġthe", chr(0xE4), "plain text é"])
    assert decode_tokens(tokenizer, ids) == ["</s>", " the", "", "plain text é"]


# ---------------------------------------------------------------- stop strings


def naive_stop(tokenizer, ids, stop, include, min_tokens, skip):
    """(string, text, tokens) of the first stop string that ends in the text of a token after the first min_tokens."""
    before = 0
    for n in range(1, len(ids) + 1):
        text = complete(decode(tokenizer, ids[:n], skip))
        if n > min_tokens:
            found = []
            for order, string in enumerate(stop):
                start = text.find(string, max(0, before - len(string) + 1))
                if start >= 0:
                    found.append((start + len(string), order, start, string))
            if found:
                end, _, start, string = min(found)
                return string, text[: end if include else start], n
        before = len(text)
    return None


def run_checker(checker, detokenizer, ids, rng):
    at = 0
    while at < len(ids):
        size = rng.choice([1, 1, 1, 2, 7])
        found = checker.update(ids[at : at + size])
        at += size
        if found is not None:
            string, length = found
            return string, detokenizer.text_now[:length], checker.num_tokens
        assert checker.num_tokens == min(at, len(ids))
    return None


def test_stop_strings_are_found_as_by_the_naive_search(tokenizer):
    rng, candidates, num_found = random.Random(3), StopCandidates(len(tokenizer) + 10), 0
    for _ in range(600):
        ids, skip = random_ids(tokenizer, rng, rng.choice([5, 20, 60])), rng.random() < 0.7
        # pieces of the text itself, so that most are found; across tokens, from inside of one, multi-byte characters
        text = decode(tokenizer, ids, skip)
        stop = []
        while len(stop) < rng.choice([1, 2, 4]):
            at, size = rng.randrange(max(1, len(text) - 2)), rng.choice([1, 2, 3, 6])
            stop.append(text[at : at + size].replace(REPLACEMENT, "a") or "x")
        include, min_tokens = rng.random() < 0.5, rng.choice([0, 0, 3, 10])
        detokenizer = IncrementalDetokenizer(tokenizer, skip)
        checker = StopChecker(candidates, detokenizer, stop, include, min_tokens)
        found = run_checker(checker, detokenizer, ids, rng)
        assert found == naive_stop(tokenizer, ids, stop, include, min_tokens, skip), (ids, stop)
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
        detokenizer = IncrementalDetokenizer(tokenizer)
        checker = StopChecker(StopCandidates(len(tokenizer)), detokenizer, stop, include)
        found = checker.update(by_bytes(tokenizer, text))
        assert (found and found[0]) == reason
        assert (found and detokenizer.text_now[: found[1]]) == expected


def test_min_tokens():
    """A string that ends in the first min_tokens tokens is passed over; one that begins there is found."""
    tokenizer = byte_level()
    ids = by_bytes(tokenizer, "ab cab cab")
    for min_tokens, expected in ((1, (("ab", 0), 2)), (2, (("ab", 4), 6)), (5, (("ab", 4), 6)), (10, (None, 10))):
        checker = StopChecker(
            StopCandidates(len(tokenizer)), IncrementalDetokenizer(tokenizer), ["ab"], min_tokens=min_tokens
        )
        assert (checker.update(ids), checker.num_tokens) == expected


def test_special_tokens_are_no_text():
    """A special token as a stop string is found only in text that shows it."""
    tokenizer = byte_level()
    ids = [*by_bytes(tokenizer, "ab"), tokenizer.eos_token_id]
    for skip, expected in ((True, None), (False, ("</s>", 2))):
        detokenizer = IncrementalDetokenizer(tokenizer, skip)
        assert StopChecker(StopCandidates(len(tokenizer)), detokenizer, ["</s>"]).update(ids) == expected


def test_byte_tokens_complete_a_string_within_their_run():
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["a", *(f"<0x{byte:02X}>" for byte in "中文".encode())])
    detokenizer = IncrementalDetokenizer(tokenizer)
    checker = StopChecker(StopCandidates(len(tokenizer)), detokenizer, ["中"], include=True)
    assert [checker.update([i]) for i in ids[:4]] == [None, None, None, ("中", 2)]
    assert detokenizer.text_now == "a中"


def test_replacement_character_as_a_stop_string():
    tokenizer = byte_level()
    bad = tokenizer.get_vocab()[chr(0xFF)]
    ids = [*by_bytes(tokenizer, "a"), bad, *by_bytes(tokenizer, "b")]
    for stop in (REPLACEMENT, REPLACEMENT + "b"):
        checker = StopChecker(StopCandidates(len(tokenizer)), IncrementalDetokenizer(tokenizer), [stop])
        assert (checker.update(ids), checker.num_tokens) == ((stop, 1), 1 + len(stop))


def test_most_tokens_are_no_candidates():
    """The saving: tokens that cannot complete a string are not detokenized. And the table is made once."""
    tokenizer = demo()
    candidates, detokenizer = StopCandidates(4096), IncrementalDetokenizer(tokenizer)
    table = candidates.table(detokenizer.tokens, ["Question:", "\n\n"])
    assert table.dtype == np.bool_ and table.shape == (4096,)
    assert {i for i in range(len(tokenizer)) if ":" in tokenizer.decode([i])} <= set(np.flatnonzero(table).tolist())
    assert not table[len(tokenizer) :].any() and table.mean() < 0.02
    assert candidates.table(detokenizer.tokens, ["\n\n", "Question:"]) is table
    fed, feed = [], detokenizer.feed
    detokenizer.feed = lambda ids: (fed.append(len(ids)), feed(ids))[1]
    checker = StopChecker(candidates, detokenizer, ["Question:", "\n\n"])
    ids = tokenizer("a long answer of many words that end in no stop string")["input_ids"]
    rare = [i for i in ids if not table[i]]
    assert len(rare) > len(ids) / 2
    assert checker.update(rare) is None and fed == []
    colon = next(i for i in np.flatnonzero(table).tolist() if tokenizer.decode([i]) == ":")
    assert checker.update([colon]) is None and fed == [len(rare), 1]
    assert detokenizer.text_now == tokenizer.decode([*rare, colon])


def test_tables_are_dropped_in_order_of_use():
    tokenizer = byte_level()
    candidates, tokens = StopCandidates(len(tokenizer)), IncrementalDetokenizer(tokenizer).tokens
    first, second = (candidates.table(tokens, [text]) for text in ("a", "b"))
    for i in range(31):
        candidates.table(tokens, [f"{i}"])
        assert candidates.table(tokens, ["a"]) is first
    assert candidates.table(tokens, ["b"]) is not second
