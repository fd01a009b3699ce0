"""Every mistake a user can make: the class of its error, and the text that says what to change."""

import gc
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from array import array
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HAS_GPU

import nanovllm
from nanovllm import (
    LLM,
    CheckpointError,
    ConfigError,
    EngineError,
    NanoVLLMError,
    OutOfMemoryError,
    RequestError,
    SamplingParams,
    WorkerError,
    kernels,
)
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.layers.attention import SDPABackend, select_backend


def refuses(error, text):
    return pytest.raises(error, match=re.escape(text))


def test_the_tree():
    """Whoever catches ValueError or RuntimeError, as for other libraries, catches these too."""
    for error in (ConfigError, CheckpointError, RequestError):
        assert issubclass(error, NanoVLLMError) and issubclass(error, ValueError)
    for error in (OutOfMemoryError, EngineError, WorkerError):
        assert issubclass(error, NanoVLLMError) and issubclass(error, RuntimeError)
    assert all(hasattr(nanovllm, name) for name in nanovllm.__all__)
    assert set(nanovllm.__all__) <= set(dir(nanovllm))  # what an interactive session completes
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = nanovllm.Engine


def test_worker_error_crosses_processes():
    error = pickle.loads(pickle.dumps(WorkerError(2, "Traceback: boom")))
    assert (error.rank, error.worker_traceback) == (2, "Traceback: boom")
    assert str(error) == "tensor-parallel rank 2 failed; the engine was shut down.\nTraceback: boom"


# ---------------------------------------------------------------- options

OPTIONS = [
    ({"max_num_seq": 3}, "LLM() has no option 'max_num_seq'. Did you mean 'max_num_seqs'?"),
    (
        {"gpu_memory_utilisation": 0.5},
        "no option 'gpu_memory_utilisation'. Did you mean 'gpu_memory_utilization'?",
    ),
    ({"zzz": 1}, "LLM() has no option 'zzz'. Did you mean"),
    ({"model_path": "x"}, "LLM() has no option 'model_path'. Did you mean 'model'?"),
    ({"max_num_seqs": 0}, "max_num_seqs=0: must be an integer >= 1."),
    ({"max_num_seqs": 2.0}, "max_num_seqs=2.0: must be an integer >= 1."),
    ({"max_num_seqs": True}, "max_num_seqs=True: must be an integer >= 1."),
    ({"max_num_batched_tokens": -1}, "max_num_batched_tokens=-1: must be an integer >= 1."),
    ({"max_model_len": 1}, "max_model_len=1: must be an integer >= 2."),
    ({"max_model_len": 5000}, "max_model_len=5000: the model has positions for 4096 tokens."),
    ({"seed": -1}, "seed=-1: must be an integer >= 0."),
    ({"num_kvcache_blocks": 0}, "num_kvcache_blocks=0: must be an integer >= 1."),
    ({"kvcache_block_size": 8}, "kvcache_block_size=8: must be an integer >= 16."),
    ({"kvcache_block_size": 40}, "kvcache_block_size=40: must be a multiple of 16."),
    (
        {"kvcache_block_size": 64, "attention_backend": "flash_attn"},
        "kvcache_block_size=64: flash-attn needs a multiple of 256. Use 256, or attention_backend='triton'.",
    ),
    (
        {"max_num_seqs": 65, "max_num_batched_tokens": 64},
        "max_num_seqs=65 is larger than max_num_batched_tokens=64: one decode step takes a token of every sequence. "
        "Lower the first or raise the second.",
    ),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0: must be in (0, 1]."),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: must be in (0, 1]."),
    ({"gpu_memory_utilization": "90%"}, "gpu_memory_utilization='90%': must be in (0, 1]."),
    ({"gpu_memory_utilization": True}, "gpu_memory_utilization=True: must be in (0, 1]."),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan: must be in (0, 1]."),
    ({"dtype": "int8"}, "dtype='int8': allowed are 'auto', 'bfloat16', 'float16', 'float32'."),
    ({"device": "tpu"}, "device='tpu': allowed are 'auto', 'cuda', 'cpu'."),
    ({"attention_backend": "x"}, "attention_backend='x': allowed are 'auto', 'flash_attn', 'triton', 'sdpa'."),
    ({"load_format": "gguf"}, "load_format='gguf': allowed are 'auto', 'dummy'."),
    ({"enforce_eager": "yes"}, "enforce_eager='yes': allowed are True, False."),
    ({"enable_prefix_caching": None}, "enable_prefix_caching=None: allowed are True, False."),
    ({"seed": 2**63}, "seed=9223372036854775808: must be below 2**63."),
    ({"revision": "v2"}, "revision='v2': "),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: must be an integer >= 1."),
    ({"tensor_parallel_size": 9}, "tensor_parallel_size=9: allowed are 1 to 8."),
    ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the model's 4 attention heads"),
]


@pytest.mark.parametrize(("options", "text"), OPTIONS, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_options(make_checkpoint, options, text):
    with refuses(ConfigError, text):
        LLM(make_checkpoint(), **{"device": "cpu", "skip_tokenizer_init": True, **options})


def test_the_model_option(make_checkpoint):
    with refuses(ConfigError, "model=7: must be a path, a hub id or None."):
        LLM(7)
    with refuses(ConfigError, "model='': must be a path, a hub id or None."):
        LLM("")
    with refuses(ConfigError, "tensor_parallel_size=2 and the model's 3 KV heads: one must divide the other."):
        LLM(make_checkpoint(num_attention_heads=6, num_key_value_heads=3), tensor_parallel_size=2, device="cpu")


def test_options_from_numpy(make_llm):
    """max_num_seqs=np.int8(100) became a negative size, and a RuntimeError of torch's."""
    options = {
        "max_num_batched_tokens": np.uint16(65535), "max_num_seqs": np.int8(100), "max_model_len": np.int16(500),
        "tensor_parallel_size": np.uint8(1), "kvcache_block_size": np.int16(16), "num_kvcache_blocks": np.int8(100),
        "seed": np.uint64(2**63 - 1),
    }  # fmt: skip
    llm = make_llm(**options)
    kept = {name: getattr(llm.config, name) for name in options}
    assert kept == options and {type(value) for value in kept.values()} == {int}
    (output,) = llm.generate([2] * 300, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output["token_ids"]) == 3
    assert make_llm(num_kvcache_blocks=np.int8(-1)).config.num_kvcache_blocks > 0


@pytest.mark.parametrize("share", [1, np.float32(0.5), np.int8(1), Fraction(1, 2)])
def test_any_real_number_is_a_share_of_memory(make_llm, share):
    """np.float32(0.5) was refused."""
    kept = make_llm(gpu_memory_utilization=share).config.gpu_memory_utilization
    assert type(kept) is float and kept == share


def test_the_default_of_max_model_len(make_checkpoint, make_llm):
    """Somebody who asked for 4096 got what the model has, without a word: it could not be told from the default."""
    short, long = (make_checkpoint(max_position_embeddings=n) for n in (128, 5000))
    with refuses(ConfigError, "max_model_len=4096: the model has positions for 128 tokens."):
        make_llm(model=short, max_model_len=4096)
    assert make_llm(model=short).config.max_model_len == 128
    assert make_llm(model=short, max_model_len=128).config.max_model_len == 128
    assert make_llm(model=long).config.max_model_len == 4096
    assert make_llm(model=long, max_model_len=5000).config.max_model_len == 5000


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_backends_that_need_a_gpu(make_checkpoint, name):
    with refuses(ConfigError, f"attention_backend={name!r} needs a CUDA device; on the CPU use 'auto' or 'sdpa'."):
        LLM(make_checkpoint(), device="cpu", attention_backend=name, skip_tokenizer_init=True)


@pytest.mark.skipif(HAS_GPU, reason="there is a CUDA device")
def test_cuda_without_cuda(make_checkpoint):
    with refuses(ConfigError, "device='cuda': torch sees no CUDA device here. Use device='cpu' or 'auto'."):
        LLM(make_checkpoint(), device="cuda", skip_tokenizer_init=True)


# ---------------------------------------------------------------- sampling parameters

SAMPLING = [
    ({"temperature": -0.1}, "SamplingParams(temperature=-0.1): temperature must be a finite number >= 0 (0 is "),
    ({"temperature": float("nan")}, "temperature must be a finite number"),
    ({"temperature": "hot"}, "SamplingParams(temperature='hot')"),
    ({"temperature": None}, "SamplingParams(temperature=None)"),
    ({"max_tokens": -1}, "SamplingParams(max_tokens=-1): max_tokens must be an integer >= 0."),
    ({"max_tokens": 2.5}, "SamplingParams(max_tokens=2.5): max_tokens must be an integer >= 0."),
    ({"max_tokens": None}, "SamplingParams(max_tokens=None)"),
    ({"ignore_eos": 1}, "SamplingParams(ignore_eos=1): ignore_eos must be True or False."),
    ({"top_k": -2}, "SamplingParams(top_k=-2): top_k must be an integer >= 1, or 0 or -1 for no limit."),
    ({"top_p": 0}, "SamplingParams(top_p=0): top_p must be in (0, 1]."),
    ({"top_p": 1.1}, "SamplingParams(top_p=1.1): top_p must be in (0, 1]."),
    ({"min_p": -0.5}, "SamplingParams(min_p=-0.5): min_p must be in [0, 1]."),
    ({"seed": 1.5}, "SamplingParams(seed=1.5): seed must be an integer or None."),
    ({"stop_token_ids": 5}, "SamplingParams(stop_token_ids=5): stop_token_ids must be a list of token ids >= 0."),
    ({"stop_token_ids": [-1]}, "SamplingParams(stop_token_ids=[-1])"),
    ({"stop_token_ids": ["a"]}, "SamplingParams(stop_token_ids=['a'])"),
    ({"min_tokens": 65}, "SamplingParams(min_tokens=65): min_tokens must be an integer in [0, max_tokens=64]."),
    ({"min_tokens": -1}, "SamplingParams(min_tokens=-1)"),
]


@pytest.mark.parametrize(("params", "text"), SAMPLING, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_sampling_params(params, text):
    with refuses(RequestError, text):
        SamplingParams(**params)


def test_sampling_params_are_frozen_and_know_their_fields():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # vLLM's default
    assert hash(SamplingParams(stop_token_ids=[3])) == hash(SamplingParams(stop_token_ids=(3,)))


NUMPY_PARAMS = {
    "temperature": np.float16(0.5), "max_tokens": np.int32(2**31 - 1), "top_k": np.int8(100), "top_p": np.float32(0.5),
    "min_p": np.float64(0.25), "seed": np.uint64(2**64 - 1), "stop_token_ids": [np.uint8(3), 4],
    "min_tokens": np.int8(40),
}  # fmt: skip


def test_sampling_params_hold_pythons_numbers():
    """numpy's stayed what they were, and overflowed in sums with the length of the prompt."""
    params = SamplingParams(**NUMPY_PARAMS)
    assert vars(params) == {**NUMPY_PARAMS, "ignore_eos": False, "stop_token_ids": (3, 4)}
    assert {type(value) for value in vars(params).values()} == {int, float, bool, tuple}
    assert {type(token_id) for token_id in params.stop_token_ids} == {int}


# ---------------------------------------------------------------- requests

FLAT = "a prompt must be a string or a flat list of integer token ids"
REQUESTS = [
    ([[]], None, "prompt 0: the prompt is empty; it must hold at least one token."),
    ([[1], []], None, "prompt 1: the prompt is empty"),
    ([[1, 2, 512]], None, "prompt 0: token id 512 is outside the vocabulary [0, 512)."),
    ([1, -3], None, "prompt 0: token id -3 is outside the vocabulary [0, 512)."),
    ([[1, 2.5]], None, FLAT),
    ([[1, "a"]], None, FLAT),
    ([[1, None]], None, FLAT),
    ([[[1, 2], [3]]], None, FLAT),
    ([np.zeros((2, 2), np.int64)], None, FLAT),
    ([np.zeros(2)], None, FLAT),
    (torch.tensor([1, 2]), None, FLAT),
    ([{"prompt_token_ids": [1]}], None, FLAT),
    ([b"12345678"], None, FLAT),
    ([None], None, FLAT),
    ([[1 << 70]], None, FLAT),
    ([{1, 2}], None, FLAT),
    ([frozenset((1, 2))], None, FLAT),
    ([memoryview(b"12345678")], None, FLAT),
    ([[3, True]], None, FLAT),
    ([False, 3], None, FLAT),
    ([np.array([True, False])], None, FLAT),
    ([torch.tensor([True, False])], None, FLAT),
    ([np.ma.array([1, 2], mask=[False, True])], None, FLAT),
    ([np.array(5)], None, FLAT),
    (5, None, "prompts must be a string or a list, not 5."),
    (None, None, "prompts must be a string or a list, not None."),
    ({"prompt": "hi"}, None, "prompts must be a string or a list, not {'prompt': 'hi'}."),
    (b"hi", None, "prompts must be a string or a list, not b'hi'."),
    (bytearray(b"hi"), None, "prompts must be a string or a list, not bytearray(b'hi')."),
    (memoryview(b"hi"), None, "prompts must be a string or a list, not <memory at"),
    ({"a"}, None, "prompts must be a string or a list, not {'a'}."),
    (torch.tensor(5), None, "prompts must be a string or a list, not tensor(5)."),
    ("hi", None, "text needs a tokenizer, but the engine was made with skip_tokenizer_init=True."),
    (
        [1] * 128,
        None,
        "has 128 tokens; with max_model_len=128 at most 127 fit. Shorten it or raise max_model_len.",
    ),
    (
        [1] * 50,
        SamplingParams(max_tokens=70),
        "prompt (50 tokens) and max_tokens=70 need 8 KV blocks of 16 tokens; the pool has 6. Lower max_tokens, "
        "or give the pool more room (num_kvcache_blocks, gpu_memory_utilization).",
    ),
    ([[1], [2]], [SamplingParams()], "2 prompts but 1 sampling_params; give one, or one for each prompt."),
    ([[1]], [], "1 prompts but 0 sampling_params"),
    ([[1]], 0.7, "must be a SamplingParams or a list of them, not 0.7."),
    ([[1]], {"temperature": 0.7}, "must be a SamplingParams or a list of them, not {'temperature': 0.7}."),
    ([[1]], [{"temperature": 0.7}], "prompt 0: sampling_params must be a SamplingParams, not dict."),
    ([[1]], SamplingParams(stop_token_ids=[600]), "stop_token_ids: 600 is outside the vocabulary [0, 512)."),
    (
        [[1]],
        SamplingParams(stop_token_ids=list(range(100, 120)), min_tokens=3),
        "min_tokens can hold back at most 16 end-of-sequence and stop ids, not 21.",
    ),
]


@pytest.fixture(scope="module")
def small_llm(make_checkpoint):
    with LLM(
        make_checkpoint(), device="cpu", skip_tokenizer_init=True, kvcache_block_size=16, max_model_len=128,
        num_kvcache_blocks=6, max_num_seqs=4,
    ) as llm:  # fmt: skip
        yield llm


@pytest.mark.parametrize(("prompts", "params", "text"), REQUESTS, ids=range(len(REQUESTS)))
def test_requests(small_llm, prompts, params, text):
    """A refused call computes nothing and leaves nothing behind, not even its good prompts."""
    with refuses(RequestError, text):
        small_llm.generate(prompts, params, use_tqdm=False)
    assert small_llm.is_finished()
    assert len(small_llm.generate([1, 2], SamplingParams(max_tokens=2), use_tqdm=False)[0]["token_ids"]) == 2


@pytest.mark.parametrize("prompt", [[], [512], 5, None, [1] * 128, {"prompt": "hi"}, "hi", {1, 2}])
def test_refused_by_add_request(small_llm, prompt):
    with pytest.raises(RequestError):
        small_llm.add_request(prompt)
    assert small_llm.is_finished()


@pytest.mark.parametrize("params", [{"temperature": 0.5}, {}, [], 0, ""])
def test_sampling_params_refused_by_add_request(small_llm, params):
    """What Python takes for false, {} for one, was taken for no parameters given."""
    with refuses(RequestError, f"sampling_params must be a SamplingParams, not {type(params).__name__}."):
        small_llm.add_request([1], params)
    assert small_llm.is_finished()


def test_what_else_holds_prompts_and_ids(small_llm):
    """Whatever has an order and holds integers will do."""
    ids = [
        [0, 1, 2], (0, 1, 2), range(3), iter([0, 1, 2]), array("i", [0, 1, 2]), [np.int64(0), np.uint8(1), 2],
        np.array([0, 1, 2]), np.ma.array([0, 1, 2], mask=False),
    ]  # fmt: skip
    for prompts in (ids, iter([(0, 1, 2)]), {(0, 1, 2): None}.keys()):
        outputs = small_llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        assert outputs and all(output.prompt_token_ids == [0, 1, 2] for output in outputs)


def test_the_users_own_error(small_llm):
    """A TypeError from within the user's generator came out as one about the prompt's form."""

    def ids():
        yield 1
        raise TypeError("the user's own")

    for use in (small_llm.add_request, lambda prompt: small_llm.generate([prompt]), small_llm.generate):
        with pytest.raises(TypeError, match="the user's own"):
            use(ids())
    assert small_llm.is_finished()


def test_refused_requests_draw_nothing(make_llm):
    """The good prompts of a refused call were counted, and later requests without a seed drew something else."""
    results = []
    for refused in ([], [[3], [4], []]):
        llm = make_llm()
        if refused:
            with refuses(RequestError, "prompt 2: the prompt is empty"):
                llm.generate(refused, use_tqdm=False)
            with refuses(RequestError, "the prompt is empty"):
                llm.add_request([])
        outputs = llm.generate([[5, 6]] * 2, SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        results.append([(output.request_id, output["token_ids"]) for output in outputs])
        assert llm.add_request([5, 6]) == 2
    assert results[0] == results[1]
    assert results[0][0][1] != results[0][1][1]


@pytest.mark.parametrize("messages", ["hello", 5, None, [["hello"]], [5], {"role": "user", "content": "hi"}])
def test_messages(small_llm, messages):
    with refuses(RequestError, 'messages must be a list such as [{"role": "user", "content": "..."}], or a list of'):
        small_llm.chat(messages, use_tqdm=False)


def test_chat_without_tokenizer(small_llm):
    with refuses(RequestError, "text needs a tokenizer"):
        small_llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)


def test_messages_that_the_template_cannot_take():
    """A message without content raised jinja2's error, and add_generation_prompt a TypeError about a duplicate."""
    with LLM(device="cpu", num_kvcache_blocks=4) as llm:
        with refuses(RequestError, "the model's chat template cannot take these messages: "):
            llm.chat([{"role": "user"}], use_tqdm=False)
        opened, closed = (
            llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=0), use_tqdm=False, **options)[0]
            for options in ({}, {"add_generation_prompt": False})
        )
        assert opened.prompt.startswith(closed.prompt) and len(opened.prompt) > len(closed.prompt)
        begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}]
        (output,) = llm.chat(begun, SamplingParams(max_tokens=0), use_tqdm=False, continue_final_message=True)
        assert output.prompt == opened.prompt + "Hel"


def test_chat_without_a_template():
    """One that is given does as well; it was refused, too."""
    template, messages = "{{ messages[0].content }}!", [{"role": "user", "content": "hi"}]
    with LLM(device="cpu", num_kvcache_blocks=4) as llm:
        llm.tokenizer.chat_template = None
        with refuses(RequestError, "chat() needs a tokenizer with a chat template; this model has none."):
            llm.chat(messages, use_tqdm=False)
        none = SamplingParams(max_tokens=0)
        assert llm.chat(messages, none, use_tqdm=False, chat_template=template)[0].prompt == "hi!"


def test_text_that_is_not_unicode():
    """A lone surrogate, as in names of files that are not UTF-8, raised the tokenizer's TypeError about its types."""
    bad, text = "\udcff bad", "the text cannot be encoded as UTF-8: 'utf-8' codec can't encode character '\\udcff'"
    none = SamplingParams(max_tokens=0)
    with LLM(device="cpu", num_kvcache_blocks=4) as llm:
        with refuses(RequestError, f"prompt 2: {text}"):
            llm.generate(["good", [5, 6], bad, "good"], none, use_tqdm=False)
        with refuses(RequestError, f"prompt 1: {text}"):
            llm.chat([[{"role": "user", "content": content}] for content in ("good", bad)], none, use_tqdm=False)
        for use in (llm.generate, llm.add_request):
            with pytest.raises(RequestError, match="^" + re.escape(text)):
                use(bad)
        assert llm.is_finished()


# ---------------------------------------------------------------- the engine's life


def test_out_of_memory_while_loading(make_checkpoint, monkeypatch):
    """Weights that do not fit raised torch's error; only an empty KV pool had ours."""

    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("nanovllm.runner.model_runner.load_model", no_room)
    with refuses(OutOfMemoryError, "no room for the model: CUDA out of memory. Tried to allocate 2.00 GiB."):
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
    """numpy's and torch's errors came through, and some of them did not even speak of memory."""
    with pytest.raises(OutOfMemoryError, match=r"^no room for the model: .*\n.* lower .*max_model_len or num_kv"):
        load(make_checkpoint(), **{"max_num_batched_tokens": 10**12, **options})


def test_a_table_of_sequences_that_does_not_fit(make_checkpoint, monkeypatch):
    """The scheduler's table of the sequences that run is made after the model."""

    def no_room(*_):
        raise MemoryError("Unable to allocate 149. TiB")

    monkeypatch.setattr("nanovllm.engine.scheduler.SequenceTable", no_room)
    with refuses(OutOfMemoryError, "no room for the model: Unable to allocate 149. TiB\nFree memory on the device, "):
        load(make_checkpoint())


def test_cuda_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "nanovllm.kernels.triton_ops", None)
    monkeypatch.delattr(kernels, "triton_ops", raising=False)
    with refuses(ConfigError, "a CUDA device needs Triton, which cannot be imported"):
        kernels.select("cuda")


@pytest.mark.parametrize("name", ["auto", "triton", "sdpa"])
def test_head_size_on_cuda(name):
    """The kernels' assertion was all that a user saw."""
    with refuses(ConfigError, "the model's head_dim=96 is not a power of two: it runs only with device='cpu'."):
        select_backend(name, "cuda", torch.bfloat16, 256, 96)


def test_more_query_heads_than_the_kernels_take():
    with refuses(ConfigError, "the model has 32 query heads for each KV head, and the kernels take at most 16."):
        select_backend("triton", "cuda", torch.bfloat16, 256, 128, 32)
    assert isinstance(select_backend("auto", "cuda", torch.bfloat16, 256, 128, 32), SDPABackend)


def test_the_users_torch_defaults(make_checkpoint):
    """A default device or dtype that the user's script had set got into the engine's own tensors."""
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


def test_after_exit(make_llm):
    llm = make_llm()
    llm.exit()
    for use in (lambda: llm.generate([1]), lambda: llm.add_request([1]), llm.step):
        with refuses(EngineError, "this engine is shut down; make a new LLM(...)."):
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
    root = Path(__file__).resolve().parent.parent
    argv = [sys.executable, "-c", FORKED]
    done = subprocess.run(argv, cwd=root, env=env, stdout=subprocess.PIPE, text=True, timeout=120)
    text = "this engine belongs to the process that was forked; make an LLM(...) in this one."
    assert done.stdout.splitlines() == [text, "1"]


def test_generate_between_steps(make_llm):
    llm = make_llm()
    llm.add_request([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
    text = "generate() needs an idle engine; finish the requests you added with step() first."
    with refuses(EngineError, text):
        llm.generate([3])
    while not llm.is_finished():
        llm.step()
    assert len(llm.generate([3], SamplingParams(max_tokens=1), use_tqdm=False)) == 1


# ---------------------------------------------------------------- checkpoints


@pytest.fixture
def damaged(make_checkpoint, tmp_path):
    """damaged(edit) -> a copy of the tiny checkpoint after ``edit(directory)``."""

    def make(edit):
        copy = tmp_path / "checkpoint"
        shutil.copytree(make_checkpoint(), copy)
        edit(copy)
        return copy

    return make


def load(path, **options):
    LLM(path, **{"device": "cpu", "skip_tokenizer_init": True, "kvcache_block_size": 16, **options}).exit()


def configured(**changes):
    def edit(path):
        config = json.loads((path / "config.json").read_text())
        config.update(changes)
        (path / "config.json").write_text(json.dumps(config))

    return edit


def weights(change):
    def edit(path):
        from safetensors.torch import load_file, save_file

        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return edit


def written(name, content):
    return lambda path: (path / name).write_bytes(content)


def truncated(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def twice(path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, path / "model-2.safetensors")


DAMAGES = {
    "missing tensor": (
        weights(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        "1 tensors are missing, among them model.layers.1.mlp.up_proj.weight.",
    ),
    "surplus tensor": (
        weights(lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)})),
        "model.safetensors: tensor 'model.layers.2.mlp.up_proj.weight' is twice there, or unknown to the model.",
    ),
    "a tensor twice": (twice, "tensor 'model.norm.weight' is twice there, or unknown to the model."),
    "misshapen tensor": (
        weights(lambda t: t.update({"model.norm.weight": torch.zeros(65)})),
        "tensor 'model.norm.weight' has shape [65], expected [64].",
    ),
    "misshapen part": (
        weights(lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(128, 64)})),
        "tensor 'model.layers.0.self_attn.k_proj.weight' has shape [128, 64], expected [64, 64].",
    ),
    "truncated weights": (truncated, "is the download complete?"),
    "empty weights": (written("model.safetensors", b""), "model.safetensors cannot be read"),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        "holds no *.safetensors file (other weight formats are not read).",
    ),
    "no config": (
        lambda path: (path / "config.json").unlink(),
        "holds no config.json; is it a model's directory?",
    ),
    "unreadable config": (written("config.json", b'{"architectures": '), "config.json cannot be read: "),
    "config not utf-8": (written("config.json", b"\xff\xfe\x00"), "config.json cannot be read: "),
    "config not an object": (written("config.json", b"[1, 2]"), "config.json holds no JSON object."),
    "unreadable generation config": (
        written("generation_config.json", b"{"),
        "generation_config.json cannot be read",
    ),
    "other architecture": (
        configured(architectures=["LlamaForCausalLM"]),
        "config.json: architectures=['LlamaForCausalLM']; supported: Qwen3ForCausalLM.",
    ),
    "no architecture": (
        configured(architectures=None),
        "config.json: architectures=[]; supported: Qwen3ForCausalLM.",
    ),
    "unknown rope scaling": (
        configured(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}),
        "config.json asks for rope scaling 'llama3'; supported are 'default', 'linear', 'yarn'.",
    ),
    "rope scaling of transformers 4": (
        configured(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "config.json asks for rope scaling 'dynamic'; supported are 'default', 'linear', 'yarn'.",
    ),
    "rope scaling with unknown fields": (
        configured(rope_parameters={"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}),
        "config.json: rope scaling 'yarn' with unsupported fields {'mscale': 0.7}.",
    ),
    "rope scaling without a factor": (
        configured(rope_parameters={"rope_type": "linear"}),
        "config.json: rope scaling 'linear' needs a 'factor'.",
    ),
    "other activation": (configured(hidden_act="gelu"), "config.json: hidden_act='gelu' is not supported."),
    "sliding window": (
        configured(use_sliding_window=True),
        "config.json: use_sliding_window=True is not supported.",
    ),
    "quantized": (
        configured(quantization_config={"quant_method": "fp8"}),
        "config.json: quantization_config={'quant_method': 'fp8'} is not supported.",
    ),
    "a size missing": (
        configured(hidden_size=None),
        "config.json: hidden_size=None, expected a positive integer.",
    ),
    "no list of architectures": (
        configured(architectures=5),
        "config.json: architectures=5; supported: Qwen3ForCausalLM.",
    ),
    "a nested architecture": (configured(architectures=[["Qwen3ForCausalLM"]]), "architectures=[['Qwen3ForCausalLM']]"),
    "a rotation that yarn cannot stretch": (
        configured(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}),
        "rope_theta=1.0; rope scaling 'yarn' needs more than 1.",
    ),
    "a rope scaling of no name": (configured(rope_parameters={"rope_type": ["yarn"]}), "rope scaling ['yarn']"),
    "eos of a generation config": (
        written("generation_config.json", b'{"eos_token_id": "</s>"}'),
        "generation_config.json: eos_token_id='</s>', expected a token id or a list of them.",
    ),
    "fractional eos": (
        written("generation_config.json", b'{"eos_token_id": [1.0]}'),
        "generation_config.json: eos_token_id=[1.0], expected a token id or a list of them.",
    ),
    "heads that do not divide": (
        configured(num_key_value_heads=3),
        "config.json: 4 attention heads cannot be shared by 3 KV heads.",
    ),
}


# value by value, as they raised Python's TypeError, or were taken for something else
KINDS = {
    "a positive integer": [
        *({"vocab_size": bad} for bad in (True, 512.0, "512")),
        *({"num_key_value_heads": bad} for bad in ("2", 2.0, 0, -2)),
        *({"head_dim": bad} for bad in ("32", -32)),
        *({"max_position_embeddings": bad} for bad in (None, "4096", 0)),
        {"original_max_position_embeddings": "64"},
    ],
    "a positive number": [
        *({"rms_norm_eps": bad} for bad in (None, "1e-6", -1e-6, float("nan"), [1e-6])),
        *({"rope_theta": bad} for bad in (None, "1e6", 0, float("inf"))),
        *({"factor": bad} for bad in ("2", 0, -2.0, True)),
        {"beta_fast": "32"},
        {"beta_slow": 0},
        {"attention_factor": "1"},
    ],
    "true or false": [{"tie_word_embeddings": "false"}, {"attention_bias": 0}],
    "an object": [{"rope_scaling": "linear"}, {"rope_parameters": ["yarn"]}],
    "a list": [{"layer_types": 5}],
    "a token id or a list of them": [{"eos_token_id": bad} for bad in ("</s>", 1.0, [1, "2"], -1, True)],
}
IN_ROPE = ("original_max_position_embeddings", "factor", "beta_fast", "beta_slow", "attention_factor")


@pytest.mark.parametrize(("kind", "change"), [(kind, change) for kind in KINDS for change in KINDS[kind]], ids=str)
def test_values_of_another_kind(damaged, kind, change):
    ((name, value),) = change.items()
    rope = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, **change}} if name in IN_ROPE else {}
    if name in ("rope_theta", "rope_scaling"):
        rope = {"rope_parameters": None}
    path = damaged(configured(**{**rope, **({} if name in IN_ROPE else change)}))
    with refuses(CheckpointError, f"config.json: {name}={value!r}, expected {kind}."):
        load(path)


def test_a_factor_of_a_linear_scaling(damaged):
    with refuses(CheckpointError, "config.json: factor=0, expected a positive number."):
        load(damaged(configured(rope_parameters={"rope_type": "linear", "factor": 0})))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints(damaged, damage):
    edit, text = DAMAGES[damage]
    with refuses(CheckpointError, text):
        load(damaged(edit))


def test_no_tokenizer(make_checkpoint):
    text = "Add it, or use skip_tokenizer_init=True and give prompts as token ids."
    with refuses(CheckpointError, text):
        load(make_checkpoint(), skip_tokenizer_init=False)


def test_damaged_tokenizer(damaged):
    path = damaged(written("tokenizer.json", b"{"))
    with refuses(CheckpointError, f"the tokenizer in {path} cannot be loaded: "):
        load(path, skip_tokenizer_init=False)


def test_no_such_model(tmp_path):
    for name in ("./no/such/dir", str(tmp_path / "nothing"), "a/b/c", "what is this?"):
        with refuses(CheckpointError, f"model={name!r}: there is no such directory, and it is not a hub id."):
            load(name)
    file = tmp_path / "model.safetensors"
    file.touch()
    with refuses(CheckpointError, f"model={str(file)!r} is a file; give the directory that holds config.json."):
        load(file)
    with refuses(CheckpointError, "holds no config.json; is it a model's directory?"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["Write a poem about the sea. " * 20, "~nobody-of-this-name/model"])
def test_a_name_that_cannot_be_looked_up(name):
    """A prompt in the place of the model, and the home of an unknown user, raised errors of pathlib's."""
    with refuses(CheckpointError, f"model={name!r:.300}: it cannot be looked up: "):
        load(name)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to root")
def test_no_permission(tmp_path):
    """A model below somebody else's home raised pathlib's PermissionError."""
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0)
    try:
        with refuses(CheckpointError, f"model={str(locked / 'model')!r}: it cannot be looked up: Permission denied."):
            load(locked / "model")
        with refuses(CheckpointError, f"{locked / 'config.json'} cannot be read: "):
            load(locked)
    finally:
        locked.chmod(0o700)


def test_hub_out_of_reach(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = "it is not in the local cache and the hub cannot be reached (or HF_HUB_OFFLINE is set)."
    with refuses(CheckpointError, f"model='Qwen/Qwen3-0.0B': no such directory, and {text}"):
        load("Qwen/Qwen3-0.0B")


def test_hub_says_no(monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise huggingface_hub.errors.HFValidationError("repo id is wrong")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with refuses(CheckpointError, "model='nobody/nothing': no such directory, and the hub says: repo id is wrong"):
        load("nobody/nothing")


def test_a_failed_start_holds_nothing(damaged):
    """An error late in the constructor must not leave the weights behind, nor a thread."""
    path = damaged(DAMAGES["unreadable generation config"][0])
    threads = threading.active_count()
    with pytest.raises(CheckpointError):
        load(path)
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is ModelRunner and o.config.model == path]
    assert threading.active_count() <= threads
