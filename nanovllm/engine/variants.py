"""Which scheduler and which KV cache an engine gets: the plain ones, unless its options or its model ask for others.
And which readouts a request may ask for by its parameters.
"""

from collections.abc import Callable, Iterable
from math import lcm

import numpy as np

from nanovllm.config import Config
from nanovllm.core import StateRows
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix_copies import CopyingBlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.snapshots import HybridBlockManager, Snapshots
from nanovllm.engine.speculation import Speculator
from nanovllm.engine.speculative_scheduler import SpeculativeScheduler
from nanovllm.readouts import Readout
from nanovllm.readouts.prompt_logprobs import PromptLogprobs
from nanovllm.sampling_params import SamplingParams

# of parameters and prompt; a request gets the first that is not None
READOUTS: tuple[Callable[[SamplingParams, np.ndarray], Readout | None], ...] = (
    PromptLogprobs.wanted_by,
)


def make_scheduler(config: Config, num_blocks: int, eos_token_ids: Iterable[int] = (),
                   state_rows: StateRows | None = None, min_copied_tokens: int | None = None) -> Scheduler:
    """``state_rows``: of models with recurrent layers; ``min_copied_tokens``: of prefix_copies.py, or None."""
    size, caching = config.kvcache_block_size, config.enable_prefix_caching

    def new_cache() -> BlockManager:
        if state_rows is not None:
            num_snapshots, chunk = state_rows
            snapshots = Snapshots(caching * num_snapshots, config.max_num_seqs + 1, lcm(size, chunk))
            return HybridBlockManager(num_blocks, size, snapshots, chunk, caching)
        if min_copied_tokens is not None and caching:
            return CopyingBlockManager(num_blocks, size, min_copied_tokens)
        return BlockManager(num_blocks, size, caching)

    speculator = Speculator.of(config)
    if speculator is None:
        return Scheduler(config, new_cache, eos_token_ids)
    return SpeculativeScheduler(speculator, config, new_cache, eos_token_ids)
