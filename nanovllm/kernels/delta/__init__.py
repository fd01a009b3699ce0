"""The operations of a gated delta net, for ``kernels.select(folder="delta")``."""

OPS = {
    "takes_delta_heads": "delta.decode",
    "gated_delta_prefill": "delta.prefill",
    "gated_delta_decode": "delta.decode",
}
