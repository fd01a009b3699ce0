"""Hand-written kernels, each with a plain twin of the same signature in ``reference.py``.

Owns the choice between them, made once when a layer is built: the Triton ones on CUDA, the twins
anywhere else. Triton is imported only when it is chosen.
"""

from types import ModuleType

import torch

from nanovllm.errors import ConfigError


def select(device_type: str | None = None) -> ModuleType:
    """The module of operations for a device type; None means torch's current default device.

    Raises:
        ConfigError: the device needs Triton, and it is not there.
    """
    if (device_type or torch.get_default_device().type) == "cuda":
        try:
            from nanovllm.kernels import triton_ops
        except ImportError as error:
            raise ConfigError(
                f"a CUDA device needs Triton, which cannot be imported ({error}). Install the package triton "
                "(on Windows triton-windows), or use device='cpu'."
            ) from error
        return triton_ops
    from nanovllm.kernels import reference

    return reference
