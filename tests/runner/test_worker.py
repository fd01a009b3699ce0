"""An engine of several ranks gives the tokens of one, and no failure of a rank leaves anything behind.

Failures are provoked for real: processes are killed, stopped, and made to raise; the parent is interrupted
and killed. The same tests run on GPUs with ``-m multigpu``.
"""

import _thread
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from helpers import all_gone

from nanovllm import LLM, ConfigError, EngineError, SamplingParams, WorkerError
from nanovllm.distributed import workers as workers_module
from nanovllm.runner import worker as worker_module
from nanovllm.runner.model_runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="signals"), pytest.mark.usefixtures("heard_sigint"),
]  # fmt: skip

ROOT = Path(__file__).parents[2]
LIMIT_S = 10.0  # from a failure to its WorkerError, everything torn down
LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
PLAIN = SamplingParams(temperature=1.0, seed=7, max_tokens=17, ignore_eos=True)
MIN_TOKENS = SamplingParams(temperature=1.0, seed=7, min_tokens=12, max_tokens=17, stop_token_ids=list(range(2, 12)))
FILTERS = SamplingParams(temperature=0.9, seed=7, top_k=20, top_p=0.9, min_p=0.01, max_tokens=17, ignore_eos=True)
KINDS_OF_SAMPLING = {  # in one batch; a filter makes the ranks gather the logits
    "greedy": [GREEDY],
    "plain": [PLAIN, MIN_TOKENS],
    "filters": [GREEDY, FILTERS, PLAIN, MIN_TOKENS],
}
PROMPTS = [np.random.default_rng(n).integers(0, 500, n).tolist() for n in (5, 17, 33, 100, 16, 1, 64, 7, 31)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def device(request):
    return request.param


def options(device: str, num_ranks: int, **others) -> dict:
    if device == "cuda" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    return {
        "device": device,
        "tensor_parallel_size": num_ranks,
        "skip_tokenizer_init": True,
        "kvcache_block_size": 16,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        **others,
    }


MODELS = {  # ranks, changes of the tiny checkpoint (None: the bundled model), further options
    "bias": (2, {"attention_bias": True}, {"num_kvcache_blocks": 14}),  # few blocks, so that sequences are preempted
    "tied, 1 KV head": (4, {"tie_word_embeddings": True, "num_key_value_heads": 1}, {}),
    "bundled, 2 KV heads": (4, None, {}),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, device, make_checkpoint):
    """An engine with several ranks, and one with a single rank."""
    num_ranks, changes, others = MODELS[request.param]
    model = None if changes is None else make_checkpoint(**changes)
    with LLM(model, **options(device, 1, **others)) as alone, LLM(model, **options(device, num_ranks, **others)) as llm:
        yield llm, alone


def token_ids(llm: LLM, params, prompts=PROMPTS) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def check_same(given: list, expected: list, device: str) -> None:
    if device == "cpu":
        assert given == expected
    else:  # sums in another order: a near tie may turn out otherwise, once in a while
        assert sum(a == b for a, b in zip(given, expected, strict=True)) >= 0.7 * len(given)


@pytest.mark.parametrize("kind", KINDS_OF_SAMPLING)
def test_tokens_are_those_of_one_rank(pair, device, kind):
    llm, alone = pair
    kinds = KINDS_OF_SAMPLING[kind]
    prompts = PROMPTS[:5] if llm.config.tensor_parallel_size == 4 else PROMPTS  # four ranks on few cores are slow
    params = [kinds[i % len(kinds)] for i in range(len(prompts))]
    check_same(token_ids(llm, params, prompts), token_ids(alone, params, prompts), device)
    if llm.config.num_kvcache_blocks == 14:
        assert llm.scheduler.num_preemptions > 0


def test_ranks_agree_on_the_number_of_kv_blocks(pair):
    llm, _ = pair
    assert llm.model_runner.num_kvcache_blocks == llm.scheduler.block_manager.num_available


# ------------------------------------------------------------------------------------------- failures


def leftovers() -> list[str]:
    """Rendezvous directories and named shared memory of this process."""
    names = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("nanovllm-")]
    shared = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return names + [name for name in shared if name.startswith(f"pym-{os.getpid()}-")]


class Failure:
    """``with``: a WorkerError of this rank comes in time, and nothing of the engine is left."""

    def __init__(self, rank: int, text: str, llm: LLM | None = None):
        self.rank, self.text = rank, text
        self.processes = workers_of(llm) if llm else []

    def __enter__(self):
        self.start = time.monotonic()
        return self

    def __exit__(self, kind, error, _):
        assert kind is WorkerError, error
        assert time.monotonic() - self.start < LIMIT_S
        assert error.rank == self.rank and self.text in error.worker_traceback, error
        assert f"rank {self.rank}" in str(error)
        assert not any(process.is_alive() for process in self.processes) and not leftovers()
        return True


def used_memory() -> list[int]:
    """Bytes of each CUDA device that are not free, whoever holds them."""
    return [total - free for free, total in map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))]


@pytest.fixture
def start(device, make_checkpoint, tmp_path, monkeypatch):
    """start(num_ranks) -> an engine whose workers a test may harm."""
    made: list[tuple[LLM, list]] = []
    memory = used_memory() if device == "cuda" else []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start(num_ranks=2, **changes):
        llm = LLM(make_checkpoint(), **options(device, num_ranks, **changes))
        made.append((llm, workers_of(llm)))
        return llm

    yield start
    for llm, processes in made:
        llm.exit()
        llm.exit()
        assert not any(process.is_alive() for process in processes)
    assert not leftovers()
    if device == "cuda":  # a worker's process alone takes more than this; the first engine's libraries stay
        grown = [(after - before) >> 20 for before, after in zip(memory, used_memory(), strict=True)]
        assert max(grown) < 400, f"MiB: {grown}"


def workers_of(llm: LLM) -> list:
    return list(llm.model_runner.workers.processes.values())


def test_a_worker_that_raises(start):
    llm = start()
    with Failure(1, "Traceback", llm):
        llm.model_runner.workers.send("no such method")
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    with pytest.raises(EngineError, match="shut down"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    again = start()  # in the same process
    assert len(token_ids(again, GREEDY)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("signal_number", "text", "num_ranks", "is_idle"),
    [(signal.SIGKILL, "SIGKILL", 4, False), (signal.SIGKILL, "SIGKILL", 2, True),
     (signal.SIGSTOP, "no sign of life", 2, False)],
)  # fmt: skip
def test_a_worker_that_is_killed_or_stopped(start, monkeypatch, signal_number, text, num_ranks, is_idle):
    llm, rank = start(num_ranks), num_ranks // 2
    if signal_number == signal.SIGSTOP:
        monkeypatch.setattr(workers_module, "SILENCE_LIMIT_S", 2.0)
    with Failure(rank, text, llm) as failure:

        def provoke():
            failure.start = time.monotonic()
            os.kill(failure.processes[rank - 1].pid, signal_number)

        provoke() if is_idle else threading.Timer(0.3, provoke).start()
        llm.generate(PROMPTS, LONG, use_tqdm=False)


def test_rank_0_that_raises(start, monkeypatch):
    llm = start()
    with Failure(0, "ZeroDivisionError", llm):
        monkeypatch.setattr(ModelRunner, "run_model", lambda *_: 1 / 0)  # the workers have the step by then
        llm.generate(PROMPTS, LONG, use_tqdm=False)


def finds_no_weights(worker, config):
    nowhere = Path(config.model_path, "nowhere")
    nowhere.mkdir(exist_ok=True)
    shutil.copy(nowhere.parent / "config.json", nowhere)
    object.__setattr__(config, "model_path", str(nowhere))
    worker_module.worker_main(worker, config)


def test_a_worker_that_fails_at_start(start, monkeypatch):
    monkeypatch.setattr(worker_module, "worker_main", finds_no_weights)
    with Failure(1, "nowhere holds no *.safetensors"):
        start()


def test_ctrl_c_in_a_step(start, monkeypatch):
    """The engine is shut down: the workers have a step that rank 0 leaves."""
    llm = start()
    processes = workers_of(llm)
    monkeypatch.setattr(ModelRunner, "run_model", lambda *_: _thread.interrupt_main())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert not any(process.is_alive() for process in processes)
    text = r"shut down, because a run on several ranks was interrupted or a rank failed; make a new LLM\(...\)\."
    with pytest.raises(EngineError, match=text):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_ctrl_c_between_two_steps(start, monkeypatch):
    """No rank has half a step, and the engine goes on. The test of the other case had a timer, which may strike before
    the first step, or in a callback of the garbage collector, whose errors Python drops.
    """
    llm = start()
    tokens, advance = token_ids(llm, GREEDY), llm.advance
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm, "advance", lambda: (advance(), _thread.interrupt_main()))
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert token_ids(llm, GREEDY) == tokens


def test_exit_twice_and_in_the_middle_of_requests(start):
    llm = start()
    processes = workers_of(llm)
    llm.add_request(PROMPTS[0], LONG)
    llm.step()
    llm.exit()
    llm.exit()
    assert [process.exitcode for process in processes] == [0]
    with pytest.raises(EngineError, match="shut down; make"):
        llm.step()


# ------------------------------------------------------------------------------------------- other processes

# as users write it: no function, no `if __name__ == "__main__"`, no exit()
SCRIPT = """
import sys, torch
torch.set_num_threads(1)
print("script runs", flush=True)
from nanovllm import LLM, SamplingParams
model, device, max_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
llm = LLM(model, device=device, tensor_parallel_size=2, skip_tokenizer_init=True, kvcache_block_size=16, max_num_seqs=8,
          max_num_batched_tokens=64, max_model_len=4096, quiet=True)
print("pids", *[p.pid for p in llm.model_runner.workers.processes.values()], flush=True)
params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
outputs = llm.generate([[1, 2, 3], [4] * 30], params, use_tqdm=False)
print("tokens", [o["token_ids"] for o in outputs])
"""


@pytest.fixture
def run_script(device, make_checkpoint, tmp_path):
    search_path = str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": search_path, "TMPDIR": str(tmp_path)}
    options(device, 2)  # skips where there are no two devices
    started = []

    def run(max_tokens: int, text: str = SCRIPT) -> subprocess.Popen:
        script = tmp_path / f"script{len(started)}.py"
        script.write_text(text)
        arguments = [sys.executable, str(script), make_checkpoint(), device, str(max_tokens)]
        started.append(
            subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             start_new_session=True)
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()
    assert not [name for name in os.listdir(tmp_path) if name.startswith("nanovllm-")]


def worker_pids(process: subprocess.Popen) -> list[int]:
    """Wait until the script's engine has started."""
    assert process.stdout.readline() == "script runs\n"
    line = process.stdout.readline().split()
    assert line and line[0] == "pids", process.communicate()[1]
    return [int(pid) for pid in line[1:]]


def test_two_engines_at_once(run_script):
    """Also: a script without a main guard runs once, and ends quietly without exit()."""
    first, second = run_script(20), run_script(20)
    answers = [process.communicate(timeout=120) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], answers
    (out, errors), (other, _) = answers
    assert out.count("script runs") == 1 and errors == ""
    assert out.splitlines()[-1].startswith("tokens") and out.splitlines()[-1] == other.splitlines()[-1]


# the child's interpreter ends, which destroys all objects that it can
FORKED = """
class Inherited:
    def __del__(self, write=os.write, getpid=os.getpid, owner=os.getpid()):
        if getpid() != owner:
            write(1, b"destroyed")

llm.model_runner.inherited = Inherited()
if os.fork() == 0:
    sys.exit()
assert os.wait()[1] == 0
outputs = llm.generate([[1, 2, 3]], params, use_tqdm=False)
print("again", outputs[0]["token_ids"])
"""


def test_the_end_of_a_forked_process_leaves_the_workers_alone(run_script):
    """They were terminated at its exit. On GPUs it aborted: destructors of CUDA graphs fail after a fork."""
    process = run_script(5, SCRIPT.replace("import sys", "import os, sys") + FORKED)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and out.splitlines()[-1].startswith("again"), errors
    assert "destroyed" not in out


def test_ctrl_c_in_a_terminal(run_script):
    """It reaches all processes; the workers leave it to rank 0, which says what is to be said once."""
    process = run_script(4000)
    pids = worker_pids(process)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
    assert all_gone(pids)


def test_a_parent_that_is_killed(run_script):
    process = run_script(4000)
    pids = worker_pids(process)
    time.sleep(0.3)
    process.kill()
    assert all_gone(pids)


@pytest.mark.parametrize("moment", ["spawned", "importing", "meeting"])
def test_a_parent_that_is_killed_at_start(run_script, tmp_path, moment):
    """Nobody is left waiting for it, and the directory in which the ranks meet is removed; it was left by those who
    had no thread yet that watches the parent."""
    process = run_script(4000)
    assert process.stdout.readline() == "script runs\n"
    children = Path(f"/proc/{process.pid}/task")
    if not children.exists():
        pytest.skip("needs /proc")
    pids: list[int] = []
    while not pids:  # the workers of an engine that is about to start
        for task in children.iterdir():
            for pid in (task / "children").read_text().split():
                if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
                    pids.append(int(pid))
    time.sleep(0.3 if moment == "importing" else 0)
    while moment == "meeting" and not list(tmp_path.glob("nanovllm-*")):
        assert process.poll() is None
    process.kill()
    assert all_gone(pids, 20)


# ------------------------------------------------------------------------------------------- refusals


def test_more_ranks_than_devices_is_refused_and_no_worker_is_left(make_checkpoint, monkeypatch):
    """Workers start before torch is imported, which counts the devices."""
    started = []

    def start(*args):
        started.append(workers_module.Workers(*args))
        return started[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(worker_module, "Workers", start)
    before = time.monotonic()
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 needs 2 CUDA devices; torch sees 1"):
        LLM(make_checkpoint(), device="cuda", tensor_parallel_size=2, skip_tokenizer_init=True)
    assert time.monotonic() - before < LIMIT_S
    (process,) = started[0].processes.values()
    assert not process.is_alive() and not started[0]._thread.is_alive()


def test_ctrl_c_while_torch_is_imported_waits_for_no_worker(make_checkpoint, monkeypatch):
    """Workers that start read no message: told to leave, they would be waited for."""

    def interrupt(config):
        raise KeyboardInterrupt

    workers = Mock(tp=None)
    monkeypatch.setattr(worker_module, "Workers", lambda *args: workers)
    monkeypatch.setattr("nanovllm.runner.kv_scales.warn_of_outliers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        LLM(make_checkpoint(), device="cpu", tensor_parallel_size=2, skip_tokenizer_init=True)
    assert workers.mock_calls == [call.dismiss(kill=True), call.join()]
