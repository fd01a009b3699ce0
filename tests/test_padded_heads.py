"""Heads padded with zeros at load to a size that kernels take. The references compute them here, which pad nothing by
themselves; ``test_families.py`` (gpu) and ``runner/test_triton_runner.py`` have the kernels. 8 s."""

import re
from dataclasses import replace
from functools import cache

import families
import pytest
import quantized_checkpoints
import torch
from families import chosen
from helpers import generate, greedy
from test_families import IDS, TOLERANCE, error, hf_logits, logits_of

from nanovllm import ConfigError, kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model

HEAD_DIM, PADDED = 24, 32
SIZES = dict(hidden_size=4 * HEAD_DIM, num_hidden_layers=2, layer_types=None)
CASES = {  # what is padded beside rows of Q, K and V and columns of the output projection
    "phi3-mini": {},  # one tensor for Q, K and V
    "phi3-longrope": {"rope_parameters": families.longrope(18) | {"partial_rotary_factor": 0.75}},
    "llama-tied-biased": {},  # all biases
    "qwen2": {},  # biases of Q, K and V only
    "smollm3": {"num_hidden_layers": 4},  # a layer without RoPE
    "granite": {},  # a factor of what attention adds
    "ernie4.5": {"head_dim": HEAD_DIM},  # interleaved, with biases
    "glm4": {"head_dim": HEAD_DIM},  # interleaved, half of a head rotated
    "mixtral": {},
}


@pytest.fixture
def padding(monkeypatch):
    """padding() lets the references want heads of a power of two, as the kernels do."""
    return lambda: monkeypatch.setattr(
        kernels.select("cpu"), "padded_head_dim", lambda head_dim: 1 << (head_dim - 1).bit_length()
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(case) -> its path, and transformers' model."""

    @cache
    def make(case):
        path = str(tmp_path_factory.mktemp(case))
        return path, families.make(path, case, **SIZES | CASES[case])

    return make


def built(path, tp=SINGLE_RANK, **changes):
    """The model of a checkpoint on one rank, filled; what is not loaded is NaN."""
    model = CausalLM(replace(read_model_config(path), **changes), None, tp)
    for param in model.parameters():
        param.view(torch.uint8).fill_(0xFF)  # NaN in every type
    load_model(model, path)
    return model


def test_what_the_kernels_want():
    pytest.importorskip("triton")
    sizes = (8, 16, 24, 64, 80, 96, 128, 192, 256)
    assert [kernels.select("cuda").padded_head_dim(n) for n in sizes] == [16, 16, 32, 64, 128, 128, 128, 256, 256]
    assert [kernels.select("cpu").padded_head_dim(n) for n in sizes] == list(sizes)


@pytest.mark.parametrize("case", CASES)
def test_logits(case, checkpoint, padding):
    path, model = checkpoint(case)
    padding()
    assert error(logits_of(path), hf_logits(model, IDS)) < TOLERANCE
    attention = built(path).model.layers[0].self_attn
    assert attention.qkv_proj.weight.shape == (8 * PADDED, SIZES["hidden_size"])
    assert attention.o_proj.weight.shape == (SIZES["hidden_size"], 4 * PADDED)
    assert attention.attn.head_dim == PADDED


@pytest.mark.parametrize("case", ["phi3-mini", "ernie4.5"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_its_part(case, size, checkpoint, padding):
    """Of the heads of a single rank; with four ranks the KV heads are replicated."""
    padding()
    path, _ = checkpoint(case)
    whole = built(path).model.layers[1].self_attn
    for rank in range(size):
        part = built(path, TPGroup(rank, size, None)).model.layers[1].self_attn
        for name in ("weight", "bias") if case == "ernie4.5" else ("weight",):
            q, k, v = getattr(whole.qkv_proj, name).split([4 * PADDED, 2 * PADDED, 2 * PADDED])
            of_kv = rank * 2 // size, min(size, 2)
            want = [q.chunk(size)[rank], *(x.chunk(of_kv[1])[of_kv[0]] for x in (k, v))]
            assert torch.equal(getattr(part.qkv_proj, name), torch.cat(want)), (name, rank)
        assert torch.equal(part.o_proj.weight, whole.o_proj.weight.chunk(size, 1)[rank]), rank


def fp8_weights(path):
    return read_model_config(path).quantized().for_length(256)


@pytest.mark.parametrize("form", [None, "channel", "tensor"])
@pytest.mark.parametrize("case", ["phi3-mini", "glm4"])
def test_fp8_weights(case, form, checkpoint, padding, tmp_path):
    """Quantized while loading, or a published form: a scale for each output feature stays that of its row."""
    path, model = checkpoint(case)
    if form is not None:
        model = families.make(tmp_path, case, **SIZES | CASES[case])
        path = str(tmp_path)
        quantized_checkpoints.write(path, model, form)
    unpadded = logits_of(path, fp8_weights(path))
    padding()
    padded = logits_of(path, fp8_weights(path))
    assert error(padded, unpadded) < 1e-5
    if form is None:
        assert error(padded, hf_logits(model, IDS)) > 1e-3  # it was FP8
    else:
        assert error(padded, hf_logits(model, IDS)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["phi3-mini", "glm4"])
def test_fp8_weights_on_the_gpu(case, padding, tmp_path):
    """Bit for bit those of the CPU: few of torch's operations take e4m3 on both."""
    quantized_checkpoints.write(tmp_path, families.make(tmp_path, case, **SIZES | CASES[case]), "channel")
    padding()
    expected = built(tmp_path)
    with torch.device("cuda"):
        model = built(tmp_path)
    for (name, param), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(param.cpu().view(torch.uint8), want.view(torch.uint8)), name


def test_the_engine(checkpoint, padding, make_llm):
    """Tokens from an FP8 KV cache as without padding; weights that are pushed are padded too; so are random ones."""
    path, model = checkpoint("phi3-mini")
    prompts, options = [IDS[:17], IDS[5:30]], {"max_model_len": 80, "num_kvcache_blocks": 16}
    with_fp8_cache = generate(make_llm(model=path, kv_cache_dtype="fp8", **options), prompts, greedy(8))
    padding()
    assert generate(make_llm(model=path, kv_cache_dtype="fp8", **options), prompts, greedy(8)) == with_fp8_cache
    llm = make_llm(model=path, load_format="dummy", **options)
    got = generate(llm, prompts, greedy(8))
    assert got != chosen(model, prompts, got)
    llm.update_weights(model.named_parameters())
    got = generate(llm, prompts, greedy(8))
    assert got == chosen(model, prompts, got)


WHY = "the model's heads of 24 are padded with zeros to 32 for the GPU's kernels, and"


@pytest.mark.parametrize("case", ["qwen3", "olmo2"])
def test_norms_of_queries_and_keys(case, padding, make_llm, tmp_path):
    """Of each head, or of all at once: they would count the zeros. Without padding both run."""
    sizes = SIZES | ({"head_dim": HEAD_DIM} if case == "qwen3" else {})
    model = families.make(tmp_path, case, **sizes)
    assert error(logits_of(str(tmp_path)), hf_logits(model, IDS)) < TOLERANCE
    padding()
    with pytest.raises(ConfigError, match=re.escape(
        f"{WHY} its norms of q and k would count them. Use device='cpu', which pads nothing."
    )):  # fmt: skip
        make_llm(model=str(tmp_path))


def test_blocks_of_fp8_scales(padding, make_llm, tmp_path):
    model = families.make(tmp_path, "phi3-mini", **SIZES)
    quantized_checkpoints.write(tmp_path, model, "qwen")
    assert error(logits_of(str(tmp_path)), hf_logits(model, IDS)) < TOLERANCE
    padding()
    with pytest.raises(ConfigError, match=re.escape(
        f"{WHY} the blocks of its FP8 scales would be cut. Load the 16-bit checkpoint (quantization='fp8' gives it a "
        "scale for each output feature), or use device='cpu', which pads nothing."
    )):  # fmt: skip
        make_llm(model=str(tmp_path))
