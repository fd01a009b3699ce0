"""Absent devices, the user's torch defaults, and too little memory."""

import pytest
import torch
from conftest import HAS_GPU

from nanovllm import LLM, ConfigError, OutOfMemoryError, SamplingParams


def load(path, **options):
    LLM(path, **{"device": "cpu", "skip_tokenizer_init": True, "kvcache_block_size": 16, **options}).exit()


@pytest.mark.skipif(HAS_GPU, reason="there is a CUDA device")
def test_cuda_without_cuda(make_checkpoint):
    with pytest.raises(ConfigError, match=r"device='cuda': torch sees no CUDA .* Use device='cpu' or 'auto'\."):
        LLM(make_checkpoint(), device="cuda", skip_tokenizer_init=True)


def test_the_users_torch_defaults(make_checkpoint):
    """A default device or dtype set by the user's script got into the engine's own tensors."""
    prompts, params = [[1, 2, 3]], SamplingParams(max_tokens=8, top_p=0.8, min_p=0.05, seed=1)
    options = {"device": "cpu", "skip_tokenizer_init": True, "num_kvcache_blocks": 4}
    results = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        try:
            torch.set_default_device(device)
            torch.set_default_dtype(dtype)
            with LLM(make_checkpoint(), **options) as llm:
                results.append(llm.generate(prompts, params, use_tqdm=False)[0]["token_ids"])
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
    assert results[0] == results[1]


def test_out_of_memory_while_loading(make_checkpoint, monkeypatch):
    """Weights that do not fit raised torch's error; only the KV cache had ours."""

    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("nanovllm.runner.model_runner.load_model", no_room)
    with pytest.raises(OutOfMemoryError, match=r"no room for the model: CUDA out of memory\. Tried .*GiB"):
        LLM(make_checkpoint(), device="cpu", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kvcache_blocks": 10**11}, {"num_kvcache_blocks": 10**15}, {"max_num_seqs": 10**12},
        {"kvcache_block_size": 2**62},
    ],
    ids=str,
)  # fmt: skip
def test_more_than_the_hosts_memory(make_checkpoint, options):
    """Errors of numpy and torch came through, and not all of them named memory."""
    with pytest.raises(OutOfMemoryError, match=r"^no room for the model: .*\n.* lower .*max_model_len or num_kv"):
        load(make_checkpoint(), **{"max_num_batched_tokens": 10**12, **options})


def test_a_table_of_sequences_that_does_not_fit(make_checkpoint, monkeypatch):
    """The scheduler's table is made after the model."""

    def no_room(*_):
        raise MemoryError("Unable to allocate 149. TiB")

    monkeypatch.setattr("nanovllm.engine.scheduler.SequenceTable", no_room)
    with pytest.raises(OutOfMemoryError, match=r"no room for the model: Unable to .* TiB\nFree memory on the"):
        load(make_checkpoint())
