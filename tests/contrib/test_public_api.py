"""``nanovllm.contrib`` leaves an engine's own attributes alone, and keeps the names that README and guide give."""

import re
from importlib import import_module

import pytest
from helpers import ROOT


def test_it_reads_no_attribute_that_is_an_engines_own():
    for path in (ROOT / "nanovllm" / "contrib").rglob("*.py"):
        assert not re.findall(r"llm\._\w+", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    ("name", "attribute"),
    [("cli", "main"), ("as_vllm.modules", "install"), ("integrations.engine_thread", "EngineThread"),
     ("integrations.trl", "rollout_func")],
)  # fmt: skip
def test_names_of_the_guide(name, attribute):
    given = getattr(import_module(f"nanovllm.{name}"), attribute)
    assert given is getattr(import_module(f"nanovllm.contrib.{name}"), attribute)
