"""From a start to exit(): errors and interrupts in between, several engines, threads, forks, and what is freed when."""

import gc
import json
import os
import re
import shutil
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import generate, gpu_param, greedy, in_threads, prompt_of, run_ahead, run_python

from nanovllm import LLM, CheckpointError, EngineError
from nanovllm.engine.guard import Guard
from nanovllm.runner.model_runner import ModelRunner

# ---------------------------------------------------------------- errors and interrupts


@pytest.mark.usefixtures("heard_sigint")
@pytest.mark.parametrize("where", ["forward", "run_model", "sample"])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize(("device", "max_in_flight"), [("cpu", 0), ("cpu", 1), gpu_param("cuda", 1)])
def test_keyboard_interrupt(make_llm, reference, where, after, device, max_in_flight, monkeypatch):
    """After Ctrl-C in generate() the next call hung, answered the old prompts too, or decoded garbage, because the host
    believed that the device had what was staged in a step that was never launched."""
    llm = make_llm(device=device, max_num_seqs=4)
    if max_in_flight:
        run_ahead(llm)
    available = llm.scheduler.block_manager.num_available
    original, calls = getattr(llm.model_runner, where), 0

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls == after:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    prompts = [prompt_of(n) for n in (30, 3, 18)]
    monkeypatch.setattr(llm.model_runner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [prompt_of(n, seed=1) for n in (30, 3, 18)], greedy(10))
    monkeypatch.undo()
    assert llm.is_finished()
    assert llm.scheduler.block_manager.num_available == available
    assert generate(llm, prompts, greedy(10)) == [reference(prompt, 10) for prompt in prompts]


@pytest.mark.parametrize("where", ["forward", "run_model", "sample"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_exit_in_a_signal_handler_amid_a_step(make_llm, where, ranks):
    """The handler returned, and the step went on with a runner that had no attributes: an AttributeError."""
    llm = make_llm(tensor_parallel_size=ranks)
    before, original = signal.signal(signal.SIGTERM, lambda *_: llm.exit()), getattr(llm.model_runner, where)
    try:
        setattr(llm.model_runner, where, lambda *args: signal.raise_signal(signal.SIGTERM) or original(*args))
        with pytest.raises(EngineError, match=r"^this engine is shut down; make a new LLM"):
            generate(llm, [prompt_of(9)], greedy(3))
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(EngineError, match=r"^this engine is shut down; make a new LLM"):
        generate(llm, [prompt_of(9)], greedy(3))


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
def test_an_interrupt_while_the_guard_is_passed(make_llm, where):
    """Before the first line of ``__exit__``, or after the last of ``__enter__``: other threads were refused ever after,
    and full garbage collections stayed off. It took about a hundred interrupts of short calls."""
    llm, code, before = make_llm(), getattr(Guard, where).__code__, (gc.get_threshold(), sys.gettrace())

    def tracer(frame, event, arg):
        if frame.f_code is code and event == ("call" if where == "__exit__" else "return"):
            sys.settrace(None)
            raise KeyboardInterrupt
        return tracer

    sys.settrace(tracer)
    try:
        llm.step()
    except KeyboardInterrupt:
        code = None
    finally:
        sys.settrace(before[1])
    assert code is None
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(generate, llm, [[5, 6]], greedy(3)).result(60)[0]) == 3
    assert gc.get_threshold() == before[0]


def test_failed_start_holds_nothing(make_checkpoint, tmp_path):
    """An error late in the constructor leaves neither the weights behind nor a thread."""
    shutil.copytree(make_checkpoint(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text("{")
    threads = threading.active_count()
    with pytest.raises(CheckpointError, match=re.escape("generation_config.json cannot be read")):
        LLM(tmp_path, device="cpu", skip_tokenizer_init=True, kvcache_block_size=16)
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is ModelRunner and o.config.model == tmp_path]
    assert threading.active_count() <= threads


# ---------------------------------------------------------------- the end


def test_after_exit(make_llm):
    """exit() in a with block, and again by hand, freed twice."""
    with make_llm() as llm:
        llm.exit()
    llm.exit()
    for use in (lambda: llm.generate([1]), lambda: llm.add_request([1]), llm.step, lambda: llm.update_weights({}),
                llm.sleep, llm.wake_up, llm.is_sleeping):  # fmt: skip
        with pytest.raises(EngineError, match=re.escape("this engine is shut down; make a new LLM(...).")):
            use()


def test_exit_frees_an_engine_that_is_referenced(make_llm):
    """Users keep the variable."""
    llm = make_llm()
    held = [weakref.ref(x) for x in (llm.model_runner.model, llm.model_runner.kv_cache)]
    llm.exit()
    gc.collect()
    assert [ref() for ref in held] == [None] * 2


def test_del_frees_without_the_cycle_collector(make_checkpoint):
    """``del llm`` freed nothing: an atexit hook, a thread or a reference cycle held the weights and the KV cache."""
    threads = threading.active_count()
    gc.collect()
    gc.disable()  # the cycle collector comes too late for device memory
    try:
        for _ in range(5):
            llm = LLM(make_checkpoint(), device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=4)
            generate(llm, [prompt_of(5)], greedy(2))
            runner = llm.model_runner
            held = [weakref.ref(x) for x in (llm, runner, runner.model, runner.kv_cache)]
            del llm, runner
            assert [ref() for ref in held] == [None] * 4
    finally:
        gc.enable()
    assert threading.active_count() <= threads + 1  # the last tokenizer thread may not have ended yet


def test_interpreter_ends_with_an_open_engine(make_checkpoint):
    """A script without exit() hung at its end, or printed tracebacks of half-destroyed modules."""
    done = run_python(
        "-W", "error", "-c",
        "from nanovllm import LLM, SamplingParams\n"
        f"llm = LLM({make_checkpoint()!r}, device='cpu', skip_tokenizer_init=True, num_kvcache_blocks=4, "
        "quiet=True)\n"
        "out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)\n"
        "print(out[0]['token_ids'])\n",
    )  # fmt: skip
    assert done.stderr == ""
    assert len(json.loads(done.stdout)) == 3


FORKED = """
import os, signal
from nanovllm import LLM, EngineError, SamplingParams

llm = LLM(device="cpu", num_kvcache_blocks=4)
params = SamplingParams(max_tokens=2)
llm.generate("hi", params, use_tqdm=False)
if os.fork() == 0:
    signal.alarm(30)
    try:
        llm.generate("hi", params, use_tqdm=False)
    except EngineError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
print(len(llm.generate("hi", params, use_tqdm=False)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_in_a_forked_process():
    """A fork has no threads but its own: the child waited forever for the tokenizer's and torch's."""
    done = run_python("-c", FORKED)
    text = "this engine belongs to the process that was forked; make an LLM(...) in this one."
    assert done.stdout.splitlines() == [text, "1"], done.stderr


# ---------------------------------------------------------------- several engines


def test_engines_after_and_beside_each_other(make_llm, make_checkpoint, reference):
    """The second engine of a process inherited the first one's context, default dtype or thread."""
    prompts = [prompt_of(20)]
    first = make_llm()
    second = make_llm(model=make_checkpoint(tie_word_embeddings=True), num_kvcache_blocks=8, dtype="bfloat16")
    other = generate(second, prompts, greedy(6))
    assert generate(first, prompts, greedy(6)) == [reference(prompts[0], 6)] != other
    first.exit()
    assert generate(second, prompts, greedy(6)) == other
    second.exit()
    assert generate(make_llm(), prompts, greedy(6)) == [reference(prompts[0], 6)]
    assert torch.get_default_dtype() == torch.float32


def test_engines_in_two_threads(make_checkpoint):
    """The forward context was global, so one engine's launch broke the other's. Engines built at the same time got each
    other's dtype: torch's default dtype is process-wide."""
    prompts = [prompt_of(n) for n in (5, 30, 17)]
    kinds = [{}, {"model": make_checkpoint(tie_word_embeddings=True), "dtype": "bfloat16"}]
    options = {"model": make_checkpoint(), "device": "cpu", "skip_tokenizer_init": True, "num_kvcache_blocks": 16}

    def outcome(kind):
        with LLM(**{**options, **kind}) as llm:
            return [generate(llm, prompts, greedy(10)) for _ in range(2)]

    alone = [outcome(kind) for kind in kinds]
    together = [[], []]
    in_threads(*(lambda kind=kind, outcomes=outcomes: outcomes.extend(outcome(kind) for _ in range(6))
                 for kind, outcomes in zip(kinds, together, strict=True)))  # fmt: skip
    assert alone[0] != alone[1]
    assert together == [[alone[0]] * 6, [alone[1]] * 6]


STARTED_IN_THREADS = """
import threading
from nanovllm import LLM, SamplingParams

prompts = []

def work():
    with LLM(device="cpu", num_kvcache_blocks=4) as llm:
        prompts.extend(llm.generate("2 + 3", SamplingParams(max_tokens=0), use_tqdm=False))

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(prompts) == 3, len(prompts)
assert all(prompt.prompt_token_ids == prompts[0].prompt_token_ids for prompt in prompts)
"""


def test_first_engines_started_in_three_threads():
    """Each imported transformers, and all but one failed: "cannot import name 'AutoTokenizer' from 'transformers'"."""
    run_python("-c", STARTED_IN_THREADS)
