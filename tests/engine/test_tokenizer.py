"""Text and chats that cannot be encoded, and tokenizers that cannot be loaded."""

import re
import shutil

import pytest

from nanovllm import LLM, CheckpointError, RequestError, SamplingParams

NONE = SamplingParams(max_tokens=0)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def demo():
    with LLM(device="cpu", num_kvcache_blocks=4) as llm:
        yield llm


def refuses(text):
    return pytest.raises(RequestError, match=re.escape(text))


def test_chat_template(demo):
    """A message without content raised jinja2's error, and add_generation_prompt a TypeError about a duplicate."""
    with refuses("the model's chat template cannot take these messages: "):
        demo.chat([{"role": "user"}], use_tqdm=False)
    opened, closed = (
        demo.chat(HI, NONE, use_tqdm=False, **options)[0].prompt for options in ({}, {"add_generation_prompt": False})
    )
    assert opened.startswith(closed) and len(opened) > len(closed)
    begun = [*HI, {"role": "assistant", "content": "Hel"}]
    (output,) = demo.chat(begun, NONE, use_tqdm=False, continue_final_message=True)
    assert output.prompt == opened + "Hel"


def test_chat_without_a_template(demo, monkeypatch):
    """A template that was given did not help; it was refused, too."""
    monkeypatch.setattr(demo.tokenizer, "chat_template", None)
    with refuses("chat() needs a tokenizer with a chat template; this model has none."):
        demo.chat(HI, use_tqdm=False)
    assert demo.chat(HI, NONE, use_tqdm=False, chat_template="{{ messages[0].content }}!")[0].prompt == "hi!"


def test_text_that_is_not_unicode(demo):
    """A lone surrogate, as in names of files that are not UTF-8, raised the tokenizer's TypeError about its types."""
    bad, text = "\udcff bad", "the text cannot be encoded as UTF-8: 'utf-8' codec can't encode character '\\udcff'"
    with refuses(f"prompt 2: {text}"):
        demo.generate(["good", [5, 6], bad, "good"], NONE, use_tqdm=False)
    with refuses(f"prompt 1: {text}"):
        demo.chat([[{"role": "user", "content": content}] for content in ("good", bad)], NONE, use_tqdm=False)
    for use in (demo.generate, demo.add_request):
        with pytest.raises(RequestError, match="^" + re.escape(text)):
            use(bad)
    assert demo.is_finished()


def test_no_tokenizer(make_checkpoint):
    text = "Add it, or use skip_tokenizer_init=True and give prompts as token ids."
    with pytest.raises(CheckpointError, match=re.escape(text)):
        LLM(make_checkpoint(), device="cpu")


def test_damaged_tokenizer(make_checkpoint, tmp_path):
    shutil.copytree(make_checkpoint(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=re.escape(f"the tokenizer in {tmp_path} cannot be loaded: ")):
        LLM(tmp_path, device="cpu", kvcache_block_size=16)
