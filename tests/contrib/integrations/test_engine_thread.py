"""An engine on a thread of its own: results are those of ``generate``, errors reach their callers. Two seconds."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from time import sleep

import pytest

from nanovllm import ConfigError, EngineError, OutOfMemoryError, RequestError, SamplingParams
from nanovllm.engine.request import Request
from nanovllm.integrations.engine_thread import EngineThread

OPTIONS = {"device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 8, "num_kvcache_blocks": 64, "quiet": True}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(make_checkpoint):
    engine = EngineThread(make_checkpoint(), kvcache_block_size=16, **OPTIONS)
    yield engine
    engine.submit([2], PARAMS).result(60)  # it still serves
    engine.llm.exit()


def test_submit_from_many_threads(engine, reference):
    prompts = [[5 + i, 7, 9] for i in range(40)]

    def complete(prompt):
        return engine.submit(prompt, PARAMS).result(60)

    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(complete, prompts))
    assert [output["token_ids"] for output in outputs] == [reference(prompt, 6) for prompt in prompts]


class Panic(BaseException):
    """As tokenizers raise it: no Exception. It ended the thread, and everyone waited for ever."""


class Hostile:
    def __init__(self, error):
        self.error = error

    def __iter__(self):
        raise self.error


def test_whatever_a_request_raises(engine):
    """A SystemExit ended the thread, too."""
    prompts = [2], [10**6], Hostile(Panic("unwrap on a None")), Hostile(SystemExit("at once"))
    good, unknown, panic, end = (engine.submit(prompt, PARAMS) for prompt in prompts)
    for future, error, text in ((unknown, RequestError, "outside the vocabulary"), (end, SystemExit, "at once"),
                                (panic, RequestError, "this request fails with Panic: unwrap on")):  # fmt: skip
        with pytest.raises(error, match=text):
            future.result(60)
    assert len(good.result(60)["token_ids"]) == 6


def test_errors_are_of_their_request(engine, monkeypatch):
    """Of one whose output cannot be made the caller waited for ever, and the requests beside it failed."""
    output = Request.output

    def failing(request):
        if request.prompt_ids.tolist() == [3]:
            raise OSError("the tokenizer's file is gone")
        return output(request)

    monkeypatch.setattr(Request, "output", failing)
    good, unknown, broken = (engine.submit([token], PARAMS) for token in (2, 10**6, 3))
    with pytest.raises(RequestError, match="outside the vocabulary"):
        unknown.result(60)
    with pytest.raises(OSError, match="file is gone"):
        broken.result(60)
    assert len(good.result(60)["token_ids"]) == 6


def test_a_failed_step_fails_its_requests(engine, monkeypatch):
    """An exception that says nothing about the device: the callers learn it, and the engine goes on."""
    with monkeypatch.context() as patch:
        error = OutOfMemoryError("no room")
        patch.setattr(engine.llm.model_runner, "forward", lambda batch: (_ for _ in ()).throw(error))
        futures = [engine.submit([i], PARAMS) for i in range(2, 5)]
        for future in futures:
            with pytest.raises(OutOfMemoryError, match="no room"):
                future.result(60)


def test_a_cancelled_request_leaves_its_seat(engine):
    """As ``asyncio.wait_for`` cancels on a timeout; it kept its seat to its end."""
    futures = [engine.submit([2 + i], SamplingParams(max_tokens=900, ignore_eos=True)) for i in range(12)]  # 8 seats
    good = engine.submit([2], PARAMS)
    while engine.llm.metrics()["num_requests_running"] < 8:
        sleep(0.001)
    assert all(future.cancel() and future.cancelled() for future in futures)
    assert len(good.result(60)["token_ids"]) == 6
    assert wait(futures, 60).done == {*futures}  # they are told, too
    assert engine.llm.is_finished() and engine.llm.metrics()["generation_tokens"] < 900


def test_calls_take_turns_with_steps(engine, reference):
    """The engine refuses other threads while it steps; on its own thread a call finds it between two steps."""
    futures = [engine.submit([2 + i, 3], PARAMS) for i in range(12)]
    outputs = engine.call(engine.llm.generate, [[9, 8]], PARAMS, use_tqdm=False).result(60)
    assert outputs[0]["token_ids"] == reference([9, 8], 6)
    assert [future.result(60)["token_ids"] for future in futures] == [reference([2 + i, 3], 6) for i in range(12)]
    own = engine.call(engine.llm.submit, [4, 3], PARAMS).result(60)  # the thread runs it, though nobody submitted to it
    assert wait([own], 60).done and own.result()["token_ids"] == reference([4, 3], 6)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.call(engine.llm.generate, [[10**6]]).result(60)


def test_exit_by_a_callback(make_checkpoint):
    """On the engine's thread, amid a step: after it everything ends, and other threads' ``exit`` returns."""
    engine = EngineThread(make_checkpoint(), **OPTIONS)
    long = engine.submit([2], SamplingParams(max_tokens=900, ignore_eos=True))
    engine.submit([2], PARAMS).add_done_callback(lambda _: engine.exit())
    with pytest.raises(EngineError, match="was shut down"):
        long.result(60)
    engine.exit()
    assert not engine.llm.is_running


def test_exit(make_checkpoint):
    engine = EngineThread(make_checkpoint(), **OPTIONS)
    futures = [engine.submit([2], SamplingParams(max_tokens=900, ignore_eos=True)) for _ in range(3)]
    engine.exit()
    engine.exit()
    for future in (*futures, engine.submit([2], PARAMS), engine.call(int)):
        with pytest.raises(EngineError, match="was shut down"):
            future.result(60)
    assert not engine.llm.is_running


def test_a_process_that_ends_amid_a_request():
    """The interpreter killed the thread within torch: "terminate called without an active exception", status 134. Short
    requests failed before, for want of an executor, which looked like a failure of the device."""
    code = (
        "import time\n"
        "from nanovllm import SamplingParams\n"
        "from nanovllm.integrations.engine_thread import EngineThread\n"
        "engine = EngineThread(device='cpu', quiet=True)\n"
        "engine.submit('introduce yourself', SamplingParams(max_tokens=4000, ignore_eos=True))\n"
        "for i in range(1000):\n"
        "    engine.submit('hello', SamplingParams(max_tokens=1 + i % 7, ignore_eos=True))\n"
        "time.sleep(0.3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_at_start():
    with pytest.raises(ConfigError, match="'max_num_sequences'"):
        EngineThread(None, max_num_sequences=3)


def test_a_failed_device_ends_the_process(make_checkpoint):
    """A supervisor such as Ray starts another; an exception it would pass on."""
    code = (
        "from nanovllm import SamplingParams\n"
        "from nanovllm.integrations.engine_thread import EngineThread\n"
        f"engine = EngineThread({make_checkpoint()!r}, **{OPTIONS})\n"
        "def run(batch): raise RuntimeError('CUDA error: an illegal memory access')\n"
        "engine.llm.model_runner.forward = run\n"
        "engine.submit([2], SamplingParams()).result()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("RuntimeError: CUDA error: an illegal memory access")
    assert "engine.submit" not in done.stderr  # no exception in the caller
