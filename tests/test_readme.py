"""The README's snippets run as they stand, offline: all but the lines that name a model of the hub."""

import re

from helpers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def without_hub_models(snippet: str) -> str:
    """Without the paragraphs of the first snippet, and the lines of the others, that need a download."""
    paragraphs = [text for text in snippet.split("\n\n") if not re.search(r"^llm = LLM\(\"Qwen", text, re.MULTILINE)]
    return "\n".join(line for line in "\n".join(paragraphs).splitlines() if not re.match(r"LLM\(\"|qwen|params", line))


def test_the_first_snippet_begins_with_the_demo_model():
    """It needed a download, and offline it ended in a traceback."""
    assert SNIPPETS[0].index("LLM()") < SNIPPETS[0].index('LLM("')


def test_snippets(capsys):
    names: dict = {}
    for snippet in SNIPPETS:
        code = without_hub_models(snippet)
        assert "Qwen" not in code and (code or "LLM(" in snippet)
        exec(code, names)
    names["llm"].exit()
    out = capsys.readouterr().out
    assert out.startswith("I am the nanovllm demo model")
    output = names["output"]
    assert len(output.outputs) == 2 and len(output.outputs[0].logprobs[0]) in (3, 4)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 230
