"""Chat templates in a process of their own: the text that transformers gives, limits, and how the process ends."""

import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from enum import Enum
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from helpers import all_gone, refuses
from pydantic import BaseModel
from transformers import AutoTokenizer

from nanovllm import RequestError
from nanovllm.engine.text import template_worker
from nanovllm.engine.text.template_worker import CHUNK, IDLE, TemplateWorker, WorkerProcess
from nanovllm.utils.checkpoint import DEMO_MODEL

HI = [{"role": "user", "content": "hi"}]
TALK = [{"role": "system", "content": "Be kind. "}, *HI, {"role": "assistant", "content": "Hel ", "tool_calls": None}]
NEVER_ENDS = "{{ 9**(9**10) }}"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory has no limit")
TOO_LONG = "the model's chat template takes more than 0.5 s for these messages: one of its loops may be endless. Give"
FAILS = "the model's chat template cannot take these messages: "


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def worker():
    worker = TemplateWorker()
    yield worker
    worker.close()


def idle_pids():
    return [process.pid for process in IDLE if process.is_usable]


def kill_idle():
    while IDLE:
        IDLE.pop().kill()


@pytest.fixture
def render(worker, tokenizer):
    def render(template=None, talk=HI, seconds=20.0, max_characters=1000, **options):
        options |= {"chat_template": template} if template else {}
        return worker.render(tokenizer, [talk], options, seconds, max_characters)[0]

    return render


def add(a: int, b: int = 2) -> int:
    """
    Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


class Role(str, Enum):
    USER = "user"


class Call(BaseModel):
    name: str
    arguments: dict


# ---------------------------------------------------------------- the text


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (None, {}),
        (None, {"add_generation_prompt": True}),
        (None, {"continue_final_message": True}),
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}", {}),
        ("{{ bos_token }}", {"bos_token": "<other>"}),
        ("{{ tools | tojson(indent=2) }}", {"tools": [add, {"name": "é<&"}]}),
        ("{{ documents[0].title }}{{ x }}{{ d }}", {"documents": [{"title": "T"}], "x": (1, 2.5, None), "d": {3: 0}}),
        ("{{ a }} {{ b }} {{ c }}", {"a": 10**30, "b": float("nan"), "c": "\udcff 𝄞"}),
        ("{% for m in messages %}{% generation %}{{ m }}\n{% endgeneration %}{% break %}{% endfor %}", {}),
        ("{{ strftime_now('%Y') }}{% if messages[2].tool_calls is defined %}!{% endif %}", {}),
    ],
)
def test_transformers_gives_the_same_text(render, tokenizer, template, options):
    given = {**options, "chat_template": template} if template else options
    assert render(template, TALK, **options) == tokenizer.apply_chat_template(TALK, tokenize=False, **given)


@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("{{ raise_exception('no ' + messages[0].role) }}", {}),
        ("{% if %}", {}),
        (None, {"continue_final_message": True, "add_generation_prompt": True}),
        (None, {"tools": [lambda x: x]}),
    ],
)
def test_transformers_gives_the_same_error(render, tokenizer, template, options):
    with pytest.raises(Exception) as raised:
        tokenizer.apply_chat_template(TALK, **{"chat_template": template, "tokenize": False, **options})
    with pytest.raises(RequestError) as refused:
        render(template, TALK, **options)
    assert str(refused.value) == FAILS + str(raised.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(3), "3"),
        (np.array([[1, 2]]), "[[1, 2]]"),
        (np.float64(0.5), "0.5"),
        (Role.USER, "user"),
        (MappingProxyType({"a": np.bool_(False)}), "{'a': False}"),
        (Call(name="add", arguments={"a": 1}), "{'name': 'add', 'arguments': {'a': 1}}"),
        (datetime.datetime(2024, 5, 6, 7), "2024-05-06 07:00:00"),
        (Path("a"), "a"),
    ],
)
def test_values_cross_as_plain_data(render, value, text):
    assert render("{{ messages[0].x }}{{ y }}", [{**HI[0], "x": value}], y=value) == 2 * text


@pytest.mark.parametrize("value", [object(), {1, 2}, [{"x": len}]], ids=["object", "set", "function"])
def test_objects_that_cannot_cross(render, value):
    with refuses("chat templates take text, numbers, booleans, None, lists and dictionaries, not "):
        render("x", x=value)
    with refuses("chat templates take text, numbers, booleans, None, lists and dictionaries, not "):
        render("x", tools=[value])
    with refuses("multiple values for keyword argument 'tokenize'"):
        render("x", tokenize=True)
    loop: list = []
    loop.append(loop)
    with refuses(FAILS + "maximum recursion depth exceeded"):
        render("x", x=loop)


def test_a_tokenizer_that_renders_itself(worker, tokenizer):
    """Such as mistral-common's, which has no Jinja template; one that is given renders as always."""

    class Own(type(tokenizer)):
        def apply_chat_template(self, conversation, **options):
            return f"own {options}"

    own = Own.from_pretrained(DEMO_MODEL)
    assert worker.render(own, [HI], {"x": 1}, 20.0, 1000) == ["own {'tokenize': False, 'x': 1}"]
    assert worker.render(own, [HI], {"chat_template": "given"}, 20.0, 1000) == ["given"]


# ---------------------------------------------------------------- limits


def test_a_call_that_never_ends(render, worker):
    """It held the interpreter's lock: no other thread of the process ran, and Ctrl-C did nothing."""
    with refuses(TOO_LONG):
        render(NEVER_ENDS, seconds=0.5)
    assert render("{{ messages[0].content }}") == "hi"


def test_a_template_that_waits(worker, tokenizer, monkeypatch):
    """Having rendered one conversation, the checkpoint's template may still explode at the next."""
    waits = "{% set n = 3 * messages | length %}{% if n > 3 %}{{ n ** (n ** 10) }}{% endif %}ok"
    monkeypatch.setattr(tokenizer, "chat_template", waits)
    assert worker.render(tokenizer, [HI] * 3, {}, 0.5, 1000) == ["ok"] * 3
    for talks in ([HI, TALK, HI], [TALK]):
        with refuses(TOO_LONG):
            worker.render(tokenizer, talks, {}, 0.5, 1000)


def test_a_form_that_the_checkpoints_template_has_rendered(worker, tokenizer, monkeypatch):
    """Its next single conversation needs no switch of processes, and has the limits that a process has for itself."""
    branches = "{% if messages[0].content == 'slow' %}" + "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    branches += "{% elif messages[0].content == 'long' %}{{ 'x' * 1001 }}{% endif %}ok"
    monkeypatch.setattr(tokenizer, "chat_template", branches)
    slow, long = ([{"role": "user", "content": content}] for content in ("slow", "long"))
    sent, send = [], WorkerProcess.send
    monkeypatch.setattr(WorkerProcess, "send", lambda process, request: sent.append(request) or send(process, request))
    assert worker.render(tokenizer, [HI], {}, 20.0, 1000) == ["ok"]
    assert len(sent) == 1
    assert worker.render(tokenizer, [HI], {}, 20.0, 1000) == ["ok"]
    with refuses(TOO_LONG):
        worker.render(tokenizer, [slow], {}, 0.5, 1000)
    with refuses("the text has 1,003 characters; allowed are 1,000."):
        worker.render(tokenizer, [long], {}, 20.0, 1000)
    assert len(sent) == 1
    others = (TALK, {}), ([{**HI[0], "x": 1}], {}), (HI, {"x": 1}), (HI, {"chat_template": branches})
    for number, (talk, options) in enumerate(others, 2):
        assert worker.render(tokenizer, [talk], options, 20.0, 1000) == ["ok"]
        assert len(sent) == number


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a'.zfill(10**10) }}",
        "{{ range(99999) | join('x' * 10**6) }}",
        "{{ ('a' * 10**5) | replace('a', 'b' * 10**6) }}",
        "{{ {'a': 1} | tojson(indent=10**10) }}",
    ],
)
@ON_LINUX
def test_gigabytes(render, worker, template):
    """They filled the host's memory, in one call that could not be cut."""
    with refuses(FAILS + "MemoryError"):
        render(template)


@ON_LINUX
def test_a_worker_that_has_grown_is_replaced(tokenizer, monkeypatch):
    """transformers keeps templates: memory that they occupy would be missing for the next conversation."""
    less = "import nanovllm.engine.text.template_worker as module; module.LEFTOVER = 10 << 20; "
    monkeypatch.setattr(template_worker, "PROGRAM", template_worker.PROGRAM.replace("from", less + "from"))
    kill_idle()
    worker, pids = TemplateWorker(), []
    for size in (1, 2, 3 * 10**6, 1):
        options = {"chat_template": "{{ messages[0].content }}{% if x %}" + size * "x" + "{% endif %}"}
        assert worker.render(tokenizer, [HI] * (CHUNK + 1), options, 20.0, 1000) == ["hi"] * (CHUNK + 1)
        pids += idle_pids() or [None]
    kill_idle()
    assert len(pids) == 4 and pids[0] == pids[1] and pids[-1] not in pids[:-1]
    assert all_gone([pid for pid in pids if pid])


def test_a_long_text(render):
    with refuses(r"the text has 1,001 characters; allowed are 1,000."):
        render("{{ 'x' * 1001 }}")
    assert render("{{ 'x' * 1000 }}") == "x" * 1000


def test_long_errors_are_cut(render):
    with refuses(FAILS + "x"):
        render("{{ raise_exception('x' * 10**6) }}")
    with pytest.raises(RequestError, match=r"^.{,2000}$"):
        render("{{ raise_exception('x' * 10**6) }}")


def test_many_conversations(worker, tokenizer, render):
    """In requests of CHUNK; after an error in the midst the next request gets its own replies."""
    halves = "{{ messages[0].content / 2 if messages[0].content is number else raise_exception(0) }}"
    options = {"chat_template": halves}
    talks = [[{"role": "user", "content": i}] for i in range(2 * CHUNK + 1)]
    assert worker.render(tokenizer, talks, options, 20.0, 1000) == [str(i / 2) for i in range(2 * CHUNK + 1)]
    with refuses(FAILS + "0"):
        worker.render(tokenizer, [*talks[:5], HI, *talks[5:]], options, 20.0, 1000)
    assert render("{{ messages[0].content }}") == "hi"
    assert worker.render(tokenizer, [], options, 20.0, 1000) == []


# ---------------------------------------------------------------- the process


@pytest.mark.usefixtures("heard_sigint")
def test_ctrl_c(render, worker):
    """The interrupt arrives while a template runs, and the reply of its worker is never read."""
    render("x")
    (pid,) = idle_pids()
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        render(NEVER_ENDS)
    assert all_gone([pid])
    assert render("{{ messages[0].content }}") == "hi"


def test_any_thread(worker, tokenizer):
    found: dict[int, list[str]] = {}

    def use(i):
        options = [{"chat_template": f"{i} {j}"} for j in range(20)]
        found[i] = [text for each in options for text in worker.render(tokenizer, [HI], each, 20.0, 1000)]

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    assert found == {i: [f"{i} {j}" for j in range(20)] for i in range(4)}


def test_a_worker_that_was_killed(render, worker):
    """As by the system, for its memory: at rest it is replaced; a template that it ran fails."""
    render("x")
    (pid,) = idle_pids()
    os.kill(pid, signal.SIGKILL)
    assert all_gone([pid])
    assert render("{{ messages[0].content }}") == "hi"
    threading.Timer(0.2, os.kill, [*idle_pids(), signal.SIGKILL]).start()
    with refuses("the model's chat template ended its process (exit code "):
        render(NEVER_ENDS)


def test_close_while_a_template_runs(render, worker):
    """``exit()`` does not wait for it."""
    render("x")
    (pid,) = idle_pids()
    threading.Timer(0.2, worker.close).start()
    with refuses("the model's chat template ended its process (exit code "):
        render(NEVER_ENDS)
    assert all_gone([pid])


def test_a_worker_that_does_not_start(tokenizer, monkeypatch):
    kill_idle()
    monkeypatch.setattr(sys, "path", [])
    worker = TemplateWorker()
    with refuses("the process that renders chat templates did not start; can it import transformers?"):
        worker.render(tokenizer, [HI], {}, 20.0, 1000)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with refuses("the process that renders chat templates cannot be started: "):
        worker.start()


def test_engines_share_a_process(worker, tokenizer, render):
    """Each had started its own, which took 0.85 s. The end of an engine leaves the process to the others."""
    render("x")
    pids, other = idle_pids(), TemplateWorker()
    other.start()
    assert other.render(tokenizer, [HI], {"chat_template": "{{ eos_token }}"}, 20.0, 1000) == [tokenizer.eos_token]
    other.close()
    assert render("x") == "x" and idle_pids() == pids and len(pids) == 1


@pytest.mark.parametrize("end", ["limit", "close", "killed"])
def test_an_engine_beside_one_whose_template_hangs(worker, tokenizer, render, end):
    """It does not wait, and the end of the other's process leaves its own alone."""
    hanging, refused = TemplateWorker(), []

    def hang():
        with pytest.raises(RequestError) as info:
            hanging.render(tokenizer, [HI], {"chat_template": NEVER_ENDS}, 1.0 if end == "limit" else 20.0, 1000)
        refused.append(str(info.value))

    render("x")
    (pid,) = idle_pids()
    thread = threading.Thread(target=hang)
    thread.start()
    while pid in idle_pids():
        time.sleep(0.01)
    assert render("x") == "x"
    (own,) = idle_pids()
    if end == "close":
        hanging.close()
    elif end == "killed":
        os.kill(pid, signal.SIGKILL)
    while thread.is_alive():
        assert render("x") == "x"
    assert all_gone([pid]) and idle_pids() == [own]
    assert refused[0].startswith(TOO_LONG.replace("0.5", "1") if end == "limit" else "the model's chat template ended")


# a script without a guard of its main module; a forked child that lives on holds the pipes open
SCRIPT = """
import os, signal, sys, threading, time
sys.modules["torch"] = None  # not needed
from transformers import AutoTokenizer
from nanovllm.engine.text.template_worker import IDLE, TemplateWorker

signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
idle, busy = TemplateWorker(), TemplateWorker()
busy.start()

def render(worker, template="x", seconds=20.0):
    return worker.render(tokenizer, [[{"role": "user", "content": "hi"}]], {"chat_template": template}, seconds, 99)

assert render(idle) == render(busy) == ["x"]
(process,) = IDLE
if os.fork() == 0:
    assert render(idle) == ["x"] and process not in IDLE
    sys.exit()
assert os.wait()[1] == 0 and render(idle) == ["x"] and IDLE == [process]
threading.Thread(target=render, args=(busy, "{{ 9**(9**10) }}", 1.5)).start()
while IDLE:
    time.sleep(0.01)
assert render(idle) == ["x"] and process not in IDLE
if (child := os.fork()) == 0:
    time.sleep(60)
print(IDLE[0].pid, process.pid, child, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="pipes of the child are inherited")
def test_forked_children_and_a_parent_that_is_killed(tmp_path):
    """A worker ends with its parent: at rest, also where a child of that holds the pipe open; else at its limit.

    A forked child renders with a worker of its own, and its end leaves the parent's alone.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(tmp_path / "script.py"), str(DEMO_MODEL)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        *workers, child = map(int, parent.stdout.readline().split())
        try:
            parent.kill()
            assert all_gone(workers, 10.0)
        finally:
            os.kill(child, signal.SIGKILL)
