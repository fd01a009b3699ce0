"""``LLM(kv_cache_dtype="fp8")`` on the CPU: answers, scales, and the same tokens however they are computed. 25 s."""

import logging
from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICES, generate, greedy, prompt_of
from test_demo_model import check_answers, check_held_out_sums

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.config import Config
from nanovllm.contrib.as_vllm.options import to_nanovllm
from nanovllm.kernels.linear import reference
from nanovllm.runner import kv_scales, memory
from nanovllm.runner.device import describe
from nanovllm.utils.checkpoint import DEMO_MODEL

FP8 = torch.float8_e4m3fn
PROMPTS = [prompt_of(40), prompt_of(9, seed=1), prompt_of(17, seed=2), prompt_of(40)[:33] + prompt_of(5, seed=3)]


def scales_of(llm):
    """fp32 [layers, 2, K]."""
    llm.model_runner.weights.require_ready()  # an update measures them when they are needed
    return torch.stack([layer.self_attn.attn.kv_scale for layer in llm.model_runner.model.model.layers])


@pytest.fixture(scope="module", params=DEVICES)
def demo(request):
    with LLM(device=request.param, kv_cache_dtype="fp8", num_kvcache_blocks=64, quiet=True) as llm:
        yield llm


def test_the_demo_model_answers_as_without(demo):
    check_answers(demo)
    check_held_out_sums(demo, 100)
    (kv_cache,) = demo.model_runner.kv_cache
    assert kv_cache.dtype == FP8
    largest = kv_cache.float().abs().amax((2, 3, 4, 5))
    assert (largest < 448).all() and (largest > 4).all()  # nothing saturates; most of the range is used


def test_half_the_bytes_are_twice_the_blocks(make_llm, monkeypatch):
    monkeypatch.setattr(memory, "CPU_KV_CACHE_BYTES", 4 << 20)
    plain, fp8 = (make_llm(dtype="bfloat16", kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert fp8.model_runner.num_kvcache_blocks == 2 * plain.model_runner.num_kvcache_blocks
    assert fp8.model_runner.kv_cache.nbytes == plain.model_runner.kv_cache.nbytes


def four_bits(x):
    """x rounded to four significant bits, half to even."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 16).round() / 16, exponent)


def test_log_probabilities_are_those_of_rounded_keys_and_values(make_llm, monkeypatch):
    """Oracle: a cache in fp32 whose keys and values are rounded as they are stored."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=1)

    def logprobs(**options):
        outputs = make_llm(**options).generate(PROMPTS, params, use_tqdm=False)
        found = [[max(at.values(), key=lambda p: p.logprob).logprob for at in o.outputs[0].logprobs] for o in outputs]
        return torch.tensor(found), [output["token_ids"] for output in outputs]

    plain, _ = logprobs()
    fp8, tokens = logprobs(kv_cache_dtype="fp8")
    store = reference.store_kvcache
    monkeypatch.setattr(reference, "store_kvcache", lambda k, v, *rest: store(four_bits(k), four_bits(v), *rest))
    rounded, expected = logprobs()
    torch.testing.assert_close(fp8, rounded, rtol=0, atol=2e-3)
    assert tokens == expected
    assert (plain - rounded).abs().max() > 0.01  # the oracle does round


@pytest.fixture(scope="module")
def alone(make_checkpoint):
    """Greedy tokens of each prompt alone, without a prefix cache."""
    options = {"kv_cache_dtype": "fp8_e4m3", "device": "cpu", "skip_tokenizer_init": True, "quiet": True}
    with LLM(make_checkpoint(), kvcache_block_size=16, enable_prefix_caching=False, **options) as llm:
        return [generate(llm, [prompt], greedy(12))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("options", [
    {},  # batched, with a shared prefix; prefills in chunks
    {"max_num_batched_tokens": 16},
    {"num_kvcache_blocks": 6},  # preemption
    {"tensor_parallel_size": 2},
    {"dtype": "float32", "attention_backend": "sdpa"},
], ids=str)  # fmt: skip
def test_the_same_tokens(options, alone, make_llm):
    llm = make_llm(**{"max_num_batched_tokens": 64, "kv_cache_dtype": "fp8", **options})
    for _ in range(2):  # the second finds the prefixes of the first
        assert generate(llm, PROMPTS, greedy(12)) == alone
    if "num_kvcache_blocks" in options:
        assert llm.metrics()["num_preemptions"] > 0
    params = SamplingParams(temperature=1e-4, n=3, max_tokens=12, ignore_eos=True)  # greedy, forked from one prefill
    forks = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert [fork.token_ids for fork in forks[0].outputs] == 3 * alone[:1]


def test_scales_are_measured_by_the_weights(make_llm, tiny):
    """Powers of two, per layer and head; measured again after an update, kept by sleep, given ones left alone."""
    llm = make_llm(kv_cache_dtype="fp8")
    before = scales_of(llm)
    assert before.shape == (2, 2, 2) and torch.equal(before, before.log2().round().exp2()) and (before != 1).any()
    tokens = generate(llm, PROMPTS, greedy(4))
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert level == 2 or generate(llm, PROMPTS, greedy(4)) == tokens
    llm.update_weights(tiny.model.named_parameters())
    assert torch.equal(scales_of(llm), before) and generate(llm, PROMPTS, greedy(4)) == tokens

    weight = tiny.model.state_dict()["model.layers.1.self_attn.v_proj.weight"].clone()
    weight[32:] *= 64  # of the second head
    addresses = [layer.self_attn.attn.kv_scale.data_ptr() for layer in llm.model_runner.model.model.layers]
    llm.update_weights({"model.layers.1.self_attn.v_proj.weight": weight}, partial=True)
    after = scales_of(llm)
    assert (after / before).tolist() == [[[1, 1], [1, 1]], [[1, 1], [1, 64]]]
    assert addresses == [layer.self_attn.attn.kv_scale.data_ptr() for layer in llm.model_runner.model.model.layers]

    first, second = (layer.self_attn.attn for layer in llm.model_runner.model.model.layers)
    first.set_kv_scale("k", torch.tensor(0.3))
    second.set_kv_scale("v", torch.tensor([0.5, 0.7]))
    llm.update_weights({"model.layers.1.self_attn.v_proj.weight": 0 * weight}, partial=True)
    scales_of(llm)
    assert first.kv_scale[0].tolist() == pytest.approx([0.3, 0.3]) and torch.equal(first.kv_scale[1], before[0, 1])
    assert second.kv_scale[1].tolist() == pytest.approx([0.5, 0.7])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_new_scales_reach_captured_graphs(dtype, make_llm, tiny):
    """Values 256 times as large, made good by o_proj, both exact: without new scales they would saturate."""
    options = {"device": "cuda", "dtype": dtype, "kv_cache_dtype": "fp8"}
    llm = make_llm(**options)
    before = generate(llm, PROMPTS, greedy(12))
    state = tiny.model.state_dict()
    new = {
        name: weight * (256 if "v_proj" in name else 1 / 256)
        for name, weight in state.items() if "v_proj" in name or "o_proj" in name
    }  # fmt: skip
    llm.update_weights(new, partial=True)
    assert (scales_of(llm)[:, 1] >= 1).all()
    assert generate(llm, PROMPTS, greedy(12)) == before


def test_a_head_of_zeros_keeps_scale_one(make_llm, tiny):
    llm = make_llm(kv_cache_dtype="fp8")
    weight = tiny.model.state_dict()["model.layers.0.self_attn.v_proj.weight"].clone()
    weight[:32] = 0
    llm.update_weights({"model.layers.0.self_attn.v_proj.weight": weight}, partial=True)
    assert scales_of(llm)[0, 1, 0] == 1
    assert len(generate(llm, PROMPTS, greedy(4))[0]) == 4


def test_without_the_option_nothing_is_measured(make_llm):
    llm = make_llm()
    assert llm.model_runner.kv_cache[0].dtype == torch.float32 and (scales_of(llm) == 1).all()


def refusal(call):
    with pytest.raises(ConfigError) as error:
        call()
    return str(error.value)


def test_refusals(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    device = torch.device("cuda")
    assert refusal(lambda: kv_scales.select_kv_dtype(Config(kv_cache_dtype="fp8"), torch.bfloat16, device)) == (
        "kv_cache_dtype='fp8' needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper), not an A100 (8.0). "
        "Use kv_cache_dtype='auto'."
    )
    assert kv_scales.select_kv_dtype(Config(), torch.bfloat16, device) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kv_scales.select_kv_dtype(Config(kv_cache_dtype="fp8"), torch.bfloat16, device) == FP8


@pytest.mark.parametrize("dtype, qk_norm, warned", [("fp8", "", True), ("fp8", "head", False), ("auto", "", False)])
def test_models_without_query_and_key_norms_are_warned_of(dtype, qk_norm, warned, caplog):
    caplog.set_level(logging.WARNING, "nanovllm")
    kv_scales.warn_of_outliers(SimpleNamespace(kv_cache_dtype=dtype, model_config=SimpleNamespace(qk_norm=qk_norm)))
    assert caplog.messages == warned * [
        "kv_cache_dtype='fp8': the model has no query/key norms, and outliers in the keys of such models (Qwen2.5) can "
        "ruin its answers; compare them with those of kv_cache_dtype='auto'."
    ]


def test_vllm_scripts_pass_it_on():
    assert to_nanovllm({"kv_cache_dtype": "fp8"})["kv_cache_dtype"] == "fp8"
    with LLM(str(DEMO_MODEL), device="cpu", quiet=True, **{"kv_cache_dtype": "fp8"}) as llm:
        assert llm.model_runner.rank.kv_dtype == FP8
        assert "float32; FP8 KV cache of " in describe(llm.config, llm.model_runner)
