"""References of the sampling kernels, in PyTorch; they define masks, adjustments, filters, noise, draw and logprobs.

B sequences, V vocabulary, R request slots, F stop ids per request, W entries of an adjustment table.
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
    # Read only by the logits steps that a batch needs, so a caller without these steps may leave them out.
    is_masked: torch.Tensor | None = None  # i32[R], 0 = every token is allowed
    is_adjusted: torch.Tensor | None = None  # i32[R], 0 = neither bias nor penalty
    presence_penalty: torch.Tensor | None = None  # f32[R], 0 = off, once for every token generated
    frequency_penalty: torch.Tensor | None = None  # f32[R], 0 = off, times how often it was generated
    repetition_penalty: torch.Tensor | None = None  # f32[R], > 0, 1 = off, for tokens of prompt and output


@dataclass(frozen=True)
class AdjustmentTable:
    """Per request slot the distinct tokens whose logits change, in no order; strided views are fine.

    W is large enough for every token that a request biases, was prompted with or generates. Every tensor-parallel rank
    keeps the whole table.
    """

    num_entries: torch.Tensor  # i32[R]
    num_counted: torch.Tensor  # i32[R], tokens of the sequence that the counts include
    token_ids: torch.Tensor  # i32[R, W], distinct
    counts: torch.Tensor  # i32[R, W], -1 only a bias; 0 in the prompt, not generated; k >= 1 generated k times
    bias: torch.Tensor  # f32[R, W], added to the logit


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
    if candidates is not None:
        candidates[0], candidates[1] = values.view(torch.int32), tokens
    return values, tokens


def pick_and_advance(candidates, req_indices, last_token, length, sampled_tokens):
    """The ranks' best candidates i32[B], appended to their requests by `advance_requests`.

    The best score wins, the lowest id on a tie. `candidates` i32[ranks, 2, B] are those of `gumbel_argmax`.
    """
    scores, tokens = candidates[:, 0].view(torch.float32), candidates[:, 1]
    tokens = tokens.masked_fill(scores < scores.amax(0), torch.iinfo(torch.int32).max).amin(0)
    advance_requests(tokens, req_indices, last_token, length, sampled_tokens)
    return tokens


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
    """Standard Gumbel noise f32[B, N] for consecutive token `ids` [N], `seed` i32[B, 2] and `length` i32[B].

    -log(e) with exponential e = -log(1 - u), u uniform. Both tails are computed without cancellation, so the noise
    keeps its resolution in large vocabularies.
    """
    tail, is_lower = uniform_tails(random_bits(seed, length, ids))
    exponential = torch.where(is_lower, -torch.log1p(-tail), -torch.log(tail))
    return -torch.log(exponential)


def random_bits(seed, length, ids):
    """32 random bits (int64) per sequence and id, [B, N].

    The upper 16 bits of id 8q + 4h + i are half h (0: the upper one) of word i of the Philox block (q, length, 0, 0);
    the lower 16 bits are those of (q, length, 1, 0).
    """
    key = seed.long().unsqueeze(1)  # [B, 1, 2]
    first, last = int(ids[0]), int(ids[-1])  # ids are consecutive
    octets = torch.arange(first // 8, last // 8 + 1, device=ids.device).unsqueeze(0)  # [1, N / 8]
    part = torch.arange(2, device=ids.device).view(2, 1, 1)
    counter = octets, length.long().unsqueeze(1), part, torch.zeros_like(octets)
    bits = torch.empty(len(seed), octets.shape[1], 8, dtype=torch.int64, device=ids.device)
    for i, (upper, lower) in enumerate(philox_4x32(counter, (key[..., 0], key[..., 1]))):  # [2, B, N / 8]
        bits[..., i] = (upper & 0xFFFF0000) | (lower >> 16)
        bits[..., 4 + i] = (upper & 0xFFFF) << 16 | (lower & 0xFFFF)
    return bits.flatten(1)[:, first % 8 : first % 8 + last - first + 1]


def philox_4x32(counter, key):
    """Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), 32-bit words in int64.

    Seven rounds are the fewest that pass BigCrush there.
    """
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = (word & mask for word in counter)
    k0, k1 = (word & mask for word in key)
    for _ in range(7):
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


def apply_token_mask(logits, req_indices, state, token_mask, vocab_start=0):
    """In place: -inf on the tokens that `token_mask` forbids, in sequences with `state.is_masked`.

    Args:
        token_mask: i32[R, ceil(vocabulary / 32)]; bit t % 32 of word t // 32 allows token t. Ids beyond are forbidden.
        vocab_start: id of column 0 of `logits` [B, V], not always a multiple of 32.
    """
    slots = req_indices.long()
    masked = ((state.is_masked[slots] != 0) & (state.length[slots] > 0)).nonzero().squeeze(1)
    if len(masked) > 0:
        ids = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
        words = token_mask[slots[masked]][:, (ids // 32).clamp(max=token_mask.shape[1] - 1)]
        allowed = (words >> (ids % 32) & 1 > 0) & (ids < 32 * token_mask.shape[1])
        logits[masked] = logits[masked].masked_fill(~allowed, -torch.inf)


def adjust_logits(logits, req_indices, state, last_token, table, vocab_start=0):
    """fp32 logits [B, V] with bias and penalties; -inf and NaN stay. First counts the last token, if it is not yet.

    Bias first, then the penalties in the order repetition, frequency, presence. Repetition divides positive logits and
    multiplies the others. Requests without `state.is_adjusted` get a plain copy.

    Args:
        last_token: i32[R], the last of the `state.length` tokens of each sequence.
        table: AdjustmentTable, counted in here.
        vocab_start: id of column 0 of `logits` [B, V]; ids outside of its V columns are counted all the same.
    """
    adjusted = logits.to(torch.float32, copy=True)
    slots = req_indices.long()
    changed = ((state.is_adjusted[slots] != 0) & (state.length[slots] > 0)).nonzero().squeeze(1)
    if len(changed) == 0:
        return adjusted
    slots = slots[changed]
    uncounted = slots[table.num_counted[slots] < state.length[slots]]
    if len(uncounted) > 0:
        count_tokens(last_token[uncounted], uncounted, table)
        table.num_counted[uncounted] = state.length[uncounted]

    num_entries = table.num_entries[slots].unsqueeze(1)
    width = int(num_entries.max())
    columns = table.token_ids[slots, :width].long() - vocab_start
    counts, bias = table.counts[slots, :width], table.bias[slots, :width]
    present = torch.arange(width, device=logits.device) < num_entries
    present &= (columns >= 0) & (columns < logits.shape[1])
    x = adjusted[changed].gather(1, columns.masked_fill(~present, 0)) + bias
    repetition = state.repetition_penalty[slots].unsqueeze(1)
    penalized = torch.where(x > 0, x / repetition, x * repetition)
    penalized = penalized - state.frequency_penalty[slots].unsqueeze(1) * counts
    penalized = penalized - state.presence_penalty[slots].unsqueeze(1) * (counts > 0)
    x = torch.where(counts >= 0, penalized, x)
    sequence, entry = present.nonzero(as_tuple=True)
    adjusted[changed[sequence], columns[sequence, entry]] = x[sequence, entry]
    return adjusted


def count_tokens(tokens, slots, table):
    """Count one generated token, i32[N], for each of the request slots, int64[N]; append it where it is new."""
    num_entries = table.num_entries[slots]
    width = int(num_entries.max())
    is_entry = torch.arange(width, device=slots.device) < num_entries.unsqueeze(1)
    matches = is_entry & (table.token_ids[slots, :width] == tokens.unsqueeze(1))
    is_new = ~matches.any(1)
    entry = torch.where(is_new, num_entries, (matches * torch.arange(width, device=slots.device)).sum(1)).long()
    table.token_ids[slots, entry] = tokens
    table.counts[slots, entry] = torch.where(is_new, 0, table.counts[slots, entry].clamp(min=0)) + 1
    table.bias[slots[is_new], entry[is_new]] = 0.0
    table.num_entries[slots[is_new]] += 1


def token_logprobs(logits, tokens, num_top, scales=None, thresholds=None):
    """Log-probabilities of one token per row and of the `num_top` most probable ones.

    Args:
        logits: [N, V], the whole vocabulary. NaN counts as -inf.
        tokens: int[N].
        num_top: number of most probable tokens, at most V; the lowest id first on a tie.
        scales: f32[N], > 0: logits are multiplied by them, as by an inverse temperature.
        thresholds: f32[N]: logits below count as -inf, before the scales; see `filter_thresholds`.

    Returns:
        i32[N, 2 + 2 * num_top], in one piece for one copy to the host; `unpack_logprobs` takes it apart. Columns: bits
        of the token's fp32 logprob; its rank, the number of logits >= its own; the top ids; the bits of their logprobs.
        In a row of -inf every logprob is -inf.
    """
    x = logits.float()
    x = x.masked_fill(x.isnan(), -torch.inf)
    if thresholds is not None:
        x = x.masked_fill(x < thresholds.unsqueeze(1), -torch.inf)
    if scales is not None:
        x = x * scales.unsqueeze(1)
    own = x.gather(1, tokens.long().unsqueeze(1))
    rank = (x >= own).sum(1, keepdim=True)
    ids = top_ids(x, num_top)
    normalizer = x.logsumexp(1, keepdim=True)
    logprobs = torch.cat((own, x.gather(1, ids.long())), 1) - normalizer
    logprobs = logprobs.masked_fill(logprobs.isnan(), -torch.inf).view(torch.int32)
    return torch.cat((logprobs[:, :1], rank.int(), ids, logprobs[:, 1:]), 1)


def top_ids(x, num_top):
    """Columns i32[N, num_top] of the largest values of fp32 `x` [N, V], the lowest column first on a tie."""
    if num_top == 0:
        return torch.empty((len(x), 0), dtype=torch.int32, device=x.device)
    # topk does not promise the lowest column of a tie, so distinct keys: an integer in the order of the floats, -column
    bits = (x + 0.0).view(torch.int32)  # -0.0 is a tie with 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) - torch.arange(x.shape[1], device=x.device)
    return -keys.topk(num_top).values.int()  # the lower half


def unpack_logprobs(packed):
    """`token_logprobs`' result, a tensor or array, as (logprob f32[N], rank i32[N], ids i32[N, k], top f32[N, k])."""
    num_top = packed.shape[1] // 2 - 1
    float32 = torch.float32 if isinstance(packed, torch.Tensor) else "float32"
    ids, top = packed[:, 2 : 2 + num_top], packed[:, 2 + num_top :]
    return packed[:, 0].view(float32), packed[:, 1], ids, top.view(float32)
