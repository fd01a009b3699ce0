"""Models named by hub id."""

import shutil

import pytest

from nanovllm import LLM
from nanovllm.utils.checkpoint import resolve_model


def test_download(make_checkpoint, monkeypatch):
    """huggingface_hub is asked for the revision, and not for weight formats that are not read."""
    import huggingface_hub

    asked = []

    def download(repo_id, **options):
        asked.append((repo_id, options))
        return make_checkpoint()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    options = {"device": "cpu", "skip_tokenizer_init": True, "num_kvcache_blocks": 4}
    with LLM("Qwen/Qwen3-0.6B", revision="v2", **options) as llm:
        assert llm.config.model_path == make_checkpoint()
    ((repo_id, options),) = asked
    assert repo_id == "Qwen/Qwen3-0.6B" and options["revision"] == "v2"
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern or "pt" in pattern for pattern in options["allow_patterns"])


@pytest.mark.parametrize(("others", "want"), [
    (("model.safetensors", "consolidated.safetensors", "original/model.safetensors"), ["model.safetensors"]),
    (("consolidated.safetensors", "original/model.safetensors"), ["consolidated.safetensors"]),  # the only ones
    (("adapter_model.safetensors", "checkpoint-9/adapter_model.safetensors"), ["adapter_model.safetensors"]),
    (("model.bin",), []),
])  # fmt: skip
def test_weights_are_downloaded_once(tmp_path, monkeypatch, others, want):
    """Copies in folders, and in Mistral's own layout, came along: two or three times the bytes."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    def download(repo_id, allow_patterns, ignore_patterns=None, **options):
        names = ("config.json", "1_Pooling/config.json", *others)
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("someone/tiny") == str(tmp_path)
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.safetensors")] == want
    assert len(list(tmp_path.rglob("config.json"))) == 2  # small files come from folders, too


@pytest.mark.parametrize("revision", [None, "v2"])
def test_cache_without_a_network(make_checkpoint, tmp_path, monkeypatch, revision):
    """A model that was downloaded once is found in the hub's cache."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--someone--tiny"
    shutil.copytree(make_checkpoint(), repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / (revision or "main")).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("someone/tiny", revision) == str(repo / "snapshots" / commit)
