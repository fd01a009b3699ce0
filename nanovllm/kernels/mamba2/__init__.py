"""The operations of Mamba-2, for ``kernels.select(folder="mamba2")``."""

OPS = {
    "takes_mamba_heads": "mamba2.decode",
    "mamba2_prefill": "mamba2.prefill",
    "mamba2_decode": "mamba2.decode",
    "gate_and_norm": "mamba2.norm",
}
