"""The engine's life: after exit, in a fork, between steps, after a start that failed."""

import gc
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nanovllm import LLM, CheckpointError, EngineError, SamplingParams
from nanovllm.runner.model_runner import ModelRunner


def refuses(text):
    return pytest.raises(EngineError, match=re.escape(text))


def test_after_exit(make_llm):
    llm = make_llm()
    llm.exit()
    for use in (lambda: llm.generate([1]), lambda: llm.add_request([1]), llm.step):
        with refuses("this engine is shut down; make a new LLM(...)."):
            use()


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
    """A fork has none of the threads that the tokenizer and torch run on: the child waited for them for ever."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).resolve().parents[2]
    argv = [sys.executable, "-c", FORKED]
    done = subprocess.run(argv, cwd=root, env=env, stdout=subprocess.PIPE, text=True, timeout=120)
    text = "this engine belongs to the process that was forked; make an LLM(...) in this one."
    assert done.stdout.splitlines() == [text, "1"]


def test_generate_between_steps(make_llm):
    llm = make_llm()
    llm.add_request([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
    text = "generate() needs an idle engine; finish the requests you added with step() first."
    with refuses(text):
        llm.generate([3])
    while not llm.is_finished():
        llm.step()
    assert len(llm.generate([3], SamplingParams(max_tokens=1), use_tqdm=False)) == 1


def test_a_failed_start_holds_nothing(make_checkpoint, tmp_path):
    """An error late in the constructor must not leave the weights behind, nor a thread."""
    shutil.copytree(make_checkpoint(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text("{")
    threads = threading.active_count()
    with pytest.raises(CheckpointError, match=re.escape("generation_config.json cannot be read")):
        LLM(tmp_path, device="cpu", skip_tokenizer_init=True, kvcache_block_size=16)
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is ModelRunner and o.config.model == tmp_path]
    assert threading.active_count() <= threads
