"""The parts and launchers of a rank: which there are, for its options, its model and its device."""

from typing import TYPE_CHECKING

from nanovllm.config import Config
from nanovllm.core import VERIFY_ROWS
from nanovllm.layers.attention_backends import select_backend
from nanovllm.runner.cascade import CascadeLauncher, SharedPrefixes
from nanovllm.runner.cuda_graphs import decode_sizes, verify_sizes
from nanovllm.runner.device import with_fitting_launches
from nanovllm.runner.drafts import Drafts, VerifyLauncher
from nanovllm.runner.inputs import DecodeInputs
from nanovllm.runner.launchers import DecodeLauncher, PrefillLauncher
from nanovllm.runner.memory import BlockCopies
from nanovllm.runner.micro_batches import MicroBatches
from nanovllm.runner.prefill_graphs import PrefillGraphs, PrefillSizes, max_layer_work
from nanovllm.runner.readouts import make_readers
from nanovllm.runner.recurrent import RecurrentStates, with_fitting_slots
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.features import COLUMNS, make_features
from nanovllm.sampling.sampler import Sampler

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

NAMES = ("parts", "launchers", "readers", "copies", "recurrent", "shared_prefixes", "drafts", "decode",
         "prefill_graphs", "micro_batches")  # fmt: skip


def put_together(runner: "ModelRunner", config: Config) -> None:
    """Give the runner its options, its request state and sampler, and what runs its batches."""
    model, tp, device = config.model_config, runner.tp, runner.device
    gqa_group = model.num_attention_heads // max(model.num_key_value_heads, tp.size)
    runner.backend = backend = select_backend(
        config.attention_backend, device.type, runner.dtype, gqa_group, model.head_dim, model.family.sinks
    )
    config = with_fitting_slots(with_fitting_launches(config, device), backend, tp, runner.dtype, device)
    runner.config = config
    runner.use_graphs = device.type == "cuda" and not config.enforce_eager and backend.capturable
    R, max_model_len = config.max_num_seqs, config.max_model_len
    sizes = decode_sizes(R) if model.has_lm_head else []
    verified = dict.fromkeys(VERIFY_ROWS, verify_sizes(R)) if config.speculates else {}
    num_drafted = max((most[-1] * (num_rows - 1) for num_rows, most in verified.items()), default=0)
    runner.request_state = state = RequestState(R, runner.max_blocks, device, COLUMNS, num_drafted)
    processed = config.logprobs_mode == "processed_logprobs"
    features = make_features(state, max_model_len, model.vocab_size, processed)
    runner.sampler = sampler = Sampler(state, tp, features)
    inputs = DecodeInputs(state, runner.block_size, max_model_len, runner.ops)
    # parts
    shares_prefixes = backend.shares_prefixes and not all(model.windows)
    runner.shared_prefixes = SharedPrefixes(state.block_table_mirror, runner.block_size, device, shares_prefixes)
    runner.copies, runner.recurrent, runner.drafts = BlockCopies(), RecurrentStates(), Drafts(state, num_drafted)
    runner.readers = make_readers(sampler, features.logprobs)
    runner.parts = [runner.copies]  # what this engine cannot need is not asked
    runner.parts += [runner.shared_prefixes] * shares_prefixes + [runner.drafts] * config.speculates
    runner.parts += [runner.recurrent] * (model.delta is not None)
    # launchers
    runner.decode = DecodeLauncher(inputs, sampler, sizes)
    prefill_sizes = PrefillSizes()
    if runner.use_graphs:
        devices = range(tp.size) if tp.size > 1 else [device]
        max_work = max_layer_work(devices, has_fp8=model.fp8 is not None)
        prefill_sizes = PrefillSizes.of(config, backend, tp.peers is not None, max_work)
    runner.prefill_graphs = PrefillGraphs(prefill_sizes, state.block_tables, max_model_len)
    waiting = {} if runner.workers is None else {"wait_until": runner.workers.wait_until}  # not for ever, on rank 0
    runner.micro_batches = MicroBatches(config, tp, device, state.block_tables, **waiting)
    runner.launchers = [runner.decode, runner.prefill_graphs, PrefillLauncher(state.block_tables)]
    if runner.micro_batches.min_tokens is not None:
        runner.launchers.insert(2, runner.micro_batches)
    if shares_prefixes:
        runner.launchers.insert(0, CascadeLauncher(runner.shared_prefixes, runner.decode))
    if config.speculates:
        runner.launchers.insert(0, VerifyLauncher(inputs, runner.drafts, sampler, verified))
