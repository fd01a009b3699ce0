"""The operations of a gated delta net, for ``kernels.select(folder="gated_delta")``."""

OPS = {
    "takes_delta_heads": "gated_delta.decode",
    "gated_delta_prefill": "gated_delta.prefill",
    "gated_delta_decode": "gated_delta.decode",
}
