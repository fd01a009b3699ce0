"""Times engines on fixed workloads: a table for people, then one line of JSON.

    python bench.py                                        # a GPU: headline at the 0.6b shape; else: the demo model
    python bench.py --size 8b --workload all --repeats 3   # random weights in the published shape, no download
    python bench.py --workload published --size llama-3.1-8b --quantization fp8 --kv-cache-dtype fp8
    python bench.py --engine nanovllm transformers vllm    # compared in one run, each in a process of its own
    python bench.py --profile trace.json                   # timeline for ui.perfetto.dev, and where the time goes

Every engine gets the same token ids, temperature 0.6 and no stop at end-of-sequence. Timed is one
``generate()`` call with all the requests, after one small warm-up. A repeat has the same lengths and
other token ids, so that no prefix cache knows it.
"""

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.engines import ENGINES, TEMPERATURE, Engine, Options, versions
from benchmarks.workloads import PUBLISHED_OPTIONS, PUBLISHED_ROWS, QWEN3, SIZES, WORKLOADS, Workload, write_model

PAGES = ["pages", "readypages"]
OWN = {*PUBLISHED_ROWS, *PAGES}  # workloads of their own
GROUPS = {"published": list(PUBLISHED_ROWS), "all": [name for name in WORKLOADS if name not in OWN]}
CPU_SCALE = 4  # without a GPU the workloads shrink: a quarter of the requests, of a quarter of the length


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time engines on fixed workloads.")
    add = parser.add_argument
    add("--workload", nargs="+", default=["headline"], choices=[*WORKLOADS, *GROUPS], metavar="NAME",
        help=f"default: headline; {', '.join([*WORKLOADS, *GROUPS])}")  # fmt: skip
    add("--model", help="directory or hub id, with its own weights")
    add("--size", choices=list(SIZES), help="random weights, published shape (default on a GPU: 0.6b, of Qwen3)")
    add("--engine", nargs="+", default=["nanovllm"], choices=list(ENGINES), help="default: nanovllm")
    add("--repeats", type=int, default=1, metavar="N", help="report the median of N runs")
    add("--scale", type=int, metavar="N", help=f"1/N of the requests, of 1/N the length (default: 1; CPU {CPU_SCALE})")
    add("--temperature", type=float, default=TEMPERATURE)
    add("--device", default="auto", choices=["auto", "cuda", "cpu"])
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    add("--quantization", choices=["fp8", "int4", "nvfp4"],
        help="FP8 weights, or random 4-bit integers or floats; nanovllm only")  # fmt: skip
    add("--tensor-parallel-size", type=int, default=1, metavar="N")
    add("--enforce-eager", action="store_true", help="no CUDA graphs, no run-ahead")
    add("--max-model-len", type=int, metavar="N")
    add("--max-num-seqs", type=int, metavar="N")
    add("--max-num-batched-tokens", type=int, metavar="N")
    add("--gpu-memory-utilization", type=float, metavar="SHARE")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None)
    add("--attention-backend", choices=["auto", "flash_attn", "triton", "sdpa"], help="nanovllm only")
    add("--kv-cache-dtype", choices=["auto", "fp8"], help="nanovllm only")
    add("--state-dtype", choices=["float32", "float16"], help="of recurrent layers; nanovllm only")
    add("--kvcache-block-size", type=int, metavar="N", help="nanovllm only")
    add("--num-kvcache-blocks", type=int, metavar="N", help="nanovllm only")
    add("--transformers-batch-size", type=int, default=32, metavar="N", help="rows of a padded batch")
    add("--profile", metavar="FILE", help="write a timeline of the last run of each workload (nanovllm only)")
    add("--json-only", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args(argv)
    if args.model and args.size:
        parser.error("--model and --size exclude each other: a size has random weights")
    if args.repeats < 1 or (args.scale is not None and not 1 <= args.scale <= 64):
        parser.error("--repeats must be at least 1, --scale between 1 and 64")
    if args.profile and not Path(args.profile).absolute().parent.is_dir():
        parser.error(f"--profile: there is no directory {Path(args.profile).parent}")  # known before the runs
    args.workload = list(dict.fromkeys(name for named in args.workload for name in GROUPS.get(named, [named])))
    if not PUBLISHED_ROWS.keys().isdisjoint(args.workload):
        vars(args).update({name: value for name, value in PUBLISHED_OPTIONS.items() if getattr(args, name) is None})
    return args


def has_gpu() -> bool:
    """Whether torch will see a GPU; found without importing it, because its import is timed later."""
    if metadata.version("torch").endswith("+cpu") or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def device_name(device: str, count: int) -> str:
    import torch

    if device != "cpu" and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return f"{count} x {name}" if count > 1 else name
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def options_of(args: argparse.Namespace, model: str | None) -> Options:
    shared = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
              "enable_prefix_caching")  # fmt: skip
    return Options(
        model=model,
        dummy=args.size is not None,
        device=args.device,
        dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        enforce_eager=args.enforce_eager,
        transformers_batch_size=args.transformers_batch_size,
        nanovllm=given(args, "attention_backend", "kv_cache_dtype", "kvcache_block_size", "num_kvcache_blocks",
                       *["quantization"] * (args.quantization == "fp8"), "state_dtype"),
        shared=given(args, *shared),
    )


def run_workload(engine: Engine, workload: Workload, args: argparse.Namespace) -> tuple[Any, float]:
    """The outputs, and the seconds that they took."""
    if workload.images is not None:
        images = workload.images, workload.is_ready
        return engine.generate_with_images(workload.prompts, *images, workload.max_tokens, args.temperature)
    start = perf_counter()
    if workload.embeds:
        outputs = engine.embed(workload.prompts)
    else:
        outputs = engine.generate(workload.prompts, workload.max_tokens, args.temperature)
    return outputs, perf_counter() - start


def time_workload(engine: Engine, workload: Workload, args: argparse.Namespace, profile: bool) -> dict[str, Any]:
    """Figures of one workload: seconds of each repeat, the median's rates, the profile if asked for."""
    seconds, figures = [], {}
    for repeat in range(args.repeats):
        draw = workload.redrawn(repeat, engine.vocab_size)
        outputs, duration = run_workload(engine, draw, args)
        seconds.append(duration)
        if draw.embeds:
            if len(outputs) != len(draw.prompts):
                raise SystemExit(f"{workload.name}: some prompt has no embedding")
        elif [len(ids) for ids in outputs] != draw.max_tokens:
            raise SystemExit(f"{workload.name}: some request has not generated the tokens it was asked for")
    middle = median(seconds)
    figures = {
        "workload": workload.name,
        "requests": len(workload.prompts),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "seconds": round(middle, 4),
        "tokens_per_s": round(workload.num_counted_tokens / middle, 2),
        "counted": "prompt and output" if workload.counts_prompts else "output",
        "repeats_tokens_per_s": [round(workload.num_counted_tokens / s, 2) for s in seconds],
    }
    if profile:  # a run of its own: recording costs some microseconds per step
        from benchmarks.timeline import Timeline

        draw = workload.redrawn(args.repeats, engine.vocab_size)
        with Timeline(engine.llm).recording() as timeline:  # type: ignore[attr-defined]
            run_workload(engine, draw, args)
        path = Path(args.profile)
        if len(args.workload) > 1:
            path = path.with_name(f"{path.stem}-{workload.name}{path.suffix}")
        timeline.write(str(path))
        figures["profile"] = {"file": str(path), **timeline.summary()}
    return figures


def run_engine(name: str, args: argparse.Namespace, model: str | None) -> dict[str, Any]:
    """Start one engine in this process, warm it up, time every workload."""
    engine = ENGINES[name](options_of(args, model))
    warmup = [[(7 * i + j) % engine.vocab_size for j in range(16)] for i in range(4)]
    start = perf_counter()
    engine.generate(warmup, [8] * len(warmup), args.temperature)
    result = {
        "engine": name,
        "how": engine.how,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "import_s": round(engine.import_seconds, 2),
        "start_s": round(engine.start_seconds, 2),
        "warmup_s": round(perf_counter() - start, 2),
        "workloads": [],
    }
    for workload in args.workload:
        profile = args.profile is not None and name == "nanovllm"
        result["workloads"].append(time_workload(engine, WORKLOADS[workload](args.scale), args, profile))
    engine.exit()
    return result


def check_installed(names: list[str]) -> None:
    """Before the first engine runs: its figures would be lost when another one turns out to be missing."""
    missing = [name for name in names if find_spec(name) is None]  # engines are called as their packages
    if missing:
        raise SystemExit(
            f"--engine: {', '.join(missing)} not installed here. Install what is missing in this environment, "
            "or leave it out."
        )


def run_apart(name: str, args: argparse.Namespace, model: str | None) -> dict[str, Any]:
    """The same in a fresh process: its imports are timed from nothing, its memory is its own."""
    argv = [sys.executable, __file__, "--json-only", "--engine", name, "--workload", *args.workload]
    for option, value in vars(args).items():
        flag = "--" + option.replace("_", "-")
        if option in ("json_only", "engine", "workload", "model", "size") or value is None or value is False:
            if option == "enable_prefix_caching" and value is False:
                argv.append("--no-enable-prefix-caching")
        else:
            argv += [flag] if value is True else [flag, str(value)]
    argv += ["--size", args.size] if args.size else ["--model", model] if model else []
    child = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise SystemExit(f"--engine {name} failed; what it said is above.")
    return json.loads(child.stdout.splitlines()[-1])["engines"][0]


def print_table(report: dict[str, Any]) -> None:
    print(f"\n{report['device']} · {report['model']} · scale 1/{report['scale']}")
    print(f"{'engine':14}{'workload':20}{'requests':>9}{'in':>11}{'out':>11}{'seconds':>10}{'tok/s':>11}  counted")
    for engine in report["engines"]:
        for w in engine["workloads"]:
            print(
                f"{engine['engine']:14}{w['workload']:20}{w['requests']:>9,}{w['prompt_tokens']:>11,}"
                f"{w['output_tokens']:>11,}{w['seconds']:>10.2f}{w['tokens_per_s']:>11,.0f}  {w['counted']}"
            )
            if len(w["repeats_tokens_per_s"]) > 1:
                print(f"{'':14}  median of " + ", ".join(f"{rate:,.0f}" for rate in w["repeats_tokens_per_s"]))
    for engine in report["engines"]:
        print(
            f"{engine['engine']}: import {engine['import_s']} s, start {engine['start_s']} s, "
            f"warm-up {engine['warmup_s']} s" + (f"; {engine['how']}" if engine["how"] else "")
        )
        for w in engine["workloads"]:
            for figure, value in w.get("profile", {}).items():
                print(f"  {w['workload']:20}{figure:28}{value}")
    print(" · ".join(f"{package} {version}" for package, version in report["versions"].items() if version), "\n")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    gpu = args.device != "cpu" and has_gpu()
    if args.scale is None:
        args.scale = 1 if gpu else CPU_SCALE
    if args.size is None and args.model is None and gpu:
        args.size = "0.6b"
    if args.quantization in ("int4", "nvfp4") and args.size is None:
        raise SystemExit(f"--quantization {args.quantization} needs --size: a checkpoint has its own weights")
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(directory, args.size, args.quantization) if args.size else args.model
        run = run_engine if len(args.engine) == 1 else run_apart
        if run is run_apart:
            check_installed(args.engine)
        engines = [run(name, args, model) for name in args.engine]
    shape = f"Qwen3-{args.size}" if args.size in QWEN3 else args.size
    report = {
        "model": f"{shape} shape, random weights" if args.size else args.model or "demo model",
        "scale": args.scale,
        "device": device_name(args.device, args.tensor_parallel_size),
        "dtype": " / ".join(dict.fromkeys(engine["dtype"] for engine in engines)),
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "tensor_parallel_size": args.tensor_parallel_size,
        "enforce_eager": args.enforce_eager,
        "engines": engines,
        "versions": versions(),
    }
    if not args.json_only:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # where it is not Unicode
        print_table(report)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
