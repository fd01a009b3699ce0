"""The attention backends, this library's own and flash-attn, and the choice among them.

Knows the limits of each backend; ``attention.py`` has their interface.
"""

from types import SimpleNamespace

import torch

from nanovllm import kernels
from nanovllm.errors import ConfigError
from nanovllm.layers.attention import AttentionBackend


class PagedBackend:
    """This library's attention: the Triton kernels, or their plain references on any device ("sdpa")."""

    def __init__(self, ops: SimpleNamespace, capturable: bool):
        self.ops = ops
        # the references read lengths on the host
        self.capturable = self.captures_prefill = self.shares_prefixes = capturable

    def prefill(self, q, layer, context, sinks):
        return self.ops.paged_prefill_attention(
            q, layer.k_cache, layer.v_cache, context.cu_seqlens_q, context.req_indices, context.context_lens,
            context.block_tables, layer.scale, context.max_seqlen_q, layer.window, layer.kv_scale, sinks, layer.softcap,
        )  # fmt: skip

    def decode(self, q, layer, context, sinks):
        # pdl: the kernel reads req_indices, context_lens, block_tables and groups before griddepcontrol.wait. Legal
        # because the embedding, a launch without PDL, separates it from the kernels that write them.
        return self.ops.paged_decode_attention(
            q, layer.k_cache, layer.v_cache, context.req_indices, context.context_lens, context.block_tables,
            layer.scale, context.max_context, pdl=True, window=layer.window, kv_scale=layer.kv_scale,
            groups=None if layer.window else context.prefix_groups, sinks=sinks, softcap=layer.softcap,
            row_lens=context.row_lens,
        )  # fmt: skip


class FlashAttentionBackend:
    """flash-attn 2 over the block tables; an optional extra. Knows no sinks (``select_backend``)."""

    capturable = True
    captures_prefill = False
    shares_prefixes = False

    def __init__(self):
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen, self.with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def prefill(self, q, layer, context, sinks):
        return self.varlen(
            q, layer.k_cache, layer.v_cache, context.cu_seqlens_q, context.cu_seqlens_k, context.max_seqlen_q,
            context.max_context, **self._options(layer), block_table=context.block_tables[context.req_indices.long()],
        )  # fmt: skip

    def decode(self, q, layer, context, sinks):
        req_indices, context_lens = context.req_indices.long(), context.context_lens
        if context.row_lens is not None:  # each row as a sequence
            req_indices = req_indices[:, None].expand(-1, len(q) // len(req_indices)).flatten()
            context_lens = context.row_lens
        out = self.with_kvcache(
            q.unsqueeze(1), layer.k_cache, layer.v_cache, cache_seqlens=context_lens,
            block_table=context.block_tables[req_indices], **self._options(layer),
        )  # fmt: skip
        return out.squeeze(1)

    @staticmethod
    def _options(layer):
        window_size = (layer.window - 1, 0) if layer.window else (-1, -1)  # tokens before and after, -1 for all
        return dict(softmax_scale=layer.scale, causal=True, window_size=window_size, softcap=layer.softcap)


MAX_GQA_GROUP = 16  # query heads per KV head: the rows of one tl.dot in the decode kernel
MAX_HEAD_DIM = {"triton": 512, "flash_attn": 256}  # tiles of wider heads do not fit into shared memory


def select_backend(
    name: str, device_type: str, dtype: torch.dtype, gqa_group: int = 1, head_dim: int = 128, has_sinks: bool = False
) -> AttentionBackend:
    """The backend for ``attention_backend=name``; "auto" is the fastest that can run (docs/experiments.md).

    Raises:
        ConfigError: the backend cannot run here, or not with the model's heads; the message names the alternatives.
    """
    plain = PagedBackend(kernels.select("cpu"), capturable=False)
    if device_type == "cpu":
        if name not in ("auto", "sdpa"):
            raise ConfigError(f"attention_backend={name!r} needs a CUDA device; on the CPU use 'auto' or 'sdpa'.")
        return plain
    if name == "triton" and gqa_group > MAX_GQA_GROUP:
        raise ConfigError(
            f"attention_backend='triton': the model has {gqa_group} query heads for each KV head, and the kernels take "
            f"at most {MAX_GQA_GROUP}. Use 'auto', 'flash_attn' or 'sdpa'."
        )
    if head_dim > MAX_HEAD_DIM.get(name, head_dim):
        raise ConfigError(
            f"attention_backend={name!r}: the model has heads of {head_dim}, and the kernels take at most "
            f"{MAX_HEAD_DIM[name]}. Use 'auto'{', ' + repr('triton') if head_dim <= MAX_HEAD_DIM['triton'] else ''} or "
            "'sdpa'."
        )
    if name == "sdpa" or (name == "auto" and (gqa_group > MAX_GQA_GROUP or head_dim > MAX_HEAD_DIM["triton"])):
        return plain
    if name == "flash_attn":
        if dtype == torch.float32:
            raise ConfigError("attention_backend='flash_attn' needs dtype bfloat16 or float16, not float32.")
        if has_sinks:
            raise ConfigError(
                "attention_backend='flash_attn': the model has attention sinks, which flash-attn 2 does not know. "
                "Use 'auto', 'triton' or 'sdpa'."
            )
        try:
            return FlashAttentionBackend()
        except ImportError as error:
            raise ConfigError(
                f"attention_backend='flash_attn': the package flash-attn cannot be imported ({error}). Install it with "
                "pip install '.[flash-attn]' in the checkout, or use 'auto', which needs nothing."
            ) from error
    return PagedBackend(kernels.select("cuda"), capturable=True)
