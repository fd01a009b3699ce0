"""From safetensors to parameters: merged layers, tying, several files, the shards of each rank, refusals."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.layers.context import Context
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import init_dummy_weights, load_model

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
BIASED = {**HEADS, "attention_bias": True}


def build(path, tp=SINGLE_RANK):
    """The model of a checkpoint, its parameters poisoned with NaN. No test here runs attention."""
    model = CausalLM(read_model_config(path), None, tp)
    for param in model.parameters():
        param.fill_(math.nan)
    return model


def loaded(path, tp=SINGLE_RANK):
    model = build(path, tp)
    load_model(model, path)
    assert not any(param.isnan().any() for param in model.parameters())
    return model


def same(path, other, tp=SINGLE_RANK):
    """Whether two checkpoints give the same parameters."""
    one, two = (loaded(each, tp).state_dict() for each in (path, other))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def tensors_of(path):
    """Every tensor of a checkpoint by name."""
    tensors = {}
    for file in Path(path).glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


@pytest.fixture
def copy_of(tmp_path):
    """copy_of(path, edit) -> a copy of a checkpoint whose tensors ``edit`` (dict -> None) has changed."""

    return lambda path, edit=lambda tensors: None: families.copied(path, tmp_path, lambda tensors, _: edit(tensors))


# -------------------------------------------------------------------- one rank


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


OTHER_HEADS = {  # what the head is, made of the embedding's copy
    "last element": lambda head: head[-1, -1:].mul_(1.01),
    "two rows swapped": lambda head: head[300:400:99].copy_(head[300:400:99].flip(0)),
    "sign of one number": lambda head: head[257, :1].neg_(),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("chunk", (7, 4096))
@pytest.mark.parametrize("case", OTHER_HEADS)
def test_a_head_that_is_not_the_embedding(case, chunk, dtype, make_checkpoint, copy_of, monkeypatch):
    """Of all rows: the first four alone were compared. With two ranks, the rank that has the rows says so."""
    monkeypatch.setattr("nanovllm.models.loader.DIGEST_ROWS", chunk)

    def edit(tensors):
        head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].to(dtype, copy=True)
        tensors["model.embed_tokens.weight"] = head.clone()
        OTHER_HEADS[case](head)

    path = copy_of(make_checkpoint(tie_word_embeddings=True, hidden_size=60), edit)
    for tp in (SINGLE_RANK, TPGroup(1, 2)):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding, but config.json ties them"):
            load_model(build(path, tp), path)


@pytest.mark.parametrize("shape", ([], [64], [512, 32], [500, 64], [513, 64], [1, 512, 64]))
def test_a_tied_head_of_another_shape(shape, make_checkpoint, copy_of):
    """Torch's own errors came through, or more rows were taken."""
    path = copy_of(make_checkpoint(tie_word_embeddings=True), lambda t: t.update({"lm_head.weight": torch.ones(shape)}))
    with pytest.raises(CheckpointError, match=re.escape(f"'lm_head.weight' has shape {shape}, expected [512, 64]")):
        load_model(build(path), path)


def merge(tensors):
    """As Phi-3 stores them: one tensor for q, k and v, one for gate and up."""
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            tensors[f"model.layers.{layer}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        parts = [tensors.pop(f"model.layers.{layer}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = torch.cat(parts)


@pytest.mark.parametrize("rank, size", [(0, 1), (1, 2), (5, 8)])
def test_layers_merged_in_the_file(rank, size, make_checkpoint, copy_of):
    path = make_checkpoint(**BIASED)
    assert same(path, copy_of(path, merge), TPGroup(rank, size))


@pytest.fixture
def sharded(make_checkpoint, tmp_path):
    """A checkpoint in several files with an index, as transformers writes them; and the same in one file."""
    from transformers import Qwen3ForCausalLM as HF

    whole = make_checkpoint()
    HF.from_pretrained(whole, dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert (tmp_path / "model.safetensors.index.json").exists()
    return str(tmp_path), whole


def test_a_file_of_several_is_missing(sharded):
    """Where all were, the error said that there was no *.safetensors file."""
    path, _ = sharded
    first, *others = sorted(Path(path).glob("model-*.safetensors"))
    for missing in ([first], others):
        for file in missing:
            file.unlink()
        with pytest.raises(CheckpointError, match=rf"index\.json names {first.name}, which is not there; is the downl"):
            load_model(build(path), path)


def test_several_files_and_others_beside_those_of_the_index(sharded):
    """As repositories have them: the same weights in one file, an adapter, what macOS leaves behind."""
    path, whole = sharded
    assert same(path, whole)
    save_file(tensors_of(whole), Path(path) / "consolidated.safetensors")
    save_file({"lora_A": torch.ones(2)}, Path(path) / "adapter_model.safetensors")
    (Path(path) / "._model-00001-of-00009.safetensors").write_bytes(b"\0\5\x16\7")
    assert same(path, whole)
    for file in (*Path(path).glob("*.index.json"), *Path(path).glob(".*"), *Path(path).glob("adapter*")):
        file.unlink()
    loaded(path)  # without an index


def test_one_file_beside_those_of_the_index(sharded):
    """Either may be the newer one: refused, unless the index is all that is left of the several."""
    path, whole = sharded
    shutil.copy(Path(whole) / "model.safetensors", path)
    text = r"the weights twice: in model\.safetensors, and in the files .*index\.json names, such as model-00001-of-"
    with pytest.raises(CheckpointError, match=text):
        load_model(build(path), path)
    for file in Path(path).glob("model-*.safetensors"):
        file.unlink()
    loaded(path)


def test_one_file_that_adds_to_those_of_the_index(sharded):
    path, whole = sharded
    shards, index = Path(path), Path(path) / "model.safetensors.index.json"
    last = sorted(shards.glob("model-*.safetensors"))[-1]
    last.rename(shards / "model.safetensors")
    files = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {name: file for name, file in files.items() if file != last.name}}))
    assert same(path, whole)


@pytest.mark.parametrize("name", ("adapter_model", "pytorch_model", "model-00001-of-00001", "._model", "consolidated"))
def test_a_file_beside_the_only_one(name, make_checkpoint, copy_of):
    """As a trainer, a conversion or macOS leaves them: "twice there, or unknown to the model"."""
    path = copy_of(make_checkpoint())
    file = Path(path) / f"{name}.safetensors"
    if name == "._model":
        file.write_bytes(b"\0\5\x16\7")
    elif name == "adapter_model":
        save_file({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 64)}, file)
    else:  # other numbers: model.safetensors is the model
        save_file({name: torch.zeros_like(tensor) for name, tensor in tensors_of(path).items()}, file)
    assert same(path, make_checkpoint())


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


# -------------------------------------------------------------------- several ranks

SIZES = (2, 4, 8)


@pytest.mark.parametrize("size", (1, *SIZES))
@pytest.mark.parametrize("tied", (True, False))
def test_the_shards_of_the_ranks_make_up_the_checkpoint(tied, size, make_checkpoint):
    """Merged layers hold their parts in order. 4 KV heads over 2, 4 and 8 ranks; over 8, two neighbours hold a replica
    of the same head."""
    path = make_checkpoint(**BIASED, tie_word_embeddings=tied)
    tensors = tensors_of(path)
    models = [loaded(path, TPGroup(rank, size)) for rank in range(size)]
    ranks = [dict(model.named_parameters()) for model in models]
    D, replicas = 16, max(1, size // 4)
    checked = set()

    def check(name, parts):
        assert torch.equal(torch.cat(parts), tensors[name]), name
        checked.add(name)

    for name in ranks[0]:
        parts = [params[name] for params in ranks]
        if ".qkv_proj." in name:
            heads, kv_heads = 8 // size, max(1, 4 // size)
            splits = [part.split([heads * D, kv_heads * D, kv_heads * D]) for part in parts]
            check(name.replace("qkv", "q"), [q for q, _, _ in splits])
            for kind, i in (("k", 1), ("v", 2)):
                for rank in range(size):  # replicas are equal
                    assert torch.equal(splits[rank][i], splits[rank // replicas * replicas][i])
                check(name.replace("qkv", kind), [splits[rank][i] for rank in range(0, size, replicas)])
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


class NoReduce(TPGroup):
    """A rank whose partial sums are left to the test."""

    num_sums = 0

    def all_reduce(self, x):
        NoReduce.num_sums += 1
        return x


def on_every_rank(path, size, run):
    return [run(loaded(path, NoReduce(rank, size))) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_the_ranks_results_add_up(size, make_checkpoint):
    """Layers that communicate: the ranks' partial sums add up to the result of a single rank."""
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
        for residual in (None, hidden):  # which is added once
            shards = iter(x.chunk(size, dim=1))
            out = on_every_rank(path, size, lambda model, layer=layer, shards=shards, residual=residual: layer(model)(
                next(shards), residual=None if residual is None else residual.clone()))  # fmt: skip
            torch.testing.assert_close(sum(out), layer(alone)(x) + (0 if residual is None else residual))


def test_sums_over_ranks(make_checkpoint, monkeypatch):
    """Each costs microseconds: one for the embeddings, two a layer."""
    model = loaded(make_checkpoint(**BIASED), NoReduce(0, 2))
    monkeypatch.setattr(NoReduce, "num_sums", 0)
    ids = torch.arange(5, dtype=torch.int32)
    model(ids, Context(ids, ids - 1, ids[:1], ids[:1], ids[:1, None], 5, ids[:2], ids[:2], 5))
    assert NoReduce.num_sums == 1 + 2 * 2


# -------------------------------------------------------------------- damaged checkpoints


LAYER, DOWN = "model.layers.0.", "model.layers.1.mlp.down_proj.weight"


def change(name, edit, is_merged=False):
    """An edit of a checkpoint's tensors: the one of this name becomes ``edit`` of it, in a file as Phi-3's if asked."""

    def changed(tensors):
        parts = dict(tensors)
        if is_merged:
            merge(tensors)
        tensors[name] = edit(tensors.get(name, parts.get(name)))

    return changed


DAMAGED = {
    "missing": (lambda t: t.pop(DOWN), r"1 tensors are missing, among them .*1\.mlp\.down_proj"),
    "surplus": (change("model.extra.weight", lambda _: torch.ones(2)), "'model.extra.weight' is .* unknown to the m"),
    "a bias that config.json does not announce": (
        change(f"{LAYER}mlp.up_proj.bias", lambda _: torch.ones(96)), "up_proj.bias' is .* unknown",
    ),
    "merged, of another size": (
        change(f"{LAYER}self_attn.qkv_proj.weight", lambda t: t[:-1].clone(), True),
        r"qkv_proj.weight' has shape \[255, 64\], expected \[256, 64\]",
    ),
    "merged, and in parts": (change(f"{LAYER}mlp.up_proj.weight", lambda t: t, True), "is twice there, or unknown"),
    # they were copied as numbers, and the model spoke nonsense
    **{str(dtype): (change(DOWN, lambda t, dtype=dtype: t.to(dtype)), f"'{DOWN}' is of {str(dtype)[6:]}, expected fl")
       for dtype in (torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64)},
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tensors(case, make_checkpoint, copy_of):
    edit, text = DAMAGED[case]
    path = copy_of(make_checkpoint(**BIASED), edit)
    with pytest.raises(CheckpointError, match=text):
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
@pytest.mark.parametrize("tp", (SINGLE_RANK, TPGroup(1, 2)))
def test_misshapen_tensor(tp, dim, name, shape, make_checkpoint, copy_of):
    """A tensor that is too large, too: a loader that slices would not notice. The error has the file's shapes."""
    wrong = list(shape)
    wrong[dim] += 16
    path = copy_of(make_checkpoint(), lambda tensors: tensors.update({name: torch.zeros(wrong)}))
    with pytest.raises(CheckpointError) as error:
        load_model(build(path, tp), path)
    assert f"tensor {name!r} has shape {wrong}, expected {shape}." in str(error.value)


UNREADABLE = r"model.safetensors cannot be read .*is the download complete"
ABSENT = r"holds no \*\.safetensors file .*is the download complete"


@pytest.mark.parametrize("name", ("model.safetensors", "model-00002-of-00002.safetensors"))
def test_a_fifo_for_weights(name, make_checkpoint, copy_of):
    """Opening it waited for ever."""
    path = copy_of(make_checkpoint())
    Path(path, name).unlink(missing_ok=True)
    os.mkfifo(Path(path, name))
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read \(it is no regular file\)"):
        load_model(build(path), path)


@pytest.mark.parametrize("in_another_file", (False, True))
@pytest.mark.parametrize("tied", (False, True))
def test_a_model_without_the_prefix(in_another_file, tied, make_checkpoint, copy_of):
    """It has an LM head where a file has; it was refused as a decoder alone."""

    def edit(tensors):
        head = tensors.pop("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
        named = {name.removeprefix("model."): tensors.pop(name) for name in list(tensors)}
        tensors |= named | ({} if in_another_file else {"lm_head.weight": head})
        heads["lm_head.weight"] = head

    whole, heads = make_checkpoint(tie_word_embeddings=tied), {}
    path = copy_of(whole, edit)
    if in_another_file:
        save_file(heads, Path(path) / "other.safetensors")
    model, want = loaded(path), loaded(whole).state_dict()
    assert model.config.has_lm_head
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("damage", "text"), [
    *((lambda file, size=size: file.write_bytes(file.read_bytes()[:size]), UNREADABLE) for size in (0, -100)),
    (lambda file: file.rename(file.with_name("pytorch_model.bin")), ABSENT),
], ids=["empty", "cut", "renamed"])  # fmt: skip
def test_damaged_file(damage, text, make_checkpoint, copy_of):
    path = copy_of(make_checkpoint())
    damage(Path(path) / "model.safetensors")
    with pytest.raises(CheckpointError, match=text):
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
