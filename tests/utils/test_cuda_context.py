"""Which starts create a CUDA context before torch is imported."""

import pytest

from nanovllm.config import Config
from nanovllm.utils import cuda_context


@pytest.mark.parametrize(
    ("variables", "device", "torch_version", "expected"),
    [
        ({}, "auto", "2.11.0", True), ({}, "cuda", "2.11.0+cu130", True), ({}, "cpu", "2.11.0", False),
        ({}, "auto", "2.11.0+cpu", False), ({"TRITON_INTERPRET": "1"}, "cuda", "2.11.0", False),
        ({"CUDA_VISIBLE_DEVICES": ""}, "auto", "2.11.0", False),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "auto", "2.11.0", True),
    ],
)  # fmt: skip
def test_nvidia_gpus_only(monkeypatch, make_checkpoint, variables, device, torch_version, expected):
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config, created = Config.from_options(make_checkpoint(), {"device": device}), []
    monkeypatch.setattr(cuda_context, "_create", created.append)
    monkeypatch.setattr(cuda_context.metadata, "version", {"torch": torch_version}.get)
    monkeypatch.setattr(cuda_context.os.path, "exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setattr(cuda_context.Thread, "start", lambda thread: thread.run())
    cuda_context.start_cuda_context(config, 3)
    assert created == [3] * expected
    monkeypatch.setattr(cuda_context.os.path, "exists", lambda path: False)
    assert not cuda_context.expects_nvidia(config)


def test_without_a_driver(monkeypatch):
    """The thread ends without a word; torch tells what is wrong."""
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(cuda_context.ctypes, "CDLL", missing)
    cuda_context._create(0)
