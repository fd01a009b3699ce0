"""Plain twins of the sampling kernels, in PyTorch alone: the filters, the noise, and the draw.

Same names and signatures as the kernels. B sequences of a step, V vocabulary, R request slots.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingState:
    """The columns of the row table that sampling reads; each indexed by row, strided views welcome.

    The meaning of the filters, in this order: logits are divided by the temperature; top-k keeps the k largest;
    top-p keeps the shortest head of what top-k left, renormalised, that holds at least the mass p; min-p keeps
    what is at least min_p times as likely as the likeliest. Tokens that tie with the last one kept are kept too.
    """

    temperature: torch.Tensor  # f32[R], 0 = greedy
    top_k: torch.Tensor  # i32[R], 0 = off
    top_p: torch.Tensor  # f32[R], 1 = off
    min_p: torch.Tensor  # f32[R], 0 = off
    seed: torch.Tensor  # i32[R, 2], the halves of a 64-bit key, low half first
    min_length: torch.Tensor  # i32[R], while length < min_length the forbidden ids may not be sampled
    forbidden: torch.Tensor  # i32[R, F], padded with -1
    length: torch.Tensor  # i32[R], 0 = null row


def filter_thresholds(logits, rows, columns, vocab_start=0):
    """The smallest logit of each sequence that its filters let through, f32[B]; -inf where nothing is filtered.

    Thresholds are in units of `logits` [B, V], before the temperature. Greedy rows need no filter: -inf. First sets
    the forbidden ids of rows shorter than their min_length to -inf, in `logits` itself. `vocab_start` is the
    id of the first column: forbidden ids elsewhere are left to others (filters need the whole vocabulary).
    """
    rows = rows.long()
    vocab_size = logits.shape[1]

    ids = columns.forbidden[rows].long() - vocab_start  # [B, F]
    too_short = columns.length[rows] < columns.min_length[rows]
    banned = too_short.unsqueeze(1) & (columns.forbidden[rows] >= 0) & (ids >= 0) & (ids < vocab_size)
    batch_index = torch.arange(len(rows), device=rows.device).unsqueeze(1).expand_as(ids)
    logits[batch_index[banned], ids[banned]] = -torch.inf

    temperature, top_k = columns.temperature[rows], columns.top_k[rows]
    top_p, min_p = columns.top_p[rows], columns.min_p[rows]
    thresholds = torch.full((len(rows),), -torch.inf, dtype=torch.float32, device=logits.device)
    filtered = (temperature > 0) & (columns.length[rows] > 0)
    filtered &= ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)
    if not filtered.any():
        return thresholds
    temperature, top_k = temperature[filtered, None], top_k[filtered, None].long()
    top_p, min_p = top_p[filtered, None], min_p[filtered, None]

    wide = logits[filtered].float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ordered = wide.sort(dim=-1, descending=True).values
    last_kept = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size) - 1
    kth = ordered.gather(1, last_kept)
    probs = (ordered.double() / temperature).masked_fill(ordered < kth, -torch.inf).softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    kept = (mass_before < top_p) | (top_p >= 1)
    kept[:, 0] = True
    nucleus = ordered.masked_fill(~kept | (ordered < kth), torch.inf).amin(1, keepdim=True)
    cuts = (last_kept < vocab_size - 1) | (top_p < 1)
    likely_enough = torch.where(min_p > 0, ordered[:, :1] + temperature * min_p.log(), -torch.inf)
    thresholds[filtered] = torch.maximum(torch.where(cuts, nucleus, -torch.inf), likely_enough).squeeze(1)
    return thresholds


def sample(logits, rows, columns, thresholds, vocab_start=0, advance=None):
    """Draw one token per sequence: the argmax of logit / temperature + Gumbel noise over logits >= threshold.

    Temperature 0 takes the largest logit, the lowest id among equals. Returns (values f32[B], tokens i32[B]):
    the winning score and its id, so that ranks which hold parts of the vocabulary (`vocab_start` is the first
    id here) settle on a winner by comparing values. The noise of an id depends on the row's seed, the row's
    length and the id alone. Null rows give token 0. NaN counts as -inf.

    `advance=(last_token, length, sampled_tokens)` also calls advance_requests on the result (for a whole vocabulary).
    """
    rows_ = rows.long()
    temperature = columns.temperature[rows_].unsqueeze(1)
    length = columns.length[rows_]
    wide = logits.float()
    allowed = (wide >= thresholds.unsqueeze(1)) & ~wide.isnan()
    scores = torch.where(temperature > 0, wide * (1.0 / temperature), wide)
    drawn = (temperature.squeeze(1) > 0).nonzero().squeeze(1)
    if len(drawn) > 0:
        ids = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
        noise = gumbel_noise(columns.seed[rows_[drawn]], length[drawn], ids)
        scores[drawn] = scores[drawn] + noise
    scores = scores.masked_fill(~allowed, -torch.inf)
    values, tokens = scores.max(dim=1)
    tokens = (scores == values.unsqueeze(1)).int().argmax(dim=1)  # max() promises no particular one of equals
    tokens = torch.where(length > 0, tokens + vocab_start, 0).int()
    values = torch.where(length > 0, values, 0.0)
    if advance is not None:
        advance_requests(tokens, rows, *advance)
    return values, tokens


def advance_requests(tokens, rows, last_token, length, sampled_tokens):
    """Append `tokens` i32[B] to their rows: last_token[row] = token, length[row] += 1; null rows stay null.

    The host finds them in sampled_tokens i32[2, R], its memory: each at [length % 2, row], so that it may read one while the
    next is written.
    """
    rows, tokens = rows.long(), tokens.to(last_token.dtype)
    live = length[rows] > 0
    rows, tokens = rows[live], tokens[live]
    last_token[rows] = tokens
    places = length[rows].long() % 2, rows
    sampled_tokens[tuple(place.to(sampled_tokens.device) for place in places)] = tokens.to(sampled_tokens.device)
    length[rows] += 1


def gumbel_noise(seed, length, ids):
    """Standard Gumbel noise f32[B, N] for the token `ids` [N] of sequences with `seed` i32[B, 2], `length` i32[B].

    -log(e), where e is exponential: e = -log(1 - u) for a uniform u. Both tails are formed without
    cancellation, so that the noise of one of 150,000 tokens has as fine a grain as of one of two.
    """
    tail, is_lower = uniform_tails(philox_bits(seed, length, ids))
    exponential = torch.where(is_lower, -torch.log1p(-tail), -torch.log(tail))
    return -torch.log(exponential)


def philox_bits(seed, length, ids):
    """32 random bits (as int64) per sequence and id, [B, N]: word id % 4 of the block at (id // 4, length, 0, 0)."""
    key = seed.long().unsqueeze(1)  # [B, 1, 2]
    first, last = int(ids[0]) // 4, int(ids[-1]) // 4
    blocks = torch.arange(first, last + 1, device=ids.device).unsqueeze(0)  # [1, N/4]
    zero = torch.zeros_like(blocks)
    words = philox_4x32((blocks, length.long().unsqueeze(1), zero, zero), (key[..., 0], key[..., 1]))
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)  # [B, 4 * blocks]
    return words[:, ids.long() - 4 * first]


def philox_4x32(counter, key):
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) on int64 tensors.

    `counter` is four and `key` two words of 32 bits; returns four words, each in 0 .. 2**32 - 1.
    """
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = (word & mask for word in counter)
    k0, k1 = (word & mask for word in key)
    for _ in range(10):
        # The products wrap at 2**64; their two halves, masked, are right all the same.
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((high >> 32) & mask) ^ c1 ^ k0,
            high & mask,
            ((low >> 32) & mask) ^ c3 ^ k1,
            low & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def uniform_tails(bits):
    """A uniform u = (bits + 0.5) / 2**32 of the open interval (0, 1) as its distance from the nearer end.

    Returns (tail f32 in (0, 0.5], is_lower): u = tail where is_lower, else u = 1 - tail. fp32 cannot hold a u near 1 to
    32 bits, but it can hold 1 - u.
    """
    is_lower = bits < 2**31
    nearer = torch.where(is_lower, bits, 0xFFFFFFFF - bits)
    return (nearer.float() + 0.5) * 2.0**-32, is_lower
