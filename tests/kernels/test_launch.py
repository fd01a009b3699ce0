"""JIT compilation at start: the warm-up compiles every kernel variant that a run launches, and launches nothing.

Run as a script, this file records the variants that Triton would compile for a Hopper GPU. Kernels are neither
interpreted nor compiled, so no GPU is needed.
"""

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from histories import ALL, at_night

pytest.importorskip("triton")

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
}  # fmt: skip
INT4 = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}}
SHAPES |= {"int4": SHAPES["0.6b"] | INT4, "moe int4": SHAPES["moe"] | INT4}
IMAGE, PATCH = 190, {"patch_size": 8, "temporal_patch_size": 1}
# Qwen2.5-VL: a tower with heads of 80, layers with windows and one without
SHAPES["images"] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "image_token_id": IMAGE,
    "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193,
    "text_config": {
        **SHAPES["tiny"], "hidden_size": 256, "model_type": "qwen2_5_vl_text", "vocab_size": 6000,
        "num_hidden_layers": 2, "max_position_embeddings": 1024, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 8, 8],
        },
    },
    "vision_config": {
        **PATCH, "depth": 2, "fullatt_block_indexes": [1], "hidden_size": 160, "num_heads": 2, "out_hidden_size": 256,
        "intermediate_size": 64, "window_size": 64, "spatial_merge_size": 2,
    },
}  # fmt: skip
# around the borders at which another variant is chosen: 1, multiples of 16, powers of two
PROMPT_LENGTHS = [
    1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256,
]  # fmt: skip
BATCH_SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 48, 63, 64]


@pytest.mark.parametrize(("shape", "num_ranks"), [
    ("tiny", 2), ("0.6b", 1), ("moe", 1), ("moe int4", 1), ("images", 1),
    *at_night(("tiny", 1), ("0.6b", 2), ("int4", 1)),
])  # fmt: skip
def test_the_warmup_compiles_all_that_a_run_launches_and_launches_nothing(shape, num_ranks, tmp_path):
    config = {
        "head_dim": 64, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "num_hidden_layers": 2, "vocab_size": 6000, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": True, "eos_token_id": 1, "torch_dtype": "bfloat16",
        **SHAPES[shape],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    if shape == "images":
        processor = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, **PATCH,
                     "size": {"shortest_edge": 256, "longest_edge": 1 << 20}}  # fmt: skip
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(tmp_path), str(num_ranks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["run"] and report["run"] <= report["warmed_up"]
    if shape == "0.6b" and report["has_gluon"]:
        assert {"decode_gemm_sm90", "prefill_gemm_sm90", "prefill_sm90"} <= set(report["modules"])
    used = {"packed", *["packed_sm90"] * report["has_gluon"]} if shape == "images" else {"filters", "masks"}
    assert {"gumbel", "step_inputs"} | used <= set(report["modules"])
    assert report["launched_in_warmup"] == [] and report["not_warmed_up"] == []


def test_a_hopper_gpu_in_place_of_others(monkeypatch):
    import torch

    from nanovllm.kernels import launch

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for without in (False, True):
        monkeypatch.setattr(launch, "WITHOUT_HOPPER", without)
        assert launch.is_sm90.__wrapped__(device) == (not without)
        assert launch.shared_kib.__wrapped__(device) == (99 if without else 227)


VARYING = {"num_tokens", "num_seqs", "num_rows", "num_tiles", "num_items", "batch_size"}


def test_sizes_of_a_batch_are_not_specialized():
    """The tower's attention was compiled again, 4 s in the middle of a job, where its tiles were a multiple of 16."""
    found = []
    for file in (Path(__file__).parents[2] / "nanovllm" / "kernels").rglob("*.py"):
        for kernel in ast.walk(ast.parse(file.read_text())):
            if not isinstance(kernel, ast.FunctionDef) or not kernel.name.endswith("_kernel"):
                continue
            options = " ".join(map(ast.unparse, kernel.decorator_list))
            if varying := {each.arg for each in kernel.args.args if each.annotation is None} & VARYING:
                assert all(f"'{name}'" in options for name in varying), f"{file}: {kernel.name}"
                found.append(kernel.name)
    assert len(found) > 20


def test_kernels_are_loaded_once_compiled_without_an_asynchronous_mode(monkeypatch):
    """Triton 3.4 (torch 2.8) has none. A kernel not loaded then would be in graph capture, where loading is illegal."""
    import torch
    import triton

    from nanovllm.kernels.launch import launch, parallel_compile

    loaded, launched = [], []

    class Compiled:
        @property
        def run(self):
            loaded.append(self)

    class Kernel:
        def run(self, *args, grid, warmup):
            if not warmup:
                launched.append((args, grid))
            return Compiled()

    monkeypatch.delattr(triton, "AsyncCompileMode", raising=False)
    with parallel_compile(torch.device("cpu")):
        launch(Kernel(), (3,), 7)
        assert len(loaded) == 1 and launched == []
    launch(Kernel(), (3,), 7)
    assert len(loaded) == 1 and launched == [((7,), (3,))]


LAUNCHER = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


def test_a_launcher_is_not_replaced_by_one_that_is_loaded_later(tmp_path, monkeypatch):
    """Threads that compile could take each other's: one start of some hundred failed at a launch."""
    from triton.runtime.build import compile_module_from_src

    from nanovllm.kernels import launch  # noqa: F401

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if not (shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("needs a C compiler")
    modules = [compile_module_from_src(src=LAUNCHER % i, name="__triton_launcher") for i in (0, 1, 0, 1, 2, 0)]
    assert [module.launch() for module in modules] == [0, 1, 0, 1, 2, 0]


@pytest.mark.parametrize("fails", ["launching", "compiling"])
def test_a_failure_does_not_wait_for_queued_compilations(monkeypatch, fails):
    """Ctrl-C ended a first start only after every kernel of the queue was compiled, half a minute later."""
    import torch
    import triton

    from nanovllm.kernels.launch import launch, parallel_compile

    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("compiles kernel by kernel")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    begun = []

    class Kernel:
        def __init__(self, number):
            self.number = number

        def run(self, *args, grid, warmup):
            mode = triton.runtime._async_compile.active_mode.get()
            num_callbacks = len(inspect.signature(mode.submit).parameters) - 2  # Triton 3.6: one, 3.9: two
            mode.submit(self.number, self.compile, *[lambda *_: None] * num_callbacks)

        def compile(self):
            begun.append(self)
            if fails == "compiling" and self.number == 0:
                raise KeyError("compiler")
            time.sleep(0.2)
            return self

    error = KeyboardInterrupt if fails == "launching" else KeyError
    with pytest.raises(error), parallel_compile(torch.device("cpu")):
        for number in range(200):
            launch(Kernel(number), (1,))
        if fails == "launching":
            raise KeyboardInterrupt
    assert len(begun) < 200
    done = []
    with parallel_compile(torch.device("cpu")):  # the next is not disturbed
        Kernel.compile = lambda self: done.append(self) or self
        for number in range(200):
            launch(Kernel(number), (1,))
    assert len(done) == 200


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_nothing_is_compiled_after_start(make_checkpoint, make_llm, monkeypatch, enforce_eager):
    import triton

    from nanovllm import SamplingParams

    llm = make_llm(
        model=make_checkpoint(num_hidden_layers=2, hidden_size=128, intermediate_size=256, head_dim=128), device="cuda",
        enforce_eager=enforce_eager, kvcache_block_size=256, max_num_batched_tokens=4096, dtype="bfloat16",
    )  # fmt: skip
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda *, repr, **_: compiled.append(repr))
    for length in (1, 7, 12, 16, 33, 63, 1000, 1100):
        for params in (SamplingParams(temperature=0, max_tokens=3), SamplingParams(top_k=5, top_p=0.9, max_tokens=3)):
            llm.generate([[5] * length] * 3, params, use_tqdm=False)
    assert compiled == []


def run_texts(llm) -> None:
    from nanovllm import SamplingParams

    llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=2, min_tokens=2), use_tqdm=False)
    filters = SamplingParams(max_tokens=2, top_k=5, top_p=0.9, min_p=0.1)
    for params in (SamplingParams(max_tokens=2), filters):
        for size in BATCH_SIZES:
            llm.generate([[size] * 3] * size, params, use_tqdm=False)
        if params is filters and not ALL:  # they change what sampling launches, which depends on the batch's size alone
            break
        for length in PROMPT_LENGTHS:
            llm.generate([[length] * length], params, use_tqdm=False)
        for size in BATCH_SIZES:
            llm.generate([[size] * (500 // size)] * size, params, use_tqdm=False)  # many tokens, few of them sampled
        for size in (8, 16):
            llm.generate([[size] * (2048 // size)] * size, params, use_tqdm=False)


def main(model: str, num_ranks: int) -> None:
    """Start one of ``num_ranks`` ranks, warm up, run; print the kernel variants requested as one line of JSON."""
    import torch
    import triton
    from PIL import Image

    class Driver:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    class SilentRanks:
        """Backend of the other ranks: they send zeros."""

        def allreduce(self, tensors, options):
            return None

        def _allgather_base(self, out, x, options):
            out.zero_()

    warmed_up, launched_in_warmup, run = {}, {}, {}
    phase = "start"

    def note(*, key, repr, fn, is_manual_warmup, **_):
        assert phase != "start"
        variants = run if phase == "run" else warmed_up if is_manual_warmup else launched_in_warmup
        variants[fn.module, fn.name, key] = repr
        return True  # do not compile, and so do not launch

    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.jit_cache_hook = note
    empty = torch.empty
    torch.empty = lambda *args, **kwargs: empty(*args, **kwargs).zero_()  # ids that no kernel writes must be valid
    # cuBLAS's share of a run would take minutes on a CPU, for values that no kernel reads
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight))
    torch.addmm = lambda residual, x, weight, *, out: out

    from nanovllm import kernels
    from nanovllm.kernels import launch

    # before anything imports them
    launch.is_sm90, launch.num_sms = (lambda device: True), (lambda device: 132)
    select, ops = kernels.select, kernels.select("cuda")
    kernels.select = lambda device_type=None, folder="": select("cuda", folder)

    from nanovllm import LLM, SamplingParams
    from nanovllm.distributed.group import SINGLE_RANK, TPGroup
    from nanovllm.engine import llm_engine
    from nanovllm.kernels.linear import dispatch
    from nanovllm.layers.attention_backends import PagedBackend
    from nanovllm.runner import parts
    from nanovllm.runner.start import compile_kernels, start_rank

    parts.select_backend = lambda *_: PagedBackend(ops, capturable=True)
    tp = SINGLE_RANK if num_ranks == 1 else TPGroup(1, num_ranks, SilentRanks())
    llm_engine.start_runner = lambda config: start_rank(config, tp)
    llm = LLM(
        model, device="cpu", dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=64,
        max_num_batched_tokens=2048, max_model_len=512, num_kvcache_blocks=80,
    )  # fmt: skip
    runner = llm.model_runner

    phase = "warmup"
    loaded = runner.model
    with torch.inference_mode(), ops.parallel_compile(runner.device):
        compile_kernels(runner)
    runner.model = loaded
    runner.allocate_kv_cache()  # parts have released theirs

    phase = "run"
    if (Path(model) / "preprocessor_config.json").exists():
        for count, side in ((1, 16), (1, 64), (1, 176), (1, 256), (2, 96), (4, 256), (7, 128), (16, 64)):
            image = {"image": Image.new("RGB", (side, side + 16), (count, side, 0))}
            prompts = [{"prompt_token_ids": [5, IMAGE, size], "multi_modal_data": image} for size in range(count)]
            llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    else:
        run_texts(llm)
    llm.exit()
    report = {
        "warmed_up": len(warmed_up),
        "launched_in_warmup": list(launched_in_warmup.values()),
        "run": len(run),
        "modules": sorted({module.rpartition(".")[2] for module, _, _ in run}),
        "has_gluon": dispatch.decode_gemm_sm90 is not None,
        "not_warmed_up": [text for variant, text in run.items() if variant not in warmed_up],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
