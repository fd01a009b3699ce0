"""Kernels by subject, each with a PyTorch reference implementation in ``reference.py`` of the same folder.

Owns the table of operations and the choice of backend, made once when a layer is built: Triton on CUDA, the references
elsewhere. Triton is imported only if chosen.
"""

from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace

import torch

from nanovllm.errors import ConfigError

# operation -> module of its kernel; its reference has the same name and signature, in the folder's ``reference.py``
OPS = {
    "parallel_compile": "launch",
    "decode_inputs": "step_inputs",
    "embed": "embedding",
    "rms_norm": "linear.norm",
    "add_post_norm": "linear.norm",
    "add_branch_norms": "linear.norm",
    "qk_rms_norm": "linear.norm",
    "act_and_mul": "linear.silu_and_mul",
    "padded_head_dim": "linear.norm_rope_store",
    "norm_rope_store": "linear.norm_rope_store",
    "rotate_heads": "linear.rotate_heads",
    "fused_linear": "linear.dispatch",
    "qkv_linear": "linear.dispatch",
    "fused_moe": "moe.dispatch",
    "chosen_experts": "moe.dispatch",
    "takes_mxfp4": "moe.dispatch",
    "takes_shared_expert": "moe.dispatch",
    "add_shared_expert": "moe.shared_expert",
    "paged_decode_attention": "attention.decode",
    "paged_prefill_attention": "attention.prefill",
    "packed_segments": "attention.packed",
    "packed_attention": "attention.packed",
    "rotate_qk": "attention.packed",
    "gelu_linear": "linear.dispatch",
    "sigmoid_gate": "linear.silu_and_mul",
    "relu2": "linear.silu_and_mul",
    "soft_cap": "linear.silu_and_mul",
}


def select(device_type: str | None = None, folder: str = "") -> SimpleNamespace:
    """The operations for a device type; None is torch's default device.

    ``folder``: take the operations of a folder that has its own table ``OPS``, such as "gated_delta".

    ``beside(module)`` takes the name of a reference module, such as "nanovllm.sampling.filters", and returns that
    module; for CUDA it returns the module of kernels with the same names, kernels/sampling/filters.py.

    Raises:
        ConfigError: a CUDA device without Triton.
    """
    return _load_ops((device_type or torch.get_default_device().type) == "cuda", folder)


@cache
def _load_ops(use_triton: bool, folder: str) -> SimpleNamespace:
    ops = {}
    for name, module in (import_module(f"nanovllm.kernels.{folder}").OPS if folder else OPS).items():
        subject, _, _ = module.rpartition(".")
        ops[name] = getattr(_load(module if use_triton else f"{subject}.reference".lstrip(".")), name)
    beside = _load_beside if use_triton else import_module
    return SimpleNamespace(**ops, beside=beside)


def _load_beside(reference: str) -> ModuleType:
    return _load(reference.removeprefix("nanovllm."))


def _load(module: str) -> ModuleType:
    try:
        return import_module(f"nanovllm.kernels.{module}")
    except ImportError as error:
        raise ConfigError(
            f"a CUDA device needs Triton, which cannot be imported ({error}). Install the package triton "
            "(on Windows triton-windows), or use device='cpu'."
        ) from error
