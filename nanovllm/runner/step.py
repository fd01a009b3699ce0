"""One launch as numbers: a header for the hosts and int32 segments for the device.

Owns the layout of both. The header is known to every rank's host and decides which kernels run; the segments are one
array, so that one copy takes them to the device. Knows nothing of queues or models.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np


class StepKind(IntEnum):
    DECODE = 0  # one token per sequence; its inputs are gathered from the request state on the device
    PREFILL = 1  # packed prompts, several query tokens per sequence
    SHORT_PREFILL = 2  # few packed tokens, padded to a captured size; each attends as a single-query sequence
    PADDED_PREFILL = 5  # packed prompts, their tokens and their number padded to a captured size
    SAMPLE = 3  # the sampling of the guided step before, whose masks needed the tokens of the one before that
    CALL = 4  # no step: a call of a ``Residency`` method, as JSON


class StepHeader(NamedTuple):
    """Sizes and flags of a launch.

    Attributes:
        kind: a ``StepKind``.
        num_updates: elements of the request state that change.
        num_sampled: requests that get a token: all of a decode batch; of a prefill those computed to their end.
        num_logits: sequences whose logits they are sampled from; fewer where completions are forked.
        num_tokens: packed tokens, padding included (0 in decode).
        num_seqs: sequences (0 in decode).
        max_seqlen_q: most query tokens of one sequence.
        max_context: upper bound of the tokens that a sequence attends.
        features: OR of the sampled requests' ``SamplingParams.features``: what to do beyond plain sampling.
        num_logprobs: most alternatives that a sampled request wants reported.
        num_adjustments: elements of the adjustment table that change.
        num_masks, num_mask_words: rows of the token masks that change, and their words together.
        num_targets: prompt tokens whose log-probabilities are reported, with ``num_prompt_logprobs`` alternatives.
        num_block_copies: KV blocks that forked completions copy.
        num_groups: groups of sequences with a shared prefix in a decode step; 0: attention is plain.
        can_split: 1 where no sequence of a prefill reads KV blocks that this launch writes for a later one, and nothing
            needs all hidden states: it may run as micro-batches.
    """

    kind: int
    num_updates: int
    num_sampled: int
    num_tokens: int = 0
    num_seqs: int = 0
    max_seqlen_q: int = 1
    max_context: int = 0
    features: int = 0
    num_logits: int = 0
    num_logprobs: int = 0
    num_adjustments: int = 0
    num_masks: int = 0
    num_mask_words: int = 0
    num_targets: int = 0
    num_prompt_logprobs: int = 0
    num_block_copies: int = 0
    num_groups: int = 0
    can_split: int = 0


HEADER_SIZE = len(StepHeader._fields)


class StepInput(NamedTuple):
    """The segments, int32: numpy arrays on the host, tensors on the device. Decode steps have the first two only.

    Attributes:
        indices, values: [num_updates], elements of the request state and their new values.
        input_ids, positions, slot_mapping: [num_tokens].
        req_indices, context_lens: [num_seqs], of a short prefill [num_tokens].
        cu_seqlens_q, cu_seqlens_k: [num_seqs + 1], not in a short prefill; in a padded one the first only.
        logits_indices: [num_logits], packed tokens to sample from; in a padded prefill its sequences, after cuts.
        sampled_req_indices: [num_sampled], the requests that get a token.
        sampled_from: [num_sampled] indices of ``logits_indices``; absent where nothing is forked.
        adjustment_indices, adjustment_values: [num_adjustments], elements of the adjustment table.
        mask_req_indices: [num_masks]; mask_words: [num_mask_words], rows of the token masks.
        target_indices, targets: [num_targets], packed tokens, and the tokens that follow them.
        copy_from, copy_to: [num_block_copies].
    """

    indices: Any
    values: Any
    input_ids: Any = ()
    positions: Any = ()
    slot_mapping: Any = ()
    req_indices: Any = ()
    context_lens: Any = ()
    cu_seqlens_q: Any = ()
    cu_seqlens_k: Any = ()
    logits_indices: Any = ()
    sampled_req_indices: Any = ()
    sampled_from: Any = ()
    adjustment_indices: Any = ()
    adjustment_values: Any = ()
    mask_req_indices: Any = ()
    mask_words: Any = ()
    target_indices: Any = ()
    targets: Any = ()
    copy_from: Any = ()
    copy_to: Any = ()


def segment_sizes(header: StepHeader) -> tuple[int, ...]:
    """Length of each segment, in the order of ``StepInput``; those after the last are absent."""
    u, t, s, n = header.num_updates, header.num_tokens, header.num_seqs, header.num_sampled
    a, m, w = header.num_adjustments, header.num_masks, header.num_mask_words
    if header.kind == StepKind.DECODE:
        return u, u
    if header.kind == StepKind.SAMPLE:
        return u, u, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, a, m, w
    requests = (s, s, s + 1, s + 1)
    if header.kind == StepKind.SHORT_PREFILL:
        requests = (t, t, 0, 0)
    elif header.kind == StepKind.PADDED_PREFILL:
        requests = (s, s, s + 1, 0)
    logits, p, c = header.num_logits, header.num_targets, header.num_block_copies
    return u, u, t, t, t, *requests, logits, n, n if logits < n else 0, a, a, m, w, p, p, c, c


def _aligned(size: int) -> int:
    """Segments start at multiples of 16 bytes: Triton compiles another variant for a less aligned pointer."""
    return -(-size // 4) * 4


def pack(header: StepHeader, step: StepInput) -> np.ndarray:
    """The segments as one int32 array."""
    sizes = segment_sizes(header)
    packed, start = np.zeros(sum(map(_aligned, sizes)), np.int32), 0
    for size, segment in zip(sizes, step, strict=False):
        packed[start : start + size] = segment
        start += _aligned(size)
    return packed


def unpack(header: StepHeader, packed: Any) -> StepInput:
    """The segments as views of ``packed``, an array or a tensor."""
    segments, start, empty = [], 0, packed[:0]
    for size in segment_sizes(header):
        # slicing a tensor costs 2.5 us, and most segments of a decode step are empty
        segments.append(packed[start : start + size] if size else empty)
        start += _aligned(size)
    return StepInput(*segments)


def to_words(header: StepHeader, packed: np.ndarray) -> np.ndarray:
    """Header and segments as one message to the other ranks."""
    return np.concatenate([np.array(header, np.int32), packed])


def from_words(words: np.ndarray) -> tuple[StepHeader, np.ndarray]:
    return StepHeader(*words[:HEADER_SIZE].tolist()), words[HEADER_SIZE:]
