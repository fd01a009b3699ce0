"""Plain twins of the sampling kernels, in PyTorch; they define the filters, the noise and the draw.

B sequences, V vocabulary, R request slots, F stop ids per request.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingState:
    """Columns of the request state that sampling reads, indexed by request slot; strided views are fine.

    Order of the filters: divide the logits by the temperature; top-k keeps the k largest; top-p keeps the shortest
    prefix of the remaining ones, sorted and renormalized, whose probabilities reach p; min-p keeps those at least min_p
    times as probable as the most probable. Ties with the last token kept are kept.
    """

    temperature: torch.Tensor  # f32[R], 0 = greedy
    top_k: torch.Tensor  # i32[R], 0 = off
    top_p: torch.Tensor  # f32[R], 1 = off
    min_p: torch.Tensor  # f32[R], 0 = off
    seed: torch.Tensor  # i32[R, 2], 64-bit Philox key, low half first
    min_len: torch.Tensor  # i32[R], stop_ids may not be sampled while length < min_len
    stop_ids: torch.Tensor  # i32[R, F], padded with -1
    length: torch.Tensor  # i32[R], 0 = padding request slot


def mask_stop_ids(logits, req_indices, state, vocab_start=0):
    """In place: -inf on the stop_ids of requests with length < min_len.

    `vocab_start` is the id of column 0 of `logits` [B, V]; ids outside of its V columns are ignored.
    """
    req_indices = req_indices.long()
    length = state.length[req_indices]
    too_short = (length > 0) & (length < state.min_len[req_indices])
    ids = state.stop_ids[req_indices].long()
    columns = ids - vocab_start
    masked = too_short.unsqueeze(1) & (ids >= 0) & (columns >= 0) & (columns < logits.shape[1])
    sequence, entry = masked.nonzero(as_tuple=True)
    logits[sequence, columns[sequence, entry]] = -torch.inf


def filter_thresholds(logits, req_indices, state):
    """The smallest logit each sequence may sample, f32[B]; -inf for greedy requests and those without a filter.

    `logits` [B, V] are before the temperature and cover the whole vocabulary.
    """
    req_indices = req_indices.long()
    vocab_size = logits.shape[1]
    temperature, top_k = state.temperature[req_indices], state.top_k[req_indices]
    top_p, min_p = state.top_p[req_indices], state.min_p[req_indices]
    thresholds = torch.full((len(req_indices),), -torch.inf, dtype=torch.float32, device=logits.device)
    filtered = (temperature > 0) & (state.length[req_indices] > 0)
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
    prob_before = probs.cumsum(-1) - probs
    kept = (prob_before < top_p) | (top_p >= 1)
    kept[:, 0] = True
    nucleus = ordered.masked_fill(~kept | (ordered < kth), torch.inf).amin(1, keepdim=True)
    has_cut = (last_kept < vocab_size - 1) | (top_p < 1)
    min_p_threshold = torch.where(min_p > 0, ordered[:, :1] + temperature * min_p.log(), -torch.inf)
    thresholds[filtered] = torch.maximum(torch.where(has_cut, nucleus, -torch.inf), min_p_threshold).squeeze(1)
    return thresholds


def gumbel_argmax(logits, req_indices, state, thresholds, vocab_start=0, advance=None):
    """Sample one token per sequence: argmax of logit / temperature + Gumbel noise over logits >= threshold.

    Temperature 0 is greedy. The lowest id wins a tie, NaN counts as -inf, padding requests get token 0. The noise
    depends on the request's seed, its length and the id alone.

    Args:
        vocab_start: id of column 0, for a rank that holds part of the vocabulary.
        advance: (last_token, length, sampled_tokens), to call `advance_requests` on the tokens.

    Returns:
        Scores f32[B] and token ids i32[B]; the best score over the ranks wins.
    """
    slots = req_indices.long()
    temperature = state.temperature[slots].unsqueeze(1)
    length = state.length[slots]
    wide = logits.float()
    allowed = (wide >= thresholds.unsqueeze(1)) & ~wide.isnan()
    scores = torch.where(temperature > 0, wide * (1.0 / temperature), wide)
    random = (temperature.squeeze(1) > 0).nonzero().squeeze(1)
    if len(random) > 0:
        ids = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
        scores[random] = scores[random] + gumbel_noise(state.seed[slots[random]], length[random], ids)
    scores = scores.masked_fill(~allowed, -torch.inf)
    values, tokens = scores.max(dim=1)
    tokens = (scores == values.unsqueeze(1)).int().argmax(dim=1)  # max() does not promise the lowest id of a tie
    tokens = torch.where(length > 0, tokens + vocab_start, 0).int()
    values = torch.where(length > 0, values, 0.0)
    if advance is not None:
        advance_requests(tokens, req_indices, *advance)
    return values, tokens


def advance_requests(tokens, req_indices, last_token, length, sampled_tokens):
    """Append `tokens` i32[B] to their requests: last_token = token, length += 1. Padding requests stay at length 0.

    The host reads them from `sampled_tokens` i32[2, R], at [length % 2, req_idx] with the length before: with one step
    in flight, step n + 1 must not overwrite a token the host has not read.
    """
    live = length[req_indices.long()] > 0
    slots, tokens = req_indices.long()[live], tokens.to(last_token.dtype)[live]
    last_token[slots] = tokens
    index = length[slots].long() % 2, slots
    sampled_tokens[tuple(i.to(sampled_tokens.device) for i in index)] = tokens.to(sampled_tokens.device)
    length[slots] += 1


def gumbel_noise(seed, length, ids):
    """Standard Gumbel noise f32[B, N] for token `ids` [N], `seed` i32[B, 2] and `length` i32[B].

    -log(e) with exponential e = -log(1 - u), u uniform. Both tails are computed without cancellation, so the noise
    keeps its resolution in large vocabularies.
    """
    tail, is_lower = uniform_tails(philox_bits(seed, length, ids))
    exponential = torch.where(is_lower, -torch.log1p(-tail), -torch.log(tail))
    return -torch.log(exponential)


def philox_bits(seed, length, ids):
    """32 random bits (int64) per sequence and id, [B, N]: word id % 4 of the Philox block (id // 4, length, 0, 0)."""
    key = seed.long().unsqueeze(1)  # [B, 1, 2]
    first, last = int(ids[0]) // 4, int(ids[-1]) // 4
    blocks = torch.arange(first, last + 1, device=ids.device).unsqueeze(0)  # [1, N/4]
    zero = torch.zeros_like(blocks)
    words = philox_4x32((blocks, length.long().unsqueeze(1), zero, zero), (key[..., 0], key[..., 1]))
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)  # [B, 4 * blocks]
    return words[:, ids.long() - 4 * first]


def philox_4x32(counter, key):
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), 32-bit words in int64."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = (word & mask for word in counter)
    k0, k1 = (word & mask for word in key)
    for _ in range(10):
        # The products wrap at 2**64; the masked halves are still those of the full product.
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((high >> 32) & mask) ^ c1 ^ k0, ((low >> 32) & mask) ^ c3 ^ k1
        c1, c3 = high & mask, low & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def uniform_tails(bits):
    """Uniform u = (bits + 0.5) / 2**32 as (tail f32 in (0, 0.5], is_lower): u = tail where is_lower, else 1 - tail.

    fp32 holds 1 - u to 32 bits near u = 1, where it cannot hold u.
    """
    is_lower = bits < 2**31
    nearer = torch.where(is_lower, bits, 0xFFFFFFFF - bits)
    return (nearer.float() + 0.5) * 2.0**-32, is_lower
