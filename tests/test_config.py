"""Options of ``LLM(...)``: defaults and accepted values. The model is a config.json without weights."""

import json
import pickle
import re
from dataclasses import fields

import numpy as np
import pytest
import torch
from conftest import TINY

from nanovllm import CheckpointError, ConfigError
from nanovllm.config import Config


@pytest.fixture
def make_config(tmp_path):
    """make_config(config_json={}, **options) -> Config of the tiny model."""

    def make(config_json=(), **options):
        raw = {**TINY, "architectures": ["Qwen3ForCausalLM"], **dict(config_json)}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return Config.from_options(str(tmp_path), options)

    return make


def test_frozen_and_sent_to_workers(make_config):
    config = make_config()
    with pytest.raises(AttributeError):
        config.num_kvcache_blocks = 7
    assert pickle.loads(pickle.dumps(config)) == config


def test_numpys_numbers_become_pythons(make_config):
    """max_num_seqs=np.int8(100) became a negative size, and a RuntimeError of torch's."""
    options = {
        "max_num_batched_tokens": np.uint16(65535), "max_num_seqs": np.int8(100), "max_model_len": np.int16(500),
        "tensor_parallel_size": np.uint8(1), "kvcache_block_size": np.int16(16), "num_kvcache_blocks": np.int8(100),
        "seed": np.uint64(2**63 - 1),
    }  # fmt: skip
    config = make_config(**options)
    kept = {name: getattr(config, name) for name in options}
    assert kept == options and {type(value) for value in kept.values()} == {int}
    assert make_config(num_kvcache_blocks=np.int8(-1)).num_kvcache_blocks == -1
    assert make_config(enforce_eager=np.True_).enforce_eager is True


def test_dtypes(make_config):
    """vLLM's "half" and "float" were refused."""
    names = {
        "auto": "auto", "bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32",
        "float": "float32", torch.bfloat16: "bfloat16", torch.half: "float16", torch.float: "float32",
    }  # fmt: skip
    assert {given: make_config(dtype=given).dtype for given in names} == names


def test_none_is_the_default(make_config):
    """max_num_seqs=None, enable_prefix_caching=None and seed=None, as scripts for vLLM pass them, were refused."""
    options = [option.name for option in fields(Config) if option.init and option.name != "model"]
    assert make_config(**dict.fromkeys(options)) == make_config()


@pytest.mark.parametrize(("given", "num_seqs", "num_tokens"), [
    ({}, 512, 16384), ({"max_num_batched_tokens": 96}, 96, 96), ({"max_num_batched_tokens": np.int16(1)}, 1, 1),
    ({"max_num_batched_tokens": 4096, "max_num_seqs": None}, 512, 4096), ({"max_num_seqs": 20_000}, 20_000, 20_000),
    ({"max_num_seqs": 3}, 3, 16384), ({"max_num_seqs": 16385, "max_num_batched_tokens": None}, 16385, 16385),
])  # fmt: skip
def test_a_default_fits_itself_to_the_other_limit(make_config, given, num_seqs, num_tokens):
    """LLM(max_num_batched_tokens=96) was refused because of a default."""
    config = make_config(**given)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (num_seqs, num_tokens)
    with pytest.raises(ConfigError, match="max_num_seqs=512 is larger than max_num_batched_tokens=96"):
        make_config(max_num_seqs=512, max_num_batched_tokens=96)


def test_revision_of_a_directory_is_ignored(make_config):
    """As in vLLM: scripts pass revision="main" with any model."""
    assert make_config(revision="main").model_path == make_config().model_path


def test_tokenizer_of_another_model(make_config, tmp_path, monkeypatch):
    """It is found when the engine starts, without weights; the model's own revision is not its revision."""
    asked = []

    def download(name, revision, cache_dir, allow_patterns, ignore_patterns):
        asked.append((name, revision, "*.safetensors" in allow_patterns))
        return str(tmp_path)

    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = make_config()
    assert config.tokenizer_path == config.model_path
    other = tmp_path / "other"
    other.mkdir()
    assert make_config(tokenizer=other).tokenizer_path == str(other)
    assert make_config(tokenizer=other, skip_tokenizer_init=True).tokenizer_path == config.model_path
    assert asked == []
    assert make_config(tokenizer="someone/tokenizer", revision="v2").tokenizer_path == str(tmp_path)
    assert asked == [("someone/tokenizer", None, False)]
    Config("someone/model", tokenizer="someone/model", revision="v2")
    assert asked[1:] == [("someone/model", "v2", True)]
    text = "tokenizer='/no/such' is not a directory (No such file or directory), nor a hub id; give the directory that "
    with pytest.raises(CheckpointError, match=re.escape(text + "holds tokenizer.json.")):
        make_config(tokenizer="/no/such")


def test_default_of_max_model_len(make_config):
    """max_model_len=4096 was lowered to the model's limit without a word: it could not be told from the default."""
    short, long = {"max_position_embeddings": 128}, {"max_position_embeddings": 5000}
    with pytest.raises(ConfigError, match="max_model_len=4096: the model has positions for 128 tokens"):
        make_config(short, max_model_len=4096)
    assert make_config(short).max_model_len == 128
    assert make_config(short, max_model_len=128).max_model_len == 128
    assert make_config(long).max_model_len == 4096
    assert make_config(long, max_model_len=5000).max_model_len == 5000
