"""Triton: an e4m3 weight in 16 bits, for devices and shapes that no FP8 kernel multiplies."""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from . import int4
from .reference import Weight


@triton.jit
def dequantize_kernel(
    data_ptr,  # e4m3 [N, C] contiguous
    scale_ptr,  # fp32 [N, G] contiguous
    y_ptr,  # [N, C] contiguous, written here
    num_channels,
    num_groups,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_C channels of an output feature."""
    pdl_launch_dependents(USE_PDL)
    feature = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < num_channels
    data = tl.load(data_ptr + feature * num_channels + c, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + feature * num_groups + c // (num_channels // num_groups), mask=mask, other=0.0)
    pdl_wait(USE_PDL)  # the output may reuse memory that the kernel before reads
    tl.store(y_ptr + feature * num_channels + c, (data * scale).to(y_ptr.dtype.element_ty), mask=mask)


def has_e4m3(device):
    """Whether Triton converts e4m3 on the device: NVIDIA from sm_89 on, and the interpreter."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def dequantized(weight, dtype):
    """Convert the Weight to `dtype`, without scales; a Weight without scales is returned unchanged."""
    if weight.scale is None:
        return weight
    if weight.has_words:
        return int4.dequantized(weight, dtype)
    if not has_e4m3(weight.data.device):
        return Weight(weight.dequantize(dtype))  # by torch, on GPUs without PDL
    num_features, num_channels = weight.data.shape
    assert weight.data.is_contiguous() and weight.scale.is_contiguous()
    y = torch.empty((num_features, num_channels), dtype=dtype, device=weight.data.device)
    block_c = min(4096, triton.next_power_of_2(num_channels))
    launch(
        dequantize_kernel, (num_features, triton.cdiv(num_channels, block_c)), weight.data, weight.scale, y,
        num_channels, weight.scale.shape[1], BLOCK_C=block_c, num_warps=max(1, min(8, block_c // 512)),
        **launch_options(weight.data.device),
    )  # fmt: skip
    return Weight(y, is_temporary=True)
