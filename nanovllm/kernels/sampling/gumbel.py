"""Triton: draws tokens, without a softmax.

Owns `sample` (Gumbel-max over the logits at or above a row's threshold, which thresholds.py finds) and `advance_requests`.
Knows nothing of requests; reference.py has the plain twins and says what the noise means.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait

# Chunks that scores are computed in, of all rows together: what the largest devices run at once. More of them would
# have more first scores to find, before which nothing can be left out.
_MAX_CHUNKS = 4096
_FEW_ROWS = 32  # up to so many, an H200 computes all scores in less time than it takes to leave most out


@triton.jit
def fast_log(x, COMPILED: tl.constexpr):
    """The natural logarithm from the hardware's unit, good to 2e-7 near 1 and relatively elsewhere."""
    if COMPILED:
        return libdevice.fast_logf(x)
    else:
        return tl.log(x)


@triton.jit
def wide_product(a, b: tl.constexpr):
    """The upper and lower half of a 64-bit product, by one instruction; tl.philox mostly gets two."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def random_words(key_low, key_high, blocks, length):
    """Four words of 32 random bits per block; see reference.philox_bits."""
    c0 = blocks.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c1, c3 = c2 + length.to(tl.uint32), c2
    for _ in tl.static_range(10):
        high0, low0 = wide_product(c0, 0xD2511F53)
        high2, low2 = wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ key_low, low2, high0 ^ c3 ^ key_high, low0
        key_low = tl.add(key_low, 0x9E3779B9, sanitize_overflow=False)
        key_high = tl.add(key_high, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def gumbel_noise(bits, COMPILED: tl.constexpr):
    """The noise that 32 random bits stand for; see reference.gumbel_noise."""
    is_lower = bits < 0x80000000
    nearer = tl.where(is_lower, bits, ~bits).to(tl.int32, bitcast=True)
    tail = (nearer.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    # -log(1 - tail) loses its digits to the subtraction where tail is small; there the series is exact to fp32.
    series = tail * (1.0 + tail * (0.5 + tail * (1.0 / 3.0 + tail * (0.25 + tail * 0.2))))
    exponential = -fast_log(tl.where(is_lower, 1.0 - tail, tail), COMPILED)
    return -fast_log(tl.where(is_lower & (tail < 0.03125), series, exponential), COMPILED)


@triton.jit
def noise_bound(bits, COMPILED: tl.constexpr):
    """No less than gumbel_noise(bits), the less the more bits: -log(-log(1 - u)) < -log(u), and bits / 2**32 < u.

    32 log(2) - log(bits), and 1e-4 for the errors of the logarithms on either side, which are below 1e-5.
    """
    return 22.18081 - fast_log(bits.to(tl.float32), COMPILED)


@triton.jit
def load_ids(ptr, ids, vocab_start, vocab_size):
    """The logits of `ids`; -inf outside of the row."""
    offs = ids - vocab_start
    return tl.load(ptr + offs, mask=(offs >= 0) & (offs < vocab_size), other=-float("inf"))


@triton.jit
def largest_of_fours(logits, COMPILED: tl.constexpr):
    """Of every four logits the largest, fp32. The hardware's max passes over NaN, the interpreter's complains."""
    x = tl.reshape(logits.to(tl.float32), (logits.shape[0] // 4, 4))
    if not COMPILED:
        x = tl.where(x == x, x, -float("inf"))
    return tl.max(x, axis=1)


@triton.jit
def best_of_four(
    logits_ptr, block, vocab_start, vocab_size, threshold,
    noisy, scale, key_low, key_high, length, COMPILED: tl.constexpr,
):  # fmt: skip
    """The best score and its id among the four ids of a block of noise; (-inf, 2**31 - 1) if none has one."""
    word = tl.arange(0, 4)
    ids = 4 * block + word
    x = load_ids(logits_ptr, ids, vocab_start, vocab_size).to(tl.float32)
    score = x
    if noisy:
        w0, w1, w2, w3 = random_words(key_low, key_high, block + tl.zeros_like(word), length)
        bits = tl.where(word < 2, tl.where(word < 1, w0, w1), tl.where(word < 3, w2, w3))
        score = x * scale + gumbel_noise(bits, COMPILED)
    allowed = (x >= threshold) & (score > -float("inf"))  # NaN fails either comparison
    value = tl.max(tl.where(allowed, score, -float("inf")))
    return value, tl.min(tl.where(allowed & (score == value), ids, 2**31 - 1))


@triton.jit
def best_of_all(
    logits_ptr, first_id, last_id, vocab_start, vocab_size, threshold,
    noisy, scale, key_low, key_high, length, BLOCK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The best score and its id among first_id .. last_id - 1; (-inf, 2**31 - 1) if none has one."""
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_id = tl.full((BLOCK,), 2**31 - 1, tl.int32)
    for first in range(first_id, last_id, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = load_ids(logits_ptr, ids, vocab_start, vocab_size).to(tl.float32)
        score = x
        if noisy:
            w0, w1, w2, w3 = random_words(key_low, key_high, first // 4 + tl.arange(0, BLOCK // 4), length)
            # Joined pairwise, so that the last two axes count the words 0, 1, 2, 3.
            bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))
            score = x * scale + gumbel_noise(bits, COMPILED)
        # Strictly better, so that the lowest id of equals stays; NaN fails either comparison.
        better = (x >= threshold) & (score > best)
        best = tl.where(better, score, best)
        best_id = tl.where(better, ids, best_id)
    value = tl.max(best)
    return value, tl.min(tl.where(best == value, best_id, 2**31 - 1))


@triton.jit
def best_of_likely(
    logits_ptr, first_id, last_id, vocab_start, vocab_size, threshold,
    noisy, temperature, scale, key_low, key_high, length, BLOCK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """What best_of_all returns, bit for bit, from few scores. For one warp, so that branches cost no barrier.

    Noise is expensive, so the score of an id, logit / temperature + noise, is bounded first. A tile has no winner if
    its largest logit with the largest noise there is stays below the best score so far. Nor have four ids if that
    holds for their largest logit with the noise of their fewest random bits. The others have their scores computed,
    the most promising first.

    A bound is the same `logit * scale + noise`, in one fused operation, with more noise, and rounding keeps the order.
    An id is left out only if its score is less than one that was found, or equal to that of a lower id.
    """
    nobody = 2**31 - 1
    best = -3.4028234663852886e38  # the least finite number: nothing wins with -inf
    best_id = nobody
    least = threshold  # the least logit that can win
    logits = load_ids(logits_ptr, first_id + tl.arange(0, BLOCK), vocab_start, vocab_size)
    largest = largest_of_fours(logits, COMPILED)
    for first in range(first_id, last_id, BLOCK):
        # Under way while this tile is worked on. The last of them is another chunk's, or outside of the row.
        logits = load_ids(logits_ptr, first + BLOCK + tl.arange(0, BLOCK), vocab_start, vocab_size)
        contends = largest >= least
        if tl.max(contends.to(tl.int32)) > 0:
            blocks = first // 4 + tl.arange(0, BLOCK // 4)
            bounds = largest
            if noisy:
                w0, w1, w2, w3 = random_words(key_low, key_high, blocks, length)
                fewest = tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3))
                bounds = largest * scale + noise_bound(fewest, COMPILED)
            bounds = tl.where(contends, bounds, -float("inf"))
            bound = tl.max(bounds)
            while bound >= best:
                block = tl.min(tl.where(bounds == bound, blocks, nobody))
                value, token = best_of_four(
                    logits_ptr, block, vocab_start, vocab_size, threshold,
                    noisy, scale, key_low, key_high, length, COMPILED,
                )  # fmt: skip
                if (value > best) | ((value == best) & (token < best_id)):
                    best = value
                    best_id = token
                    if noisy:
                        # 33 * log(2) = 22.9 is the most noise there is; what is more covers the rounding.
                        reached = tl.minimum(best * (1 - 1e-6), best * (1 + 1e-6)) - 24.0
                        least = tl.maximum(threshold, reached * temperature)
                    else:
                        least = tl.maximum(threshold, best)
                beaten = (blocks == block) | ((bounds == best) & (4 * blocks > best_id))
                bounds = tl.where(beaten, -float("inf"), bounds)
                bound = tl.max(bounds)
        largest = largest_of_fours(logits, COMPILED)
    return tl.where(best_id == nobody, -float("inf"), best), best_id


@triton.jit(do_not_specialize_on_alignment=["tiles_per_chunk"])
def sample_chunks_kernel(
    logits_ptr,  # [B, V], written by the LM head
    req_indices_ptr,  # i32[B]
    temperature_ptr,  # the row table's columns, each with its row stride
    seed_ptr,
    length_ptr,
    thresholds_ptr,  # f32[B], written by filter_thresholds
    values_ptr,  # f32[B, chunks], written here: the best score of a chunk
    tokens_ptr,  # i32[B, chunks], written here: its id
    vocab_start,
    vocab_size,
    tiles_per_chunk,
    logits_stride,
    temperature_stride,
    seed_stride,
    length_stride,
    FEW_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPILED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one chunk of ids of one sequence, BLOCK at a time.

    Few rows leave room to compute all scores at once, which takes less time than to choose among them.
    """
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    chunk = tl.program_id(0)
    sequence = tl.program_id(1)
    row = tl.load(req_indices_ptr + sequence).to(tl.int64)
    length = tl.load(length_ptr + row * length_stride)
    if length > 0:
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        threshold = tl.load(thresholds_ptr + sequence)
        key_low = tl.load(seed_ptr + row * seed_stride).to(tl.uint32, bitcast=True)
        key_high = tl.load(seed_ptr + row * seed_stride + 1).to(tl.uint32, bitcast=True)
        logits_ptr += sequence.to(tl.int64) * logits_stride
        noisy = temperature > 0.0
        scale = 1.0 / tl.where(noisy, temperature, 1.0)
        # Tiles begin at multiples of four ids, as blocks of noise do; vocab_start need not.
        first_id = (vocab_start // 4) * 4 + chunk * tiles_per_chunk * BLOCK
        last_id = first_id + tiles_per_chunk * BLOCK
        if FEW_ROWS:
            value, token = best_of_all(
                logits_ptr, first_id, last_id, vocab_start, vocab_size, threshold,
                noisy, scale, key_low, key_high, length, BLOCK, COMPILED,
            )  # fmt: skip
        else:
            value, token = best_of_likely(
                logits_ptr, first_id, last_id, vocab_start, vocab_size, threshold,
                noisy, temperature, scale, key_low, key_high, length, BLOCK, COMPILED,
            )  # fmt: skip
        num_chunks = tl.num_programs(0)
        tl.store(values_ptr + sequence * num_chunks + chunk, value)
        tl.store(tokens_ptr + sequence * num_chunks + chunk, token)


@triton.jit
def sample_combine_kernel(
    values_ptr,  # f32[B, chunks], written by sample_chunks_kernel
    tokens_ptr,  # i32[B, chunks]; 2**31 - 1 where a chunk had nothing to offer
    req_indices_ptr,  # i32[B]
    length_ptr,  # i32[R] strided
    value_ptr,  # f32[B], written here
    token_ptr,  # i32[B], written here
    last_token_ptr,  # i32[R] strided, written here with ADVANCE
    new_length_ptr,  # i32[R] strided, counted up here with ADVANCE
    outbox_ptr,  # i32[2, R] of the host, written here with ADVANCE
    vocab_start,
    num_chunks,
    length_stride,
    last_token_stride,
    new_length_stride,
    outbox_stride,
    ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per sequence."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    sequence = tl.program_id(0)
    row = tl.load(req_indices_ptr + sequence).to(tl.int64)
    value = 0.0
    token = 0
    if tl.load(length_ptr + row * length_stride) > 0:
        offs = tl.arange(0, BLOCK)
        mask = offs < num_chunks
        values = tl.load(values_ptr + sequence * num_chunks + offs, mask=mask, other=-float("inf"))
        tokens = tl.load(tokens_ptr + sequence * num_chunks + offs, mask=mask, other=2**31 - 1)
        value = tl.max(values)
        token = tl.min(tl.where(values == value, tokens, 2**31 - 1))
        # Nothing to choose from (all NaN or -inf): the first id, which is at least a valid one.
        token = tl.where(token == 2**31 - 1, vocab_start, token)
        if ADVANCE:
            tl.store(last_token_ptr + row * last_token_stride, token)
            length = tl.load(new_length_ptr + row * new_length_stride)
            tl.store(outbox_ptr + length % 2 * outbox_stride + row, token)
            tl.store(new_length_ptr + row * new_length_stride, length + 1)
    tl.store(value_ptr + sequence, value)
    tl.store(token_ptr + sequence, token)


def sample(logits, rows, columns, thresholds, vocab_start=0, advance=None):
    """See reference.sample. Two launches, the row update included."""
    batch_size, vocab_size = logits.shape
    device = logits.device
    assert logits.stride(1) == 1 and columns.seed.stride(1) == 1
    value = torch.empty(batch_size, dtype=torch.float32, device=device)
    token = torch.empty(batch_size, dtype=torch.int32, device=device)
    if batch_size == 0:
        return value, token
    few_rows = batch_size <= _FEW_ROWS
    block = 1024 if few_rows else 512
    num_tiles = triton.cdiv(vocab_size + vocab_start % 4, block)
    tiles_per_chunk = triton.cdiv(batch_size * num_tiles, _MAX_CHUNKS)
    num_chunks = triton.cdiv(num_tiles, tiles_per_chunk)
    values = torch.empty((batch_size, num_chunks), dtype=torch.float32, device=device)
    tokens = torch.empty((batch_size, num_chunks), dtype=torch.int32, device=device)
    options = launch_options(device)
    launch(
        sample_chunks_kernel,
        (num_chunks, batch_size),
        logits,
        rows,
        columns.temperature,
        columns.seed,
        columns.length,
        thresholds,
        values,
        tokens,
        vocab_start,
        vocab_size,
        tiles_per_chunk,
        logits.stride(0),
        columns.temperature.stride(0),
        columns.seed.stride(0),
        columns.length.stride(0),
        FEW_ROWS=few_rows,
        BLOCK=block,
        COMPILED=device.type == "cuda",
        num_warps=4 if few_rows else 1,
        **options,
    )
    last_token, new_length, sampled_tokens = advance if advance is not None else (columns.length, columns.length, tokens)
    launch(
        sample_combine_kernel,
        (batch_size,),
        values,
        tokens,
        rows,
        columns.length,
        value,
        token,
        last_token,
        new_length,
        sampled_tokens,
        vocab_start,
        num_chunks,
        columns.length.stride(0),
        last_token.stride(0),
        new_length.stride(0),
        sampled_tokens.stride(0),
        ADVANCE=advance is not None,
        BLOCK=triton.next_power_of_2(num_tiles),
        num_warps=1,
        **options,
    )
    return value, token


@triton.jit(do_not_specialize=["batch_size"])
def advance_rows_kernel(
    tokens_ptr,  # i32[B]
    req_indices_ptr,  # i32[B]
    last_token_ptr,  # i32[R] strided, written here
    length_ptr,  # i32[R] strided, counted up here
    outbox_ptr,  # i32[2, R] of the host, written here
    batch_size,
    last_token_stride,
    length_stride,
    outbox_stride,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < batch_size
    rows = tl.load(req_indices_ptr + offs, mask=mask, other=0).to(tl.int64)
    length = tl.load(length_ptr + rows * length_stride, mask=mask, other=0)
    token = tl.load(tokens_ptr + offs, mask=mask, other=0)
    tl.store(last_token_ptr + rows * last_token_stride, token, mask=length > 0)
    tl.store(outbox_ptr + length % 2 * outbox_stride + rows, token, mask=length > 0)
    tl.store(length_ptr + rows * length_stride, length + 1, mask=length > 0)


def advance_requests(tokens, rows, last_token, length, sampled_tokens):
    """See reference.advance_requests."""
    (batch_size,) = rows.shape
    if batch_size > 0:
        block = 128
        launch(
            advance_rows_kernel,
            (triton.cdiv(batch_size, block),),
            tokens,
            rows,
            last_token,
            length,
            sampled_tokens,
            batch_size,
            last_token.stride(0),
            length.stride(0),
            sampled_tokens.stride(0),
            BLOCK=block,
            **launch_options(rows.device),
        )
