"""Compiles the kernels of a start on an H200 without a GPU, and prints a line for each variant: name, hash of its PTX.

    python tools/ptx.py > before.txt                    # 0.6b, 8b, FP8 weights and KV cache, mixtures: seven minutes
    python tools/ptx.py 8b 8b:quantization=fp8          # published shapes of bench.py; with options of LLM, int4, nvfp4
    python tools/ptx.py --arch 86 8b:quantization=int4  # for another compute capability: 8.6

With ``--arch`` it fails where a kernel needs more shared memory than a GPU of that kind has.

Two trees with equal lines run equal kernels there: the proof of a change that only moves code. A kernel that does not
compile shows as well, Gluon ones included. What it does not show: whether a kernel is right, what is launched with
which values, and the last step from PTX to machine code.

Owns the disguise of this machine: tensors without memory (torch's meta device) that say they are on "cuda:0", and a
Triton driver that names its target. Needs Triton and a CPU build of torch.
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1"}  # PTX without places in the source
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from benchmarks.workloads import write_model
from nanovllm import kernels
from nanovllm.config import Config
from nanovllm.kernels import launch
from nanovllm.runner.start import start_rank

CUDA, META = torch.device("cuda", 0), torch.device("meta")
CASES = ["0.6b", "0.6b:kv_cache_dtype=fp8", "8b", "8b:quantization=fp8", "llama-3.2-1b", "qwen3-30b-a3b",
         "qwen3-30b-a3b-fp8", "gemma-3-12b", "gpt-oss-20b"]  # fmt: skip
# By compute capability: name, SMs, and bytes of shared memory that a program may use.
GPUS = {80: ("A100", 108, 166_912), 86: ("RTX 3090", 82, 101_376), 89: ("RTX 4090", 128, 101_376),
        90: ("H200", 132, 232_448), 100: ("B200", 148, 232_448), 120: ("RTX 5090", 170, 101_376)}  # fmt: skip


class Compiled(Exception):
    """The kernels are compiled; the start would read the weights now."""


class OnMeta(TorchFunctionMode):
    """Tensors that are asked for on the GPU are made on the meta device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def moved(value):
            is_gpu = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
            return META if is_gpu and function is not torch.device else value

        kwargs = {name: moved(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*map(moved, args), **kwargs)


def disguise(arch: int) -> None:
    """Make torch and Triton believe in a GPU of this compute capability."""
    name, num_sms, shared = GPUS[arch]
    gpu = SimpleNamespace(name=f"NVIDIA {name}", multi_processor_count=num_sms, shared_memory_per_block_optin=shared,
                          total_memory=150_000_000_000)  # fmt: skip
    device_of = torch._C.TensorBase.device.__get__

    def device(tensor):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_ours = device_of(tensor) == META and not caller.startswith("torch")
        return CUDA if is_ours else device_of(tensor)

    torch.Tensor.device = property(device)
    torch.Tensor.data_ptr = lambda tensor: (1 << 20) + tensor.storage_offset() * tensor.element_size()
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": divmod(arch, 10),
        "get_device_properties": gpu, "is_current_stream_capturing": False, "memory_allocated": 0,
        "max_memory_allocated": 0, "set_device": None, "synchronize": None, "empty_cache": None,
        "reset_peak_memory_stats": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    driver = {"get_current_target": GPUTarget("cuda", arch, 32), "get_current_device": 0, "get_current_stream": 0}
    triton.runtime.driver.set_active(SimpleNamespace(**{n: lambda *_, a=a: a for n, a in driver.items()}))
    CUDABackend.make_cubin = lambda *_: b""


def compile_case(case: str, found: dict[tuple[str, str], str]) -> None:
    """Add the variants of a start: (name, hash) -> shared memory, warps and lines of PTX."""
    size, *options = re.split("[:,]", case)

    def record(kernel, grid, *args, **options):
        if 0 in grid:
            return
        compiled = kernel.run(*args, grid=grid, warmup=True, **options)
        ptx = re.sub(r"\s*//.*", "", compiled.asm["ptx"]).replace(compiled.metadata.name, "kernel")
        key = kernel.fn.__name__, hashlib.sha1(ptx.encode()).hexdigest()[:12]
        found[key] = f"{compiled.metadata.shared:7} {compiled.metadata.num_warps:3} {ptx.count(chr(10)):6}"

    @contextmanager
    def compile_here(_):
        def begin():
            raise Compiled

        launch.compile_only.set(True)
        yield begin

    ops = kernels.select("cuda")  # imports all kernels
    for name, module in list(sys.modules.items()):
        if name.startswith("nanovllm.kernels") and hasattr(module, "launch") and callable(module.launch):
            module.launch = record
    ops.parallel_compile = compile_here
    with tempfile.TemporaryDirectory() as directory:
        given: dict[str, Any] = dict(option.split("=") for option in options)
        if "speculative_config" in given:  # its method
            given["speculative_config"] = {"method": given["speculative_config"]}
        in_words = given.pop("quantization") if given.get("quantization") in ("int4", "nvfp4") else None
        config = Config.from_options(write_model(directory, size, in_words), {
            "load_format": "dummy", "device": "cuda", "skip_tokenizer_init": True, "quiet": True, **given,
        })  # fmt: skip
        try:
            with OnMeta():
                start_rank(config)
        except Compiled:
            launch.compile_only.set(False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, choices=list(GPUS))
    parser.add_argument("cases", nargs="*", default=CASES)
    options = parser.parse_args()
    disguise(options.arch)
    variants: dict[tuple[str, str], str] = {}
    for case in options.cases:
        compile_case(case, variants)
        print(f"{case}: {len(variants)} variants so far", file=sys.stderr, flush=True)
    for (name, digest), figures in sorted(variants.items()):
        print(f"{name:28} {digest} {figures}")
    needs = {name: int(figures.split()[0]) for (name, _), figures in sorted(variants.items(), key=lambda x: x[1])}
    *_, limit = GPUS[options.arch]
    if too_large := [f"{name} ({size:,})" for name, size in needs.items() if size > limit]:
        sys.exit(f"sm_{options.arch} has {limit:,} bytes of shared memory; more need {', '.join(too_large)}")
