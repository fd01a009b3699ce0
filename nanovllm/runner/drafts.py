"""Verify steps: B sequences with Q rows each, their last token and a draft (``engine/speculation/``).

The tokens of a draft have rows of their own in the request state, after the padding slot: copies of their request's
row, further on by 1, 2, ... tokens. So they are prepared, computed and sampled like requests; dead ones have length 0.
"""

from collections.abc import Hashable
from functools import partial

import numpy as np
import torch

from nanovllm.core import Batch
from nanovllm.messages.verify import MAX_VERIFIED_SEQS, VERIFY_ROWS, DraftTokens
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import DECODE, SAMPLE, CUDAGraphs
from nanovllm.runner.inputs import DecodeInputs
from nanovllm.runner.launchers import DecodeLauncher
from nanovllm.runner.part import Launcher, Part, Rank, Step
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Arrays, Feature
from nanovllm.sampling.sampler import Sampler


def verify_sizes(max_num_seqs: int) -> list[int]:
    """Captured sizes in sequences, for either number of rows."""
    most = min(max_num_seqs, MAX_VERIFIED_SEQS)
    return [size for size in (1, 2, 4, 8) if size < most] + [most]


def most_tokens(rank: Rank) -> int:
    """Tokens of all drafts in the largest verify step."""
    return verify_sizes(rank.config.max_num_seqs)[-1] * (VERIFY_ROWS[-1] - 1)


class Drafts(Part):
    """The drafts of the decode batch on the device; ``num_tokens``: most of all drafts of a step."""

    @classmethod
    def num_request_rows(cls, rank: Rank) -> int:
        if not rank.config.speculates:
            return 0
        return 2 * most_tokens(rank)

    @classmethod
    def make(cls, rank: Rank, state: RequestState, decode: DecodeLauncher) -> "Drafts | None":
        if not rank.config.speculates:
            return None
        drafts, sizes = cls(state, most_tokens(rank)), verify_sizes(rank.config.max_num_seqs)
        drafts.launchers = (VerifyLauncher(decode.inputs, drafts, decode.sampler, dict.fromkeys(VERIFY_ROWS, sizes)),)
        return drafts

    def __init__(self, state: RequestState, num_tokens: int):
        self._state, self._num_tokens = state, num_tokens
        self._first = state.padding_req_idx + 1
        # sampling overwrites the last tokens of the draft rows, so the same number of rows after them keeps the drafts
        self._tokens = state.last_token[self._first + num_tokens :]
        rows = np.arange(self._first, self._first + num_tokens, dtype=np.int32)
        self._places = np.concatenate([*state.places(rows), state.places(rows + num_tokens)[0]])
        self._rows = torch.from_numpy(rows).to(state.device)

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        """Prepare tokens and lengths of the draft rows; the rows beyond the batch are dead."""
        if DraftTokens in batch.messages:
            drafts, Q = batch.messages[DraftTokens].token_ids, batch.num_rows
            values = np.zeros((3, self._num_tokens), np.int32)  # tokens, lengths, tokens that are kept
            values[0, : drafts.size] = values[2, : drafts.size] = drafts.ravel()
            values[1, : drafts.size] = ((batch.lengths[:, None] + np.arange(1, Q)) * (drafts >= 0)).ravel()
            self._state.set(arrays, self._places, values.ravel())

    def rows(self, size: int, num_rows: int) -> torch.Tensor:
        """Device: request slots i32[B * Q] of a verify step: each sequence's own, then the rows of its draft."""
        drafted = self._rows[: size * (num_rows - 1)].view(size, num_rows - 1)
        return torch.cat([self._state.batch_req_indices[:size, None], drafted], 1).flatten()

    def rows_on_host(self, batch: Batch) -> np.ndarray:
        """The same, int32 [B, Q]."""
        size, num_drafted = len(batch.req_indices), batch.num_rows - 1
        drafted = np.arange(size * num_drafted, dtype=np.int32).reshape(size, num_drafted) + self._first
        return np.concatenate([batch.req_indices[:, None], drafted], 1)

    def spread(self, size: int, num_rows: int) -> None:
        """Device: copy each request's sampling columns and block table to its draft rows; token and length are set."""
        owners = self._state.batch_req_indices[:size, None].expand(size, num_rows - 1).flatten()
        table = self._state.table
        table[self._first :][: len(owners), 2:] = table[:, 2:].index_select(0, owners)

    def accept(self, rows: torch.Tensor, num_rows: int) -> None:
        """Device: move each request past the correct tokens of its draft, once every row has sampled; see
        ``DraftTokens.num_accepted``."""
        state, rows = self._state, rows.view(-1, num_rows).long()
        tokens, is_live = state.last_token[rows], state.length[rows[:, 1:]] > 0
        drafts = self._tokens[: is_live.numel()].reshape(is_live.shape)
        is_right = ((tokens[:, :-1] == drafts) & is_live).int()
        num_accepted = is_right.cumprod(1).sum(1)
        state.last_token[rows[:, 0]] = tokens.gather(1, num_accepted[:, None])[:, 0]
        state.length[rows[:, 0]] += num_accepted.int()


class VerifyLauncher(Launcher):
    """Decode steps with drafts. ``sizes``: number of rows -> captured sizes, in sequences."""

    def __init__(self, inputs: DecodeInputs, drafts: Drafts, sampler: Sampler, sizes: dict[int, list[int]]):
        self.inputs, self.drafts, self.sampler, self.sizes = inputs, drafts, sampler, sizes

    def takes(self, batch: Batch, arrays: Arrays) -> bool:
        return DraftTokens in batch.messages

    def run(self, step: Step) -> tuple[torch.Tensor, None]:
        size, num_rows = len(step.batch.req_indices), step.batch.num_rows
        if step.graphs is not None:
            return step.graphs.replay((DECODE, num_rows), size), None
        return self._forward(step.model, num_rows, size), None

    def _forward(self, model: CausalLM, num_rows: int, size: int) -> torch.Tensor:
        self.drafts.spread(size, num_rows)
        return model(*self.inputs(size, rows=self.drafts.rows(size, num_rows)))

    def _sample(self, model: CausalLM, hidden: torch.Tensor, num_rows: int,
                used: tuple[Feature, ...] = ()) -> torch.Tensor:
        rows = self.drafts.rows(len(hidden) // num_rows, num_rows)
        tokens, _ = self.sampler(model.compute_logits(hidden), rows, used)
        self.drafts.accept(rows, num_rows)
        return tokens

    def rows(self, step: Step) -> torch.Tensor:
        return self.drafts.rows(len(step.batch.req_indices), step.batch.num_rows)

    def rows_on_host(self, batch: Batch) -> np.ndarray:
        return self.drafts.rows_on_host(batch)

    def sample_graph(self, batch: Batch) -> Hashable:
        return SAMPLE, batch.num_rows

    def sampled(self, batch: Batch, rows: torch.Tensor) -> None:
        self.drafts.accept(rows, batch.num_rows)

    def capture(self, model: CausalLM, graphs: CUDAGraphs) -> None:
        def sample(num_rows: int, size: int) -> torch.Tensor:
            return self._sample(model, graphs.output((DECODE, num_rows), size), num_rows)

        for n, sizes in self.sizes.items():
            graphs.capture((DECODE, n), sizes, partial(self._forward, model, n))
            graphs.capture((SAMPLE, n), sizes, partial(sample, n))

    def compile(self, model: CausalLM) -> None:
        for num_rows, sizes in self.sizes.items():
            for size in sizes:
                hidden = self._forward(model, num_rows, size)
                for used in ((), self.sampler.compiled_at_start):
                    self._sample(model, hidden, num_rows, used)

    def most_rows(self) -> int:
        return max(num_rows * sizes[-1] for num_rows, sizes in self.sizes.items())

    def num_graphs(self) -> int:
        return 2 * sum(map(len, self.sizes.values()))
