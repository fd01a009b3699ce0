"""The one file to run before every commit: a little of everything, in a few seconds."""

import subprocess
import sys

import pytest
from helpers import ROOT, generate, greedy, prompt_of, tokens_of

from nanovllm import LLM, ConfigError, RequestError, SamplingParams

PRIMES = "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97"
PROMPTS = [prompt_of(n) for n in (5, 16, 17, 33, 90)]


def test_import_is_light():
    """``import nanovllm`` took seconds, because a value type imported torch."""
    code = (
        "import sys, nanovllm\n"
        "nanovllm.SamplingParams(temperature=0)\n"
        "print([m for m in ('torch', 'transformers', 'triton', 'flash_attn', 'huggingface_hub') if m in sys.modules])"
    )
    argv = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, text=True).stdout.strip() == "[]"


def test_demo_model_answers():
    """The README's first command: the bundled model, from text to text."""
    with LLM(device="cpu") as llm:
        conversation = [{"role": "user", "content": "list all prime numbers within 100"}]
        (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    assert output["text"].strip() == PRIMES
    assert output.outputs[0].finish_reason == "stop"


def test_greedy_equals_transformers(make_llm, reference):
    """A small batch, chunked prefill and a growing block table."""
    assert generate(make_llm(), PROMPTS, greedy(20)) == [reference(prompt, 20) for prompt in PROMPTS]


def test_preemption_and_prefix_hits_change_nothing(make_llm):
    params = [SamplingParams(temperature=t, max_tokens=30, seed=7, ignore_eos=True) for t in (0, 1, 0.7, 0, 1)]
    roomy, tight = make_llm(), make_llm(num_kvcache_blocks=9)
    expected = generate(roomy, PROMPTS, params)
    again = roomy.generate(PROMPTS, params, use_tqdm=False)
    assert tokens_of(again) == expected and again[4].num_cached_tokens == 80
    assert generate(tight, PROMPTS, params) == expected
    assert tight.scheduler.num_preemptions > 0


def test_mistakes_are_refused_and_the_engine_goes_on(make_llm):
    llm = make_llm()
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(max_modle_len=100)
    with pytest.raises(RequestError, match="empty"):
        llm.generate([PROMPTS[0], []], use_tqdm=False)
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=-1)
    assert llm.is_finished()
    assert len(generate(llm, PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))[0]) == 3
