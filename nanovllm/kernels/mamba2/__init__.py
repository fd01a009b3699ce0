"""The operations of Mamba-2, for ``kernels.select(folder="mamba2")``."""

OPS = {
    "takes_heads": "mamba2.decode",
    "prefill": "mamba2.prefill",
    "decode": "mamba2.decode",
}
