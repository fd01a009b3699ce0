"""JIT compilation of every kernel variant before the first step, in parallel and without running one."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.runner.graph_sizes import grouped_sizes
from nanovllm.runner.kv_scales import calibrate
from nanovllm.runner.memory import allocate_kv_cache
from nanovllm.runner.micro_batches import MIN_TOKENS
from nanovllm.runner.step import StepHeader, StepInput, StepKind

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

# Kernels are chosen by the number of tokens, with borders at multiples of 64 and at powers of two.
WARMUP_SIZES = (1, 2, 4, 8, 15, 16, 31, 32, 63, 64, 127, 128, 192, 255, 256, 511, 512, 1023, 1024, 2048)


def compile_kernels(runner: "ModelRunner", warmup_features: int) -> None:
    """Issue every launch of start-up and of a step inside ``parallel_compile``: kernels are compiled and do not run.

    Of the logits steps those in ``warmup_features``.
    The model has few layers and a KV cache of one block. Weights are uninitialised; every token belongs to the padding
    request slot.
    """
    config, state = runner.config, runner.request_state
    runner.model = runner.make_model(config.model_config.one_layer_of_each_kind())
    runner.warmup_model()
    runner.kv_cache = allocate_kv_cache(runner.model, 1, runner.block_size, runner.kv_dtype, runner.device)
    calibrate(runner)
    # First attention, filters and the longest prefills: their kernels take the longest to compile.
    for size in runner.decode_sizes:
        hidden = runner.model(*runner.decode_inputs(size, config.max_model_len))
        for features in (0, warmup_features):
            runner.sample(hidden, state.batch_req_indices[:size], features)
    for size in grouped_sizes(runner.decode_sizes) if runner.staged_writes.groups.enabled else ():
        runner.model(*runner.decode_inputs(size, config.max_model_len, is_grouped=True))
    for num_tokens in (n for n in reversed(WARMUP_SIZES) if n <= config.max_num_batched_tokens):
        ids = torch.zeros(num_tokens, dtype=torch.int32, device=runner.device)
        cu_seqlens = torch.tensor([0, num_tokens], dtype=torch.int32, device=runner.device)
        context = min(num_tokens, config.max_model_len)
        req_indices = ids[:1] + state.padding_req_idx
        step = StepInput(
            indices=ids[:0], values=ids[:0], input_ids=ids, positions=ids, slot_mapping=ids - 1,
            req_indices=req_indices, context_lens=cu_seqlens[1:].clamp(max=context), cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens.clamp(max=context), logits_indices=ids[:1], sampled_req_indices=req_indices,
        )  # fmt: skip
        header = StepHeader(
            StepKind.PREFILL, num_updates=0, num_sampled=1, num_logits=1, num_tokens=num_tokens, num_seqs=1,
            max_seqlen_q=num_tokens, max_context=context,
        )  # fmt: skip
        runner.run_prefill(header, step, np.empty(0, np.int32))
        # of larger halves a sum may not fit its buffers
        if num_tokens == MIN_TOKENS // 2 and runner.micro_batches.min_tokens is not None:
            inputs = runner.packed_prefill_inputs(header, step, step.logits_indices.long())
            runner.micro_batches.forward(runner.model.model, [inputs, inputs])
    for size in runner.prefill_sizes.short:
        runner.model(*runner.prefill_inputs.short(size))
    for size, _ in runner.prefill_sizes.padded:
        runner.model(*runner.prefill_inputs.padded(size))
    del runner.model, runner.kv_cache
