"""The sampler's features, in the order in which they are applied. The only file that names them all."""

from typing import Any, NamedTuple

import numpy as np

from nanovllm.sampling.filters import Filters
from nanovllm.sampling.forced import Forced
from nanovllm.sampling.masks import MinTokens, TokenMasks
from nanovllm.sampling.penalties import Penalties
from nanovllm.sampling.processors import Processors
from nanovllm.sampling.token_logprobs import Logprobs

# name -> numpy dtype: the columns of the request state that sampling reads, beside the length
COLUMNS: dict[str, Any] = {
    "temperature": np.float32,  # 0 = greedy
    "seed": np.uint64,  # Philox key; on the device i32[R, 2], low half first
    **{name: dtype for kind in (Filters, MinTokens, Penalties, TokenMasks) for name, dtype in kind.columns.items()},
}


class Features(NamedTuple):
    masks: TokenMasks
    min_tokens: MinTokens
    processors: Processors
    penalties: Penalties
    forced: Forced
    filters: Filters
    logprobs: Logprobs


def make_features(state: Any, max_model_len: int, vocab_size: int, processed_logprobs: bool = False) -> Features:
    """Build the features for a ``RequestState`` with ``COLUMNS``; the sizes limit their tables."""
    R, device = state.max_num_seqs, state.device
    return Features(
        TokenMasks(R, vocab_size, device),
        MinTokens(),
        Processors(R),
        Penalties(R, max_model_len, vocab_size, state.last_token),
        Forced(R),
        Filters(),
        Logprobs(R, vocab_size, processed_logprobs),
    )
