"""The whole engine on the Triton kernels, interpreted on the CPU: what a GPU runs, without one.

The kernels have tests of their own; these show that the layers hand them the right tensors.
"""

import os
from dataclasses import replace

import families
import pytest
import quantized_checkpoints
import torch
from helpers import generate, greedy, interpret_fp8_exactly
from histories import at_night
from test_speculation import know

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="compiled kernels run in the tests marked gpu"
)

from nanovllm import SamplingParams, kernels  # noqa: E402
from nanovllm.layers.attention_backends import PagedBackend  # noqa: E402
from nanovllm.runner import parts  # noqa: E402

PROMPTS = [[5, 6, 7] * 7, [5, 6, 7] * 6, [400]]
OPTIONS = {"max_num_batched_tokens": 20, "max_num_seqs": 3}  # chunks, and a prefix that hits
WITHOUT_LOGITS_STEPS = [greedy(4), SamplingParams(seed=3, max_tokens=4, ignore_eos=True), greedy(4)]
WITH_LOGITS_STEPS = [
    SamplingParams(temperature=1.2, seed=4, max_tokens=4, top_k=40, top_p=0.9, min_p=0.01, min_tokens=4),
    greedy(4),
    SamplingParams(temperature=0.7, seed=5, max_tokens=4, top_k=5, ignore_eos=True),
]


@pytest.fixture
def use_triton(monkeypatch):
    """Call it: engines that are made from then on run the kernels."""

    def use():
        select, ops = kernels.select, kernels.select("cuda")
        monkeypatch.setattr(kernels, "select", lambda device_type=None, folder="": select("cuda", folder))
        monkeypatch.setattr(parts, "select_backend", lambda *_: PagedBackend(ops, capturable=True))

    return use


@pytest.fixture
def check_same(make_llm, use_triton):
    """check_same(options, prompts, params) -> two engines with the same tokens: on the kernels, and on their twins."""

    def check(options, prompts=PROMPTS, params=WITHOUT_LOGITS_STEPS):
        twins = make_llm(**OPTIONS, **options)
        expected = generate(twins, prompts, params)
        use_triton()
        llm = make_llm(**OPTIONS, **options)
        assert generate(llm, prompts, params) == expected
        return llm, twins

    return check


@pytest.mark.parametrize("params", [WITHOUT_LOGITS_STEPS, WITH_LOGITS_STEPS], ids=["plain", "logits steps"])
def test_triton_kernels_give_the_tokens_of_their_twins(params, make_checkpoint, check_same):
    check_same({"model": make_checkpoint(num_hidden_layers=1)}, params=params)


@pytest.mark.parametrize("params", [WITH_LOGITS_STEPS, *at_night(WITHOUT_LOGITS_STEPS)])
def test_verify_steps(params, make_checkpoint, make_llm, use_triton):
    """Rows of drafts go through every kernel of a decode step and of sampling."""
    model = make_checkpoint(num_hidden_layers=1)
    params = [replace(each, max_tokens=7) for each in params]
    outputs = make_llm(model=model, **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
    use_triton()
    llm = make_llm(model=model, speculative_config={"method": "ngram", "adaptive": False}, **OPTIONS)
    know(llm, outputs, length=3)
    assert generate(llm, PROMPTS, params) == [output["token_ids"] for output in outputs]
    assert llm.metrics()["spec_decode_num_accepted_tokens"] > 5


def test_an_fp8_kv_cache(make_checkpoint, check_same, monkeypatch):
    """Measured by the kernels too, the scales are the twins': powers of two."""
    interpret_fp8_exactly(monkeypatch)
    engines = check_same({"model": make_checkpoint(num_hidden_layers=1), "kv_cache_dtype": "fp8"})
    ours, theirs = (x.model_runner.model.model.layers[0].self_attn.attn for x in engines)
    assert torch.equal(ours.kv_scale, theirs.kv_scale)
    assert ours.k_cache.dtype == torch.float8_e4m3fn and ours.k_cache[0].float().any()


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "gpt-oss-attention", "olmo3", "phi3-mini"])
def test_a_family_that_needs_every_kernel(case, tmp_path, check_same, monkeypatch):
    """Windows, post-norms, gelu, norms over all heads, an fp32 norm before a GEMV and one in the QKV epilogue;
    heads that the kernels want padded; soft caps and sinks."""
    monkeypatch.setitem(families.BASE, "num_hidden_layers", 3)
    if case == "gpt-oss-attention":
        monkeypatch.setitem(families.CASES[case][1], "mlp_layer_types", ["dense"] * 3)
    if case == "gemma3":
        monkeypatch.setitem(families.CASES[case][1], "layer_types", families.MIXED[-3:])
    families.make(tmp_path, case)
    llm, _ = check_same({"model": str(tmp_path), "max_model_len": 256}, [[5, 6, 7] * 7, [100]], greedy(3))
    if case == "phi3-mini":
        assert llm.model_runner.kv_cache[0].shape[-1] == 32


def test_fp8_weights(tmp_path, check_same):
    """The GEMV reads them; more tokens dequantize them off Hopper. Partial blocks make groups of 32 channels."""
    model = families.make(tmp_path, "qwen3", num_hidden_layers=1, layer_types=None)
    quantized_checkpoints.write(tmp_path, model, "qwen")
    check_same({"model": str(tmp_path), "max_model_len": 256}, [[5, 6, 7]], greedy(2))


@pytest.mark.parametrize("case, form, scheme", [
    ("qwen3", "gptq", {"size": 32, "act_order": True}), ("qwen3-moe", "awq", {"size": 32}),
    *at_night(("qwen3", "awq", {})),
])  # fmt: skip
def test_integers_of_four_bits(case, form, scheme, tmp_path, check_same):
    """The GEMV and tiles read the words, of experts, too; groups of fewer than 32 channels are dequantized."""
    more = {"moe_intermediate_size": 64, "mlp_only_layers": []} if case == "qwen3-moe" else {}
    model = quantized_checkpoints.make(tmp_path, case, num_hidden_layers=1, **more)
    quantized_checkpoints.write(tmp_path, model, form, **scheme)
    prompts = [[5, 6]] if case == "qwen3-moe" else [[5, 6, 7], [100]]  # experts of two tokens, and of one
    llm, _ = check_same({"model": str(tmp_path), "max_model_len": 256}, prompts, greedy(2))
    assert llm.model_runner.model.model.layers[0].self_attn.o_proj.weight.dtype == torch.int32


def test_mxfp4_experts(tmp_path, check_same):
    """gpt-oss: kept as they are where Triton multiplies them, dequantized for the twins."""
    quantized_checkpoints.write(tmp_path, quantized_checkpoints.make(tmp_path, "gpt-oss", num_hidden_layers=1), "mxfp4")
    llm, _ = check_same({"model": str(tmp_path), "max_model_len": 256}, [[5, 6, 7], [100]], greedy(2))
    assert llm.model_runner.model.model.layers[0].mlp.experts.down_proj.dtype == torch.uint8
