"""The comparison of a kernel with its twin: results, and all memory that the arguments lie in.

`inside` surrounds an argument with NaN in memory: a kernel that reads beyond it gets NaN, and one that writes beyond it
removes NaN.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from histories import at_night

from . import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float32, torch.bfloat16]


class Row(NamedTuple):
    """A kernel's row in a table of tests."""

    kernel: Callable
    twin: Callable
    make: Callable[..., tuple]  # make(dtype, *case): the arguments of both
    cases: Sequence[tuple]
    scale: float = 1.0  # of the tolerance
    overwrites: int | None = None  # index of the argument in which the kernel, unlike its twin, leaves its result
    dtypes: Sequence[Any] = DTYPES
    gpu: bool = False  # too large for the interpreter


def inside(x, before=3, after=3):
    """x [N, C] as columns of a wider tensor, the others NaN, or a negative number far from every id."""
    poison = torch.nan if x.is_floating_point() else -(10**6)
    wide = torch.full((len(x), before + x.shape[1] + after), poison, dtype=x.dtype, device=x.device)
    columns = wide[:, before : before + x.shape[1]]
    columns.copy_(x)
    return columns


def tensors_of(value):
    """The tensors in nested arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, (tuple, list)) else vars(value).values() if hasattr(value, "__dict__") else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def memory_of(tensor):
    """All elements of a tensor's storage."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.element_size()
    return torch.tensor([], dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (size,), (1,))


def assert_close(actual, expected, scale=1.0):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    tolerance = TOLERANCE.get(expected.dtype, 0.0) * scale
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def check(kernel, twin, args, scale=1.0, overwrites=None):
    """Run both on arguments of their own, compare, return the kernel's result."""
    theirs = copy.deepcopy(args)  # with strides, and views of one tensor remain views of one
    expected, actual = twin(*theirs), kernel(*args)
    for pair in zip(tensors_of(actual), tensors_of(expected), strict=True):
        assert_close(*pair, scale)
        assert not pair[1].is_floating_point() or pair[1].isfinite().all()
    if overwrites is not None:  # write where the kernel should have written
        storage = args[overwrites].untyped_storage()
        assert actual.untyped_storage().data_ptr() == storage.data_ptr()
        place = memory_of(theirs[overwrites]).as_strided(actual.shape, actual.stride(), actual.storage_offset())
        place.copy_(expected)
    for pair in zip(tensors_of(args), tensors_of(theirs), strict=True):
        assert_close(*map(memory_of, pair), scale)
    return actual


def each_once(*lists):
    """Tuples in which each value of each list occurs; on a GPU and at night all combinations."""
    if at_night(True):
        return list(itertools.product(*lists))
    return [tuple(values[i % len(values)] for values in lists) for i in range(max(map(len, lists)))]


def cases_of(table):
    """(name, case, dtype) for pytest.mark.parametrize."""
    return [
        pytest.param(name, case, dtype, marks=[pytest.mark.gpu] * row.gpu)
        for name, row in table.items()
        for case, dtype in each_once(row.cases, row.dtypes)
    ]


def call(check, *args, gpu=False, splits=None, **options):
    """A case of a table of calls: parameters ``check, args, options, splits``."""
    options_shown = (f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())
    shown = ", ".join([*(str(arg)[:60] for arg in args), *options_shown])
    name = f"{check.__name__.removeprefix('check_')}({shown}){'' if splits is None else splits}"
    return pytest.param(check, args, options, splits, id=name, marks=[pytest.mark.gpu] * gpu)


def check_row(row, case, dtype):
    return check(row.kernel, row.twin, row.make(dtype, *case), row.scale, row.overwrites)


def ids(num, limit):
    """i32 [num] of random numbers below a limit."""
    return torch.randint(0, limit, (num,), device=DEVICE, dtype=torch.int32)
