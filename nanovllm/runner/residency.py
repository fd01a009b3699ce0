"""What of a rank is in the device's memory between requests: its weights can be replaced, and all of it put to sleep.

Owns the copies on the host, and the record of weights that are undefined. The engine is idle whenever this is called.
Addresses: an update writes in place, so CUDA graphs stay valid; sleep drops them, and wake-up captures them again.
"""

import ctypes
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.errors import CheckpointError, ConfigError, EngineError, NanoVLLMError, OutOfMemoryError
from nanovllm.kernels.fp8 import E4M3
from nanovllm.models.loader import WeightFiller
from nanovllm.runner.kv_scales import calibrate
from nanovllm.runner.memory import detach_kv_cache

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

Weights = str | os.PathLike | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
TAGS = "weights", "kv_cache"
# Pinned memory is handed out in powers of two. In pieces of this size little of it is lost.
CHUNK_BYTES = 64 << 20
BUCKET_BYTES = 512 << 20  # of tensors on their way to the other ranks


class Residency:
    """One rank's; rank 0's is asked by the engine, and drives the others by ``call``.

    Attributes:
        asleep: tags of what is not in the device's memory.
        undefined: checkpoint names of weights that must be pushed before the engine can run. Known to rank 0.
    """

    def __init__(self, runner: "ModelRunner"):
        self._runner = weakref.proxy(runner)  # in a cycle a failed start would keep its memory until the next full GC
        self.asleep: set[str] = set()
        self.undefined: set[str] = set()
        self._why_undefined = ""
        self._needs_calibration = False
        self._num_calls = 0
        self._num_written = 0  # tensors, by the last ``load``
        # of parameters and buffers that sleep: storage, size in bytes, its bytes on the host (none if dropped)
        self._sleeping: list[tuple[torch.UntypedStorage, int, list[torch.Tensor]]] = []

    def require_ready(self) -> None:
        """Rank 0, before a request runs. Raises EngineError where none can."""
        if self.asleep:
            raise EngineError(f"the engine sleeps ({', '.join(sorted(self.asleep))}); call wake_up() first.")
        if self.undefined:
            some = ", ".join(sorted(self.undefined)[:3])
            raise EngineError(
                f"{self._why_undefined}: {len(self.undefined)} tensors are undefined, among them {some}. Call "
                "update_weights with all of them first."
            )
        if self._needs_calibration:  # once for all the updates before, which may be of a tensor each
            self.call("calibrate")
            self._needs_calibration = False

    # ------------------------------------------------------------ ranks

    def call(self, method: str, *args: Any) -> Any:
        """Rank 0: run a method on every rank; returns rank 0's result, or raises what a rank raised."""
        workers = self._runner.workers
        if workers is None:
            return getattr(self, method)(*args)
        with workers.guard():
            workers.send("residency", method, *args)
            result, error = self._run(method, args)
            errors = [error, *(error for _, error in workers.wait_for_answers(self._num_calls))]
        for error in filter(None, errors):
            raise error
        return result

    def answer(self, method: str, *args: Any) -> tuple[int, NanoVLLMError | None]:
        """Another rank: run a call; returns its number and error."""
        _, error = self._run(method, args)
        return self._num_calls, error

    def _run(self, method: str, args: Any) -> tuple[Any, NanoVLLMError | None]:
        self._num_calls += 1
        try:
            return getattr(self, method)(*args), None
        except NanoVLLMError as error:
            return None, error

    # ------------------------------------------------------------ weights

    def update(self, weights: Weights, partial: bool) -> set[str]:
        """Rank 0: write the weights on every rank; returns their names.

        Until all tensors are written the engine counts as undefined, unless the update ends before it wrote any.
        """
        if "weights" in self.asleep:
            raise EngineError("the weights sleep; call wake_up(tags=['weights']) before they are updated.")
        if isinstance(weights, (str, os.PathLike)):
            source = os.path.abspath(os.path.expanduser(weights))  # another rank may have another working directory
            parts: Any = [source]
            if not os.path.exists(source):
                raise CheckpointError(f"update_weights: {source} does not exist; give a directory of safetensors.")
        else:
            source, parts = "update_weights", [as_pairs(weights)]
            if self._runner.workers is not None:
                parts = in_buckets(parts[0], self._runner.model.unused_tensors)
        before, why = self.undefined, self._why_undefined
        missing = set(WeightFiller(self._runner.model).missing)
        self.undefined, self._why_undefined = set(missing), "an update of the weights failed half way"
        written: set[str] = set()
        self._num_written = 0
        try:
            for part in parts:
                names = self._load_bucket(part) if isinstance(part, dict) else self.call("load", part)
                if again := names & written:
                    raise CheckpointError(f"{source}: tensor {min(again)!r} is twice there.")
                written |= names
            missing -= written
            if missing and not partial:
                some = ", ".join(sorted(missing)[:5])
                raise CheckpointError(
                    f"{source}: {len(missing)} tensors are missing, among them {some}; give all of them, or "
                    "partial=True."
                )
            halves = half_given(written, before, WeightFiller(self._runner.model).missing)
            if halves and not partial:
                raise CheckpointError(
                    f"{source}: {halves[0]} is missing; data and scale of an FP8 weight go together. Give both, or the "
                    "weight in 16 bits."
                )
        except BaseException:
            if not written and not self._num_written:
                self.undefined, self._why_undefined = before, why
            raise
        self.undefined = (before - written) | set(halves)
        self._why_undefined = why or "an FP8 weight got its data or its scale alone"
        self._needs_calibration = self._runner.kv_dtype == E4M3
        return written

    @torch.inference_mode()
    def calibrate(self) -> None:
        """Every rank: set the scales of an FP8 KV cache by the new weights; the cache is empty now."""
        runner = self._runner
        calibrate(runner.model, runner.config, runner.dtype, runner.device)
        runner.synchronize()

    @torch.inference_mode()
    def load(self, weights: str | Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Every rank: write tensors, of files or given as pairs, into the parameters; returns their names."""
        filler = WeightFiller(self._runner.model)
        self._runner.synchronize()
        try:
            if isinstance(weights, str):
                filler.fill_from_files(weights)
            else:
                filler.fill_from(weights, "update_weights")
        finally:
            self._num_written = len(filler.filled)
            self._runner.synchronize()  # the caller may change its tensors, or delete the files
        return filler.filled

    def _load_bucket(self, bucket: dict[str, torch.Tensor]) -> set[str]:
        """``load`` on every rank, by a file in shared memory."""
        from safetensors.torch import save_file

        with shared_directory(sum(tensor.nbytes for tensor in bucket.values())) as directory:
            file = os.path.join(directory, "update_weights")  # errors name it
            save_file(bucket, file)
            bucket.clear()
            return self.call("load", file)

    # ------------------------------------------------------------ sleep

    def sleep(self, level: int) -> None:
        """Every rank: 1 moves the weights to the host, 2 drops them; KV cache, graphs and sampling tables go."""
        if level not in (1, 2):
            raise ConfigError(f"sleep: level={level!r} must be 1 (weights to the host) or 2 (weights dropped).")
        runner = self._runner
        runner.synchronize()
        self.asleep = set(TAGS)  # before the work, so that wake_up mends what an interrupt leaves
        runner.graphs = None  # they hold addresses of weights and KV cache
        runner.sampler.release()
        self._drop_kv_cache()
        if level == 2:
            self.undefined = set(WeightFiller(runner.model).missing)
            self._why_undefined = "the weights were dropped by sleep(level=2)"
        if level == 2 or runner.device.type == "cuda":  # on the CPU the weights are on the host
            self._offload(keep=level == 1)
        self._free_cached_memory()

    def wake_up(self, tags: list[str]) -> None:
        """Every rank: take the memory of ``tags`` again, and capture the graphs when all is there.

        Raises:
            OutOfMemoryError: the device has no room; what slept sleeps on.
        """
        runner, waking = self._runner, self.asleep & set(tags)
        try:
            with torch.inference_mode():
                if "weights" in waking:
                    self._restore()
                if "kv_cache" in waking:
                    runner.allocate_kv_cache()
                if waking == self.asleep and runner.use_graphs and runner.graphs is None:
                    runner.capture_cudagraph()
        except (torch.OutOfMemoryError, MemoryError) as error:
            runner.graphs = None
            if "kv_cache" in waking:
                self._drop_kv_cache()
            for storage, _, _ in self._sleeping if "weights" in waking else ():
                storage.resize_(0)
            self._free_cached_memory()
            raise OutOfMemoryError(
                f"wake_up: no room on {runner.device} for {', '.join(sorted(waking))}: {error}\nFree memory there (a "
                "trainer's, perhaps) and call wake_up again."
            ) from error
        self.asleep -= waking
        if "weights" in waking:
            self._sleeping = []

    def _drop_kv_cache(self) -> None:
        self._runner.kv_cache = None
        detach_kv_cache(self._runner.model)

    def _offload(self, keep: bool) -> None:
        """Free every storage of the model. Buffers are in no checkpoint, so their bytes are kept in any case."""
        model = self._runner.model
        parameters = {param.untyped_storage()._cdata for param in model.parameters()}
        if not keep:  # those already on the host go too
            self._sleeping = [
                (storage, size, [] if storage._cdata in parameters else chunks)
                for storage, size, chunks in self._sleeping
            ]
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:  # tied, or asleep
                continue
            chunks = to_host(storage) if keep or storage._cdata not in parameters else []
            self._sleeping.append((storage, storage.nbytes(), chunks))
            storage.resize_(0)

    def _restore(self) -> None:
        for storage, size, chunks in self._sleeping:
            storage.resize_(size)
            for target, chunk in zip(as_bytes(storage).split(CHUNK_BYTES), chunks, strict=False):
                target.copy_(chunk, non_blocking=True)
        self._runner.synchronize()

    def _free_cached_memory(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()
        elif sys.platform == "linux":  # glibc keeps freed pages of tensors below 32 MiB
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)


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


def half_given(written: set[str], undefined: set[str], known: set[str]) -> list[str]:
    """Names not written of data, or scales, of FP8 weights whose other half is written, and was not ``undefined``."""
    new = written - undefined
    others = {f"{name}_scale" for name in new} | {name.removesuffix("_scale") for name in new}
    return sorted((others & known) - written)


# ---------------------------------------------------------------- to the other ranks


def as_pairs(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Pairs (name, tensor), checked one by one."""
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    try:
        pairs = iter(pairs)
    except TypeError:
        pairs = iter([pairs])
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise CheckpointError(
                "update_weights takes a path of safetensors, or pairs (name, tensor) such as model.named_parameters(), "
                f"not {pair!s:.100}."
            )
        yield pair[0], pair[1]


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


def shared_directory(num_bytes: int) -> tempfile.TemporaryDirectory:
    """In shared memory if it has room: a container may have 64 MiB of it."""
    shm = "/dev/shm"
    has_room = os.path.isdir(shm) and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 1.1 * num_bytes
    return tempfile.TemporaryDirectory(prefix="nanovllm-", dir=shm if has_room else None)
