"""The engine's factory: kinds of KV cache and scheduler, by options and model; readouts and attachments of requests.

The only file that imports the engine's features. Each is one line of a list; the first that is not None is taken.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.hybrid.block_manager import HybridBlockManager
from nanovllm.engine.images.factory import make_images
from nanovllm.engine.loading import Attachments
from nanovllm.engine.prefix_copies import CopyingBlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.speculation.scheduler import SpeculativeScheduler
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.readouts import Readout
from nanovllm.readouts.prompt_logprobs import PromptLogprobs
from nanovllm.sampling_params import SamplingParams

NewCache = Callable[[], BlockManager]
CACHES: tuple[Callable[[Config, int, dict[str, Any]], BlockManager | None], ...] = (
    HybridBlockManager.of,
    CopyingBlockManager.of,
)
SCHEDULERS: tuple[Callable[[Config, NewCache, Iterable[int]], Scheduler | None], ...] = (
    SpeculativeScheduler.of,
)  # fmt: skip

READOUTS: tuple[Callable[[SamplingParams, np.ndarray], Readout | None], ...] = (
    PromptLogprobs.wanted_by,
)  # fmt: skip

ATTACHMENTS: tuple[Callable[[Config, AsyncTokenizer], Attachments | None], ...] = (
    make_images,
)  # fmt: skip


def make_attachments(config: Config, tokenizer: AsyncTokenizer) -> Attachments:
    return next((each for make in ATTACHMENTS if (each := make(config, tokenizer)) is not None), Attachments())


def make_scheduler(config: Config, num_blocks: int, eos_token_ids: Iterable[int], facts: dict[str, Any]) -> Scheduler:
    """``facts``: of the runner's parts, by name."""

    def new_cache() -> BlockManager:
        for of in CACHES:
            if (cache := of(config, num_blocks, facts)) is not None:
                return cache
        return BlockManager(num_blocks, config.kvcache_block_size, config.enable_prefix_caching)

    for of in SCHEDULERS:
        if (scheduler := of(config, new_cache, eos_token_ids)) is not None:
            return scheduler
    return Scheduler(config, new_cache, eos_token_ids)
