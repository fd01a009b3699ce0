"""The text the demo model is trained on: what its generators promise, without training."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import make_demo  # noqa: E402
from make_demo import ANSWER, CHECKS, IM_END_ID, KINDS, ROW_LENGTH, held_out  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return make_demo.train_tokenizer()


def test_equal_questions_have_equal_answers():
    """Two answers to one question would narrow the margin, and greedy output would depend on rounding."""
    rng, seen = random.Random(1), {}
    for kind in [*KINDS] * 10_000:
        question, answer = kind(rng)
        assert seen.setdefault(question.lower(), answer) == answer, question
    drawn = [(seen[key], CHECKS[check]) for check in CHECKS if (key := check.lower().rstrip("?.")) in seen]
    assert len(drawn) >= 10 and all(generated == expected for generated, expected in drawn)


@pytest.mark.parametrize(("kind", "sign"), ((make_demo.sums, 1), (make_demo.differences, -1)))
def test_arithmetic(kind, sign):
    """The answers are right, and the held-out sums are never asked."""
    rng = random.Random(2)
    for _ in range(20_000):
        question, answer = kind(rng)
        a, b = map(int, re.findall(r"\d+", question))
        assert int(answer) == (b - a if "from" in question else a + sign * b)
        assert sign < 0 or not held_out(a, b)


def test_held_out_share_and_symmetry():
    pairs = [(a, b) for a in range(100) for b in range(100)]
    assert 0.15 < sum(held_out(a, b) for a, b in pairs) / len(pairs) < 0.20
    assert all(held_out(a, b) == held_out(b, a) for a, b in pairs)


def test_import_is_light():
    code = "import sys, make_demo; assert not {'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=TOOLS)


def test_rows_hold_whole_answers(tokenizer):
    """Every answer but the one that the row's end cuts off ends with <|im_end|>; a row depends on its seed alone."""
    ids, weights = make_demo.make_rows(tokenizer, range(40))
    assert ids.shape == weights.shape == (40, ROW_LENGTH)
    for row, is_answer in zip(ids.tolist(), (weights == ANSWER).tolist(), strict=True):
        ends = [i for i in range(ROW_LENGTH - 1) if is_answer[i] and not is_answer[i + 1]]
        assert len(ends) > 3 and all(row[i] == IM_END_ID for i in ends)
    assert make_demo.make_rows(tokenizer, [7])[0].tolist() == ids[7:8].tolist()


def test_tokenizer(tokenizer):
    """Lossless, every digit is a token, and the script still makes the tokenizer that is bundled."""
    for text in ("what is 37 + 45?", "Ünïcödé 你好 🙂\n\t\x00", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("1234567890").ids) == 10
    bundled = TOOLS.parent / "nanovllm" / "assets" / "demo"
    assert json.loads((bundled / "tokenizer.json").read_text(encoding="utf-8")) == json.loads(tokenizer.to_str())
    config = json.loads((bundled / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == tokenizer.get_vocab_size()
