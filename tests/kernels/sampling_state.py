"""Shared by the tests of the sampling kernels: random request states, and the filters by their definition.

The kernels are compiled where there is a GPU, and run under Triton's interpreter elsewhere.
"""

import math
import os
from types import SimpleNamespace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from nanovllm import kernels  # noqa: E402

MODULES = ("masks", "penalties", "filters", "gumbel", "token_logprobs")


def functions(device_type):
    """The functions of all sampling modules, references or kernels."""
    modules = [vars(kernels.select(device_type).beside(f"nanovllm.sampling.{name}")) for name in MODULES]
    return SimpleNamespace(**{name: value for module in modules for name, value in module.items()})


reference, KERNELS = functions("cpu"), functions("cuda")
BOTH = pytest.mark.parametrize("ops", [reference, KERNELS], ids=["reference", "triton"])


def make_state(num_requests, **values):
    """Each value (a number or a list) in every request slot; columns are strided views of one integer table."""
    defaults = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_len=0, stop_ids=-1, length=1)
    table = torch.zeros((num_requests, 32), dtype=torch.int32, device=DEVICE)
    columns, start = {}, 0
    for name, default in defaults.items():
        width = {"seed": 2, "stop_ids": 16}.get(name, 1)
        column = table[:, start : start + width]
        if isinstance(default, float):
            column = column.view(torch.float32)
        if name == "seed":
            column[:] = torch.randint(-(2**31), 2**31 - 1, (num_requests, 2), device=DEVICE)
        else:
            column[:] = default
        if name in values:
            value = torch.as_tensor(values[name], device=DEVICE)
            column[:] = value if value.dim() != 1 else value[:, None]
        columns[name] = column if width > 1 else column[:, 0]
        start += width
    return SimpleNamespace(**columns)


def random_state(num_requests):
    rand = torch.rand(4, num_requests)
    state = make_state(
        num_requests,
        temperature=rand[0] * 1.5,
        top_k=torch.randint(0, 80, (num_requests,)),
        top_p=rand[1] + 0.2,
        min_p=(rand[2] - 0.5).clamp(min=0) * 0.2,
        length=torch.randint(0, 9, (num_requests,)),
        min_len=torch.randint(0, 9, (num_requests,)),
        stop_ids=torch.randint(-1, 100, (num_requests, 16)),
    )
    state.temperature[::5] = 0
    state.top_k[::3] = 0
    return state


def every_request(state):
    return torch.arange(len(state.length), device=DEVICE, dtype=torch.int32)


def no_thresholds(num_sequences):
    return torch.full((num_sequences,), -torch.inf, device=DEVICE)


def kept_ids(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Set of ids that may be sampled, by the definition, in Python floats."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if 0 < top_k < len(logits):
        order = [i for i in order if logits[i] >= logits[order[top_k - 1]]]
    exp_logits = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    kept, sum_exp, total = [], 0.0, sum(exp_logits.values())
    for i in order:
        is_tie = bool(kept) and logits[i] == logits[kept[-1]]
        if top_p < 1 and kept and sum_exp >= top_p * total and not is_tie:
            break
        kept.append(i)
        sum_exp += exp_logits[i]
    return {i for i in kept if exp_logits[i] >= min_p}


def same_selection(logits, expected, actual, slack=2):
    """Both thresholds keep the same ids, up to `slack` of them whose cumulative probability is p to fp32."""
    wide = logits.float()
    differing = (wide >= expected[:, None]) != (wide >= actual[:, None])
    return bool((differing.sum(1) <= slack).all()) and torch.equal(expected.isinf(), actual.isinf())
