"""The runner's factory: parts, launchers and readers of a rank, by its options, model and device.

The only file that imports the runner's features.
"""

from dataclasses import replace
from functools import partial

from nanovllm import kernels
from nanovllm.config import Config
from nanovllm.distributed.group import TPGroup
from nanovllm.layers.attention_backends import select_backend
from nanovllm.runner.cascade import Cascade
from nanovllm.runner.cuda_graphs import decode_sizes
from nanovllm.runner.device import select_device, select_dtype, with_fitting_launches
from nanovllm.runner.drafts import Drafts
from nanovllm.runner.images import VisionPart
from nanovllm.runner.inputs import DecodeInputs
from nanovllm.runner.kv_scales import select_kv_dtype
from nanovllm.runner.launchers import DecodeLauncher, PrefillLauncher
from nanovllm.runner.memory import BlockCopier
from nanovllm.runner.part import Equipment, Launcher, Part, Rank
from nanovllm.runner.prefill_graphs import PrefillGraphs
from nanovllm.runner.prefix_copies import PrefixCopies
from nanovllm.runner.readers import Reader
from nanovllm.runner.readers.pooled_state import read_pooled_states
from nanovllm.runner.readers.prompt_logprobs import read_prompt_logprobs
from nanovllm.runner.recurrent import RecurrentStates
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.features import COLUMNS, make_features
from nanovllm.sampling.sampler import Sampler

# Parts take in a batch in this order, and their launchers are asked in it.
PARTS: tuple[type[Part], ...] = (
    BlockCopier,
    VisionPart,
    Drafts,
    Cascade,
    RecurrentStates,
    PrefixCopies,
)
READERS: dict[str, Reader] = {  # by kind of readout
    "prompt_logprobs": read_prompt_logprobs,
    "pooled_state": read_pooled_states,
}


def equip(config: Config, tp: TPGroup) -> Equipment:
    """Choose all that runs a rank's batches."""
    rank = make_rank(config, tp)
    for kind in PARTS:
        rank = replace(rank, config=kind.fitted(rank))
    config, model = rank.config, rank.config.model_config
    R, max_model_len = config.max_num_seqs, config.max_model_len
    num_rows = sum(kind.num_request_rows(rank) for kind in PARTS)
    state = RequestState(R, rank.max_blocks, rank.device, COLUMNS, num_rows)
    processed = config.logprobs_mode == "processed_logprobs"
    sampler = Sampler(state, tp, make_features(state, max_model_len, model.vocab_size, processed))
    inputs = DecodeInputs(state, config.kvcache_block_size, max_model_len, rank.ops)
    decode = DecodeLauncher(inputs, sampler, decode_sizes(R) if model.has_lm_head else [])
    # skips parts that this engine cannot need
    parts = [part for kind in PARTS if (part := kind.make(rank, state, decode)) is not None]
    launchers: list[Launcher] = [*(each for part in parts for each in part.launchers), decode]
    if rank.use_graphs:
        launchers.append(PrefillGraphs.of(rank, state, parts))
    launchers.append(PrefillLauncher(state.block_tables))
    readers = {kind: partial(read, sampler) for kind, read in READERS.items()}
    return Equipment(rank, state, sampler, decode, parts, launchers, readers)


def make_rank(config: Config, tp: TPGroup) -> Rank:
    model, device = config.model_config, select_device(config.device, tp.rank, tp.size)
    dtype = select_dtype(config.dtype, model.dtype, device)
    gqa_group = model.num_attention_heads // max(model.num_key_value_heads, tp.size)
    sinks = model.family.sinks
    backend = select_backend(config.attention_backend, device.type, dtype, gqa_group, model.head_dim, sinks)
    kv_dtype = select_kv_dtype(config, dtype, device)
    config = with_fitting_launches(config, device)
    return Rank(config, tp, device, dtype, kv_dtype, backend, kernels.select(device.type))
