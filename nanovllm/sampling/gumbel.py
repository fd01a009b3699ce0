"""The draw in plain PyTorch: noise, argmax, and the step of the requests. Kernels: ``kernels/sampling/gumbel.py``.

B sequences, V vocabulary, R request slots.
"""

from functools import cache

import torch

NOISE_AT_ONCE = 1 << 19  # numbers: fewer cost more calls, more leave the caches
ROUNDING = 1e-4  # largest rounding error of noise


def gumbel_argmax(logits, req_indices, state, thresholds, vocab_start=0, advance=None, candidates=None):
    """Sample one token per sequence: argmax of logit / temperature + Gumbel noise over logits >= threshold.

    Temperature 0 is greedy. The lowest id wins a tie, NaN counts as -inf, padding requests get token 0. The noise
    depends on the request's seed, its length and the id alone.

    Args:
        vocab_start: id of column 0, for a rank that holds part of the vocabulary.
        advance: (last_token, length, sampled_tokens), to call `advance_requests` on the tokens.
        candidates: i32[2, B], written: the results as rows of one tensor, scores by their bits.

    Returns:
        Scores f32[B] and token ids i32[B]; `pick_and_advance` chooses between ranks.
    """
    slots = req_indices.long()
    temperature = state.temperature[slots].unsqueeze(1)
    length = state.length[slots]
    wide = logits.float()
    allowed = wide >= thresholds.unsqueeze(1)  # no NaN is
    scores = wide * torch.where(temperature > 0, 1.0 / temperature, 1.0)
    scores = torch.where(allowed, scores, -torch.inf)
    random = (temperature.squeeze(1) > 0).nonzero().squeeze(1)
    for rows in random.split(max(1, NOISE_AT_ONCE // logits.shape[1])) if len(random) else ():
        seed, own = state.seed[slots[rows]], scores[rows]
        columns = (own > -torch.inf).any(0).nonzero().squeeze(1)
        if len(columns) > logits.shape[1] // 8:  # filters left many of them
            own = torch.where(contenders(own, seed, length[rows], vocab_start), own, -torch.inf)
            columns = (own > -torch.inf).any(0).nonzero().squeeze(1)
        if len(columns):
            own[:, columns] += gumbel_noise(seed, length[rows], columns + vocab_start)
        scores[rows] = own
    tokens = scores.argmax(dim=1)  # the lowest id of a tie
    values = scores.gather(1, tokens[:, None]).squeeze(1)
    tokens = torch.where(length > 0, tokens + vocab_start, 0).int()
    values = torch.where(length > 0, values, 0.0)
    if advance is not None:
        advance_requests(tokens, values, req_indices, *advance)
    if candidates is not None:
        candidates[0], candidates[1] = values.view(torch.int32), tokens
    return values, tokens


def pick_and_advance(candidates, req_indices, last_token, length, sampled_tokens):
    """The ranks' best candidates i32[B], appended to their requests by `advance_requests`.

    The best score wins, the lowest id on a tie. `candidates` i32[ranks, 2, B] are those of `gumbel_argmax`.
    """
    scores, tokens = candidates[:, 0].view(torch.float32), candidates[:, 1]
    tokens = tokens.masked_fill(scores < scores.amax(0), torch.iinfo(torch.int32).max).amin(0)
    advance_requests(tokens, scores.amax(0), req_indices, last_token, length, sampled_tokens)
    return tokens


def advance_requests(tokens, scores, req_indices, last_token, length, sampled_tokens):
    """Append `tokens` i32[B] to their requests: last_token = token, length += 1. Padding requests stay at length 0.

    The host reads them from `sampled_tokens` i32[R], before it launches the next sampling; there it finds -1 where the
    score f32[B] is infinite: every logit is NaN or -inf, or one is +inf. The device goes on with a valid id.
    """
    live = length[req_indices.long()] > 0
    slots, tokens = req_indices.long()[live], tokens.to(last_token.dtype)[live]
    last_token[slots] = tokens
    seen = tokens.masked_fill(scores[live].isinf(), -1)
    sampled_tokens[slots.to(sampled_tokens.device)] = seen.to(sampled_tokens.device)
    length[slots] += 1


def gumbel_noise(seed, length, ids):
    """Standard Gumbel noise f32[B, N] for ascending token `ids` [N], `seed` i32[B, 2] and `length` i32[B].

    -log(e) with exponential e = -log(1 - u), u uniform. Both tails are computed without cancellation, so the noise
    keeps its resolution in large vocabularies.
    """
    return noise_of(random_bits(seed, length, ids))


def noise_of(bits):
    tail, is_lower = uniform_tails(bits)
    exponential = torch.where(is_lower, -torch.log1p(-tail), -torch.log(tail))
    return -torch.log(exponential)


def contenders(scores, seed, length, vocab_start):
    """Mask of the scores f32[B, N] (ids from `vocab_start` on) that may become the largest once noise is added.

    The upper half of the random bits bounds the noise, at half the work and without a logarithm.
    """
    ids = torch.arange(vocab_start, vocab_start + scores.shape[1], device=scores.device)
    (upper,) = random_halves(seed, length, ids, 1)
    highest, lowest = noise_bounds(scores.device)
    bound = scores + highest.index_select(0, upper.flatten()).view(scores.shape)
    best = bound.argmax(1, keepdim=True)
    return bound >= scores.gather(1, best) + lowest[upper.gather(1, best).long()]


@cache
def noise_bounds(device):
    """The highest and the lowest noise f32[2**16] of random bits, by their upper half."""
    upper = torch.arange(1 << 16, device=device) << 16
    return noise_of(upper) + ROUNDING, noise_of(upper | 0xFFFF) - ROUNDING


def random_bits(seed, length, ids):
    """32 random bits (int64) per sequence and id, [B, N]."""
    upper, lower = random_halves(seed, length, ids, 2)
    return upper.long() << 16 | lower


def random_halves(seed, length, ids, num_halves):
    """The upper, or the upper and the lower 16 random bits (int32) per sequence and id, [num_halves, B, N].

    The upper 16 bits of id 8q + 4h + i are half h (0: the upper one) of word i of the Philox block (q, length, 0, 0);
    the lower 16 bits are those of (q, length, 1, 0).
    """
    key = seed.long().unsqueeze(1)  # [B, 1, 2]
    first, last = int(ids[0]), int(ids[-1])
    if last - first + 1 == len(ids):
        octets = torch.arange(first // 8, last // 8 + 1, device=ids.device)
        wanted = slice(first % 8, first % 8 + len(ids))
    else:
        octets, octet_of = torch.unique_consecutive(ids // 8, return_inverse=True)
        wanted = octet_of * 8 + ids % 8
    octets = octets.unsqueeze(0)  # [1, N / 8], of scattered ids up to [1, N]
    part = torch.arange(num_halves, device=ids.device).view(-1, 1, 1)
    counter = octets, length.long().unsqueeze(1), part, torch.zeros_like(octets)
    bits = torch.empty(num_halves, len(seed), octets.shape[1], 8, dtype=torch.int32, device=ids.device)
    for i, word in enumerate(philox_4x32(counter, (key[..., 0], key[..., 1]))):  # [num_halves, B, N / 8]
        bits[..., i], bits[..., 4 + i] = word >> 16, word & 0xFFFF
    return bits.flatten(2)[..., wanted]


def philox_4x32(counter, key):
    """Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), 32-bit words in int64.

    Seven rounds are the fewest that pass BigCrush there.
    """
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = (word & mask for word in counter)
    k0, k1 = (word & mask for word in key)
    for _ in range(7):
        # The products wrap at 2**64; their halves are still those of the full product. Only factors need be masked.
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((high >> 32) ^ (c1 ^ k0)).bitwise_and_(mask), ((low >> 32) ^ (c3 ^ k1)).bitwise_and_(mask)
        c1, c3 = high, low
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1 & mask, c2, c3 & mask


def uniform_tails(bits):
    """Uniform u = (bits + 0.5) / 2**32 as (tail f32 in (0, 0.5], is_lower): u = tail where is_lower, else 1 - tail.

    fp32 holds 1 - u to 32 bits near u = 1, where it cannot hold u.
    """
    is_lower = bits < 2**31
    nearer = torch.where(is_lower, bits, 0xFFFFFFFF - bits)
    return (nearer.float() + 0.5) * 2.0**-32, is_lower
