"""A rank's weights between requests: updated in place, put to sleep with the rest of the device's memory, woken up.

Owns the copies on the host, which weights are missing, and which are not the checkpoint's. The engine is idle whenever
this is called. An update keeps addresses, so CUDA graphs stay valid; sleep drops the graphs, and wake-up captures them
again.
"""

import ctypes
import math
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.errors import CheckpointError, ConfigError, EngineError, NanoVLLMError, OutOfMemoryError
from nanovllm.models.loader import WeightFiller
from nanovllm.runner.kv_scales import calibrate
from nanovllm.runner.packing import drop_packed_weights, pack_weights
from nanovllm.runner.part import extra_modules
from nanovllm.utils.checkpoint import resolve_model

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

Source = str | os.PathLike | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
TAGS = "weights", "kv_cache"
# Pinned memory is allocated in powers of two, so pieces of this size waste little of it.
CHUNK_BYTES = 64 << 20
BUCKET_BYTES = 512 << 20  # bytes of tensors on their way to the other ranks
ALIGNMENT = 64  # bytes


class Weights:
    """Sleep, wake-up and update of a rank's weights. Rank 0's is asked by the engine; its ``call`` runs all ranks'."""

    def __init__(self, runner: "ModelRunner"):
        self._runner = weakref.proxy(runner)  # in a cycle, a failed start would keep its memory until the next full GC
        self.sleeping: set[str] = set()  # tags that are not in the device's memory
        # On rank 0, by their names in the checkpoint:
        self.missing: dict[str, str] = {}  # weights to be given before the engine can run, and why
        self.changed: set[str] = set()  # weights that are not the checkpoint's
        self.lora: str | None = None  # the adapter that is merged into them, as it was given
        self._is_unsettled = False
        # address of a parameter or buffer -> storage, size in bytes, its bytes on the host (none if dropped)
        self._offloaded: dict[int, tuple[torch.UntypedStorage, int, list[torch.Tensor]]] = {}

    def require_ready(self) -> None:
        """Rank 0, before a request runs. Raises EngineError where none can."""
        if self.sleeping:
            raise EngineError(f"the engine sleeps ({', '.join(sorted(self.sleeping))}); call wake_up() first.")
        if self.missing:
            some = sorted(self.missing)[:3]
            raise EngineError(
                f"{self.missing[some[0]]}: {len(self.missing)} tensors are missing, among them {', '.join(some)}. Call "
                "update_weights with all of them first."
            )
        if self._is_unsettled:  # once for all the updates before, each of which may be a single tensor
            self.call("settle")
            self._is_unsettled = False

    def call(self, method: str, *args: Any) -> None:
        """Rank 0: run a method on every rank; raises a rank's error."""
        workers = self._runner.workers
        if workers is None:
            getattr(self, method)(*args)
            return
        with workers.guard():
            workers.send("weights", method, *args)
            errors = [self.attempt(method, *args), *workers.wait_for_answers()]
        for error in filter(None, errors):
            raise error

    def attempt(self, method: str, *args: Any) -> NanoVLLMError | None:
        """Run a method on this rank; returns the error that the caller is to hear of."""
        try:
            getattr(self, method)(*args)
        except NanoVLLMError as error:
            return error
        return None

    def update(self, weights: Source | None, partial: bool) -> set[str]:
        """Rank 0: write the weights on every rank; returns their names.

        An update that fails leaves all weights missing, unless it ends before it wrote any.
        """
        source = "update_weights"
        if isinstance(weights, (str, os.PathLike)):
            weights = source = os.path.abspath(os.path.expanduser(weights))  # ranks may have other working directories
            if not os.path.exists(source):
                raise CheckpointError(f"update_weights: {source} does not exist; give a directory of safetensors.")
        written = self._write(weights, source, partial)
        is_checkpoint = source == os.path.abspath(self._runner.config.model_path)
        self.changed = set() if is_checkpoint else self.changed | written if partial else written
        self.lora = None
        return written

    def merge(self, lora: str | os.PathLike | None) -> set[str]:
        """Rank 0: merge this adapter into the checkpoint's weights; returns the names of the tensors written.

        Read are the tensors that it changes, and those that are not the checkpoint's now.
        """
        config = self._runner.config
        if config.load_format == "dummy":
            raise ConfigError("update_weights: lora needs a checkpoint's weights; leave out load_format='dummy'.")
        path = None if lora is None else os.path.abspath(resolve_model(lora, option="lora"))
        written = self._write(config.model_path, config.model_path, False, path, self.changed | self.missing.keys())
        self.lora, self.changed = None if lora is None else str(lora), self._filler.adapted
        return written

    def _write(self, weights: Any, source: str, partial: bool, adapter: str | None = None,
               only: set[str] | None = None) -> set[str]:
        """Rank 0: fill the parameters of every rank. ``adapter`` and ``only`` as for ``WeightFiller``."""
        if "weights" in self.sleeping:
            raise EngineError("the weights sleep; call wake_up(tags=['weights']) before they are updated.")
        self.call("begin_update", adapter, only)
        filler, before = self._filler, self.missing
        self.missing = before | dict.fromkeys(filler.missing, "an update of the weights failed half way")
        try:
            with closing(self._parts(weights)) as parts:
                for part in parts:
                    self.call("load", part)
            if not partial:
                filler.check_complete(source, "; give all of them, or partial=True")
            filler.check_gathered(source)
        except BaseException:
            if not filler.filled:
                self.missing = before
            raise
        # the other half of an FP8 weight, unless this is the half that was missing
        halves = filler.missing & {other_half(name) for name in filler.filled - before.keys()}
        self.missing = {name: why for name, why in before.items() if name not in filler.filled}
        self.missing |= dict.fromkeys(halves, "an FP8 weight got its data or its scale alone")
        self._is_unsettled = True
        return filler.filled

    def _parts(self, weights: Any) -> Generator[Any, None, None]:
        """Yield the sources that ranks load in turn: the path, or all pairs; for several ranks shared memory."""
        if isinstance(weights, str):
            yield weights
        elif self._runner.workers is None:
            yield as_pairs(weights)
        else:
            for bucket in in_buckets(as_pairs(weights), self._filler.unused):
                with shared_file() as file:
                    shared = SharedTensors.describe(file, bucket)
                    for (_, view), tensor in zip(shared.views(), bucket.values(), strict=True):
                        view.copy_(tensor)
                    bucket.clear()
                    yield shared

    def begin_update(self, adapter: str | None, only: set[str] | None) -> None:
        """Every rank: no weight is written yet."""
        runner = self._runner
        extra, base = extra_modules(runner.parts), runner.config.model_path
        self._filler = WeightFiller(runner.model, extra, adapter=adapter, base=base, only=only)

    @torch.inference_mode()
    def load(self, weights: "str | SharedTensors | Iterable[tuple[str, torch.Tensor]]") -> None:
        """Every rank: write tensors, of files, shared, or given as pairs, into the parameters."""
        self._runner.synchronize()
        try:
            if isinstance(weights, str):
                self._filler.fill_from_files(weights)
            else:
                pairs = weights.views() if isinstance(weights, SharedTensors) else weights
                self._filler.fill_from(pairs, "update_weights")
        finally:
            self._runner.synchronize()  # the caller may change its tensors, or delete the files
            if self._filler.filled:
                drop_packed_weights(self._runner.model)

    @torch.inference_mode()
    def settle(self) -> None:
        """Every rank: forget results of the old weights, pack the new ones, and measure the scales of an FP8 KV
        cache, which is empty now.
        """
        runner = self._runner
        for part in runner.parts:
            part.reset()
        if runner.device.type == "cpu":
            pack_weights(runner.model)
        calibrate(runner.rank, runner.model, runner.parts)
        runner.synchronize()

    def sleep(self, level: int) -> None:
        """Every rank: 1 moves the weights to the host, 2 drops them; KV cache, graphs and sampling tables go."""
        if level not in (1, 2):
            raise ConfigError(f"sleep: level={level!r} must be 1 (weights to the host) or 2 (weights dropped).")
        runner = self._runner
        runner.synchronize()
        self.sleeping = set(TAGS)  # before the work, so that wake_up mends what an interrupt leaves
        runner.graphs = None  # they hold addresses of weights and KV cache
        runner.sampler.release()
        runner.release_kv_cache()
        if level == 2:
            why = "the weights were dropped by sleep(level=2)"
            self.missing = dict.fromkeys(WeightFiller(runner.model, extra_modules(runner.parts)).missing, why)
            drop_packed_weights(runner.model)
        if level == 2 or runner.device.type == "cuda":  # on the CPU the weights are on the host
            self._offload(keep=level == 1)
        free_cached_memory(runner.device)

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Every rank: take the memory of ``tags``, by default all, again, and capture the graphs when all is there.

        Raises:
            OutOfMemoryError: the device has no room; what slept sleeps on.
        """
        given = TAGS if tags is None else tags
        if not isinstance(given, (list, tuple, set)) or not all(tag in TAGS for tag in given):
            raise ConfigError(f"wake_up: tags={tags!r} must be None or a list of {', '.join(map(repr, TAGS))}.")
        runner, waking = self._runner, self.sleeping & set(given)
        try:
            with torch.inference_mode():
                if "weights" in waking:
                    self._restore()
                if "kv_cache" in waking:
                    runner.allocate_kv_cache()
                if waking == self.sleeping and runner.rank.use_graphs and runner.graphs is None:
                    runner.capture_cudagraph()
        except (torch.OutOfMemoryError, MemoryError) as error:
            runner.graphs = None
            if "kv_cache" in waking:
                runner.release_kv_cache()
            for storage, _, _ in self._offloaded.values() if "weights" in waking else ():
                storage.resize_(0)
            free_cached_memory(runner.device)
            raise OutOfMemoryError(
                f"wake_up: no room on {runner.device} for {', '.join(sorted(waking))}: {error}\nFree memory there (a "
                "trainer's, perhaps) and call wake_up again."
            ) from error
        self.sleeping -= waking
        if "weights" in waking:
            self._offloaded = {}

    def _offload(self, keep: bool) -> None:
        """Free every storage of the weights. Buffers are in no checkpoint, so their bytes are kept in any case."""
        modules = (self._runner.model, *extra_modules(self._runner.parts))
        for tensor in (tensor for module in modules for tensor in (*module.parameters(), *module.buffers())):
            storage, keeps = tensor.untyped_storage(), keep or not isinstance(tensor, torch.nn.Parameter)
            if storage.nbytes() > 0:  # else it is tied, or was offloaded before
                chunks = to_host(storage) if keeps else []
                self._offloaded[storage._cdata] = storage, storage.nbytes(), chunks
                storage.resize_(0)
            elif not keeps:
                self._offloaded[storage._cdata][2].clear()

    def _restore(self) -> None:
        for storage, size, chunks in self._offloaded.values():
            storage.resize_(size)
            for target, chunk in zip(as_bytes(storage).split(CHUNK_BYTES), chunks, strict=False):
                target.copy_(chunk, non_blocking=True)
        self._runner.synchronize()


def other_half(name: str) -> str:
    """The scale of an FP8 weight's data, the data of a scale."""
    return name.removesuffix("_scale") if name.endswith("_scale") else f"{name}_scale"


def free_cached_memory(device: torch.device) -> None:
    """Release the memory that the allocators of torch or the C library keep for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        with suppress(AttributeError):  # only glibc has this function, and it keeps freed pages of tensors below 32 MiB
            ctypes.CDLL(None).malloc_trim(0)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def to_host(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    """A storage's bytes as pieces in pinned memory."""
    on_gpu, chunks = storage.device.type == "cuda", []
    for chunk in as_bytes(storage).split(CHUNK_BYTES):
        try:
            on_host = torch.empty(len(chunk), dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(
                f"sleep: no room on the host for the weights: {error}\nCall wake_up(), or sleep(level=2), which drops "
                "them."
            ) from error
        chunks.append(on_host.copy_(chunk, non_blocking=True))
    if on_gpu:
        torch.cuda.synchronize(storage.device)
    return chunks


def as_pairs(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Pairs (name, tensor), checked one by one."""
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    for pair in pairs if isinstance(pairs, Iterable) else [pairs]:
        match pair:
            case [str() as name, torch.Tensor() as tensor]:
                yield name, tensor
            case _:
                raise CheckpointError(
                    "update_weights takes a path of safetensors, or pairs (name, tensor) such as "
                    f"model.named_parameters(), not {pair!s:.100}."
                )


def in_buckets(pairs: Iterable[tuple[str, torch.Tensor]], unused: re.Pattern[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Copies on the host of at most BUCKET_BYTES together, or of one tensor."""
    bucket: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in pairs:
        if unused.fullmatch(name):
            continue
        if name in bucket or (bucket and num_bytes + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = {}, 0
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


@dataclass(frozen=True)
class SharedTensors:
    """A file of tensors that every rank maps into its memory.

    Attributes:
        layout: of each tensor its name, dtype, shape, and where it begins, in bytes.
    """

    file: str
    num_bytes: int
    layout: list[tuple[str, torch.dtype, tuple[int, ...], int]]

    @classmethod
    def describe(cls, file: str, tensors: Mapping[str, torch.Tensor]) -> "SharedTensors":
        """The layout that has room for these tensors."""
        layout, end = [], 0
        for name, tensor in tensors.items():
            layout.append((name, tensor.dtype, tuple(tensor.shape), end))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(file, max(end, ALIGNMENT), layout)

    def views(self) -> list[tuple[str, torch.Tensor]]:
        """Pairs (name, tensor), whose memory is the file's."""
        data = torch.from_file(self.file, shared=True, size=self.num_bytes, dtype=torch.uint8)
        return [
            (name, data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
            for name, dtype, shape, start in self.layout
        ]


@contextmanager
def shared_file() -> Iterator[str]:
    """A new file for processes of this user. Linux keeps it in memory, and frees it with the last that has it open."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("nanovllm-update_weights"), "r+b") as file:
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with tempfile.TemporaryDirectory(prefix="nanovllm-") as directory:
            yield os.path.join(directory, "update_weights")
