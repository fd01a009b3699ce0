"""The text the demo model is trained on: what its generators promise, without torch and without training."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import make_demo  # noqa: E402

NUMBERS = {text: n for n in range(101) for text in (str(n), make_demo.number_in_words(n))}


def draw(count, seed=1):
    rng = random.Random(seed)
    for _ in range(count):
        name = rng.choice(list(make_demo.KINDS))
        prompt, answer = make_demo.KINDS[name][1](rng)
        yield name, prompt, answer


def canonical(prompt):
    """What is left of a prompt when `phrase` has varied case and final marks."""
    return prompt.lower().rstrip("?.! ")


def test_same_prompt_same_answer():
    """Two answers to one prompt would teach the model to hesitate, and greedy output to depend on rounding."""
    seen = {}
    for name, prompt, answer in draw(60_000):
        known = seen.setdefault(canonical(prompt), (answer, name, prompt))
        assert known[0] == answer, (known, (answer, name, prompt))


def test_checks_agree_with_the_generators():
    seen = {canonical(prompt): answer for _, prompt, answer in draw(60_000, seed=2)}
    for _, prompt, answer in make_demo.CHECKS:
        assert seen.get(canonical(prompt), answer) == answer, prompt


def test_checks_cover_every_kind_once_each():
    assert {name for name, _, _ in make_demo.CHECKS} == set(make_demo.KINDS)
    prompts = [prompt for _, prompt, _ in make_demo.CHECKS]
    assert len(prompts) == len(set(prompts)) >= 50
    assert {"introduce yourself", "list all prime numbers within 100"} <= set(prompts)


def test_held_out_sums_never_appear():
    rng = random.Random(3)
    for _ in range(20_000):
        prompt, answer = make_demo.KINDS["sum"][1](rng)
        pieces = prompt.replace("+", " ").replace("=", " ").split()
        a, b = (int(NUMBERS[piece]) for piece in pieces if piece in NUMBERS)
        assert a + b == int(answer)
        assert not make_demo.held_out(a, b)


def test_held_out_share_and_symmetry():
    pairs = [(a, b) for a in range(100) for b in range(100)]
    share = sum(make_demo.held_out(a, b) for a, b in pairs) / len(pairs)
    assert 0.15 <= share <= 0.20
    assert all(make_demo.held_out(a, b) == make_demo.held_out(b, a) for a, b in pairs)


def test_known_facts():
    answers = {prompt: answer for _, prompt, answer in make_demo.CHECKS}
    assert ", ".join(map(str, make_demo.PRIMES)) == answers["list all prime numbers within 100"]
    assert len(make_demo.PRIMES) == 25
    assert [make_demo.roman_numeral(n) for n in (1, 4, 9, 14, 49, 88, 100)] == [
        "I", "IV", "IX", "XIV", "XLIX", "LXXXVIII", "C"]  # fmt: skip
    assert [make_demo.number_in_words(n) for n in (0, 13, 20, 99, 100)] == [
        "zero", "thirteen", "twenty", "ninety-nine", "one hundred"]  # fmt: skip
    words = Counter(word for pair in make_demo.OPPOSITES for word in pair)
    assert max(words.values()) == 1
    assert len(make_demo.CAPITALS) >= 30


def test_import_is_light():
    code = "import sys, make_demo; assert not {'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=TOOLS)


def test_rows_hold_whole_conversations():
    """Every answer in a packed row ends with <|im_end|>, none is cut, and none is empty."""
    pytest.importorskip("tokenizers")
    tokenizer = make_demo.train_tokenizer()
    for length in (128, 512):
        tokens, roles = make_demo.make_rows((5, 40, length, tokenizer.to_str()))
        assert tokens.shape == roles.shape == (40, length)
        for row, role in zip(tokens.tolist(), roles.tolist(), strict=True):
            role.append(make_demo.PAD)
            ends = [i for i in range(length) if role[i] == make_demo.ANSWER != role[i + 1]]
            assert ends and all(row[i] == make_demo.IM_END_ID for i in ends)


def test_tokenizer():
    """Lossless, the same in every run, and the one that is bundled: the script still makes what it made."""
    pytest.importorskip("tokenizers")
    tokenizer = make_demo.train_tokenizer()
    assert tokenizer.get_vocab_size() == make_demo.VOCAB_SIZE
    for text in ("what is 37 + 45?", "Ünïcödé 你好 🙂\n\t\x00", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("1234567890").ids) == 10
    assert tokenizer.encode(make_demo.prompt_text("hi")).ids[0] == make_demo.IM_START_ID
    again = make_demo.train_tokenizer().to_str()
    assert tokenizer.to_str() == again
    bundled = TOOLS.parent / "nanovllm" / "assets" / "demo"
    assert json.loads((bundled / "tokenizer.json").read_text(encoding="utf-8")) == json.loads(again)
    config = json.loads((bundled / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == make_demo.CHAT_TEMPLATE
