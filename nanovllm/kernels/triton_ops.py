"""The Triton kernels under the names of their plain twins."""

from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.decode_attention import paged_decode_attention
from nanovllm.kernels.inputs import compiling_ahead, decode_inputs
from nanovllm.kernels.linear import fused_linear, project_heads
from nanovllm.kernels.norm import rms_norm
from nanovllm.kernels.prefill_attention import paged_prefill_attention
from nanovllm.kernels.rope_store import norm_rope_store, store_kvcache
from nanovllm.kernels.sample import advance_rows, sample
from nanovllm.kernels.thresholds import logit_thresholds

__all__ = [
    "advance_rows",
    "compiling_ahead",
    "decode_inputs",
    "fused_linear",
    "logit_thresholds",
    "norm_rope_store",
    "paged_decode_attention",
    "paged_prefill_attention",
    "project_heads",
    "rms_norm",
    "sample",
    "silu_and_mul",
    "store_kvcache",
]
