"""Kernels are compiled at start: what a rehearsal asks for is all that is asked for afterwards.

Run as a script, this file is a process in which kernels are neither interpreted nor compiled: Triton is told of a GPU
that is not there, and only what it would compile is written down. So it needs no GPU.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
PROMPT_LENGTHS = [*range(1, 36), 48, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256]
BATCH_SIZES = [*range(1, 20), 31, 32, 33, 48, 63, 64]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_rehearsal_compiles_all_that_a_run_launches_and_runs_nothing(shape, num_ranks, tmp_path):
    config = {
        "head_dim": 64, **SHAPES[shape], "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "num_hidden_layers": 2, "vocab_size": 6000, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": True, "eos_token_id": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(tmp_path), str(num_ranks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["run"] and report["run"] <= report["rehearsed"]
    if shape == "0.6b" and report["has_ring"]:
        assert {"decode_gemm_kernel", "product_kernel"} <= {name.rpartition(".")[2] for name in report["names"]}
    assert report["launched_in_rehearsal"] == [] and report["not_rehearsed"] == []


def test_without_an_asynchronous_mode_kernels_are_loaded_as_they_are_compiled(monkeypatch):
    """As with torch 2.8: one that was not would be loaded while a graph is captured, which CUDA forbids."""
    import torch
    import triton

    from nanovllm.kernels import inputs

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
    with inputs.parallel_compile(torch.device("cpu")):
        inputs.launcher(Kernel(), (3,))(7)
        assert len(loaded) == 1 and launched == []
    inputs.launcher(Kernel(), (3,))(7)
    assert len(loaded) == 1 and launched == [((7,), (3,))]


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


def main(model: str, num_ranks: int) -> None:
    """Start an engine of one of ``num_ranks`` ranks, rehearse, run; print what was asked for as one line of JSON."""
    import torch
    import triton

    class Driver:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    class SilentRanks:
        """Stands for the others' backend: what they would send is zeros."""

        def allreduce(self, tensors, options):
            return None

        def _allgather_base(self, out, x, options):
            out.zero_()

    rehearsed, launched_in_rehearsal, run = {}, {}, {}
    phase = "start"

    def note(*, key, repr, fn, is_manual_warmup, **_):
        assert phase != "start"
        asked = run if phase == "run" else rehearsed if is_manual_warmup else launched_in_rehearsal
        asked[fn.name, key] = repr
        return True  # do not compile, and so do not launch

    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.jit_cache_hook = note

    from nanovllm import LLM, SamplingParams, kernels
    from nanovllm.engine import llm_engine, model_runner
    from nanovllm.kernels import linear, triton_ops
    from nanovllm.layers.attention import TritonBackend
    from nanovllm.distributed.group import SINGLE_RANK, TPGroup

    torch.empty = torch.zeros  # token ids that no kernel writes must be valid ones
    kernels.select = model_runner.select = lambda device_type=None: triton_ops
    model_runner.select_backend = lambda *_: TritonBackend()
    if linear.decode_gemm_sm90 is not None:
        linear.decode_gemm_sm90.is_sm90 = linear.prefill_gemm_sm90.is_sm90 = lambda device: True
        linear.num_sms = lambda device: 132
    group = SINGLE_RANK if num_ranks == 1 else TPGroup(1, num_ranks, SilentRanks())
    llm_engine.start_runner = lambda config: model_runner.ModelRunner(config, group)
    llm = LLM(
        model, device="cpu", dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=64,
        max_num_batched_tokens=2048, max_model_len=512, num_kvcache_blocks=80,
    )  # fmt: skip
    runner = llm.model_runner

    phase = "rehearsal"
    model_and_pages = runner.model, runner.kv_cache
    with torch.inference_mode(), triton_ops.parallel_compile(runner.device):
        runner.compile_kernels()
    runner.model, runner.kv_cache = model_and_pages

    phase = "run"
    for params in (SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, top_k=5, top_p=0.9, min_p=0.1)):
        for length in PROMPT_LENGTHS:
            llm.generate([[length] * length], params, use_tqdm=False)
        for size in BATCH_SIZES:
            llm.generate([[size] * 3] * size, params, use_tqdm=False)
            llm.generate([[size] * (500 // size)] * size, params, use_tqdm=False)  # many tokens, few of them sampled
        for size in (8, 16):
            llm.generate([[size] * (2048 // size)] * size, params, use_tqdm=False)
    llm.exit()
    not_rehearsed = [text for variant, text in run.items() if variant not in rehearsed]
    report = {
        "rehearsed": len(rehearsed),
        "launched_in_rehearsal": list(launched_in_rehearsal.values()),
        "run": len(run),
        "names": sorted({name for name, _ in run}),
        "has_ring": linear.decode_gemm_sm90 is not None,
        "not_rehearsed": not_rehearsed,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
