"""The compile server: what it has compiled is found in Triton's cache; without it, all is as if there were none.

Run as a script, this file compiles kernels for a Hopper GPU, which needs no GPU, and reports one line of JSON.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanovllm.config import Config
from nanovllm.utils import compile_server as module
from nanovllm.utils import head_start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and file locks")

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def double(x):
    return 2 * x

@triton.jit
def apply(x_ptr, n, fn: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(x_ptr + offs, fn(tl.load(x_ptr + offs, mask=offs < n)), mask=offs < n)

@triton.jit
def wrong(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), tl.arange(0, 2 * SIZE))
"""


@pytest.fixture
def run_script(tmp_path):
    """run_script(name) -> Popen of this file's script of that name, with a Triton cache and kernels of its own."""
    pytest.importorskip("triton")
    (tmp_path / "kernels_of_test.py").write_text(KERNELS)
    started = []

    def run(name):
        environment = {
            **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"),
            "TRITON_DEFAULT_FP_FUSION": "1",  # Triton 3.9 warns if it is not set
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        }  # fmt: skip
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([sys.executable, __file__, name], env=environment, stdout=pipe, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    limit = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_kernels_of_the_server_are_found_and_those_it_does_not_answer_are_compiled_here(run_script):
    report = json.loads(run_script("compile").communicate(timeout=300)[0].splitlines()[-1])
    assert report["by the server"] == [["apply", True]]
    assert report["error"].startswith("CompilationError") and "wrong" in report["error"]
    assert report["server killed"] == [["apply", False]]
    assert report["records"] == ["", "compiled\n"]  # not after an error
    for pid in report["pids"]:
        assert not is_alive(pid)


def test_the_server_ends_with_its_engine(run_script):
    process = run_script("wait")
    pid = int(process.stdout.readline())
    assert is_alive(pid)
    process.kill()
    wait_until_gone(pid)


@pytest.fixture
def started(monkeypatch):
    """The servers started: processes that wait until they are killed, or their standard input ends."""
    started = []

    def popen(command, **options):
        started.append(subprocess_popen([sys.executable, "-c", "import sys; sys.stdin.buffer.read()"], **options))
        return started[-1]

    subprocess_popen = subprocess.Popen
    monkeypatch.setattr(module.subprocess, "Popen", popen)
    return started


@pytest.fixture
def cached(monkeypatch):
    """Kernels in the cache. Kernels are numbers here."""
    cached = set()
    monkeypatch.setattr(module, "read_closure", lambda kernel: (kernel,))
    monkeypatch.setattr(module, "is_cached", cached.__contains__)
    monkeypatch.setattr(module, "pickled", lambda request: b"request")
    return cached


def test_a_second_process_with_the_same_kernels_waits_for_the_first(started, cached, tmp_path, monkeypatch):
    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            cached.add(7)

    slept = []
    first, second = module.CompileServer(tmp_path / "record"), module.CompileServer(tmp_path / "record")
    assert len(started) == 1
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "sleep", sleep)
        second.request(7)()
        assert len(slept) == 3
        patch.setattr(module, "TIMEOUT_S", -1.0)
        second.request(8)()  # not for ever
    wait = second.request(8)
    first.close(is_compiled=True)
    wait()
    second.close(is_compiled=True)
    assert (tmp_path / "record").read_text() == "compiled\n" and len(slept) == 3


def test_nobody_waits_for_a_server_without_need(started, cached, tmp_path, monkeypatch):
    server = module.CompileServer(tmp_path / "record")
    cached.add(7)
    server.request(7)()
    assert server._num_requests == 0
    begin = time.monotonic()
    for wait in [server.request(8) for _ in range(module.MIN_KERNELS - 1)]:
        wait()  # few, and the server is not ready
    assert server._num_requests == module.MIN_KERNELS - 1
    waits = [server.request(8) for _ in range(module.MIN_KERNELS)]
    started[0].kill()
    for wait in waits:
        wait()  # the server is gone
    server.request(8)()
    assert time.monotonic() - begin < module.TIMEOUT_S / 2
    server.close(is_compiled=False)
    server.close(is_compiled=True)
    assert (tmp_path / "record").read_text() == ""


def test_a_server_that_hangs_holds_up_nobody(started, cached, tmp_path, monkeypatch):
    server = module.CompileServer(tmp_path / "record")
    started[0].send_signal(signal.SIGSTOP)
    waits = [server.request(7) for _ in range(400)]  # more than a socket holds
    monkeypatch.setattr(module, "pickled", lambda request: bytes(10_000_000))
    server.request(7)()
    server.close(is_compiled=False)
    assert started[0].returncode == -signal.SIGKILL
    for wait in waits:
        wait()


def test_a_full_disk_ends_no_start(started, tmp_path):
    server = module.CompileServer(Path("/dev/full"))
    server.close(is_compiled=True)
    server.close(is_compiled=False)


SERVER = """
import os, signal, socket, sys, time
from types import ModuleType
sys.path[:] = {path!r}
from nanovllm.utils import compile_server as module

def compile_request(fd):
    time.sleep(0.2)
    with socket.socket(fileno=fd) as connection:
        os.write(1, connection.recv(1))
        connection.sendall(module.ANSWER)

for name in ("triton", "triton.runtime", "triton.runtime.cache", "nanovllm.kernels"):
    sys.modules[name] = ModuleType(name)
sys.modules["triton.runtime.cache"].triton_key = lambda: None
sys.modules["nanovllm"].kernels = sys.modules["nanovllm.kernels"]
sys.modules["nanovllm.kernels"]._load_ops = lambda use_triton: None
module.compile_request, module.MAX_CHILDREN = compile_request, 1
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as a user's process that starts many may have it
module.serve()
"""


def test_requests_end_with_the_engine(tmp_path, monkeypatch):
    """Each is a letter here."""

    def popen(command, **options):
        with (tmp_path / "letters").open("wb") as file:
            return subprocess_popen([sys.executable, "-c", code], **{**options, "stdout": file})

    subprocess_popen, code = subprocess.Popen, SERVER.format(path=sys.path)
    monkeypatch.setattr(module.subprocess, "Popen", popen)
    server = module.CompileServer(tmp_path / "record")
    answers = [server._send(letter) for letter in (b"a", b"b", b"c", b"d", b"e", b"f")]
    for answer in answers[:2]:
        answer.settimeout(60)
        assert answer.recv(10) == module.ANSWER
    server._control.close()  # as if the engine's process were killed
    for answer in answers:
        answer.close()
    server._process.wait(60)
    assert (tmp_path / "letters").read_bytes() in (b"ab", b"abc")
    server.close(is_compiled=False)


def test_a_server_is_started_only_if_kernels_may_be_missing(started, tmp_path, monkeypatch, make_checkpoint):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = Config.from_options(make_checkpoint(), {})
    for _ in range(2):
        with module.compile_server(config):
            assert module.active.get() is not None
        assert module.active.get() is None
    assert len(started) == 2 and all(server.returncode is not None for server in started)
    module.record_path(config).write_text("compiled\n")
    with module.compile_server(config):
        assert module.active.get() is None
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/none")  # cannot be written
    with module.compile_server(config):
        assert module.active.get() is None
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    with monkeypatch.context() as frozen:
        frozen.setattr(module.sys, "frozen", True, raising=False)
        with module.compile_server(config):
            assert module.active.get() is None
    monkeypatch.setattr(module.sys, "executable", None)  # in a program with Python inside
    with module.compile_server(config):
        assert module.active.get() is None
    assert len(started) == 2


def test_the_record_is_of_what_decides_the_kernels(tmp_path, monkeypatch, make_checkpoint):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def path(**options):
        return module.record_path(Config.from_options(make_checkpoint(), options))

    assert path().parent == tmp_path
    assert path() == path(seed=7, gpu_memory_utilization=0.5, quiet=True)
    assert len({path(), path(max_num_seqs=8), path(dtype="float16"), path(kv_cache_dtype="fp8")}) == 4
    code = (
        "from nanovllm.utils.compile_server import record_path; from nanovllm.config import Config; "
        f"print(record_path(Config.from_options({make_checkpoint()!r}, {{'quantization': 'fp8'}})))"
    )
    for seed in "12":  # the order of sets
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert printed.stdout.strip() == str(path(quantization="fp8")), printed.stderr


@pytest.mark.parametrize(
    ("variables", "device", "torch_version", "expected"),
    [
        ({}, "auto", "2.11.0", True), ({}, "cuda", "2.11.0+cu130", True), ({}, "cpu", "2.11.0", False),
        ({}, "auto", "2.11.0+cpu", False), ({"TRITON_INTERPRET": "1"}, "cuda", "2.11.0", False),
        ({"CUDA_VISIBLE_DEVICES": ""}, "auto", "2.11.0", False),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "auto", "2.11.0", True),
    ],
)  # fmt: skip
def test_a_head_start_is_for_nvidia_gpus(monkeypatch, make_checkpoint, variables, device, torch_version, expected):
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = Config.from_options(make_checkpoint(), {"device": device})
    monkeypatch.setattr(head_start.metadata, "version", {"torch": torch_version}.get)
    monkeypatch.setattr(head_start.os.path, "exists", lambda path: path == "/dev/nvidiactl")
    assert head_start.expects_nvidia(config) == expected
    monkeypatch.setattr(head_start.os.path, "exists", lambda path: False)
    assert not head_start.expects_nvidia(config)


START = """
import json, sys
import nanovllm.utils.compile_server as module
started, popen = [], module.subprocess.Popen
def start(args, **options):  # Triton starts compilers of C
    process = popen(args, **options)
    if args[0] == sys.executable:
        started.append(process)
    return process
module.subprocess.Popen = start
import triton
compiled = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(cache_hit)
from nanovllm import LLM
llm = LLM(sys.argv[1], load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, num_kvcache_blocks=64)
llm.generate([[1, 2, 3]], use_tqdm=False)
assert all(server.returncode is not None for server in started)
print(json.dumps([len(started), len(compiled), sum(compiled)]))
"""


@pytest.mark.gpu
def test_a_first_start_has_its_kernels_compiled_and_a_second_starts_no_server(make_checkpoint, tmp_path):
    model = make_checkpoint(hidden_size=128, intermediate_size=256, head_dim=64)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    reports = []
    for _ in range(2):
        printed = subprocess.run(
            [sys.executable, "-c", START, model], env=environment, capture_output=True, text=True, check=True
        )
        reports.append(json.loads(printed.stdout.splitlines()[-1]))
    (num_servers, num_kernels, num_cached), second = reports
    assert num_servers == (len(os.sched_getaffinity(0)) >= head_start.MIN_CPUS)
    assert num_kernels > 10 and num_cached == num_kernels * num_servers
    assert second == [0, num_kernels, num_kernels]


def script(name: str) -> None:
    import torch
    import triton

    class Driver:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    module.MIN_KERNELS = 0
    directory = Path(os.environ["TRITON_CACHE_DIR"])
    server = module.CompileServer(directory / "record")
    if name == "wait":
        print(server._process.pid, flush=True)
        time.sleep(600)

    import kernels_of_test

    from nanovllm.kernels import launch as launch_module
    from nanovllm.kernels.launch import launch, parallel_compile

    triton.runtime.driver.set_active(Driver())
    launch_module._load = lambda kernel: kernel  # no device to load it on
    torch.cuda.set_device = lambda device: None
    compiled, x = [], torch.zeros(64)
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: compiled.append((src.name, cache_hit))

    def compile_all(server, *kernels):
        compiled.clear()
        token = module.active.set(server)
        try:
            with parallel_compile(torch.device("cuda")):
                for kernel, *args in kernels:
                    launch(kernel, (1,), x, *args)
        finally:
            module.active.reset(token)

    apply = kernels_of_test.apply, 7, kernels_of_test.double
    report, pids = {}, [server._process.pid]
    try:
        compile_all(server, (*apply, 64), (kernels_of_test.wrong, 64))
    except Exception as error:
        report |= {"error": f"{type(error).__name__}: {error}", "by the server": list(compiled)}
    server.close(is_compiled=False)
    server = module.CompileServer(directory / "record 2")
    pids.append(server._process.pid)
    os.kill(pids[1], signal.SIGKILL)
    compile_all(server, (*apply, 128))
    report |= {"server killed": compiled, "pids": pids}
    report["records"] = [(directory / name).read_text() for name in ("record", "record 2")]
    print(json.dumps(report))


if __name__ == "__main__":
    script(sys.argv[1])
