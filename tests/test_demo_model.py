"""The bundled demo model, as its users meet it: ``LLM()`` without a path, text in and text out."""

import random
import sys
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.utils.checkpoint import DEMO_MODEL

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from make_demo import CHECKS, END_OF_TEXT_ID, IM_END_ID, held_out, prompt_text

GREEDY = SamplingParams(temperature=0, max_tokens=400)


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", dtype="auto") as llm:
        yield llm


def ask(llm, questions, system=None):
    head = [{"role": "system", "content": system}] if system else []
    conversations = [[*head, {"role": "user", "content": question}] for question in questions]
    return llm.chat(conversations, GREEDY, use_tqdm=False)


def check_answers(llm, system=None):
    for (question, answer), output in zip(CHECKS.items(), ask(llm, CHECKS, system), strict=True):
        assert output["text"] == answer, question
        assert output["finish_reason"] == "stop" and output["token_ids"][-1] == IM_END_ID
        assert output.prompt == prompt_text(question, system)


def check_held_out_sums(llm, count=None):
    """Training never saw these sums, in either order: the model follows a rule there, it does not remember."""
    pairs = [(a, b) for a in range(100) for b in range(100) if held_out(a, b)]
    pairs = random.Random(0).sample(pairs, count or len(pairs))
    answers = [output["text"] for output in ask(llm, [f"What is {a} + {b}?" for a, b in pairs])]
    assert sum(answer == str(a + b) for answer, (a, b) in zip(answers, pairs, strict=True)) >= 0.95 * len(pairs)


def test_the_files_are_small_and_complete():
    files = {file.name: file.stat().st_size for file in DEMO_MODEL.iterdir()}
    assert sum(files.values()) <= 8e6
    configs = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert files.keys() == configs | {"README.md", "tokenizer.json", "model.safetensors"}


@pytest.mark.parametrize("system", (None, "You are a helpful assistant."))
def test_every_check(llm, system):
    check_answers(llm, system)


def test_sums_it_never_saw(llm):
    """A sample here, all of them on a GPU."""
    check_held_out_sums(llm, 400)


def test_transformers_reads_the_same_model(llm):
    """An ordinary Qwen3 checkpoint: transformers, told nothing, gives the engine's tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    assert type(model).__name__ == "Qwen3ForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for output in ask(llm, CHECKS):
        prompt, completion = output.prompt_token_ids, output["token_ids"]
        assert tokenizer(output.prompt)["input_ids"] == prompt
        assert tokenizer.decode(completion, skip_special_tokens=True) == output["text"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + completion[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == completion


def test_it_ends_at_either_end_token(llm):
    assert llm.scheduler.eos_token_ids == {IM_END_ID, END_OF_TEXT_ID}  # generation_config.json names both


@pytest.mark.gpu
@pytest.mark.parametrize("options", (
    {}, {"enforce_eager": True}, {"dtype": "float32"}, {"attention_backend": "sdpa"}, {"max_num_seqs": 100},
))  # fmt: skip
def test_the_gpu_answers_the_same(options):
    with LLM(device="cuda", num_kvcache_blocks=256, **options) as llm:
        check_answers(llm)
        check_held_out_sums(llm)
