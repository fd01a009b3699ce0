"""Hand-written kernels, each with a plain twin of the same signature in ``reference.py``.

Owns the choice between them, made once when a layer is built: the Triton ones on CUDA, the twins
anywhere else. Triton is imported only when it is chosen.
"""

from types import ModuleType

import torch


def select(device_type: str | None = None) -> ModuleType:
    """The module of operations for a device type; None means torch's current default device."""
    if (device_type or torch.get_default_device().type) == "cuda":
        from nanovllm.kernels import triton_ops

        return triton_ops
    from nanovllm.kernels import reference

    return reference
