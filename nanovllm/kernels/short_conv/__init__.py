"""The operations of a short convolution, for ``kernels.select(folder="short_conv")``."""

OPS = {
    "prefill": "short_conv.prefill",
    "decode": "short_conv.decode",
}
