"""The forward context: what attention must know of the batch, without passing it through every layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Context:
    """One launch's batch, as attention sees it. S sequences, T packed tokens, R rows of the row table.

    Attributes:
        is_prefill: prompts' tokens, packed; otherwise one token for each sequence.
        rows: int32 [S], each sequence's row in ``block_tables``.
        context_lens: int32 [S], tokens to attend, the new ones included.
        block_tables: int32 [R, max_blocks].
        slot_mapping: int32 [T], where keys and values go; -1 nowhere.
        max_context: upper bound of ``context_lens``, known to the host.
        cu_seqlens_q, cu_seqlens_k: int32 [S+1], running sums of new tokens and of ``context_lens`` (prefill).
        max_seqlen_q: most new tokens of one sequence (prefill).
        has_prefix: some sequence attends tokens that are not in this launch, so pages must be read (prefill).
        sampled: int64 [N], the places of the tokens that are sampled, the last ones of the first N sequences
            (prefill); None: all tokens' hidden states are wanted.
    """

    is_prefill: bool
    rows: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_context: int
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 1
    has_prefix: bool = False
    sampled: torch.Tensor | None = None

    def of_sampled(self) -> "Context":
        """The sampled tokens as a decode batch: once the launch's keys and values are stored, they are nothing else.

        Its slots are those of the whole launch, for nothing is left to store.
        """
        assert self.sampled is not None
        n = len(self.sampled)
        rows, context_lens = self.rows[:n], self.context_lens[:n]
        return Context(False, rows, context_lens, self.block_tables, self.slot_mapping, self.max_context)


_context: ContextVar[Context | None] = ContextVar("context", default=None)  # of this thread: others may run an engine


def get_context() -> Context:
    context = _context.get()
    assert context is not None, "attention was called outside set_context()"
    return context


@contextmanager
def set_context(context: Context) -> Iterator[None]:
    """Make ``context`` this thread's current one within a ``with`` block; it cannot be nested and is always reset."""
    assert _context.get() is None, "set_context() cannot be nested"
    _context.set(context)
    try:
        yield
    finally:
        reset_context()


def reset_context() -> None:
    _context.set(None)
