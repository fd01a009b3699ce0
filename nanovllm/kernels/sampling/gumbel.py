"""Triton: draws one token per sequence with the Gumbel-max trick, without a softmax.

Owns `gumbel_argmax` and `pick_and_advance`; their references in nanovllm/sampling/gumbel.py define the noise. Does not
know the filters: they arrive as one threshold per sequence.

B sequences, V vocabulary, R request slots. Octet q: ids 8q .. 8q + 7, whose random bits are two Philox blocks.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait

_MAX_SEGMENTS = 4096  # over all sequences: about the number of programs that the largest GPUs run at once
_BLOCK = 1024  # ids per iteration


@triton.jit
def fast_log(x, COMPILED: tl.constexpr):
    """Natural logarithm by the special function unit: absolute error 2e-7 near 1, relative elsewhere."""
    if COMPILED:
        return libdevice.fast_logf(x)
    else:
        return tl.log(x)


@triton.jit
def wide_product(a, b: tl.constexpr):
    """High and low half of a 64-bit product by one instruction; tl.philox mostly compiles to two."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def random_words(key_low, key_high, octets, length, PART: tl.constexpr):
    """Philox4x32-7: four 32-bit words per octet, of the upper 16 bits of its ids (part 0) or of the lower ones (1)."""
    c0 = octets.to(tl.uint32)
    c2 = tl.full(c0.shape, PART, tl.uint32)
    c3 = tl.zeros_like(c0)
    c1 = c3 + length.to(tl.uint32)
    for _ in tl.static_range(7):
        high0, low0 = wide_product(c0, 0xD2511F53)
        high2, low2 = wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ key_low, low2, high0 ^ c3 ^ key_high, low0
        key_low = tl.add(key_low, 0x9E3779B9, sanitize_overflow=False)
        key_high = tl.add(key_high, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def random_bits(key_low, key_high, octets, length):
    """32 random bits for each id of some octets, [ids]; the reference is random_bits."""
    u0, u1, u2, u3 = random_words(key_low, key_high, octets, length, PART=0)
    l0, l1, l2, l3 = random_words(key_low, key_high, octets, length, PART=1)
    # Upper halves of words belong to ids 0 to 3, lower halves to 4 to 7. Joined so that they flatten in order.
    b0, b1, b2, b3 = two_ids(u0, l0), two_ids(u1, l1), two_ids(u2, l2), two_ids(u3, l3)
    return tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), (8 * octets.shape[0],))


@triton.jit
def two_ids(upper, lower):
    """The bits of two ids, [..., 2], from a word of either part."""
    return tl.join((upper & 0xFFFF0000) | (lower >> 16), (upper << 16) | (lower & 0xFFFF))


@triton.jit
def gumbel_noise(bits, COMPILED: tl.constexpr):
    """32 random bits -> standard Gumbel noise; the reference is gumbel_noise."""
    is_lower = bits < 0x80000000
    nearer = tl.where(is_lower, bits, ~bits).to(tl.int32, bitcast=True)
    tail = (nearer.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    # 1 - tail rounds away a small tail; there the series of -log(1 - tail) is exact to fp32.
    series = tail * (1.0 + tail * (0.5 + tail * (1.0 / 3.0 + tail * (0.25 + tail * 0.2))))
    exponential = -fast_log(tl.where(is_lower, 1.0 - tail, tail), COMPILED)
    return -fast_log(tl.where(is_lower & (tail < 0.03125), series, exponential), COMPILED)


@triton.jit(do_not_specialize_on_alignment=["tiles_per_segment"])
def gumbel_argmax_kernel(
    logits_ptr,  # [B, V], written by the LM head
    req_indices_ptr,  # i32[B]
    temperature_ptr, seed_ptr, length_ptr,  # sampling columns [R], with their strides
    thresholds_ptr,  # f32[B], written by filter_thresholds, or -inf
    values_ptr, tokens_ptr,  # f32, i32[B, segments], written here: best score of each segment, its id
    vocab_start, vocab_size, tiles_per_segment, logits_stride, temperature_stride, seed_stride, length_stride,
    BLOCK: tl.constexpr, COMPILED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (segments, B): a segment of a sequence's ids, in tiles of BLOCK; (-inf, 2**31 - 1) if none is allowed."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    segment = tl.program_id(0)
    sequence = tl.program_id(1)
    req_idx = tl.load(req_indices_ptr + sequence).to(tl.int64)
    length = tl.load(length_ptr + req_idx * length_stride)
    if length > 0:
        temperature = tl.load(temperature_ptr + req_idx * temperature_stride)
        threshold = tl.load(thresholds_ptr + sequence)
        key_low = tl.load(seed_ptr + req_idx * seed_stride).to(tl.uint32, bitcast=True)
        key_high = tl.load(seed_ptr + req_idx * seed_stride + 1).to(tl.uint32, bitcast=True)
        logits_ptr += sequence.to(tl.int64) * logits_stride
        is_random = temperature > 0.0
        scale = 1.0 / tl.where(is_random, temperature, 1.0)
        first_id = (vocab_start // 8) * 8 + segment * tiles_per_segment * BLOCK  # vocab_start may lie inside an octet
        last_id = first_id + tiles_per_segment * BLOCK
        best = tl.full((BLOCK,), -float("inf"), tl.float32)
        best_id = tl.full((BLOCK,), 2**31 - 1, tl.int32)
        for first in range(first_id, last_id, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            offs = ids - vocab_start
            x = tl.load(logits_ptr + offs, mask=(offs >= 0) & (offs < vocab_size), other=-float("inf")).to(tl.float32)
            score = x
            if is_random:
                bits = random_bits(key_low, key_high, first // 8 + tl.arange(0, BLOCK // 8), length)
                score = x * scale + gumbel_noise(bits, COMPILED)
            # Strict: on a tie the lowest id stays. NaN fails either comparison.
            better = (x >= threshold) & (score > best)
            best = tl.where(better, score, best)
            best_id = tl.where(better, ids, best_id)
        value = tl.max(best)
        token = tl.min(tl.where(best == value, best_id, 2**31 - 1))
        num_segments = tl.num_programs(0)
        tl.store(values_ptr + sequence * num_segments + segment, value)
        tl.store(tokens_ptr + sequence * num_segments + segment, token)


@triton.jit(do_not_specialize_on_alignment=["token_ptr"])
def combine_segments_kernel(
    values_ptr, tokens_ptr,  # f32, i32[B, segments], written by gumbel_argmax_kernel
    req_indices_ptr,  # i32[B]
    length_ptr,  # i32[R] strided
    value_ptr, token_ptr,  # f32, i32[B], written here
    last_token_ptr,  # i32[R] strided, like the next two written here with ADVANCE
    new_length_ptr,  # i32[R] strided, incremented
    sampled_tokens_ptr,  # i32[R], pinned host memory
    vocab_start, num_segments, length_stride, last_token_stride, new_length_stride,
    ADVANCE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B,): the best segment of each sequence; with ADVANCE also `advance_requests`."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    sequence = tl.program_id(0)
    req_idx = tl.load(req_indices_ptr + sequence).to(tl.int64)
    value = 0.0
    token = 0
    if tl.load(length_ptr + req_idx * length_stride) > 0:
        offs = tl.arange(0, BLOCK)
        mask = offs < num_segments
        values = tl.load(values_ptr + sequence * num_segments + offs, mask=mask, other=-float("inf"))
        tokens = tl.load(tokens_ptr + sequence * num_segments + offs, mask=mask, other=2**31 - 1)
        value = tl.max(values)
        token = tl.min(tl.where(values == value, tokens, 2**31 - 1))
        # No allowed id (all NaN or -inf): the first one, whose embedding can be looked up. The host gets -1.
        token = tl.where(token == 2**31 - 1, vocab_start, token)
        if ADVANCE:
            tl.store(last_token_ptr + req_idx * last_token_stride, token)
            length = tl.load(new_length_ptr + req_idx * new_length_stride)
            tl.store(sampled_tokens_ptr + req_idx, tl.where(tl.abs(value) < float("inf"), token, -1))
            tl.store(new_length_ptr + req_idx * new_length_stride, length + 1)
    tl.store(value_ptr + sequence, value)
    tl.store(token_ptr + sequence, token)


def gumbel_argmax(logits, req_indices, state, thresholds, vocab_start=0, advance=None, candidates=None):
    """See gumbel_argmax in nanovllm/sampling/gumbel.py. Two launches, `advance` included."""
    batch_size, vocab_size = logits.shape
    device = logits.device
    assert logits.stride(1) == 1 and state.seed.stride(1) == 1
    if candidates is None:
        value = torch.empty(batch_size, dtype=torch.float32, device=device)
        token = torch.empty(batch_size, dtype=torch.int32, device=device)
    else:
        value, token = candidates[0].view(torch.float32), candidates[1]
    if batch_size == 0:
        return value, token
    num_tiles = triton.cdiv(vocab_size + vocab_start % 8, _BLOCK)
    tiles_per_segment = triton.cdiv(batch_size * num_tiles, _MAX_SEGMENTS)
    num_segments = triton.cdiv(num_tiles, tiles_per_segment)
    values = torch.empty((batch_size, num_segments), dtype=torch.float32, device=device)
    tokens = torch.empty((batch_size, num_segments), dtype=torch.int32, device=device)
    options = launch_options(device)
    launch(
        gumbel_argmax_kernel, (num_segments, batch_size),
        logits, req_indices, state.temperature, state.seed, state.length, thresholds, values, tokens,
        vocab_start, vocab_size, tiles_per_segment,
        logits.stride(0), state.temperature.stride(0), state.seed.stride(0), state.length.stride(0),
        BLOCK=_BLOCK, COMPILED=device.type == "cuda", num_warps=4, **options,
    )  # fmt: skip
    last_token, new_length, sampled_tokens = advance if advance is not None else (state.length, state.length, tokens)
    launch(
        combine_segments_kernel, (batch_size,),
        values, tokens, req_indices, state.length, value, token, last_token, new_length, sampled_tokens,
        vocab_start, num_segments,
        state.length.stride(0), last_token.stride(0), new_length.stride(0),
        ADVANCE=advance is not None, BLOCK=triton.next_power_of_2(num_tiles), num_warps=1, **options,
    )  # fmt: skip
    return value, token


@triton.jit(do_not_specialize=["batch_size"])
def pick_and_advance_kernel(
    candidates_ptr,  # i32[SIZE, 2, B], gathered
    req_indices_ptr,  # i32[B]
    tokens_ptr,  # i32[B], written here
    last_token_ptr,  # i32[R] strided, written here
    length_ptr,  # i32[R] strided, incremented here
    sampled_tokens_ptr,  # i32[R], pinned host memory, written here
    batch_size, last_token_stride, length_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < batch_size
    req_idx = tl.load(req_indices_ptr + offs, mask=mask, other=0).to(tl.int64)
    length = tl.load(length_ptr + req_idx * length_stride, mask=mask, other=0)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    token = tl.full((BLOCK,), 2**31 - 1, tl.int32)
    for rank in tl.static_range(SIZE):
        scores_ptr = candidates_ptr + 2 * rank * batch_size
        score = tl.load(scores_ptr + offs, mask=mask, other=0).to(tl.float32, bitcast=True)
        candidate = tl.load(scores_ptr + batch_size + offs, mask=mask, other=0)
        token = tl.where(score > best, candidate, tl.where(score == best, tl.minimum(token, candidate), token))
        best = tl.maximum(best, score)
    tl.store(tokens_ptr + offs, token, mask=mask)
    tl.store(last_token_ptr + req_idx * last_token_stride, token, mask=length > 0)
    tl.store(sampled_tokens_ptr + req_idx, tl.where(tl.abs(best) < float("inf"), token, -1), mask=length > 0)
    tl.store(length_ptr + req_idx * length_stride, length + 1, mask=length > 0)


def pick_and_advance(candidates, req_indices, last_token, length, sampled_tokens):
    """See pick_and_advance in nanovllm/sampling/gumbel.py. One launch."""
    size, _, batch_size = candidates.shape
    assert candidates.is_contiguous()
    tokens, block = torch.empty(batch_size, dtype=torch.int32, device=candidates.device), 128
    launch(
        pick_and_advance_kernel, (triton.cdiv(batch_size, block),),
        candidates, req_indices, tokens, last_token, length, sampled_tokens,
        batch_size, last_token.stride(0), length.stride(0),
        SIZE=size, BLOCK=block, **launch_options(candidates.device),
    )  # fmt: skip
    return tokens
