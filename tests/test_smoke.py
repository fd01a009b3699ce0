"""The one file to run before every commit: a little of everything, in a few seconds."""

import random
import subprocess
import sys

import pytest
import torch

from nanovllm import LLM, ConfigError, RequestError, SamplingParams

PRIMES = "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97"


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, 512) for _ in range(n)] for n in (5, 16, 17, 33, 90)]


def test_import_is_light():
    """`import nanovllm` once took seconds because a value type imported torch."""
    heavy = "('torch', 'transformers', 'triton', 'flash_attn')"
    code = f"import sys, nanovllm; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_demo_model_answers():
    """The README's first command: the bundled model, from text to text."""
    with LLM(device="cpu") as llm:
        conversation = [{"role": "user", "content": "list all prime numbers within 100"}]
        (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    assert output["text"].strip() == PRIMES
    assert output.outputs[0].finish_reason == "stop"


def test_greedy_equals_transformers(make_checkpoint, make_llm, prompts):
    """A small batch, chunked prefill and a growing block table against transformers."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(make_checkpoint()).eval()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for prompt, output in zip(prompts, make_llm().generate(prompts, params, use_tqdm=False), strict=True):
        ids = list(prompt)
        for _ in range(20):
            with torch.inference_mode():
                ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        assert output["token_ids"] == ids[len(prompt) :]


def test_preemption_and_prefix_hits_change_nothing(make_llm, prompts):
    params = [SamplingParams(temperature=t, max_tokens=30, seed=7, ignore_eos=True) for t in (0, 1, 0.7, 0, 1)]
    roomy, tight = make_llm(), make_llm(num_kvcache_blocks=9)
    expected = [output["token_ids"] for output in roomy.generate(prompts, params, use_tqdm=False)]
    again = roomy.generate(prompts, params, use_tqdm=False)
    squeezed = tight.generate(prompts, params, use_tqdm=False)
    assert [output["token_ids"] for output in again] == expected
    assert again[4].num_cached_tokens == 80
    assert [output["token_ids"] for output in squeezed] == expected
    assert tight.scheduler.num_preemptions > 0


def test_mistakes_are_refused_and_the_engine_goes_on(make_llm, prompts):
    llm = make_llm()
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(max_modle_len=100)
    with pytest.raises(RequestError, match="empty"):
        llm.generate([prompts[0], []], use_tqdm=False)
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=-1)
    assert llm.is_finished()
    (output,) = llm.generate(prompts[0], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output["token_ids"]) == 3
