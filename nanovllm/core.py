"""The sequence, and the two batches that the scheduler forms: shared by engine and runner.

Owns the sequence's tokens, counters and status, and the form of a batch. A batch is the message of a step: plain
columns, from which every rank's runner prepares its inputs. Knows neither queues nor devices.

Token ranges of a running sequence::

    [0, num_cached)      keys and values were found in the prefix cache
    [0, num_computed)    the launch that writes their keys and values was issued (prefill; see the scheduler)
    [0, num_tokens)      ids known to the host
    [0, num_scheduled)   the same plus the tokens being sampled by a step in flight
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from nanovllm.messages import Attachment, Messages, attached
from nanovllm.messages.sampling import SamplingColumns
from nanovllm.outputs import FinishReason
from nanovllm.readouts import Readout, ReadoutBatch, merged
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One prompt and one completion of it.

    Args:
        prompt_token_ids: at least one token.
        sampling_params: of the request.
        seq_id: unique in its engine; also the order of arrival.
        block_size: tokens per KV block.
        seed: 64-bit key of its sampling noise.
        min_tokens_stop_ids: ids that may not be sampled among its first ``min_tokens`` tokens.
        group_id: the same for all completions of one prompt; they share its blocks. None: seq_id.

    Attributes:
        readout, attachment: results and inputs of its prompt besides tokens, or None.
        allowed_mask: tokens it may sample, a bit each, int32 [ceil(V / 32)], or None.
        req_idx: while it runs, its request slot: its row in every table of host and devices; else -1.
    """

    def __init__(self, prompt_token_ids: ListLike[int] | np.ndarray, sampling_params: SamplingParams = SamplingParams(),
                 seq_id: int = 0, block_size: int = 256, seed: int = 0,
                 min_tokens_stop_ids: tuple[int, ...] = (), group_id: int | None = None):
        self.seq_id = seq_id
        self.group_id = seq_id if group_id is None else group_id
        self.status = SequenceStatus.WAITING
        self.sampling_params = sampling_params
        self.seed = seed
        self.min_tokens_stop_ids = min_tokens_stop_ids
        self.block_size = block_size
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_cached_tokens = 0  # tokens found in the prefix cache at its first admission
        self.num_computed_tokens = 0  # computed tokens among those known at admission; decoding does not change it
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # hashes of its leading full blocks, computed on demand
        self.num_registered_blocks = 0  # leading blocks that the prefix cache knows
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.arrived_at = self.entered_at = self.prefilled_at = 0.0  # perf_counter, in seconds; see metrics.py
        self.readout: Readout | None = None
        self.attachment: Attachment | None = None
        self.allowed_mask: np.ndarray | None = None
        self.req_idx = -1
        self._table: Any = None  # the scheduler's ``SequenceTable``
        self._token_ids = np.array(prompt_token_ids, np.int32)  # its tokens while it has no request slot

    def attach(self, table: Any, req_idx: int) -> None:
        self._table, self.req_idx, self._token_ids = table, req_idx, np.empty(0, np.int32)

    def detach(self) -> None:
        self._token_ids = self.tokens(0, self.num_tokens).copy()
        self._table, self.req_idx = None, -1

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids) if self._table is None else int(self._table.num_tokens[self.req_idx])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop) as int32."""
        return (self._token_ids if self._table is None else self._table.tokens[self.req_idx])[start:stop]

    @property
    def token_ids(self) -> list[int]:
        return self.tokens(0, self.num_tokens).tolist()

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens(0, self.num_prompt_tokens).tolist()

    @property
    def completion_token_ids(self) -> list[int]:
        return self.tokens(self.num_prompt_tokens, self.num_tokens).tolist()

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_num_tokens(self) -> int:
        assert self.sampling_params.max_tokens is not None  # the request layer has resolved it
        return self.num_prompt_tokens + self.sampling_params.max_tokens

    @property
    def min_num_tokens(self) -> int:
        """Lower bound of its final length, unless it fails or is aborted."""
        params = self.sampling_params
        may_stop = not params.ignore_eos or params.stop_token_ids or params.ends_by_content
        return self.num_prompt_tokens + params.min_tokens if may_stop else self.max_num_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether it generates anything; otherwise its prompt is computed for the readout alone."""
        return self.sampling_params.max_tokens != 0

    @property
    def pending_readout(self) -> Readout | None:
        """The readout, unless its results are known: the sequence is resumed after preemption."""
        return self.readout if self.num_completion_tokens == 0 else None

    def is_read_at(self, stop: int) -> bool:
        """Whether the hidden state of its token before ``stop`` is sampled from, or is all that its readout reads."""
        is_end = self.is_sampled and stop == self.num_tokens
        return is_end or (self.readout is not None and self.readout.takes_last(stop))

    @property
    def max_cached_tokens(self) -> int:
        """Upper bound of the prefix-cache hit. Positions whose hidden states are read must be computed."""
        last = self.num_tokens - 1
        return last if (readout := self.pending_readout) is None else min(last, readout.first_needed)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    def block(self, i: int) -> np.ndarray:
        """Token ids of block i, int32 [<= block_size]."""
        return self.tokens(i * self.block_size, min((i + 1) * self.block_size, self.num_tokens))


@dataclass(frozen=True)
class NewSequences:
    """Columns of the n sequences that get a request slot with a batch."""

    req_indices: np.ndarray  # int32 [n]
    num_tokens: np.ndarray  # int32 [n], known now
    num_prompt_tokens: np.ndarray  # int32 [n]
    num_blocks: np.ndarray  # int32 [n]
    block_ids: np.ndarray  # int32 [num_blocks.sum()], their block tables, concatenated
    seeds: np.ndarray  # uint64 [n]
    sampling: SamplingColumns

    @classmethod
    def of(cls, seqs: ListLike[Sequence]) -> "NewSequences":
        return cls(
            _int32(seq.req_idx for seq in seqs),
            _int32(seq.num_tokens for seq in seqs),
            _int32(seq.num_prompt_tokens for seq in seqs),
            _int32(len(seq.block_table) for seq in seqs),
            _int32(chain.from_iterable(seq.block_table for seq in seqs)),
            np.fromiter((seq.seed for seq in seqs), np.uint64),
            SamplingColumns.of(seqs),
        )

    def __len__(self) -> int:
        return len(self.seeds)


@dataclass(frozen=True)
class PrefillBatch:
    """Compute tokens [starts[i], stops[i]) of S sequences; sample for the N requests whose last token is among them.

    Sequences whose last hidden state is sampled from or read out come first. Request ``req_indices[j]`` is sampled from
    the logits of sequence ``sampled_from[j]``: itself, or the one it was forked from.
    """

    is_decode: ClassVar[bool] = False
    num_rows: ClassVar[int] = 1  # rows of logits for each sampled request
    req_indices: np.ndarray  # int32 [N], the sampled requests
    seq_ids: np.ndarray  # int64 [N]
    sampled_from: np.ndarray  # int32 [N], in [0, S)
    chunk_req_indices: np.ndarray  # int32 [S], the computed sequences
    starts: np.ndarray  # int32 [S]
    stops: np.ndarray  # int32 [S]
    token_ids: np.ndarray  # int32 [sum(stops - starts)], packed
    num_read: int  # sequences, the first ones, whose last hidden state is read
    new: NewSequences  # sequences admitted by this batch
    messages: Messages = field(default_factory=dict)  # for parts of the runner
    readouts: tuple[ReadoutBatch, ...] = ()  # results besides tokens
    seqs: ListLike[Sequence] = ()  # [S]; on the host only

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "seqs": ()}

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N], as of a ``DecodeBatch``."""
        return self.stops[self.sampled_from]

    @property
    def ends(self) -> list[Sequence]:
        """Sequences that end with this batch, because they sample nothing. Host."""
        stops = zip(self.seqs, self.stops.tolist(), strict=True)
        return [seq for seq, stop in stops if not seq.is_sampled and stop == seq.num_tokens]

    @classmethod
    def of(cls, chunks: ListLike[tuple[Sequence, int, int]], sampled: ListLike[tuple[Sequence, Sequence]],
           new: ListLike[Sequence], messages: Messages) -> "PrefillBatch":
        """From at least one chunk (sequence, start, stop). ``sampled``: requests, and whose last logits each gets."""
        is_read = [seq.is_read_at(stop) for seq, _, stop in chunks]
        chunks = [chunks[i] for i in np.argsort(np.logical_not(is_read), kind="stable")]
        seqs = [seq for seq, _, _ in chunks]
        place = {seq.req_idx: i for i, seq in enumerate(seqs)}
        return cls(
            _int32(seq.req_idx for seq, _ in sampled),
            np.fromiter((seq.seq_id for seq, _ in sampled), np.int64),
            _int32(place[origin.req_idx] for _, origin in sampled),
            _int32(seq.req_idx for seq in seqs),
            _int32(start for _, start, _ in chunks),
            _int32(stop for _, _, stop in chunks),
            np.concatenate([seq.tokens(start, stop) for seq, start, stop in chunks]),
            sum(is_read),
            NewSequences.of(new),
            messages | attached((seq.attachment, start, stop) for seq, start, stop in chunks),
            merged((seq.pending_readout, seq.seq_id, start, stop) for seq, start, stop in chunks),
            seqs,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def needs_every_state(self) -> bool:
        """Whether other hidden states than the last ones are read."""
        return any(each.needs_every_state for each in self.readouts)


@dataclass(frozen=True)
class DecodeBatch:
    """Compute the last token of every sequence and sample the next."""

    is_decode: ClassVar[bool] = True
    readouts: ClassVar[tuple[ReadoutBatch, ...]] = ()
    req_indices: np.ndarray  # int32 [B]
    seq_ids: np.ndarray  # int64 [B]
    lengths: np.ndarray  # int32 [B], tokens known before this step samples one; also the lengths of the contexts
    new_blocks: np.ndarray  # int32 [n, 3]: a request slot, the end of its block table, the block put there
    num_rows: int = 1  # rows computed for each sequence: its last token, and guesses of the next ones
    messages: Messages = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.req_indices) * self.num_rows


Batch = PrefillBatch | DecodeBatch


def _int32(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int32)
