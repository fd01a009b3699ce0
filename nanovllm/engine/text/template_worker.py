"""Renders chat templates, which strangers wrote, in a process of its own.

Owns that process, from its start to its end, and its limits. Does not choose the template of a conversation. A call of
a C function (``9 ** (9 ** 10)``) cannot be interrupted, except with its process::

    engine's process                                     worker (``serve``)
    any thread, under a lock  -- stdin: one request -->   transformers' apply_chat_template
                              <- stdout: its text ------

Engines of a process share the worker, since a request carries everything that its text depends on. A call borrows it.
Another engine that renders meanwhile starts a second one, so a template that hangs or kills its worker fails alone.

There is one exception, because two switches of processes take longer than a conversation. The checkpoint's own template
renders a single conversation in the engine's process once it has rendered one of the same form in the worker: the same
roles and fields of messages, the same options. ``time_limit`` ends its loops there. A template that depends on more,
such as a word or a date, could still hold that process.

A request is plain data, as ``marshal`` writes it. The worker limits itself: a timer of the system ends it after the
seconds of a request. On Linux, allocations beyond a limit fail; elsewhere only the time and the length of the text are
limited. The worker ends with the engine's process, however that ends. The next request replaces a worker that has died.
The start takes a second, mostly transformers' import: ``start`` does not wait for it.
"""

import datetime
import decimal
import faulthandler
import inspect
import marshal
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, BinaryIO

from nanovllm.errors import RequestError
from nanovllm.utils.time_limit import TimeLimitError, time_limit

MEMORY = 2 << 30  # most bytes beyond those at the start
LEFTOVER = 512 << 20  # if more bytes stay occupied after a request, the worker is replaced
CHUNK = 64  # conversations per request
MAX_FORMS = 10_000
START_SECONDS = 120.0  # for imports from a cold disk
ROOT = str(Path(__file__).resolve().parents[3])  # holds nanovllm
PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from nanovllm.engine.text.template_worker import serve; serve()"
REQUEST = struct.Struct("<Q")  # number of bytes that follow
REPLY = struct.Struct("<??Q")  # text or error; whether the worker is to be replaced; number of bytes that follow
AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, PurePath)
TOO_LONG = (
    "the model's chat template takes more than {:g} s for these messages: one of its loops may be endless. Give "
    "another chat_template."
)
RULE = "chat templates take text, numbers, booleans, None, lists and dictionaries"


class WorkerProcess:
    """One worker process, which one engine at a time may ask."""

    def __init__(self) -> None:
        path = [part for part in sys.path if isinstance(part, str)]
        path.append(ROOT)  # it may be in the list as "", and the working directory may have changed
        try:  # detached from the terminal, whose Ctrl-C reaches every process of its group or console
            self._popen: Any = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )  # fmt: skip
        except (OSError, TypeError) as error:
            raise RequestError(f"the process that renders chat templates cannot be started: {error}") from None
        self.pid, self._owner = self._popen.pid, os.getpid()
        self.is_up = False  # it has reported that it is ready
        self.kill = weakref.finalize(self, _end, self._popen, self._owner)  # at the latest when the interpreter ends

    @property
    def is_usable(self) -> bool:
        """It runs, and a forked child does not use its parent's, whose pipes it has too."""
        return self._owner == os.getpid() and self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._popen.returncode

    def send(self, request: bytes) -> None:
        self._popen.stdin.write(REQUEST.pack(len(request)) + request)
        self._popen.stdin.flush()

    def read_reply(self) -> tuple[bool, str]:
        """Whether it is a text or an error, and the text; raises EOFError if the process has ended."""
        header = self._popen.stdout.read(REPLY.size)
        if len(header) < REPLY.size:
            raise EOFError
        is_text, is_last, num_bytes = REPLY.unpack(header)
        encoded = self._popen.stdout.read(num_bytes)
        if len(encoded) < num_bytes:
            raise EOFError
        if is_last:
            self.kill()
        return is_text, encoded.decode("utf-8", "surrogatepass")


IDLE: list[WorkerProcess] = []  # nobody asks them now; needs no lock: pop, append and remove are atomic


def _borrow() -> WorkerProcess:
    """A process that is the caller's alone until it is in ``IDLE`` again."""
    with suppress(IndexError):
        while not (process := IDLE.pop()).is_usable:
            process.kill()
        return process
    return WorkerProcess()


class TemplateWorker:
    """The worker as seen by one engine; any thread may call it. A forked child gets a worker of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._forms: set[tuple] = set()  # forms that the checkpoint's template has rendered there
        self._borrowed: list[WorkerProcess] = []  # the one it asks; ``close`` or ``_exchange`` pops it, not both

    def start(self) -> None:
        """Start a process unless one waits, without waiting until it is ready."""
        if not any(process.is_usable for process in IDLE):
            IDLE.append(WorkerProcess())

    def close(self) -> None:
        """Kill the process if it renders for this engine: the call that waits for it fails. Others may render on."""
        with suppress(IndexError):
            self._borrowed.pop().kill()
        for process in IDLE[1:]:  # as many as engines have rendered at the same time
            with suppress(ValueError):  # borrowed meanwhile
                IDLE.remove(process)
                process.kill()

    def render(self, tokenizer: Any, conversations: ListLike[Any], options: dict[str, Any], seconds: float,
               max_characters: int) -> list[str]:
        """Each conversation as text, as by ``tokenizer.apply_chat_template``, whose ``options`` these are.

        One conversation of a known form renders in this process (see the top); so do all conversations of a tokenizer
        whose class has a method of its own, such as mistral-common's.

        Args:
            seconds, max_characters: limits of one conversation.

        Raises:
            RequestError: the template fails, or exceeds a limit; or a value is no plain data.
        """
        from transformers import PreTrainedTokenizerBase

        try:
            method = getattr(tokenizer.apply_chat_template, "__func__", None)
            is_own = not options.get("chat_template")
            if method is not PreTrainedTokenizerBase.apply_chat_template and is_own:
                return [tokenizer.apply_chat_template(talk, tokenize=False, **options) for talk in conversations]
            tools = options.get("tools")
            template = tokenizer.get_chat_template(options.get("chat_template"), tools)
            if isinstance(tools, (list, tuple)):
                options = {**options, "tools": [_as_schema(tool) for tool in tools]}
            options, plain = _plain(options), [_plain(talk) for talk in conversations]
            forms = [_form(template, talk, options) for talk in plain] if is_own else []
            if is_own and len(plain) == 1 and forms[0] in self._forms:
                with time_limit(seconds):
                    text = tokenizer.apply_chat_template(plain[0], tokenize=False, **options)
                return [_checked(text, max_characters)]
            shared = seconds, max_characters, template, _plain(tokenizer.special_tokens_map), options
            texts: list[str] = []
            while len(texts) < len(plain):
                request = marshal.dumps((*shared, plain[len(texts) : len(texts) + CHUNK]))
                texts += self._exchange(request, min(CHUNK, len(plain) - len(texts)), seconds)
            if len(self._forms) > MAX_FORMS:
                self._forms.clear()
            self._forms.update(forms)
            return texts
        except RequestError:
            raise
        except TimeLimitError:
            raise RequestError(TOO_LONG.format(seconds)) from None
        except Exception as error:  # a tokenizer of another class, or a tool without a schema
            raise RequestError(_failure(error)) from None

    def _exchange(self, request: bytes, num_texts: int, seconds: float) -> list[str]:
        """Send a request, and read its replies, up to the first error, which is raised."""
        if self._owner != os.getpid():  # a forked child, whose parent's thread may hold the lock
            self.__init__()  # type: ignore[misc]
        with self._lock:
            process, texts, before = _borrow(), [], 0.0
            self._borrowed.append(process)
            try:
                if not process.is_up:
                    process.read_reply()
                    process.is_up = True
                process.send(request)
                for _ in range(num_texts):
                    before = time.monotonic()
                    is_text, text = process.read_reply()
                    if not is_text:
                        break
                    texts.append(text)
            except (EOFError, OSError, ValueError):  # it has ended, or ``close`` has closed its pipes
                took = time.monotonic() - before
                process.kill()
            except BaseException:
                process.kill()  # Ctrl-C: replies still to come would be taken for those of the next request
                raise
            else:
                if not is_text:
                    raise RequestError(text)
                return texts
            finally:
                with suppress(IndexError):  # closed meanwhile
                    self._borrowed.pop()
                    if process.is_usable:
                        IDLE.append(process)
        if not process.is_up:
            raise RequestError("the process that renders chat templates did not start; can it import transformers?")
        if before and took > 0.9 * seconds:  # this process may have read the previous reply a little late
            raise RequestError(TOO_LONG.format(seconds))
        raise RequestError(f"the model's chat template ended its process (exit code {process.exit_code}).")


def _end(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child, whose exit must not end its parent's worker
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # the request was not read
            pipe.close()  # type: ignore[union-attr]


def _form(template: str, conversation: list[dict], options: dict[str, Any]) -> tuple:
    """The parts of a conversation that the branches of templates usually depend on."""
    messages = tuple([(m.get("role"), *m) for m in conversation])
    return template, messages, *options, *map(bool, options.values())


def _checked(text: str, max_characters: int) -> str:
    if len(text) > max_characters:
        raise RequestError(f"the text has {len(text):,} characters; allowed are {max_characters:,}.")
    return text


def _as_schema(tool: Any) -> Any:
    """A tool as plain data; transformers takes functions too, whose code cannot cross."""
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        from transformers.utils import get_json_schema

        return get_json_schema(tool)
    return tool


def _plain(value: Any) -> Any:
    """The value in Python's own types, which ``marshal`` takes; raises RequestError if it has no such form."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (dict, Mapping)):  # most hold only strings, and calls take time
        return {
            name if type(name) is str else _plain(name): x if type(x) is str else _plain(x) for name, x in value.items()
        }
    if isinstance(value, list):
        return [_plain(x) for x in value]
    if isinstance(value, tuple):
        return tuple([_plain(x) for x in value])
    for kind in (str, int, float):
        if isinstance(value, kind):  # an enumeration, or a token with flags
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, AS_TEXT):
        return str(value)
    if callable(getattr(value, "tolist", None)):  # numpy's numbers and arrays
        return _plain(value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic's models
        return _plain(value.model_dump())
    raise RequestError(f"{RULE}, not {type(value).__name__}: {value!r:.100}. Convert it first.")


def _failure(error: Exception) -> str:
    why = str(error) or type(error).__name__  # a MemoryError says nothing
    return f"the model's chat template cannot take these messages: {why:.1500}"


# ---------------------------------------------------------------- in the worker


def serve() -> None:
    """Main function of the worker: render requests from stdin until it is closed."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps what libraries print out of the replies
    if hasattr(signal, "setitimer"):  # the parent may ignore the signal, or block it
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    _limit_time(START_SECONDS)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    sys.modules["torch"] = None  # type: ignore[assignment]  # a template needs none; its import may take seconds
    from transformers import PreTrainedTokenizerBase

    apply, at_start = PreTrainedTokenizerBase.apply_chat_template, _memory()
    _limit_memory(at_start + MEMORY)
    _limit_time(0)
    _reply(replies, True, False, "")
    while header := requests.read(REQUEST.size):
        seconds, max_characters, template, special_tokens, options, conversations = marshal.loads(
            requests.read(*REQUEST.unpack(header))
        )
        tokenizer: Any = SimpleNamespace(special_tokens_map=special_tokens, get_chat_template=lambda *_, t=template: t)
        for i, conversation in enumerate(conversations, 1):
            _limit_time(seconds)
            try:
                text = _checked(apply(tokenizer, conversation, tokenize=False, **options), max_characters)
                is_text = True
            except RequestError as error:
                is_text, text = False, str(error)
            except Exception as error:  # a template may raise anything
                is_text, text = False, _failure(error)
            _limit_time(0)
            is_end = not is_text or i == len(conversations)
            # occupied memory, as by templates that transformers keeps, would be missing for the next request
            _reply(replies, is_text, is_end and _memory() > at_start + LEFTOVER, text)
            if is_end:
                break  # the parent stops reading after an error
    os._exit(0)


def _reply(replies: BinaryIO, is_text: bool, is_last: bool, text: str) -> None:
    encoded = text.encode("utf-8", "surrogatepass")
    replies.write(REPLY.pack(is_text, is_last, len(encoded)))
    replies.write(encoded)
    replies.flush()


def _limit_time(seconds: float) -> None:
    """End this process after ``seconds``, whatever runs in it; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process, without Python
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def _limit_memory(num_bytes: int) -> None:
    """Make allocations beyond ``num_bytes`` fail, if the system supports it."""
    if sys.platform == "linux":
        import resource

        with suppress(ValueError, OSError):  # a stricter limit is in force
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _memory() -> int:
    """The bytes of this process's address space; 0 where it has no limit."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


def _end_with_parent(parent: int) -> None:
    """End this process with its parent, even where a forked child of the parent holds the pipe open."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
