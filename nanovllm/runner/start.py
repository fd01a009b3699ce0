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
from nanovllm.models.kinds import load_kind
from nanovllm.models.loader import init_dummy_weights, load_model
from nanovllm.runner import memory
from nanovllm.runner.device import model_defaults, select_device, translate_oom
from nanovllm.runner.inputs import prefill_inputs
from nanovllm.runner.kv_scales import calibrate
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.packing import pack_weights
from nanovllm.runner.part import extra_modules, one_sequence
from nanovllm.runner.parts import equip
from nanovllm.runner.weights import Weights

# Kernels are chosen by the number of tokens, with borders at multiples of 64 and at powers of two.
WARMUP_SIZES = (1, 2, 4, 8, 15, 16, 31, 32, 63, 64, 127, 128, 192, 255, 256, 384, 511, 512, 1023, 1024, 2048)


def start_rank(config: Config, tp: TPGroup = SINGLE_RANK, workers: Workers | None = None) -> ModelRunner:
    """This rank's runner, ready for its first batch. ``workers``: the other ranks, on rank 0 of several."""
    with torch.inference_mode(), translate_oom():
        on_gpu = select_device(config.device, tp.rank, tp.size).type == "cuda"
        if on_gpu:
            torch.cuda.set_device(tp.rank)
        runner = ModelRunner(equip(config, tp), workers)
        runner.weights = Weights(runner)
        with runner.rank.ops.parallel_compile(runner.device) as begin:
            if on_gpu:
                compile_kernels(runner)
            begin()
            runner.model = load(runner)  # while the kernels compile
        if not on_gpu:
            pack_weights(runner.model)
        tp.join() if workers is None else workers.join_group()
        config.model_config.prove(runner.model, runner.block_size, runner.rank.use_graphs)
        reserved_bytes = warmup_model(runner)
        calibrate(runner.rank, runner.model, runner.parts)
        allocate_kv_cache(runner, reserved_bytes)
        if runner.rank.use_graphs:
            runner.capture_cudagraph()
    return runner


def connect(config: Config, ranks: Workers | Worker) -> TPGroup:
    """This rank's group, once all are up. ``ranks``: the workers, on rank 0; the worker itself, on another."""
    return ranks.connect(select_device(config.device, ranks.rank, config.tensor_parallel_size))


def make_model(runner: ModelRunner, model_config: ModelConfig) -> CausalLM:
    """A model with uninitialised weights."""
    with model_defaults(runner.rank.dtype, runner.device):
        return load_kind(model_config.model_class)(model_config, runner.rank.backend, runner.tp)


def load(runner: ModelRunner) -> CausalLM:
    """The model with the checkpoint's weights, or random ones."""
    config, model = runner.config, make_model(runner, runner.config.model_config)
    with model_defaults(runner.rank.dtype, runner.device):
        if config.load_format == "dummy":
            init_dummy_weights(model, config.seed + runner.tp.rank)
        else:
            runner.weights.changed = load_model(
                model, config.model_path, config.lora_path, extra_modules(runner.parts)
            )
            runner.weights.lora = None if config.lora is None else str(config.lora)
    return model


def compile_kernels(runner: ModelRunner) -> None:
    """Issue every launch of a start and of a step inside ``parallel_compile``: kernels are compiled and do not run.

    Of the sampling features only the common ones take part. The model has one layer of each kind and a KV cache of one
    block. Weights are uninitialised; every token belongs to the padding slot.
    """
    config, state, device = runner.config, runner.request_state, runner.device
    runner.model = model = make_model(runner, config.model_config.one_layer_of_each_kind())
    warmup_model(runner)
    config.model_config.prove(model, runner.block_size, rehearses=True)
    kv_cache = memory.allocate_kv_cache(model, 1, runner.block_size, runner.rank.kv_dtype, device)
    for part in runner.parts:
        part.allocate(model, kv_cache, 0)
    calibrate(runner.rank, model, runner.parts)
    # First attention, filters and the longest prefills: their kernels take the longest to compile.
    for launcher in runner.launchers:
        launcher.compile(model)
    longest = config.max_num_batched_tokens
    if not runner.rank.backend.capturable:  # references, which need whole contexts
        longest = min(longest, config.max_model_len)
    for num_tokens in (n for n in reversed(WARMUP_SIZES) if n <= longest):
        ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        cu_seqlens = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        context = min(num_tokens, config.max_model_len)
        tensors = {
            "input_ids": ids, "positions": ids, "slot_mapping": ids - 1, "req_indices": ids[:1] + state.padding_req_idx,
            "context_lens": cu_seqlens[1:].clamp(max=context), "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens.clamp(max=context), **one_sequence(runner.rank, runner.parts, num_tokens),
        }  # fmt: skip
        model(*prefill_inputs(tensors, state.block_tables, context, num_tokens, ids[:1].long()))
    for part in runner.parts:
        part.release(model)
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
    tensors, block_tables = one_sequence(runner.rank, runner.parts, num_tokens), runner.request_state.block_tables
    hidden = runner.model(ids, Context(ids, ids - 1, ids[:1], ids[:1], block_tables, num_tokens, tensors=tensors))
    # This takes the most memory: with several ranks, filters gather the logits.
    runner.decode.sample(runner.model, hidden[:num_seqs], runner.sampler.compiled_at_start)
    torch.cuda.synchronize()
    prefill_peak = torch.cuda.max_memory_allocated() - before
    del hidden
    if not runner.rank.use_graphs:
        return prefill_peak
    # Graphs keep their activations; the largest graph's are estimated from the prefill's, in proportion to tokens.
    num_graphs = sum(each.num_graphs() for each in runner.launchers)
    largest = max(each.most_tokens() for each in runner.launchers)
    graph_peak = num_graphs * memory.GRAPH_BYTES + prefill_peak * (num_seqs + largest) // num_tokens
    num_rows = max(num_seqs, *(each.most_rows() for each in runner.launchers))
    logits_bytes = num_rows * config.model_config.vocab_size // runner.tp.size * 8
    return prefill_peak + graph_peak + logits_bytes


def allocate_kv_cache(runner: ModelRunner, reserved_bytes: int) -> None:
    """Size the KV cache by the memory left, unless the user set its size; parts take their share of it first."""
    config, model, device, tp, parts = runner.config, runner.model, runner.device, runner.tp, runner.parts
    bytes_per_block = memory.block_bytes(model, runner.block_size, runner.rank.kv_dtype)
    num_blocks = config.num_kvcache_blocks
    if num_blocks == -1:
        reserved_bytes += sum(part.reserved_bytes(model) for part in parts)
        num_bytes = memory.cache_bytes(config, device, bytes_per_block, reserved_bytes)
    else:
        num_bytes = num_blocks * bytes_per_block
    shared_bytes = sum(part.share(model, num_bytes) for part in parts)
    if num_blocks == -1:
        num_blocks = (num_bytes - shared_bytes) // bytes_per_block
        if tp.size > 1:
            sizes = torch.tensor([num_blocks, *(part.num_rows for part in parts)], device=device)
            num_blocks, *num_rows = tp.all_gather(sizes).view(-1, len(sizes)).amin(0).tolist()
            for part, part_rows in zip(parts, num_rows, strict=True):
                part.num_rows = part_rows
        if runner.workers is not None:
            runner.workers.check()  # with a dead rank the minimum over ranks is undefined
        if num_blocks < 1:
            raise memory.no_room(config, device, bytes_per_block, reserved_bytes)
        num_blocks = min(num_blocks, config.max_num_seqs * runner.rank.max_blocks)
    runner.num_kvcache_blocks = num_blocks
    runner.facts = {name: fact for part in parts for name, fact in part.facts().items()}
    runner.allocate_kv_cache()
