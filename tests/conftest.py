"""Fixtures of all tests: tiny random Qwen3 checkpoints made by transformers, engines on them, and their oracle."""

import gc
import inspect
import json
import multiprocessing.util
import os
import signal
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace

# operations of tiny models on several threads stall at their barriers where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # before anything imports triton: its kernels then run on the CPU, slowly and exactly
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import families  # noqa: E402
import histories  # noqa: E402
from helpers import Reference  # noqa: E402
from logits_twin import BF16_TOLERANCE, FP32_TOLERANCE  # noqa: E402

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
LONGEST = ("test_ways.py", "test_pretrained.py", "test_hybrid_ways.py", "test_ray_data.py", "test_without.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One worker runs all tests of a file, which share engines and references. The longest files begin."""
    if config.option.dist != "load":  # asked for
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by the number of tests, of which the longest files have few
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(config, items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "multigpu" in item.keywords and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))
    if not HAS_GPU and not histories.ALL:
        tests: dict = {}
        for item in items:
            if "gpu" not in item.keywords and (item.path.parent.name == "kernels" or "combinations" in item.keywords):
                tests.setdefault((item.path, item.originalname), []).append(item)
        left_out = {item for cases in tests.values() for item in set(cases).difference(each_value_once(cases))}
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def each_value_once(cases):
    """The fewest cases of a test, roughly, in which each value of each parameter occurs."""
    missing, kept = {}, []
    for item in cases:
        params = getattr(item, "callspec", SimpleNamespace(params={})).params
        together = [mark.args[0] for mark in item.iter_markers("parametrize")]  # "a, b": a value is a pair
        names = [each.replace(" ", "").split(",") if isinstance(each, str) else each for each in together]
        missing[item] = {("", len(names))} | {tuple((name, repr(params[name])) for name in each) for each in names}
    while missing:
        best = max(missing, key=lambda item: len(missing[item]))  # the first of equals
        kept.append(best)
        seen = missing[best]
        missing = {item: rest for item, values in missing.items() if (rest := values - seen)}
    return kept


@contextmanager
def turn_on_gpu(run, alone):
    """A readers-writer lock of the workers of pytest-xdist's ``run``: ``alone``, or beside others that are not."""
    import fcntl

    path = os.path.join(tempfile.gettempdir(), f"nanovllm-tests-{run}")
    with open(path + ".gate", "w") as gate, open(path + ".gpu", "w") as gpu:
        fcntl.flock(gate, fcntl.LOCK_EX)  # who waits to be alone keeps it, and nobody overtakes
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(gpu, fcntl.LOCK_UN)  # closing would not do: a forked process may have the file open, too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Tests marked ``whole_gpu`` measure or fill the device's memory, which tests of other workers would change; so do
    those of several GPUs, whose ranks also wait for each other.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    alone = not {"whole_gpu", "multigpu"}.isdisjoint(item.keywords)
    with turn_on_gpu(run, alone) if HAS_GPU and run else nullcontext():
        result = yield
        if HAS_GPU and alone:
            torch.cuda.empty_cache()
        return result


def pytest_terminal_summary(terminalreporter):
    """Each reason for skipped tests once, with their number: -rs has a line for every place, hundreds of them."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"SKIPPED [{number:,}] {reason}")


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(scope="session")
def frozen():
    """(test file, number of imported modules) at the last freeze of ``frozen_modules``."""
    return [None, 0]


@pytest.fixture(autouse=True)
def frozen_modules(request, frozen):
    """Each engine's start collects garbage, which walks the objects of torch and transformers for 0.1 to 0.3 s: a
    quarter of the time of tests that start engines. They stay, and so do transformers' models, imported one by one.
    """
    if frozen != (now := [request.path, len(sys.modules)]):
        gc.collect()
        gc.freeze()
        frozen[:] = now


@pytest.fixture(scope="session", autouse=True)
def forked_workers():
    """Without a GPU, workers are forked from a server that has imported torch, which costs a process 1.5 s of CPU time.

    They are spawned, as a user's are, in tests/distributed/test_workers.py and in scripts that tests run.
    """
    if HAS_GPU or "forkserver" not in multiprocessing.get_all_start_methods():
        yield
        return
    from nanovllm.distributed import workers

    multiprocessing.util.get_temp_dir()  # its socket: before a test has a longer path for temporary files
    multiprocessing.set_forkserver_preload(["torch.distributed", "nanovllm.runner.model_runner"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "START_METHOD", "forkserver")
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    """Triton's interpreter looks through all names of its language at each call of a function by a kernel.

    That took a third of the kernels' tests' time. It looks for builtins, which are the same ones each time.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if not hasattr(interpreter, "_patch_builtin"):  # not there, or of another version
        yield
        return
    is_builtin, patch_attr, known = interpreter.tl.core.is_builtin, interpreter._patch_attr, {}

    def patch_builtin(language, builder, *scope):
        if language not in known:  # nothing is patched yet
            known[language] = [name for name, member in inspect.getmembers(language) if is_builtin(member)]
        for name in known[language]:
            member = getattr(language, name)
            if is_builtin(member):
                patch_attr(language, name, member, builder, *scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


@pytest.fixture(scope="session", autouse=True)
def float32_on_a_cpu():
    """On a CPU the default dtype follows its instructions, and what tests compare must not: without ``dtype`` it is
    float32 there. With ``dtype="auto"`` it is a user's default, as in scripts that tests run.
    """
    from nanovllm.config import Config

    build = Config.from_options

    def from_options(model, options):
        if options.get("dtype") is None and (options.get("device") == "cpu" or not HAS_GPU):
            options = {**options, "dtype": "float32"}
        return build(model, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Config, "from_options", from_options)
        yield


@pytest.fixture
def heard_sigint():
    """A shell's background jobs ignore SIGINT: Python then installs no handler, and neither do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """make_checkpoint(**overrides) -> path of a random fp32 Qwen3 checkpoint without a tokenizer.

    ``overrides`` change ``TINY``; one checkpoint is written for each set of them. Treat it as
    read-only: a test that damages files copies them first.
    """
    made: dict[str, str] = {}

    def make(**overrides) -> str:
        key = json.dumps(overrides, sort_keys=True)
        if key not in made:
            from transformers import Qwen3Config, Qwen3ForCausalLM

            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = Qwen3ForCausalLM(Qwen3Config(**{**TINY, **overrides})).float()
                for name, p in model.named_parameters():
                    torch.nn.init.normal_(p, mean=float("norm" in name), std=0.1)
            path = tmp_path_factory.mktemp("checkpoint")
            model.save_pretrained(path)
            made[key] = str(path)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny(make_checkpoint):
    """transformers on the checkpoint of ``make_checkpoint()``."""
    return Reference(make_checkpoint())


@pytest.fixture(scope="session")
def reference(tiny):
    """reference(prompt, n) -> the n tokens that transformers generates greedily with the tiny checkpoint."""
    known: dict[tuple, list] = {}

    def generate(prompt, n):
        tokens = known.setdefault(tuple(prompt), [])
        if len(tokens) < n:
            tokens[:] = tiny.greedy(prompt, n)
        return tokens[:n]

    return generate


@pytest.fixture
def make_llm(make_checkpoint):
    """make_llm(**options) -> LLM that is shut down at the end of the test.

    Without ``model`` it is the tiny random checkpoint; without ``device`` the CPU; blocks of 16.
    """
    from nanovllm import LLM

    made = []

    def make(**options):
        defaults = {
            "model": make_checkpoint() if "model" not in options else None,
            "device": "cpu",
            "skip_tokenizer_init": True,
            "kvcache_block_size": 16,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
        }
        llm = LLM(**{**defaults, **options})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.exit()


@pytest.fixture(params=[
    pytest.param(("cpu", "float32", FP32_TOLERANCE), id="cpu float32"),
    *(pytest.param(("cuda", *case), id=f"cuda {case[0]}", marks=pytest.mark.gpu)
      for case in (("float32", FP32_TOLERANCE), ("bfloat16", BF16_TOLERANCE))),
])  # fmt: skip
def on(request, make_llm):
    """on(**options) -> an engine of ``make_llm`` on the device; log-probabilities are within ``on.tolerance``."""
    device, dtype, tolerance = request.param

    def make(**options):
        return make_llm(device=device, dtype=dtype, **{"num_kvcache_blocks": 512, **options})

    make.device, make.tolerance = device, tolerance
    return make


@pytest.fixture(scope="module")
def demo():
    """An engine on the bundled model, on the CPU."""
    from nanovllm import LLM

    with LLM(device="cpu", kvcache_block_size=16, max_num_seqs=8, max_model_len=512, num_kvcache_blocks=256,
             quiet=True) as llm:  # fmt: skip
        yield llm


@pytest.fixture(scope="session")
def small_llm(make_checkpoint):
    """An engine whose cache is smaller than its longest request. Leave no request behind."""
    from nanovllm import LLM

    with LLM(
        make_checkpoint(), device="cpu", skip_tokenizer_init=True, kvcache_block_size=16, max_model_len=128,
        num_kvcache_blocks=6, max_num_seqs=4,
    ) as llm:  # fmt: skip
        yield llm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(case) -> its path, and transformers' model."""

    @cache
    def make(case):
        path = str(tmp_path_factory.mktemp(case))
        return path, families.make(path, case)

    return make


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """published(family, form, **scheme) -> (path of a checkpoint of ``quantized_checkpoints.py``, of its dequantized
    weights, transformers' model of them). Treat them as read-only.
    """
    import quantized_checkpoints

    made = {}

    def make(family, form, **scheme):
        key = f"{family} {form} {scheme}"
        if key not in made:
            path, plain = (str(tmp_path_factory.mktemp(kind)) for kind in ("quantized", "plain"))
            model = quantized_checkpoints.make(path, family)
            tensors = quantized_checkpoints.write(path, model, form, **scheme)
            assert sum(x.dtype in (torch.float8_e4m3fn, torch.int32, torch.uint8) for x in tensors.values()) >= 8
            model.save_pretrained(plain)
            made[key] = path, plain, model
        return made[key]

    return make
