"""Device memory: what the KV cache takes beside other processes, and what a finished engine leaves."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from helpers import generate, greedy, prompt_of

from nanovllm import LLM, OutOfMemoryError

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_device_memory_does_not_grow(make_checkpoint, enforce_eager):
    """Of ten engines one after another the graphs' memory pools or the KV caches stayed on the device."""
    before, allocated, used = torch.cuda.memory_allocated(), [], []
    for _ in range(10):
        llm = LLM(
            make_checkpoint(), dtype="bfloat16", skip_tokenizer_init=True, num_kvcache_blocks=4096, max_num_seqs=8,
            enforce_eager=enforce_eager,
        )  # fmt: skip
        generate(llm, [prompt_of(5)], greedy(2))
        model, kv_cache = llm.model_runner.model, llm.model_runner.kv_cache
        assert kv_cache.nbytes == 512 << 20  # too large to be mistaken for anything else
        held = weakref.ref(model), weakref.ref(kv_cache)
        del llm, model, kv_cache
        gc.collect()
        assert [ref() for ref in held] == [None] * 2
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    assert max(used[2:]) - used[1] < 32 << 20, used
    # torch makes its libraries' workspaces once for each stream and keeps them: 32 MiB on some GPUs
    assert allocated[1] - before < 256 << 20, (before, allocated)
    assert max(allocated[2:]) <= allocated[1], allocated


HOLD = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_holds_device_memory(make_checkpoint):
    """gpu_memory_utilization counted this process only: beside another one the KV cache was too large, and the first
    long prompt ran out of memory. All used memory counts; where nothing is left, the error gives the figures."""
    path = make_checkpoint(num_key_value_heads=4, head_dim=128)  # a block is 1 MiB: the cache could fill the device
    options = {
        "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_num_seqs": 1 << 14,
        "max_model_len": 4096, "max_num_batched_tokens": 1 << 14,
    }  # fmt: skip
    free, total = torch.cuda.mem_get_info()
    hold = int(free * 0.3)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(hold)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        with LLM(path, gpu_memory_utilization=0.6, **options) as llm:
            generate(llm, [prompt_of(100)], greedy(2))
            free_now, _ = torch.cuda.mem_get_info()
            assert total - free_now < 0.62 * total
            assert llm.model_runner.kv_cache.nbytes < 0.6 * total - hold
        with pytest.raises(OutOfMemoryError, match=r"no room for a KV cache.*gpu_memory_utilization=0.2 of"):
            LLM(path, gpu_memory_utilization=0.2, **options)
    finally:
        other.communicate()
