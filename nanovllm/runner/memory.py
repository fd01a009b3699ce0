"""How much memory the KV cache gets, and its allocation."""

import math
import sys
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.core import Batch
from nanovllm.errors import OutOfMemoryError
from nanovllm.layers.attention import Attention
from nanovllm.messages.block_copies import BlockCopies
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.part import Part, Rank
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Arrays, Tensors

if TYPE_CHECKING:
    from nanovllm.runner.launchers import DecodeLauncher

CPU_KV_CACHE_BYTES = 2 << 30  # modest: other programs need the host's memory
GRAPH_BYTES = 2 << 20  # device memory per captured graph, without its activations (measured)
BLOCKS_AT_ONCE = 64  # blocks copied through a buffer: 32 MiB for blocks of 256 tokens, 8 KV heads of 128
GIB = 1 << 30


class KVCache(list[torch.Tensor]):
    """Keys and values of all layers: [2, layers, num_blocks, block_size, K, D] for each shape of their blocks.

    A block id is the same block in every layer.
    """

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self)


def attention_layers(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def block_bytes(model: nn.Module, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers of this rank."""
    return sum(math.prod(layer.block_shape(block_size)) for layer in attention_layers(model)) * dtype.itemsize


def cache_bytes(config: Config, device: torch.device, bytes_per_block: int, reserved_bytes: int) -> int:
    """Compute the bytes for the KV cache next to weights and ``reserved_bytes`` of activations; may be negative."""
    if device.type == "cpu":
        blocks_of_one_seq = -(-config.max_model_len // config.kvcache_block_size)
        return max(CPU_KV_CACHE_BYTES, blocks_of_one_seq * bytes_per_block)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total * config.gpu_memory_utilization) - (total - free) - reserved_bytes


def no_room(config: Config, device: torch.device, bytes_per_block: int, reserved_bytes: int) -> OutOfMemoryError:
    """The error for a device without room for one block."""
    free, total = torch.cuda.mem_get_info()
    return OutOfMemoryError(
        f"no room for a KV cache on {device}: gpu_memory_utilization={config.gpu_memory_utilization} of "
        f"{total / GIB:.1f} GiB allows {total * config.gpu_memory_utilization / GIB:.1f}; {(total - free) / GIB:.1f} "
        f"are in use (weights {torch.cuda.memory_allocated() / GIB:.1f}, the rest other processes), activations need "
        f"{reserved_bytes / GIB:.1f}, one block {bytes_per_block / GIB:.3f}. Free memory on the device, raise "
        "gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs."
    )


def allocate_kv_cache(model: nn.Module, num_blocks: int, block_size: int, dtype: torch.dtype,
                      device: torch.device) -> KVCache:
    """A zeroed KV cache; each attention layer gets its views of it."""
    groups: dict[tuple[int, ...], list[Attention]] = {}
    for layer in attention_layers(model):
        groups.setdefault(layer.block_shape(block_size), []).append(layer)
    kv_cache = KVCache()
    for block_shape, layers in groups.items():
        kv_cache.append(zeros((block_shape[0], len(layers), num_blocks, *block_shape[1:]), dtype, device))
        for layer, k_cache, v_cache in zip(layers, *kv_cache[-1], strict=True):
            layer.attach_cache(k_cache, v_cache)
    return kv_cache


def detach_kv_cache(model: nn.Module) -> None:
    """The layers let go of the KV cache; until the next one they store nothing."""
    for layer in attention_layers(model):
        layer.attach_cache(torch.empty(0), torch.empty(0))


def copy_blocks(kv_cache: KVCache, copy_from: torch.Tensor, copy_to: torch.Tensor) -> None:
    """In every layer of the KV cache, block copy_to[i] becomes a copy of block copy_from[i]; int64 [n] each."""
    for tensor in kv_cache:
        as_bytes = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # torch cannot copy e4m3 by index
        for start in range(0, len(copy_to), BLOCKS_AT_ONCE):
            chunk = slice(start, start + BLOCKS_AT_ONCE)
            for cache in as_bytes.flatten(0, 1):
                cache.index_copy_(0, copy_to[chunk], cache.index_select(0, copy_from[chunk]))


class BlockCopier(Part):
    """Copies blocks of the KV cache, before and after a prefill's forward pass; see ``BlockCopies``."""

    kv_cache: KVCache | None = None

    @classmethod
    def make(cls, rank: Rank, state: RequestState, decode: "DecodeLauncher") -> "BlockCopier | None":
        return cls()

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        if BlockCopies in batch.messages:
            copies: BlockCopies = batch.messages[BlockCopies]
            for when, pairs in zip(("before", "after"), copies, strict=True):
                if pairs:
                    arrays[f"{when}_from"], arrays[f"{when}_to"] = np.array(pairs, np.int32).T

    def write(self, batch: Batch, tensors: Tensors) -> None:
        self._copy("before", tensors)

    def finish(self, batch: Batch, tensors: Tensors) -> None:
        self._copy("after", tensors)

    def _copy(self, when: str, tensors: Tensors) -> None:
        if f"{when}_from" in tensors:
            assert self.kv_cache is not None
            copy_blocks(self.kv_cache, tensors[f"{when}_from"].long(), tensors[f"{when}_to"].long())

    def allocate(self, model: CausalLM, kv_cache: KVCache, num_slots: int) -> None:
        self.kv_cache = kv_cache

    def release(self, model: CausalLM) -> None:
        self.kv_cache = None


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU the OS maps their pages at the first write."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > sys.maxsize:  # numpy and torch raise other errors for such a size
        raise MemoryError(f"{num_bytes:.1e} bytes were asked for.")
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
