"""From a model's name to its directory, and its JSON files."""

import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.errors import CheckpointError
from nanovllm.models.config_reader import read_model_config
from nanovllm.utils.checkpoint import (
    DEMO_MODEL,
    read_eos_token_ids,
    read_generation_config,
    resolve_model,
)


def test_directories(tmp_path, monkeypatch):
    assert resolve_model(None) == str(DEMO_MODEL)
    assert resolve_model(str(tmp_path)) == resolve_model(tmp_path) == str(tmp_path)
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("~/model") == str(tmp_path / "model")
    assert resolve_model("model") == "model"  # a directory, though it could be a hub id
    assert resolve_model(tmp_path, revision="v2") == str(tmp_path)


@pytest.mark.parametrize(("name", "why"), [
    *((name, "") for name in ("./no/such/dir", ".hidden", "/no/such/dir", "a/b/c", "what is this?", "a\0b")),
    # a prompt in the place of the model, and the home of an unknown user, raised pathlib's errors
    ("Write a poem about the sea. " * 20, "File name too long"),
    ("~nobody-of-this-name/model", "Could not determine home directory"),
])  # fmt: skip
def test_no_such_directory(name, why):
    text = re.escape(f"model={name!r:.300} is not a directory ({why}")
    with pytest.raises(CheckpointError, match=f"{text}.*nor a hub id; give the directory that holds config"):
        resolve_model(name)


def test_a_file(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    file.touch()
    monkeypatch.chdir(tmp_path)
    for name in (file, file.name):  # the bare name could be a hub id
        with pytest.raises(CheckpointError, match=re.escape(f"model={str(name)!r} is not a directory (it is a file)")):
            resolve_model(name)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    """A model below another user's home raised pathlib's PermissionError."""
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0)
    try:
        model = str(locked / "model")
        with pytest.raises(CheckpointError, match=re.escape(f"model={model!r} is not a directory (Permission denied)")):
            resolve_model(model)
        with pytest.raises(CheckpointError, match=re.escape(f"{locked / 'config.json'} cannot be read (Permission")):
            read_model_config(locked)
    finally:
        locked.chmod(0o700)


def test_hub_out_of_reach(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = "it is not in the local cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set)."
    demo = " LLM() without a model runs the bundled demo model."
    for option, hint in (("model", demo), ("tokenizer", "")):
        start = rf"^{option}='Qwen/Qwen3-0.0B' is not a directory .*"
        with pytest.raises(CheckpointError, match=start + re.escape(text + hint) + "$") as error:
            resolve_model("Qwen/Qwen3-0.0B", option=option)
        assert error.value.__cause__ is error.value.__context__ is None  # no traceback of the HTTP client's


def test_hub_says_no(monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise huggingface_hub.errors.HFValidationError("repo id is wrong")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=r"model='nobody/nothing' .*the hub says: repo id is wrong") as error:
        resolve_model("nobody/nothing")
    assert error.value.__cause__ is error.value.__context__ is None  # no traceback of the HTTP client's


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "config.json cannot be read (No such file or directory); is it a model's directory"),
        (b'{"architectures": ', "config.json cannot be read (Expecting value"),
        (b"\xff\xfe\x00", "config.json cannot be read ('utf-8' codec"),
        (b"[" * 100_000, "config.json cannot be read (maximum recursion depth exceeded"),
        (b"[1, 2]", "config.json holds no JSON object."),
        (b'{"architectures": ["GemmaFourForCausalLM"]}', "config.json: architectures=['GemmaFourForCausalLM'] must be"),
    ],
)
def test_config_json(content, text, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(text)) as error:
        read_model_config(tmp_path)
    assert error.value.__cause__ is None and (error.value.__suppress_context__ or error.value.__context__ is None)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no FIFOs")
def test_a_fifo_for_config_json(tmp_path):
    """Reading it waited for ever."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read \(it is no regular file\)"):
        read_model_config(str(tmp_path))


SPECIAL = {
    "fifo": lambda path: os.mkfifo(path), "device": lambda path: os.symlink("/dev/zero", path),
    "terminal": lambda path: os.symlink("/dev/tty", path),
}  # fmt: skip
FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "tekken.json", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/rag.jinja", "preprocessor_config.json", "processor_config.json",
    "hf_quant_config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors", "modules.json",
)  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no FIFOs")
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("option", ["model", "tokenizer", "lora"])
def test_special_files(option, kind, tmp_path):
    """transformers waited for ever, or read without end, where a FIFO or a device had the name of a file."""
    adapter = ("adapter_config.json", "adapter_model.safetensors")
    for i, name in enumerate(adapter if option == "lora" else FILES):
        path = shutil.copytree(DEMO_MODEL, tmp_path / str(i))
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).unlink(missing_ok=True)
        SPECIAL[kind](path / name)
        with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is no regular file; a checkpoint has no FIFOs"):
            Config(**{"model": DEMO_MODEL, option: path})


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="has no sockets in folders")
def test_a_socket(tmp_path, monkeypatch):
    path = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    monkeypatch.chdir(path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("chat_template.jinja")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja is no regular file"):
            Config(model=path)


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_links_and_folders_in_a_checkpoint(tmp_path):
    """The hub's cache has links to files; a link to nothing is like no file."""
    for file in DEMO_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").symlink_to(tmp_path / "nothing")
    (tmp_path / "added_tokens.json").symlink_to(tmp_path / "added_tokens.json")
    (tmp_path / "onnx").mkdir()
    assert Config(model=tmp_path).model_path == str(tmp_path)


def test_old_and_new_transformers_write_the_same_model(make_checkpoint, tmp_path):
    """transformers' layout of today and the older layout of the same numbers give one and the same config."""
    path = make_checkpoint()
    new = json.loads(Path(path, "config.json").read_text())
    old = {**new, "torch_dtype": new.get("dtype", "float32"), "rope_scaling": None}
    rope = old.pop("rope_parameters", {})
    old.update(rope_theta=rope.get("rope_theta", new.get("rope_theta")))
    old.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_model_config(tmp_path) == read_model_config(path)


def test_end_of_sequence_ids(tmp_path):
    of_config, file = list(read_model_config(DEMO_MODEL).eos_token_ids), tmp_path / "generation_config.json"
    assert of_config and read_eos_token_ids(tmp_path, of_config) == of_config
    for content, want in (("{}", of_config), ('{"eos_token_id": null}', of_config), ('{"eos_token_id": 7}', [7]),
                          ('{"eos_token_id": [8, 7]}', [8, 7]), ('{"eos_token_id": []}', [])):  # fmt: skip
        file.write_text(content)
        assert read_eos_token_ids(tmp_path, of_config) == want
    for bad in ("</s>", [1.0]):
        file.write_text(json.dumps({"eos_token_id": bad}))
        text = f"generation_config.json: eos_token_id={bad!r} must be a token id or a list of them."
        with pytest.raises(CheckpointError, match=re.escape(text)):
            read_eos_token_ids(tmp_path, of_config)
    file.write_text("{")
    with pytest.raises(CheckpointError, match=re.escape("generation_config.json cannot be read")):
        read_eos_token_ids(tmp_path, of_config)


QWEN3 = {"bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "temperature": 0.6,
         "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"max_new_tokens": 512, "repetition_penalty": 1.05, "min_p": 0.1, "length_penalty": 2, "max_length": 9},
         {"max_tokens": 512, "repetition_penalty": 1.05, "min_p": 0.1}),
        ({"temperature": None, "top_k": None}, {}),
        ({"do_sample": False, "top_k": 50}, {"top_k": 50}),  # do_sample counts in transformers, not in vLLM
        ({}, {}),
    ],
)  # fmt: skip
def test_sampling_defaults(content, want, tmp_path):
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_generation_config(tmp_path) == want
    SamplingParams(**want)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"top_p": 1.5}', "top_p=1.5 must be in (0, 1]. LLM(generation_config='vllm') ignores these defaults."),
        ('{"max_new_tokens": "many"}', "max_new_tokens='many' must be an integer >= 0 or None. LLM(generation_config="),
        ("[]", "generation_config.json holds no JSON object."),
    ],
)
def test_bad_sampling_defaults(content, text, tmp_path):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        read_generation_config(tmp_path)


@pytest.mark.parametrize("fields", [
    {"architectures": 5}, {"architectures": {"0": "Qwen3ForCausalLM"}}, {"rope_parameters": {"full_attention": [3]}},
    {"num_attention_heads": 2**20, "num_key_value_heads": 1, "head_dim": 2**20}, {"text_config": {"rope_scaling": "x"}},
    {"architectures": ["MiniMaxM2ForCausalLM"], "rotary_dim": "x"}, {"quantization_config": [1]},
    {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 10**12},
    {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2000, "num_experts_per_tok": 2, "num_hidden_layers": 5000,
     "moe_intermediate_size": 64, "quantization_config": {"quant_method": "fp8"}},
    {"layer_types": {"0": "full_attention"}}, {"eos_token_id": {"a": 1}}, {"num_hidden_layers": {}},
], ids=str)  # fmt: skip
def test_fields_of_other_forms(fields, make_checkpoint, tmp_path):
    """Raw exceptions, or memory filled with descriptions."""
    raw = json.loads(Path(make_checkpoint(), "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(str(tmp_path))


def test_a_quantization_that_is_no_object(make_checkpoint, tmp_path):
    shutil.copy(Path(make_checkpoint(), "config.json"), tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": "FP8"}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: quantization='FP8' must be an object or None"):
        read_model_config(str(tmp_path))


def test_a_huge_json_file(monkeypatch, make_checkpoint):
    monkeypatch.setattr("nanovllm.utils.checkpoint.MAX_JSON_BYTES", 1 << 8)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read .it has more than 0 MiB"):
        read_model_config(make_checkpoint())
