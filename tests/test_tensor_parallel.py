"""Several ranks give the tokens of one, and no failure of a rank leaves anything behind.

Failures are provoked for real: processes are killed, stopped, and made to raise; the parent is interrupted
and killed. The same tests run on GPUs with ``-m multigpu``.
"""

import _thread
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import worker_mains

from nanovllm import LLM, ConfigError, EngineError, SamplingParams, WorkerError
from nanovllm.engine import tensor_parallel
from nanovllm.distributed.channel import Backoff, Channel
from nanovllm.layers import parallel

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Ranks that share few cores must not wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    "bias": (2, {"attention_bias": True}, {"num_kvcache_blocks": 14}),  # a small pool, so that sequences are preempted
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
    prompts = PROMPTS[:5] if llm.config.model is None else PROMPTS  # the bundled model has more layers
    params = [kinds[i % len(kinds)] for i in range(len(prompts))]
    check_same(token_ids(llm, params, prompts), token_ids(alone, params, prompts), device)
    if llm.config.num_kvcache_blocks == 14:
        assert llm.scheduler.num_preemptions > 0


def test_ranks_agree_on_the_pool(pair):
    llm, _ = pair
    assert llm.config.num_kvcache_blocks == llm.scheduler.block_manager.num_available


# ------------------------------------------------------------------------------------------- the channel


class Elsewhere:
    """A spawned process that reads a channel."""

    def __init__(self, context, memory, rank, size):
        self.answers, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=worker_mains.echo, args=(memory, rank, size, theirs), daemon=True)
        with tensor_parallel._without_main_module():
            self.process.start()


def test_channel_carries_messages_of_any_size_to_all_readers():
    context, size = multiprocessing.get_context("spawn"), 3
    memory = context.RawArray(ctypes.c_char, Channel.NUM_BYTES)
    channel = Channel(memory, 0, size)
    readers = [Elsewhere(context, memory, rank, size) for rank in (1, 2)]
    rng = np.random.default_rng(0)
    for num_words in (1, 7, 300_000, 2, Channel.NUM_WORDS, Channel.NUM_WORDS - 1, 1_500_000, 5, 0):
        words = rng.integers(-(2**31), 2**31, num_words).astype(np.int32)
        channel.send("run_model", words, Backoff())
        for reader in readers:
            assert reader.answers.poll(30)
            assert reader.answers.recv() == ("run_model", num_words, int(words.sum(dtype=np.int64)))
    for reader in readers:
        reader.process.join(10)
        assert reader.process.exitcode == 0


def test_channel_waits_for_the_slowest_reader_and_says_so():
    memory = bytearray(Channel.NUM_BYTES)
    channel, reader = Channel(memory, 0, 3), Channel(memory, 1, 3)  # nobody reads as rank 2

    class Full(Exception):
        pass

    def pause():
        raise Full

    channel.send("run_model", np.arange(Channel.NUM_WORDS - 2, dtype=np.int32), pause)
    assert reader.receive()[1][-1] == Channel.NUM_WORDS - 3
    with pytest.raises(Full):
        channel.send("exit", np.empty(0, np.int32), pause)


# ------------------------------------------------------------------------------------------- the small sums


def check_sums(results, world):
    for n, (result, gathered) in zip(worker_mains.SUM_SIZES, results, strict=True):
        parts = torch.stack([worker_mains.sum_parts(n, rank) for rank in range(world)])
        torch.testing.assert_close(torch.as_tensor(result), parts.sum(0), rtol=0, atol=1e-6)
        assert torch.equal(torch.as_tensor(gathered), parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_one_shot_between_processes():
    pytest.importorskip("triton")
    context, world = torch.multiprocessing.get_context("spawn"), 2
    buffers = [torch.zeros(2 * worker_mains.SUM_CAPACITY).share_memory_() for _ in range(world)]
    marks = [torch.zeros(world, worker_mains.SUM_PROGRAMS, dtype=torch.int64).share_memory_() for _ in range(world)]
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=worker_mains.sums, args=(rank, buffers, marks, theirs), daemon=True))
        pipes.append(ours)
        with tensor_parallel._without_main_module():
            processes[-1].start()
    results: list[list] = [[] for _ in pipes]
    for _ in worker_mains.SUM_SIZES:  # in turn: a full pipe would stop its rank, and the other one with it
        for pipe, received in zip(pipes, results, strict=True):
            assert pipe.poll(60)
            received.append(pipe.recv())
    for received in results:
        check_sums(received, world)
    for process in processes:
        process.join(10)


@pytest.mark.gpu
def test_one_shot_between_streams():
    """Two ranks on one GPU; then one whose peer is gone, and which is released by hand."""
    from nanovllm.kernels.all_reduce import one_shot

    world, programs, capacity = 2, worker_mains.SUM_PROGRAMS, worker_mains.SUM_CAPACITY
    buffers = [torch.zeros(2 * capacity, device="cuda") for _ in range(world)]
    marks = [torch.zeros(world, programs, dtype=torch.int64, device="cuda") for _ in range(world)]
    addresses = [torch.tensor([t.data_ptr() for t in tensors], device="cuda") for tensors in (buffers, marks)]
    epochs = [torch.zeros(programs, dtype=torch.int64, device="cuda") for _ in range(world)]
    streams = [torch.cuda.Stream() for _ in range(world)]
    xs = [[worker_mains.sum_parts(n, rank).cuda() for n in worker_mains.SUM_SIZES] for rank in range(world)]
    outs = [[torch.full((world + 1, *x.shape), float("nan"), device="cuda") for x in xs[rank]] for rank in range(world)]
    released = [torch.ones(1, dtype=torch.int64).pin_memory() for _ in range(world)]

    def launch(rank, i):
        arguments = (*addresses, epochs[rank], released[rank], capacity, rank, world)
        one_shot(xs[rank][i], outs[rank][i][0], *arguments, block=512, num_warps=4)
        one_shot(xs[rank][i], outs[rank][i][1:], *arguments, gather=True, block=512, num_warps=4)

    for i in range(len(worker_mains.SUM_SIZES)):  # the driver loads no kernel while another runs: let all be loaded
        for rank in range(world):
            launch(rank, i)
    torch.cuda.synchronize()
    for flag, mark in zip(released, marks, strict=True):
        flag.zero_()
        mark.zero_()
    for epoch in epochs:
        epoch.zero_()
    torch.cuda.synchronize()
    for i in range(len(worker_mains.SUM_SIZES)):
        for rank in range(world):
            with torch.cuda.stream(streams[rank]):
                launch(rank, i)
    torch.cuda.synchronize()
    for rank in range(world):
        check_sums([(out[0].cpu(), out[1:].cpu()) for out in outs[rank]], world)

    with torch.cuda.stream(streams[0]):
        launch(0, 0)
        launch(0, 1)
    time.sleep(0.05)
    assert not streams[0].query()  # it waits for rank 1
    released[0].fill_(1)
    torch.cuda.synchronize()


def test_ranks_meet_whatever_they_did_before(tmp_path):
    """Symmetric memory numbers its keys by process: a second engine waited for its new workers for ever."""
    stores = [parallel._CountedFromZero(dist.FileStore(str(tmp_path / "store"), 2)) for _ in range(2)]
    for store in stores:
        store._store.set_timeout(timedelta(seconds=2))
    for step in range(3):
        keys = [f"Exchange/{7 * (rank == 0) + step}" for rank in range(2)]  # rank 0 has met others seven times
        for rank, store in enumerate(stores):
            store.set(f"{keys[rank]}/{rank}", b"%d of step %d" % (rank, step))
        for rank, store in enumerate(stores):
            peer = f"{keys[rank]}/{1 - rank}"
            store.wait([peer])
            assert store.check([peer]) and store.get(peer) == b"%d of step %d" % (1 - rank, step)
            assert store.add(f"{keys[rank]}/barrier", 1) == rank + 1
    stores[0].set("Exchange/other", b"no number")
    assert stores[1].get("Exchange/other") == b"no number"


# ------------------------------------------------------------------------------------------- failures


def leftovers() -> tuple[list, list, list]:
    """What an engine could leave behind: worker processes, shared memory, directories."""
    shared = []
    if os.path.isdir("/dev/shm"):
        shared = [name for name in os.listdir("/dev/shm") if name.startswith(("pym-", "psm_", "nanovllm"))]
    directories = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("nanovllm-")]
    return multiprocessing.active_children(), shared, directories


class Failure:
    """``with``: a WorkerError of this rank comes in time, and nothing is left."""

    def __init__(self, rank: int, text: str):
        self.rank, self.text = rank, text
        self.mine: list = []  # the engine's workers

    def __enter__(self):
        self.before, self.start = leftovers(), time.monotonic()
        return self

    def provoked(self):
        self.start = time.monotonic()

    def __exit__(self, kind, error, _):
        assert kind is WorkerError, error
        assert time.monotonic() - self.start < LIMIT_S
        assert error.rank == self.rank and self.text in error.worker_traceback, error
        assert f"rank {self.rank}" in str(error)
        processes, shared, directories = leftovers()
        assert not [p for p in processes if p in self.mine]
        assert (shared, directories) == self.before[1:]
        return True


def used_memory() -> list[int]:
    """Bytes of each CUDA device that are not free, whoever holds them."""
    return [total - free for free, total in map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))]


@pytest.fixture
def start(device, make_checkpoint):
    """start(num_ranks) -> an engine whose workers a test may harm."""
    others, made = multiprocessing.active_children(), []
    memory = used_memory() if device == "cuda" else []

    def start(num_ranks=2, **changes):
        llm = LLM(make_checkpoint(), **options(device, num_ranks, **changes))
        made.append(llm)
        return llm

    yield start
    for llm in made:
        llm.exit()
        llm.exit()
    assert [p for p in multiprocessing.active_children() if p not in others] == []
    if device == "cuda":  # a worker's process alone takes more than this; the first engine's libraries stay
        grown = [(after - before) >> 20 for before, after in zip(memory, used_memory(), strict=True)]
        assert max(grown) < 400, f"MiB: {grown}"


def workers_of(llm: LLM) -> list:
    return list(llm.model_runner.workers._processes.values())


def soon(provoke, delay_s=0.7):
    threading.Timer(delay_s, provoke).start()


def test_a_worker_that_raises(start):
    llm = start()
    with Failure(rank=1, text="TypeError") as failure:
        failure.mine = workers_of(llm)
        llm.model_runner.write_shm("run_model", np.full(3, 7, np.int32))  # too short for a step
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    with pytest.raises(EngineError, match="shut down"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    again = start()  # in the same process
    assert len(token_ids(again, GREEDY)) == len(PROMPTS)


def test_a_worker_that_is_killed_in_a_step(start):
    llm = start(4)
    victim = workers_of(llm)[1]
    with Failure(rank=2, text="SIGKILL") as failure:
        failure.mine = workers_of(llm)
        soon(lambda: (failure.provoked(), victim.kill()))
        llm.generate(PROMPTS, LONG, use_tqdm=False)


def test_a_worker_that_is_killed_while_idle(start):
    llm = start()
    with Failure(rank=1, text="SIGKILL") as failure:
        failure.mine = workers_of(llm)
        workers_of(llm)[0].kill()
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    llm = start()
    mine = workers_of(llm)
    mine[0].kill()
    llm.exit()
    assert not any(p.is_alive() for p in mine)


def test_a_worker_that_stops(start, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "SILENCE_LIMIT_S", 3.0)
    llm = start()
    with Failure(rank=1, text="no sign of life") as failure:
        failure.mine = workers_of(llm)
        soon(lambda: (failure.provoked(), os.kill(failure.mine[0].pid, signal.SIGSTOP)))
        llm.generate(PROMPTS, LONG, use_tqdm=False)


def test_rank_0_that_raises(start, monkeypatch):
    llm = start()
    with Failure(rank=0, text="ZeroDivisionError") as failure:
        failure.mine = workers_of(llm)
        monkeypatch.setattr(llm.model_runner, "run_model", lambda *_: 1 / 0)  # the others have heard of it by then
        llm.generate(PROMPTS, LONG, use_tqdm=False)


@pytest.mark.parametrize(
    ("main", "text"),
    [
        (worker_mains.raises, "nowhere"),
        (worker_mains.is_killed, "SIGKILL"),
        (worker_mains.is_silent, "no sign of life"),
        (worker_mains.never_ready, "stalled at start"),
    ],
)
def test_a_worker_that_fails_at_start(start, monkeypatch, main, text):
    monkeypatch.setattr(tensor_parallel, "worker_main", main)
    monkeypatch.setattr(tensor_parallel, "SILENCE_LIMIT_S", 4.0)
    monkeypatch.setattr(tensor_parallel, "START_TIMEOUT_S", 5.0)
    with Failure(rank=1, text=text):
        start()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_exit_while_a_worker_does_not_hear(make_checkpoint, monkeypatch, signal_number):
    """A dead or stopped worker was asked to leave, and rank 0's device waited for it for ever, with all its memory."""
    aborted = []
    monkeypatch.setattr(tensor_parallel, "LEAVE_S", 1.0)
    monkeypatch.setattr(parallel.TPGroup, "drain", lambda self, timeout_s: bool(aborted))  # a device that waits
    monkeypatch.setattr(parallel.TPGroup, "abort", lambda self: aborted.append(self))
    llm = LLM(make_checkpoint(), **options("cpu", 2))
    runner, worker = llm.model_runner, workers_of(llm)[0]
    os.kill(worker.pid, signal_number)
    llm.exit()
    assert aborted and not hasattr(runner, "model")
    assert worker not in multiprocessing.active_children()


def test_ctrl_c(start):
    """The engine is shut down: nobody knows which ranks the interrupted step has reached."""
    llm = start()
    mine = workers_of(llm)
    soon(_thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert not any(p.is_alive() for p in mine)
    text = r"shut down, because a run on several ranks was interrupted or a rank failed; make a new LLM\(...\)\."
    with pytest.raises(EngineError, match=text):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_exit_twice_and_in_the_middle_of_requests(start):
    llm = start()
    llm.add_request(PROMPTS[0], LONG)
    llm.step()
    mine = workers_of(llm)
    llm.exit()
    llm.exit()
    assert not any(p.is_alive() for p in mine) and [p.exitcode for p in mine] == [0]
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
          max_num_batched_tokens=64, max_model_len=4096)
print("pids", *[p.pid for p in llm.model_runner.workers._processes.values()], flush=True)
params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
outputs = llm.generate([[1, 2, 3], [4] * 30], params, use_tqdm=False)
print("tokens", [o["token_ids"] for o in outputs])
"""


@pytest.fixture
def run_script(device, make_checkpoint, tmp_path):
    root = str(Path(__file__).parents[1])
    search_path = root + os.pathsep + os.environ.get("PYTHONPATH", "")
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


def all_gone(pids: list[int], limit_s: float = LIMIT_S) -> bool:
    def is_there(pid: int) -> bool:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")  # an orphan nobody waits for stays as a zombie in some containers
            return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + limit_s
    while any(is_there(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_two_engines_at_once(run_script):
    """Also: a script without a main guard runs once, and ends quietly without exit()."""
    first, second = run_script(20), run_script(20)
    answers = [process.communicate(timeout=120) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], answers
    (out, errors), (other, _) = answers
    assert out.count("script runs") == 1 and errors == ""
    assert out.splitlines()[-1].startswith("tokens") and out.splitlines()[-1] == other.splitlines()[-1]


FORKED = """
if os.fork() == 0:
    sys.exit()
assert os.wait()[1] == 0
outputs = llm.generate([[1, 2, 3]], params, use_tqdm=False)
print("again", outputs[0]["token_ids"])
"""


def test_the_end_of_a_forked_process_leaves_the_workers_alone(run_script):
    """They were terminated with it, for it had inherited the list of its parent's daemons."""
    process = run_script(5, SCRIPT.replace("import sys", "import os, sys") + FORKED)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and out.splitlines()[-1].startswith("again"), errors


def test_starts_in_two_threads_leave_the_main_module_in_its_place():
    """Otherwise nothing that the user's script defines can be pickled from then on."""
    main = sys.modules["__main__"]
    hidden = [threading.Event() for _ in range(2)]
    may_end = [threading.Event() for _ in range(2)]

    def start(i):
        with tensor_parallel._without_main_module():
            hidden[i].set()
            may_end[i].wait(10)

    threads = [threading.Thread(target=start, args=(i,)) for i in range(2)]
    try:
        threads[0].start()
        assert hidden[0].wait(10) and sys.modules["__main__"] is not main
        threads[1].start()
        hidden[1].wait(0.3)  # it does so while the first is at it, unless it is made to wait
        for thread, event in zip(threads, may_end, strict=True):
            event.set()
            thread.join(10)
        assert sys.modules["__main__"] is main
    finally:
        sys.modules["__main__"] = main


def test_ctrl_c_in_a_terminal(run_script):
    """It reaches all processes; the workers leave it to rank 0, which says what is to be said once."""
    process = run_script(4000)
    pids = worker_pids(process)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
    assert all_gone(pids)


def test_a_parent_that_is_killed(run_script):
    process = run_script(4000)
    pids = worker_pids(process)
    time.sleep(0.5)
    process.kill()
    assert all_gone(pids)


def test_a_parent_that_is_killed_at_start(run_script):
    """Nobody is left waiting for it, and the directory in which the ranks meet is removed."""
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
    time.sleep(0.3)
    process.kill()
    assert all_gone(pids, 20)


# ------------------------------------------------------------------------------------------- refusals


def test_sizes_that_do_not_divide_name_the_figures(make_checkpoint):
    for changes, size, text in (
        ({}, 3, r"tensor_parallel_size=3 .* 4 attention heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, r"tensor_parallel_size=2 .* 3 KV heads"),
        ({"vocab_size": 510}, 4, r"tensor_parallel_size=4 .* 510 vocabulary"),
        ({"intermediate_size": 98}, 4, r"tensor_parallel_size=4 .* 98 intermediate"),
        ({}, 9, r"tensor_parallel_size=9.* 1 to 8"),
    ):
        with pytest.raises(ConfigError, match=text):
            LLM(make_checkpoint(**changes), tensor_parallel_size=size, device="cpu", skip_tokenizer_init=True)


def test_more_ranks_than_devices_is_refused_before_anything_is_spawned(make_checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(tensor_parallel, "Workers", None)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 needs 2 CUDA devices; torch sees 1"):
        LLM(make_checkpoint(), device="cuda", tensor_parallel_size=2, skip_tokenizer_init=True)
