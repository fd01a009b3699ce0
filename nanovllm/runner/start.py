"""From a configuration to a runner that is ready: the order of a start, on one rank.

Owns that order: kernels compile while the weights are read, a dummy prefill measures the memory of activations, the KV
cache takes what is left, CUDA graphs are captured.
"""

import torch

from nanovllm.config import Config
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.distributed.workers import Worker, Workers
from nanovllm.layers.context import Context
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import init_dummy_weights, load_model
from nanovllm.runner import memory
from nanovllm.runner.device import model_defaults, select_device, translate_oom
from nanovllm.runner.inputs import prefill_inputs
from nanovllm.runner.kv_scales import calibrate
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.packing import pack_weights
from nanovllm.runner.recurrent import NAMES, SNAPSHOT_SHARE, allocate_states, chunks_of_one, row_bytes

# Kernels are chosen by the number of tokens, with borders at multiples of 64 and at powers of two.
WARMUP_SIZES = (1, 2, 4, 8, 15, 16, 31, 32, 63, 64, 127, 128, 192, 255, 256, 511, 512, 1023, 1024, 2048)


def start_rank(config: Config, tp: TPGroup = SINGLE_RANK, workers: Workers | None = None) -> ModelRunner:
    """This rank's runner, ready for its first batch. ``workers``: the other ranks, on rank 0 of several."""
    with torch.inference_mode(), translate_oom():
        runner = ModelRunner(config, tp, workers)
        with runner.ops.parallel_compile(runner.device) as begin:
            if runner.device.type == "cuda":
                compile_kernels(runner)
            begin()
            runner.model = load(runner)  # while the kernels compile
        if runner.device.type == "cpu":
            pack_weights(runner.model)
        tp.join() if workers is None else workers.join_group()
        reserved_bytes = warmup_model(runner)
        calibrate(runner.model, config, runner.dtype, runner.device)
        allocate_kv_cache(runner, reserved_bytes)
        if runner.use_graphs:
            runner.capture_cudagraph()
    return runner


def connect(config: Config, ranks: Workers | Worker) -> TPGroup:
    """This rank's group, once all are up. ``ranks``: the workers, on rank 0; the worker itself, on another."""
    return ranks.connect(select_device(config.device, ranks.rank, config.tensor_parallel_size))


def make_model(runner: ModelRunner, model_config: ModelConfig) -> CausalLM:
    """A model with uninitialised weights."""
    with model_defaults(runner.dtype, runner.device):
        return CausalLM(model_config, runner.backend, runner.tp)


def load(runner: ModelRunner) -> CausalLM:
    """The model with the checkpoint's weights, or random ones."""
    config, model = runner.config, make_model(runner, runner.config.model_config)
    with model_defaults(runner.dtype, runner.device):
        if config.load_format == "dummy":
            init_dummy_weights(model, config.seed + runner.tp.rank)
        else:
            runner.weights.changed = load_model(model, config.model_path, config.lora_path)
            runner.weights.lora = None if config.lora is None else str(config.lora)
    return model


def compile_kernels(runner: ModelRunner) -> None:
    """Issue every launch of a start and of a step inside ``parallel_compile``: kernels are compiled and do not run.

    Of the sampling features those that most requests use. The model has one layer of each kind and a KV cache of one
    block. Weights are uninitialised; every token belongs to the padding slot.
    """
    config, state = runner.config, runner.request_state
    runner.model = model = make_model(runner, config.model_config.one_layer_of_each_kind())
    warmup_model(runner)
    memory.allocate_kv_cache(model, 1, runner.block_size, runner.kv_dtype, runner.device)
    allocate_states(model, 1, runner.dtype, runner.state_dtype, runner.device)
    calibrate(model, config, runner.dtype, runner.device)
    # First attention, filters and the longest prefills: their kernels take the longest to compile.
    for launcher in runner.launchers:
        launcher.compile(model)
    for num_tokens in (n for n in reversed(WARMUP_SIZES) if n <= config.max_num_batched_tokens):
        ids = torch.zeros(num_tokens, dtype=torch.int32, device=runner.device)
        cu_seqlens = torch.tensor([0, num_tokens], dtype=torch.int32, device=runner.device)
        context = min(num_tokens, config.max_model_len)
        tensors = {
            "input_ids": ids, "positions": ids, "slot_mapping": ids - 1, "req_indices": ids[:1] + state.padding_req_idx,
            "context_lens": cu_seqlens[1:].clamp(max=context), "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens.clamp(max=context),
        }  # fmt: skip
        if config.model_config.delta is not None:
            tensors |= zip(NAMES, chunks_of_one(num_tokens, state.padding_req_idx, runner.device), strict=True)
        model(*prefill_inputs(tensors, state.block_tables, context, num_tokens, ids[:1].long()))
    del runner.model


def warmup_model(runner: ModelRunner) -> int:
    """Run the largest prefill without a KV cache; return the bytes to reserve for activations and graphs."""
    if runner.device.type == "cpu":
        return 0
    config = runner.config
    num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ids = torch.zeros(num_tokens, dtype=torch.int32, device=runner.device)
    chunks = chunks_of_one(num_tokens, num_seqs, runner.device)
    hidden = runner.model(
        ids, Context(ids, ids - 1, ids[:1], ids[:1], runner.request_state.block_tables, num_tokens, chunks=chunks)
    )
    # The most memory: with several ranks, filters gather the logits.
    runner.decode.sample(runner.model, hidden[:num_seqs], runner.sampler.compiled_at_start)
    torch.cuda.synchronize()
    prefill_peak = torch.cuda.max_memory_allocated() - before
    del hidden
    if not runner.use_graphs:
        return prefill_peak
    # Graphs keep their activations; estimate the largest ones' from the prefill's, in proportion to tokens.
    num_graphs, largest = sum(each.num_graphs() for each in runner.launchers), runner.prefill_graphs.sizes.largest
    graph_peak = num_graphs * memory.GRAPH_BYTES + prefill_peak * (num_seqs + largest) // num_tokens
    num_rows = max(num_seqs, *(each.most_rows() for each in runner.launchers))
    logits_bytes = num_rows * config.model_config.vocab_size // runner.tp.size * 8
    return prefill_peak + graph_peak + logits_bytes


def allocate_kv_cache(runner: ModelRunner, reserved_bytes: int) -> None:
    """Size the KV cache, and the snapshots of recurrent layers, by the memory left, unless the user set their sizes;
    give each layer its views."""
    config, model, device, tp = runner.config, runner.model, runner.device, runner.tp
    bytes_per_block = memory.block_bytes(model, runner.block_size, runner.kv_dtype)
    bytes_per_row = row_bytes(model, runner.dtype, runner.state_dtype)
    num_blocks, num_snapshots = config.num_kvcache_blocks, config.num_state_snapshots
    if num_blocks == -1:
        reserved_bytes += bytes_per_row * (config.max_num_seqs + 1)
        num_bytes = memory.cache_bytes(config, device, bytes_per_block, reserved_bytes)
    else:
        num_bytes = num_blocks * bytes_per_block
    if not bytes_per_row or not config.enable_prefix_caching:
        num_snapshots = 0
    elif num_snapshots == -1:
        num_snapshots = max(0, int(num_bytes * SNAPSHOT_SHARE) // bytes_per_row)
    if num_blocks == -1:
        num_blocks = (num_bytes - num_snapshots * bytes_per_row) // bytes_per_block
        if tp.size > 1:
            sizes = torch.tensor([num_blocks, num_snapshots], device=device)
            num_blocks, num_snapshots = tp.all_gather(sizes).view(-1, 2).amin(0).tolist()
        if runner.workers is not None:
            runner.workers.check()  # with a dead rank the minimum over ranks is undefined
        if num_blocks < 1:
            raise memory.no_room(config, device, bytes_per_block, reserved_bytes)
        num_blocks = min(num_blocks, config.max_num_seqs * runner.max_blocks)
    runner.num_kvcache_blocks, runner.num_snapshots = num_blocks, num_snapshots
    runner.allocate_kv_cache()
