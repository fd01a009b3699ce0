"""The operations of a gated delta net, for ``kernels.select(folder="gated_delta")``."""

OPS = {
    "takes_heads": "gated_delta.decode",
    "prefill": "gated_delta.prefill",
    "decode": "gated_delta.decode",
}
