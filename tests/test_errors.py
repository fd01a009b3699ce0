"""The tree of errors, and the public names."""

import pickle
from dataclasses import fields

import pytest
from helpers import run_python

import nanovllm
from nanovllm import (
    CheckpointError,
    ConfigError,
    EngineError,
    NanoVLLMError,
    OutOfMemoryError,
    RequestError,
    WorkerError,
)
from nanovllm.config import Config


def test_the_tree():
    """``except ValueError`` or ``RuntimeError``, as for other libraries, catches these too."""
    for error in (ConfigError, CheckpointError, RequestError):
        assert issubclass(error, NanoVLLMError) and issubclass(error, ValueError)
    for error in (OutOfMemoryError, EngineError, WorkerError):
        assert issubclass(error, NanoVLLMError) and issubclass(error, RuntimeError)


def test_the_length_of_a_text():
    """Errors repeated values of any length: a name of 100,000 characters, a schema, a regular expression."""
    word = "x" * 100_000
    calls = [
        lambda: nanovllm.SamplingParams(**{word: 1}), lambda: nanovllm.LLM(**{word: 1}), lambda: nanovllm.LLM(word),
        lambda: nanovllm.SamplingParams(min_tokens=10**3000),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(NanoVLLMError) as found:
            call()
        assert len(str(found.value)) <= 2000
    text = "begin " + word + " end"
    for error in RequestError(text), pickle.loads(pickle.dumps(RequestError(text))):
        assert len(str(error)) <= 2000 and str(error).startswith("begin x") and str(error).endswith(" end")
        assert "98,607 characters" in str(error)
    assert str(RequestError(text[:2000])) == text[:2000]
    assert str(WorkerError(1, text)).endswith(text)  # a traceback is whole


def test_public_names():
    assert all(hasattr(nanovllm, name) for name in nanovllm.__all__)
    assert set(nanovllm.__all__) <= set(dir(nanovllm))  # for completion in an interactive session
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = nanovllm.Engine


def test_help_lists_the_options():
    """After ``import nanovllm`` alone; README names both, and neither gave the options."""
    code = "import nanovllm, pydoc; print(pydoc.plain(pydoc.render_doc(nanovllm.{}))); import sys; print(*sys.modules)"
    for name in ("LLM", "config.Config"):
        out = run_python("-c", code.format(name)).stdout
        missing = [each.name for each in fields(Config) if each.init and f" {each.name}: " not in out]
        assert not missing, missing
    assert "max_num_seqs: int = 512" in out and "torch" not in out.splitlines()[-1].split()


@pytest.mark.parametrize(("text", "expected"), [
    ("the image 'https://me:pass@h.org/a.png?sig=1&b=2#c' cannot", "the image 'https://h.org/a.png' cannot"),
    ("a http://token@[::1]:80/x?y, b", "a http://[::1]:80/x, b"), ("s3://k:a/b@bucket/x?'y'z", "s3://bucket/x"),
    ("cut at 'https://me:passw'", "cut at 'https://'"), ("HTTP://ME:P@H/", "HTTP://H/"),
    *[(text, text) for text in ("http://h:8080/a@1/b", "at 10:30/40 or C:/a?b", "why? a#b @c", "see https://h:", "")],
])  # fmt: skip
def test_texts_of_errors_have_no_secrets(text, expected):
    """A URL that an error quoted had its user, password and signature: in a job's output, and on a terminal."""
    assert [str(kind(text)) for kind in (RequestError, ConfigError, EngineError)] == [expected] * 3


def test_texts_of_errors_are_short():
    """A value that an error quoted had megabytes, and so had the row of a job's output."""
    why = "; it must be an integer."
    for value in ("x" * 10**6, "ab://c:d" * 10**5, "ab://c:d'" * 10**5, "\u00e9" * 3000):
        text = str(RequestError(f"seed={value}{why}"))
        assert len(text) <= 2000 and text.startswith("seed=") and text.endswith(why[2:])
    fits = RequestError("y" * 2000)
    assert str(fits) == "y" * 2000 == str(pickle.loads(pickle.dumps(fits)))


def test_worker_error_crosses_processes():
    error = pickle.loads(pickle.dumps(WorkerError(2, "Traceback: boom")))
    assert (error.rank, error.worker_traceback) == (2, "Traceback: boom")
    assert str(error) == "tensor-parallel rank 2 failed; the engine was shut down.\nTraceback: boom"
