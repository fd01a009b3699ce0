"""The bundled demo model, as its users meet it: ``LLM()`` without a path, text in and text out."""

import random
import sys
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.utils.checkpoint import DEMO_MODEL

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import make_demo

GREEDY = SamplingParams(temperature=0, max_tokens=400)


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu") as llm:
        yield llm


def ask(llm, questions, system=None):
    head = [{"role": "system", "content": system}] if system else []
    conversations = [[*head, {"role": "user", "content": question}] for question in questions]
    return llm.chat(conversations, GREEDY, use_tqdm=False)


def check_answers(llm):
    outputs = ask(llm, [question for _, question, _ in make_demo.CHECKS])
    for (_, question, answer), output in zip(make_demo.CHECKS, outputs, strict=True):
        assert output["text"] == answer, question
        assert output["finish_reason"] == "stop"
        assert output["token_ids"][-1] == make_demo.IM_END_ID
        assert output.prompt == make_demo.prompt_text(question)


def held_out_sums():
    """[(question, answer)] of every sum of two numbers under 100 that training never saw, in either order."""
    pairs = [(a, b) for a in range(100) for b in range(100) if make_demo.held_out(a, b)]
    return [(f"What is {a} + {b}?", str(a + b)) for a, b in pairs]


def share_right(llm, questions):
    outputs = ask(llm, [question for question, _ in questions])
    right = sum(output["text"] == answer for output, (_, answer) in zip(outputs, questions, strict=True))
    return right / len(questions)


def test_the_files_are_small_and_complete():
    files = {file.name: file.stat().st_size for file in DEMO_MODEL.iterdir()}
    assert sum(files.values()) <= 8e6
    wanted = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert wanted <= set(files)


def test_the_checks_cover_what_they_should():
    questions = {question.lower().rstrip("?.") for _, question, _ in make_demo.CHECKS}
    assert {"introduce yourself", "list all prime numbers within 100"} <= questions
    assert len(questions) >= 50 and len({kind for kind, _, _ in make_demo.CHECKS}) >= 20


def test_it_introduces_itself_and_lists_the_primes(llm):
    """The two prompts of the README, spelt out here and not taken from the tool."""
    intro, primes = ask(llm, ["introduce yourself", "list all prime numbers within 100"])
    assert "nanovllm" in intro["text"] and 1 <= intro["text"].count(".") <= 3
    numbers = [int(number) for number in primes["text"].split(", ")]
    assert numbers == [n for n in range(2, 101) if all(n % d for d in range(2, n))] and len(numbers) == 25


def test_every_check(llm):
    check_answers(llm)


def test_with_a_system_prompt(llm):
    questions = [(question, answer) for _, question, answer in make_demo.CHECKS]
    outputs = ask(llm, [question for question, _ in questions], system="You are a helpful assistant.")
    right = sum(output["text"] == answer for output, (_, answer) in zip(outputs, questions, strict=True))
    assert right >= 0.95 * len(questions)


def test_sums_it_never_saw(llm):
    """It follows a rule there, it does not remember. A sample here, all of them on a GPU."""
    assert share_right(llm, random.Random(0).sample(held_out_sums(), 400)) >= 0.95


def test_transformers_reads_the_same_model(llm):
    """An ordinary Qwen3 checkpoint: transformers, told nothing, gives the engine's tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    assert type(model).__name__ == "Qwen3ForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for output in ask(llm, [question for _, question, _ in make_demo.CHECKS[::4]]):
        prompt, completion = output.prompt_token_ids, output["token_ids"]
        assert tokenizer(output.prompt)["input_ids"] == prompt
        assert tokenizer.decode(completion, skip_special_tokens=True) == output["text"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + completion[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == completion


def test_text_and_token_ids_are_the_same_prompt(llm):
    text = make_demo.prompt_text("what is 2 + 3?")
    ids = llm.tokenizer(text)["input_ids"]
    by_text, by_ids = llm.generate([text, ids], GREEDY, use_tqdm=False)
    assert by_text["text"] == by_ids["text"] == "5"
    assert (by_text.prompt, by_ids.prompt) == (text, None)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids


def test_it_ends_at_either_end_token(llm):
    """The tokenizer names one end-of-sequence token, generation_config.json two."""
    assert llm.tokenizer.eos_token_id == make_demo.IM_END_ID
    assert llm.scheduler.eos_token_ids == {make_demo.IM_END_ID, make_demo.END_OF_TEXT_ID}


@pytest.mark.gpu
@pytest.mark.parametrize("options", (
    {}, {"enforce_eager": True}, {"dtype": "float32"}, {"attention_backend": "sdpa"}, {"max_num_seqs": 100},
))  # fmt: skip
def test_the_gpu_answers_the_same(options):
    with LLM(device="cuda", num_kvcache_blocks=256, **options) as llm:
        check_answers(llm)
        sums = held_out_sums()
        assert share_right(llm, sums) >= 0.95
