"""Absent devices, the user's torch defaults, CPU threads, the line at start, and too little memory."""

import copy
import logging
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import HAS_GPU
from helpers import record_calls

from nanovllm import LLM, ConfigError, OutOfMemoryError, SamplingParams
from nanovllm.config import Config
from nanovllm.runner import device as device_module
from nanovllm.runner.device import describe, layer_weights, select_dtype, step_threads, with_fitting_launches
from nanovllm.runner.recurrent import RecurrentStates
from nanovllm.runner.worker import announce


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


# ---------------------------------------------------------------- dtype

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "has_bfloat16", "of_bfloat16", "of_float16"),
    [(CPU, True, "bfloat16", "float32"), (CPU, False, "float32", "float32"),
     (GPU, True, "bfloat16", "float16"), (GPU, False, "float16", "float16")],
)  # fmt: skip
def test_default_dtype(device, has_bfloat16, of_bfloat16, of_float16, monkeypatch):
    """On every CPU it was float32, also where bfloat16 takes two thirds of the time. A dtype that is given is taken."""
    monkeypatch.setattr(device_module, "has_fast_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0) if has_bfloat16 else (7, 5))
    expected = {"bfloat16": of_bfloat16, "float16": of_float16, "float32": "float32"}
    for checkpoint, default in expected.items():
        assert select_dtype("auto", checkpoint, device) == getattr(torch, default)
        assert [select_dtype(given, checkpoint, device) for given in expected] == [getattr(torch, x) for x in expected]


@pytest.mark.parametrize("is_fast", [True, False])
def test_the_engine_computes_in_the_default_dtype(is_fast, monkeypatch, caplog):
    """With the demo model, whose checkpoint is bfloat16; the line at start says it."""
    monkeypatch.setattr(device_module, "has_fast_bfloat16", lambda: is_fast)
    caplog.set_level(logging.INFO, logger="nanovllm")
    with LLM(device="cpu", dtype="auto", num_kvcache_blocks=4) as llm:
        chat = [{"role": "user", "content": "12 + 30"}]
        assert llm.chat(chat, SamplingParams(temperature=0), use_tqdm=False)[0]["text"] == "42"
    assert f" on the CPU, {'bfloat16' if is_fast else 'float32'}; KV cache" in caplog.text


def test_what_torch_is_asked_about_bfloat16_is_there():
    """Private functions, without which it would be taken to be slow everywhere."""
    assert hasattr(torch.cpu, "_is_avx512_bf16_supported") and hasattr(torch.cpu, "_is_amx_tile_supported")


# ---------------------------------------------------------------- CPU threads


@pytest.fixture
def four_cores(monkeypatch):
    """A machine of four cores, with torch's default for it; nothing set by the user."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield monkeypatch
    torch.set_num_threads(before)


def threads_of_a_step(context) -> int:
    """And the process's setting is put back."""
    before = torch.get_num_threads()
    with context():
        inside = torch.get_num_threads()
        with context():
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == inside
    assert torch.get_num_threads() == before
    return inside


SMALL = Config().model_config  # the demo model
LARGE = replace(
    SMALL, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
    layers=tuple(replace(layer, num_key_value_heads=8) for layer in SMALL.layers),
)  # fmt: skip


def test_layer_weights_counts_the_matrices_of_a_layer(make_llm):
    llm = make_llm()
    layer = llm.model_runner.model.model.layers[0]
    assert layer_weights(llm.config.model_config) == sum(p.numel() for p in layer.parameters() if p.dim() == 2)


@pytest.mark.parametrize(
    ("model", "device", "num_ranks", "threads"),
    [(SMALL, CPU, 1, 1), (SMALL, CPU, 2, 1), (LARGE, CPU, 1, 4), (LARGE, CPU, 2, 2), (LARGE, CPU, 4, 1),
     (LARGE, CPU, 8, 1), (SMALL, GPU, 1, 4)],
)  # fmt: skip
def test_threads_for_the_size_of_the_model(four_cores, model, device, num_ranks, threads):
    """The demo model ran 8 to 13 times slower where another process took some of a core."""
    assert threads_of_a_step(step_threads(model, device, num_ranks)) == threads


def test_threads_after_an_error(four_cores):
    with pytest.raises(KeyboardInterrupt), step_threads(SMALL, CPU, 1)():
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 4


def test_threads_that_the_user_chose(four_cores):
    """Before the engine's start or later, in the environment or in the script."""
    context = step_threads(SMALL, CPU, 1)
    torch.set_num_threads(3)
    assert threads_of_a_step(context) == 3
    assert threads_of_a_step(step_threads(SMALL, CPU, 1)) == 3
    torch.set_num_threads(4)
    assert threads_of_a_step(context) == 1
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        with four_cores.context() as patch:
            patch.setenv(name, "4")
            assert threads_of_a_step(step_threads(SMALL, CPU, 1)) == 4
    torch.set_num_threads(2)  # torch's own default where two threads share a physical core
    assert threads_of_a_step(step_threads(LARGE, CPU, 1)) == 2
    assert threads_of_a_step(step_threads(SMALL, CPU, 1)) == 1


def test_threads_of_an_engine(four_cores, make_llm):
    """Steps of the tiny model run on one thread; the user's code between them, and after an error, on four."""
    llm = make_llm()
    seen, run_sampler = [], llm.model_runner.run_sampler
    llm.model_runner.run_sampler = lambda *args: seen.append(torch.get_num_threads()) or run_sampler(*args)
    llm.add_request([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    while not llm.is_finished():
        llm.step()
        assert torch.get_num_threads() == 4
    assert seen == [1, 1, 1]


@pytest.mark.parametrize(
    ("device", "max_num_batched_tokens", "max_num_seqs", "expected"),
    [("cpu", 16_384, 512, 1024), ("cpu", 1000, 512, 1000), ("cpu", 9000, 2000, 2000), ("cuda", 16_384, 512, 16_384)],
)
def test_launches_of_a_cpu_are_small(device, max_num_batched_tokens, max_num_seqs, expected):
    """Large ones spent up to a third of their time in page faults. The given options stay as they are."""
    config = Config(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
    assert with_fitting_launches(config, torch.device(device)).max_num_batched_tokens == expected
    assert config.max_num_batched_tokens == max_num_batched_tokens


def test_a_long_prompt_on_a_cpu_is_computed_in_chunks(make_llm, reference):
    llm = make_llm(max_num_batched_tokens=4000, max_model_len=1200)
    batches = record_calls(llm.model_runner, "forward")
    prompt = [(7 * i) % 500 for i in range(1100)]
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [batch.num_tokens for batch in batches] == [1024, 76, 1] and output["token_ids"] == reference(prompt, 2)


# ---------------------------------------------------------------- the line at start


@pytest.mark.parametrize(
    ("width", "size"), [(1 << 20, "8.0 MiB"), (1 << 17, "1.0 MiB"), (1 << 16, "520.0 KiB"), (32, "8.2 KiB")]
)
def test_line_at_start_of_recurrent_layers(width, size):
    """How many sequences fit, and why. Of small states it said that they have 0.0 MiB."""
    config, fitting = Config(), copy.copy(Config())
    vars(fitting).update(max_num_seqs=200)
    rank = SimpleNamespace(dtype=torch.bfloat16, config=fitting)
    part = RecurrentStates(rank)
    part.states, part.num_rows = (torch.zeros(2, 4, 1024), torch.zeros(2, 4, width)), 3
    runner = SimpleNamespace(device=CPU, rank=rank, num_kvcache_blocks=100, config=fitting, parts=[part])
    line = describe(config, runner)
    assert line.endswith(
        f"max_num_seqs 200 with states of {size} each and 3 snapshots of them (not 512: they take half of what the "
        "weights leave)"
    )


@pytest.mark.parametrize(
    ("device", "options", "where"),
    [
        ("cpu", {}, f"the CPU (torch {torch.__version__} sees no CUDA device), bfloat16"),  # it fell back
        ("cpu", {"device": "cpu"}, "the CPU, bfloat16"),
        ("cpu", {"device": "cpu", "tensor_parallel_size": 2}, "2 × CPU, bfloat16"),
        ("cuda", {}, "NVIDIA H200, bfloat16"),
        ("cuda", {"device": "cuda", "tensor_parallel_size": 2}, "2 × NVIDIA H200, bfloat16"),
        ("cuda", {"quantization": "fp8"}, "NVIDIA H200, bfloat16 with FP8 weights"),
    ],
)
def test_line_at_start(device, options, where, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    config, rank = Config(**options), SimpleNamespace(dtype=torch.bfloat16)
    runner = SimpleNamespace(device=torch.device(device), rank=rank, num_kvcache_blocks=100, config=config, parts=[])
    assert describe(config, runner) == (
        f"nanovllm: the demo model on {where}; KV cache of 25,600 tokens; max_model_len 4,096, max_num_seqs 512"
    )


def test_line_at_start_is_logged(make_checkpoint, caplog):
    caplog.set_level(logging.INFO, logger="nanovllm")
    load(make_checkpoint(), num_kvcache_blocks=7, quiet=True)
    assert not caplog.records
    load(make_checkpoint(), num_kvcache_blocks=7)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("nanovllm", "INFO")
    line = f"nanovllm: {make_checkpoint()} on the CPU, float32; KV cache of 112 tokens; max_model_len 4,096"
    assert record.getMessage().startswith(line)


def test_where_the_line_at_start_goes(monkeypatch, capsys):
    """stderr, until somebody configures logging."""
    root, logger = logging.getLogger(), logging.getLogger("nanovllm")
    monkeypatch.setattr(root, "handlers", [])
    announce("started")
    assert capsys.readouterr() == ("", "started\n")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    announce("started")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
    announce("started")
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------- too little memory


@pytest.mark.parametrize(("place", "error"), [
    # weights that do not fit raised torch's error; only the KV cache had ours
    ("runner.start.load_model", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    # the scheduler's table is made after the model
    ("engine.scheduler.SequenceTable", MemoryError("Unable to allocate 149. TiB")),
])  # fmt: skip
def test_out_of_memory_at_start(place, error, make_checkpoint, monkeypatch):
    def no_room(*_):
        raise error

    monkeypatch.setattr(f"nanovllm.{place}", no_room)
    with pytest.raises(OutOfMemoryError, match=f"no room for the model: {re.escape(str(error))}\nFree memory on the"):
        load(make_checkpoint())


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
