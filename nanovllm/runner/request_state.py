"""State of the running requests on the device, and the host's staged writes to it.

Owns one int32 buffer on the device. Its head has the request slots and the groups of the current decode batch; the rest
is a table with a row per request slot: last token, length, sampling parameters, block table. A decode step reads its
inputs from this state and writes its tokens to it, so the host sends only what changes, and nothing while nothing does.
"""

from array import array
from itertools import accumulate
from struct import Struct

import numpy as np
import torch

from nanovllm.engine.sequence import INT32_MAX, Sequence
from nanovllm.kernels.sampling.reference import SamplingState
from nanovllm.runner.prefix_groups import StagedGroups, columns_of, num_words
from nanovllm.runner.sampling_tables import MAX_FLOAT, StagedTables
from nanovllm.sampling_params import LOGIT_ADJUSTMENTS, MAX_STOP_IDS, TOKEN_MASK

# int32 words per request of each column; floats are kept as their bits, the seed as two halves
COLUMNS = {
    "last_token": 1,
    "length": 1,
    "temperature": 1,
    "top_k": 1,
    "top_p": 1,
    "min_p": 1,
    "seed": 2,
    "min_len": 1,
    "stop_ids": MAX_STOP_IDS,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1,
    "is_adjusted": 1,
    "is_masked": 1,
    "padding": 2,  # block tables begin at a multiple of 16 bytes
}
START = dict(zip([*COLUMNS, "block_table"], accumulate(COLUMNS.values(), initial=0), strict=True))
ROW = Struct(f"=2ifi2fQi{MAX_STOP_IDS}i3f2i8x")  # the columns as bytes; Q is the seed, x the padding
assert ROW.size == 4 * START["block_table"]


class RequestState:
    """Device side.

    Attributes:
        batch_req_indices: int32 [R], batch position -> request slot; the padding request slot beyond the batch.
        prefix_groups: who shares a prefix in the batch; undefined beyond it, and in steps without groups.
        last_token, length: int32 [R + 1]; length counts the token whose keys and values are computed next.
        sampling: the sampling columns, each [R + 1, ...].
        block_tables: int32 [R + 1, max_blocks].
        sampled_tokens: int32 [2, R + 1], pinned host memory, written by the sampling kernel. Double-buffered by parity
            of the length: with one step in flight, step n + 1 must not overwrite a token the host has not read.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device):
        R = max_num_seqs
        self.padding_req_idx = R  # length 0: stores nothing, attends nothing, samples nothing
        width = START["block_table"] + max_blocks
        self.buffer = torch.zeros(R + num_words(R) + (R + 1) * width, dtype=torch.int32, device=device)
        self.batch_req_indices = self.buffer[:R]
        self.batch_req_indices.fill_(self.padding_req_idx)
        self.prefix_groups = columns_of(self.buffer[R:], R)
        table = self.buffer[-(R + 1) * width :].view(R + 1, width)
        self.sampled_tokens = torch.zeros(2, R + 1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")

        def column(name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            start, size = START[name], COLUMNS[name]
            values = table.view(dtype)[:, start : start + size]
            return values if name in ("seed", "stop_ids") else values[:, 0]

        self.last_token, self.length = column("last_token"), column("length")
        self.block_tables = table[:, START["block_table"] :]
        self.sampling = SamplingState(
            temperature=column("temperature", torch.float32),
            top_k=column("top_k"),
            top_p=column("top_p", torch.float32),
            min_p=column("min_p", torch.float32),
            seed=column("seed"),
            min_len=column("min_len"),
            stop_ids=column("stop_ids"),
            length=self.length,
            presence_penalty=column("presence_penalty", torch.float32),
            frequency_penalty=column("frequency_penalty", torch.float32),
            repetition_penalty=column("repetition_penalty", torch.float32),
            is_adjusted=column("is_adjusted"),
            is_masked=column("is_masked"),
        )

    def apply(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """buffer[indices] = values; both int32 [n] on the device."""
        self.buffer.index_copy_(0, indices.long(), values)


class StagedWrites:
    """Host side: collects writes to the request state until the next launch takes them along."""

    def __init__(self, max_num_seqs: int, max_blocks: int, tables: StagedTables):
        self.max_num_seqs = max_num_seqs
        self.groups = StagedGroups(max_num_seqs, max_blocks, lambda i, values: self._stage(max_num_seqs + i, values))
        self.width = START["block_table"] + max_blocks
        self.tables = tables
        self.reset()

    def reset(self) -> None:
        """Drop staged writes and all knowledge of the device's state: a launch may never have reached it."""
        self._batch_req_indices = np.full(self.max_num_seqs, -1, np.int32)  # as on the device; -1 unknown
        self._indices: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._features = np.zeros(self.max_num_seqs, np.int32)
        self._num_logprobs = np.zeros(self.max_num_seqs, np.int32)
        self.tables.reset()
        self.groups.reset()

    def features(self, req_indices: np.ndarray) -> int:
        """OR of the requests' feature bits."""
        return int(np.bitwise_or.reduce(self._features[req_indices]))

    def num_logprobs(self, req_indices: np.ndarray) -> int:
        """Most alternatives that one of the requests wants reported."""
        return int(self._num_logprobs[req_indices].max(initial=0))

    def num_alternatives(self, num_logprobs: int | None) -> int:
        """What a request that gives this asks for; -1 is the whole vocabulary."""
        return self.tables.vocab_size if num_logprobs == -1 else min(num_logprobs or 0, self.tables.vocab_size)

    def add(self, *seqs: Sequence) -> None:
        """Stage everything about sequences that were given a request slot."""
        starts, rows = [], []
        for seq in seqs:
            params, features, stop_ids = seq.sampling_params, seq.features, seq.min_tokens_stop_ids
            self._features[seq.req_idx] = features
            self._num_logprobs[seq.req_idx] = self.num_alternatives(params.logprobs)
            self.tables.add(seq, features)
            self.groups.add(seq)
            row = ROW.pack(
                0,  # last token: prefill samples it
                seq.num_tokens,
                0.0 if params.is_greedy else min(params.temperature, MAX_FLOAT),
                min(max(params.top_k, 0), INT32_MAX),  # larger values have the same effect
                params.top_p, params.min_p,
                seq.seed,
                min(seq.num_prompt_tokens + params.min_tokens, INT32_MAX),
                *stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids)),
                params.presence_penalty, params.frequency_penalty,
                max(1 / MAX_FLOAT, min(params.repetition_penalty, MAX_FLOAT)),
                features & LOGIT_ADJUSTMENTS,
                features & TOKEN_MASK,
            )  # fmt: skip
            rows.append(row + array("i", seq.block_table).tobytes())
            starts.append(self.groups.end + seq.req_idx * self.width)
        sizes = [len(row) // 4 for row in rows]
        offsets = np.repeat(np.subtract(starts, np.cumsum([0, *sizes[:-1]])), sizes)  # of the buffer to the values
        values = np.frombuffer(b"".join(rows), np.int32)
        self._stage((np.arange(len(values)) + offsets).astype(np.int32), values)

    def append_blocks(self, seqs: list[Sequence]) -> None:
        """Stage the last block of these sequences' block tables."""
        if seqs:
            self.groups.append_blocks(seqs)
            start = self.groups.end + START["block_table"] - 1
            indices = [start + seq.req_idx * self.width + len(seq.block_table) for seq in seqs]
            self._stage(np.array(indices, np.int32), np.array([seq.block_table[-1] for seq in seqs], np.int32))

    def set_batch(self, req_indices: np.ndarray) -> None:
        """Stage the next decode batch, int32 [B]; only positions that differ are sent."""
        target = np.full(self.max_num_seqs, self.max_num_seqs, np.int32)
        target[: len(req_indices)] = req_indices
        changed = np.flatnonzero(target != self._batch_req_indices)
        if len(changed):
            self._stage(changed.astype(np.int32), target[changed])
            self._batch_req_indices = target

    def _stage(self, indices: np.ndarray, values: np.ndarray) -> None:
        self._indices.append(indices)
        self._values.append(values)

    def drain(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices and values staged since the last call, int32 [n] each."""
        if not self._indices:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        staged = np.concatenate(self._indices), np.concatenate(self._values)
        self._indices, self._values = [], []
        return staged
