"""Ctrl-C in the middle of ``generate`` leaves an engine that works. Several ranks: ``tests/runner/test_worker.py``."""

import random
import signal

import pytest

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def prompts(seed):
    rng = random.Random(seed)
    return [rng.choices(range(2, 512), k=length) for length in (30, 3, 18)]


def generate(llm, seed):
    return [output["token_ids"] for output in llm.generate(prompts(seed), GREEDY, use_tqdm=False)]


@pytest.fixture(autouse=True)
def heard_sigint():
    """A script's background jobs ignore SIGINT: Python then installs no handler, and neither do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def expected(request, make_checkpoint):
    """The device, and the tokens of an engine that was not interrupted."""
    options = {"kvcache_block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 4, "num_kvcache_blocks": 64}
    with LLM(make_checkpoint(), device=request.param, skip_tokenizer_init=True, **options) as llm:
        return request.param, generate(llm, seed=0)


@pytest.mark.parametrize("where", ["run", "run_model"])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_keyboard_interrupt(make_llm, expected, where, after, depth, monkeypatch):
    """The next call waited for ever, answered the old prompts too, or decoded garbage, since the host believed that the
    device had the updates of a step that was never launched."""
    device, tokens = expected
    llm = make_llm(device=device, max_num_seqs=4)
    if device == "cuda" and depth == 0:
        pytest.skip("on GPUs steps always run ahead")
    llm.model_runner.max_in_flight = depth
    original, calls = getattr(llm.model_runner, where), 0

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls == after:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(llm.model_runner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, seed=1)
    monkeypatch.undo()
    assert llm.is_finished()
    assert llm.scheduler.block_manager.num_available == llm.config.num_kvcache_blocks
    assert generate(llm, seed=0) == tokens
