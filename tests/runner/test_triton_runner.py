"""The whole engine on the Triton kernels, interpreted on the CPU: what a GPU runs, without one.

The kernels have their own tests; these show that the engine hands them the right tensors.
"""

import os

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="compiled kernels run in the tests marked gpu"
)

from nanovllm import SamplingParams, kernels  # noqa: E402
from nanovllm.layers.attention import PagedBackend  # noqa: E402
from nanovllm.runner import model_runner  # noqa: E402

PROMPTS = [[5, 6, 7] * 13, [5, 6, 7] * 9, [400]]
OPTIONS = {"max_num_batched_tokens": 32, "max_num_seqs": 3}  # chunks, and a prefix that hits


@pytest.fixture
def triton_everywhere(monkeypatch):
    ops = kernels.select("cuda")
    monkeypatch.setattr(kernels, "select", lambda device_type=None: ops)
    monkeypatch.setattr(model_runner, "select_backend", lambda *_: PagedBackend(ops, capturable=True))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=1.2, seed=4, max_tokens=5, top_k=40, top_p=0.9, min_p=0.01, min_tokens=5),
    ],
    ids=["greedy", "temperature", "filters"],
)
def test_the_engine_on_triton_kernels_gives_the_plain_engines_tokens(params, make_checkpoint, make_llm, request):
    model = make_checkpoint(num_hidden_layers=1)
    plain = make_llm(model=model, **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
    request.getfixturevalue("triton_everywhere")
    interpreted = make_llm(model=model, **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
    assert [out["token_ids"] for out in interpreted] == [out["token_ids"] for out in plain]
