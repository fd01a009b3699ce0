"""From a checkpoint to parameters: packing, tying, several files, the parts of each rank, rope scaling, refusals."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.layers.attention import SDPABackend
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.models.decoder import Qwen3ForCausalLM
from nanovllm.model_config import RopeScaling
from nanovllm.utils.checkpoint import read_model_config
from nanovllm.utils.loader import init_dummy_weights, load_model

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
BIASED = {**HEADS, "attention_bias": True}


def build(path, group=SINGLE_RANK):
    """The model of a checkpoint, its parameters poisoned with NaN."""
    model = Qwen3ForCausalLM(read_model_config(path), SDPABackend(), group)
    for param in model.parameters():
        param.fill_(math.nan)
    return model


def loaded(path, group=SINGLE_RANK):
    model = build(path, group)
    load_model(model, path)
    assert not any(param.isnan().any() for param in model.parameters())
    return model


def tensors_of(path):
    """Every tensor of a checkpoint by name."""
    tensors = {}
    for file in Path(path).glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


@pytest.fixture
def copy_of(tmp_path):
    """copy_of(path, edit) -> a copy of a checkpoint whose tensors ``edit`` (dict -> None) has changed."""

    def make(path, edit=lambda tensors: None):
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        tensors = tensors_of(copy)
        edit(tensors)
        for file in copy.glob("*.safetensors*"):
            file.unlink()
        save_file(tensors, copy / "model.safetensors")
        return str(copy)

    return make


# -------------------------------------------------------------------- one rank


def test_merged_layers_hold_their_parts_in_order(make_checkpoint):
    path = make_checkpoint(**BIASED)
    model, tensors = loaded(path), tensors_of(path)
    params = dict(model.named_parameters())
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        for kind in ("weight", "bias"):
            parts = [tensors[f"{attention}{part}_proj.{kind}"] for part in "qkv"]
            assert torch.equal(params[f"{attention}qkv_proj.{kind}"], torch.cat(parts))
        parts = [tensors[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(params[f"{mlp}gate_up_proj.weight"], torch.cat(parts))
    merged = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    same = [name for name in tensors if not any(part in name for part in merged)]
    assert (
        set(same) < set(params) and len(same) == len(params) - 6
    )  # qkv weight and bias, gate_up: of two layers
    assert all(torch.equal(params[name], tensors[name]) for name in same)


@pytest.mark.parametrize("head_in_file", (False, True))
def test_tied_embedding(head_in_file, make_checkpoint, copy_of):
    """One matrix, also where the file holds a copy of it under the head's name."""

    def edit(tensors):
        assert "lm_head.weight" not in tensors
        if head_in_file:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    path = copy_of(make_checkpoint(tie_word_embeddings=True), edit)
    model = loaded(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors_of(path)["model.embed_tokens.weight"])
    hidden = torch.randn(3, model.lm_head.weight.shape[1])
    torch.testing.assert_close(model.lm_head(hidden), hidden @ model.model.embed_tokens.weight.T)


def test_untied_head_is_its_own(make_checkpoint):
    model = loaded(make_checkpoint())
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.fixture
def sharded(make_checkpoint, tmp_path):
    """A checkpoint in several files with an index, as transformers writes them; and the same in one file."""
    from transformers import Qwen3ForCausalLM as HF

    whole = make_checkpoint()
    HF.from_pretrained(whole, dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert (tmp_path / "model.safetensors.index.json").exists()
    return str(tmp_path), whole


def test_several_files(sharded):
    several, whole = (loaded(path).state_dict() for path in sharded)
    assert several.keys() == whole.keys()
    assert all(torch.equal(several[name], whole[name]) for name in whole)


def test_a_file_of_several_is_missing(sharded):
    path, _ = sharded
    next(iter(sorted(Path(path).glob("model-*.safetensors")))).unlink()
    with pytest.raises(CheckpointError, match=r"\d+ tensors are missing, among them .*weight"):
        load_model(build(path), path)


def test_other_files_beside_those_of_the_index(sharded):
    """As repositories have them: the same weights in one file, an adapter, what macOS leaves behind."""
    path, whole = sharded
    save_file(tensors_of(whole), Path(path) / "consolidated.safetensors")
    save_file({"lora_A": torch.ones(2)}, Path(path) / "adapter_model.safetensors")
    (Path(path) / "._model-00001-of-00009.safetensors").write_bytes(b"\0\5\x16\7")
    several, one = loaded(path).state_dict(), loaded(whole).state_dict()
    assert several.keys() == one.keys() and all(torch.equal(several[name], one[name]) for name in one)


def test_one_file_beside_those_of_the_index(sharded):
    """Either may be the newer one: refused, unless the index is all that is left of the several."""
    path, whole = sharded
    shutil.copy(Path(whole) / "model.safetensors", path)
    with pytest.raises(CheckpointError, match="is twice there"):
        load_model(build(path), path)
    for file in Path(path).glob("model-*.safetensors"):
        file.unlink()
    loaded(path)


def test_an_unreadable_index(sharded):
    path, _ = sharded
    (Path(path) / "model.safetensors.index.json").write_text('{"weight_map": {')
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json cannot be read"):
        load_model(build(path), path)


def test_weights_are_converted_to_the_models_dtype(make_checkpoint):
    path = make_checkpoint()
    model = build(path).to(torch.bfloat16)
    load_model(model, path)
    want = tensors_of(path)["model.layers.1.mlp.down_proj.weight"].to(torch.bfloat16)
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, want)


@pytest.mark.parametrize("dtype", (torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64))
def test_weights_that_are_not_floats(dtype, make_checkpoint, copy_of):
    """They were copied as numbers, and the model spoke nonsense."""
    name = "model.layers.1.mlp.down_proj.weight"
    path = copy_of(make_checkpoint(), lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is of {str(dtype)[6:]}, expected floats"):
        load_model(build(path), path)


# -------------------------------------------------------------------- several ranks

SIZES = (2, 4, 8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tied", (True, False))
def test_the_parts_of_the_ranks_make_up_the_checkpoint(tied, size, make_checkpoint):
    """4 KV heads over 2, 4 and 8 ranks; over 8, two neighbours hold the same head."""
    path = make_checkpoint(**BIASED, tie_word_embeddings=tied)
    tensors = tensors_of(path)
    models = [loaded(path, TPGroup(rank, size)) for rank in range(size)]
    ranks = [dict(model.named_parameters()) for model in models]
    D, copies = 16, max(1, size // 4)
    checked = set()

    def check(name, parts):
        assert torch.equal(torch.cat(parts), tensors[name]), name
        checked.add(name)

    for name in ranks[0]:
        parts = [params[name] for params in ranks]
        if ".qkv_proj." in name:
            splits = [
                part.split([8 // size * D, max(1, 4 // size) * D, max(1, 4 // size) * D]) for part in parts
            ]
            check(name.replace("qkv", "q"), [q for q, _, _ in splits])
            for kind, i in (("k", 1), ("v", 2)):
                for rank in range(size):  # copies are equal
                    assert torch.equal(splits[rank][i], splits[rank // copies * copies][i])
                check(name.replace("qkv", kind), [splits[rank][i] for rank in range(0, size, copies)])
        elif ".gate_up_proj." in name:
            check(name.replace("gate_up", "gate"), [part.chunk(2)[0] for part in parts])
            check(name.replace("gate_up", "up"), [part.chunk(2)[1] for part in parts])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            check(name, [torch.cat(parts, dim=1)])
        elif name.endswith("o_proj.bias"):
            assert all(not part.any() for part in parts[1:])  # added up over the ranks, it must count once
            check(name, parts[:1])
        elif "embed_tokens" in name or "lm_head" in name:
            check(name, parts)
        else:
            assert "norm" in name
            assert all(torch.equal(part, parts[0]) for part in parts)
            check(name, parts[:1])
    assert checked == set(tensors)


class Silent(TPGroup):
    """A rank whose partial results are left as they are, for the test to add up."""

    def all_reduce(self, x):
        return x


def on_every_rank(path, size, run):
    return [run(loaded(path, Silent(rank, size))) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_the_ranks_results_add_up(size, make_checkpoint):
    """Each layer with an exchange: partial sums of all ranks are what one rank computes alone."""
    path = make_checkpoint(**BIASED)
    alone = loaded(path)
    ids = torch.arange(0, 512, 7)
    embedded = on_every_rank(path, size, lambda model: model.model.embed_tokens(ids))
    assert torch.equal(sum(embedded), alone.model.embed_tokens(ids))

    hidden, attended, inner = (
        torch.randn(5, width, generator=torch.Generator().manual_seed(width)) for width in (64, 128, 96)
    )
    logits = on_every_rank(path, size, lambda model: model.lm_head(hidden))
    torch.testing.assert_close(torch.cat(logits, dim=1), alone.lm_head(hidden))
    for x, layer in (
        (attended, lambda model: model.model.layers[0].self_attn.o_proj),  # with a bias
        (inner, lambda model: model.model.layers[1].mlp.down_proj),
    ):
        parts = iter(x.chunk(size, dim=1))
        out = on_every_rank(path, size, lambda model, layer=layer, parts=parts: layer(model)(next(parts)))
        torch.testing.assert_close(sum(out), layer(alone)(x))
        # what the layer adds to must count once, too
        parts = iter(x.chunk(size, dim=1))
        out = on_every_rank(
            path,
            size,
            lambda model, layer=layer, parts=parts: layer(model)(next(parts), residual=hidden.clone()),
        )
        torch.testing.assert_close(sum(out), layer(alone)(x) + hidden)


@pytest.mark.parametrize(
    ("size", "message"),
    (
        (3, "does not divide the model's 8 attention heads"),
        (16, "does not divide the model's 8 attention heads"),
    ),
)
def test_a_number_of_ranks_that_does_not_fit(size, message, make_checkpoint):
    with pytest.raises(ConfigError, match=message):
        read_model_config(make_checkpoint(**HEADS)).check_tensor_parallel(size)


def test_kv_heads_that_do_not_fit_the_ranks(make_checkpoint):
    path = make_checkpoint(num_attention_heads=12, num_key_value_heads=6, head_dim=16)
    with pytest.raises(ConfigError, match="the model's 6 KV heads: one must divide the other"):
        read_model_config(path).check_tensor_parallel(4)


# -------------------------------------------------------------------- damaged checkpoints


def test_missing_tensor(make_checkpoint, copy_of):
    name = "model.layers.1.self_attn.k_proj.weight"
    path = copy_of(make_checkpoint(), lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"1 tensors are missing, among them {name}"):
        load_model(build(path), path)


def test_surplus_tensor(make_checkpoint, copy_of):
    path = copy_of(make_checkpoint(), lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"'model.extra.weight' is .* unknown to the model"):
        load_model(build(path), path)


def test_tensor_in_two_files(make_checkpoint, copy_of):
    path = copy_of(make_checkpoint())
    save_file({"model.norm.weight": torch.ones(64)}, Path(path) / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' is twice there"):
        load_model(build(path), path)


@pytest.mark.parametrize(
    ("name", "shape"),
    (
        ("model.layers.0.self_attn.q_proj.weight", [128, 64]),
        ("model.layers.0.self_attn.v_proj.weight", [64, 64]),
        ("model.layers.0.self_attn.o_proj.weight", [64, 128]),
        ("model.layers.1.mlp.up_proj.weight", [96, 64]),
        ("model.layers.1.mlp.down_proj.weight", [64, 96]),
        ("model.layers.1.input_layernorm.weight", [64]),
        ("model.embed_tokens.weight", [512, 64]),
        ("lm_head.weight", [512, 64]),
    ),
)
@pytest.mark.parametrize("dim", (0, -1))
@pytest.mark.parametrize("group", (SINGLE_RANK, TPGroup(1, 2)))
def test_misshapen_tensor(group, dim, name, shape, make_checkpoint, copy_of):
    """Also one that is too large: a loader that slices would not notice. Shapes in the error are the file's."""
    wrong = list(shape)
    wrong[dim] += 16
    path = copy_of(make_checkpoint(), lambda tensors: tensors.update({name: torch.zeros(wrong)}))
    with pytest.raises(CheckpointError) as error:
        load_model(build(path, group), path)
    assert f"tensor {name!r} has shape {wrong}, expected {shape}." in str(error.value)


def test_a_bias_the_config_does_not_know(make_checkpoint, copy_of):
    name = "model.layers.0.self_attn.q_proj.bias"
    path = copy_of(make_checkpoint(), lambda tensors: tensors.update({name: torch.ones(128)}))
    with pytest.raises(CheckpointError, match="unknown to the model"):
        load_model(build(path), path)


def test_truncated_file(make_checkpoint, copy_of):
    path = copy_of(make_checkpoint())
    file = Path(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read .*is the download complete"):
        load_model(build(path), path)


def test_no_safetensors(make_checkpoint, copy_of):
    path = copy_of(make_checkpoint())
    (Path(path) / "model.safetensors").rename(Path(path) / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        load_model(build(path), path)


# -------------------------------------------------------------------- random weights


def test_dummy_weights(make_checkpoint):
    """Filled, of an untrained model's scale, and the same for the same seed."""
    path = make_checkpoint(attention_bias=True)
    models = [build(path) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        init_dummy_weights(model, seed)
    states = [dict(model.named_parameters()) for model in models]
    for name, param in states[0].items():
        assert torch.equal(param, states[1][name])
        if "norm" in name:
            assert (param == 1).all()
        else:
            assert not torch.equal(param, states[2][name])
            assert 0.01 < param.std() < 0.03


# -------------------------------------------------------------------- config.json

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn, published for Qwen3": {**YARN, "original_max_position_embeddings": 32768},
    "yarn, other ramp": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, given attention factor": {**YARN, "attention_factor": 1.25},
    "yarn, no stretching": {**YARN, "factor": 1.0},
}


def hf_cos_sin(rope, theta, head_dim, num_positions):
    """transformers' cosines and sines, [num_positions, head_dim] in our layout."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=64, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=131072,
        rope_parameters={**rope, "rope_theta": theta},
    )  # fmt: skip
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions).unsqueeze(0))
    return torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)


@pytest.mark.parametrize("head_dim", (32, 128))
@pytest.mark.parametrize("theta", (10_000.0, 1_000_000.0))
@pytest.mark.parametrize("name", ROPES)
def test_rope_is_transformers_rope(name, theta, head_dim):
    """Both spellings of config.json: one dict, or ``rope_theta`` and ``rope_scaling`` apart."""
    new = {"rope_parameters": {**ROPES[name], "rope_theta": theta}, "max_position_embeddings": 131072}
    scaling = {("type" if key == "rope_type" else key): value for key, value in ROPES[name].items()}
    old = {"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": 131072}
    assert RopeScaling.from_json(new) == RopeScaling.from_json(old)
    got = get_rope(head_dim, 1000, RopeScaling.from_json(new)).cos_sin
    want = hf_cos_sin(ROPES[name], theta, head_dim, 1000)
    # an angle of 1000 rad has a rounding error of 6e-5
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)
    torch.testing.assert_close(got[:16], want[:16], atol=2e-6, rtol=0)


def test_the_scalings_differ():
    """Otherwise the test above would show nothing."""
    tables = [
        get_rope(32, 100, RopeScaling.from_json({"rope_scaling": rope, "rope_theta": 1e4})).cos_sin
        for name, rope in ROPES.items()
        if name != "yarn, no stretching"
    ]
    for i, one in enumerate(tables):
        assert all((one - other).abs().max() > 1e-2 for other in tables[:i])


def test_yarn_without_original_length_takes_the_models():
    with_length = {"rope_scaling": {**YARN, "original_max_position_embeddings": 2048}, "rope_theta": 1e6}
    without = {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "rope_theta": 1e6,
        "max_position_embeddings": 2048,
    }
    assert RopeScaling.from_json(with_length) == RopeScaling.from_json(without)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'; supported are"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling 'llama3'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a 'factor'"),
        ({"rope_scaling": {**YARN, "mscale": 0.7}}, "unsupported fields {'mscale': 0.7}"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "unsupported fields {'truncate': False}"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.* is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be shared by 3 KV heads"),
        ({"head_dim": 15}, "heads of size 15; rotation takes an even size"),
        ({"head_dim": None, "hidden_size": 60}, "heads of size 15"),
        ({"head_dim": None, "num_attention_heads": 128}, "heads of size 0"),
        ({"hidden_size": None}, "hidden_size=None, expected a positive integer"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'; supported are"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0, expected a positive integer"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architectures=.*LlamaForCausalLM.*; supported: Qwen3ForCausalLM",
        ),
    ),
)
def test_what_cannot_be_honoured_is_refused(change, message, make_checkpoint, tmp_path):
    config = json.loads((Path(make_checkpoint()) / "config.json").read_text())
    if "rope_scaling" in change:
        config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        read_model_config(str(tmp_path))


PUBLISHED = {  # config.json of Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_a_published_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = read_model_config(str(tmp_path))
    assert config.rope == RopeScaling(kind="default", theta=1e6, original_max_position=40960)
    assert (config.dtype, config.head_dim, config.num_key_value_heads) == ("bfloat16", 128, 8)
    assert config.tie_word_embeddings and not config.attention_bias and config.eos_token_ids == (151645,)
    for size in (1, 2, 4, 8):
        config.check_tensor_parallel(size)


def test_yarn_added_to_a_published_config(tmp_path):
    """Qwen's recipe for long contexts leaves max_position_embeddings at 40960, and longer prompts were refused."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED, "rope_scaling": scaling}))
    assert read_model_config(str(tmp_path)).max_position_embeddings == 131072


def test_two_different_rope_scalings():
    """The recipe's dict beside the one that transformers 5 writes was ignored: the model ran unstretched."""
    new, old = {"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(CheckpointError, match=r"rope_parameters=.* and rope_scaling=.* differ; write all into"):
        RopeScaling.from_json({"rope_parameters": new, "rope_scaling": old})
    want = RopeScaling.from_json({"rope_parameters": new})
    assert RopeScaling.from_json({"rope_parameters": new, "rope_scaling": {"type": "default"}}) == want
    for other in (new, None, {}):
        assert RopeScaling.from_json({"rope_parameters": new, "rope_scaling": other}) == want
        assert RopeScaling.from_json({"rope_parameters": other, "rope_scaling": new}) == want


def test_old_and_new_transformers_write_the_same_model(make_checkpoint, tmp_path):
    """What transformers writes today and the older layout of the same numbers give one and the same config."""
    new = json.loads((Path(make_checkpoint()) / "config.json").read_text())
    old = {**new, "torch_dtype": new.get("dtype", "float32"), "rope_scaling": None}
    rope = old.pop("rope_parameters", {})
    old.update(rope_theta=rope.get("rope_theta", new.get("rope_theta")))
    old.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_model_config(str(tmp_path)) == read_model_config(make_checkpoint())


def test_the_file_is_read_as_linear_layers_are_used(make_checkpoint):
    """A weight is [output, input], as in ``torch.nn.Linear``."""
    path = make_checkpoint()
    model, x = loaded(path), torch.randn(3, 96)
    weight = tensors_of(path)["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(model.model.layers[0].mlp.down_proj(x), F.linear(x, weight))
