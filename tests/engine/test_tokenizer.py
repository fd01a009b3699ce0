"""Text in and out: what cannot be encoded, tokenizers that cannot be loaded, and where end-of-sequence is written."""

import json
import re
import shutil
from dataclasses import replace
from datetime import datetime

import pytest
from helpers import generate, greedy, prompt_of, refuses, tokens_of
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import LLM, CheckpointError, RequestError, SamplingParams
from nanovllm.engine.text import tokenizer
from nanovllm.engine.text.fast_tokenizer import FastTokenizer
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.utils.checkpoint import DEMO_MODEL

NONE = SamplingParams(max_tokens=0)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def demo():
    with LLM(device="cpu", num_kvcache_blocks=4) as llm:
        yield llm


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
    """A base model has a tokenizer and no chat template. One that was given was refused, too."""
    monkeypatch.setattr(demo.tokenizer, "chat_template", None)
    with refuses("chat() needs a tokenizer with a chat template; this model has none. Use generate()"):
        demo.chat(HI, use_tqdm=False)
    assert demo.chat(HI, NONE, use_tqdm=False, chat_template="{{ messages[0].content }}!")[0].prompt == "hi!"


def search(query: str):
    """Search.

    Args:
        query: what to look for.
    """


TOOL = {"type": "function", "function": {"name": "f", "description": "<é>"}}


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        ("{{ tools | tojson }}", {"tools": [TOOL]}, json.dumps([TOOL], ensure_ascii=False)),
        ("{% for t in tools %}{{ t.function.name }}{{ t.function.parameters.required }}{% endfor %}",
         {"tools": [search]}, "search['query']"),
        ("{{ strftime_now('%Y') }}", {}, f"{datetime.now():%Y}"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}", {}, "hi"),
        ("{{ eos_token }}{{ bos_token is defined }}", {}, "<|im_end|>False"),
    ],
)  # fmt: skip
def test_what_templates_have(demo, template, options, expected):
    (output,) = demo.chat(HI, NONE, use_tqdm=False, chat_template=template, **options)
    assert output.prompt == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('only <system> first') }}", "only <system> first"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),  # in a sandbox, for it came with the checkpoint
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ 'a' * 10**18 }}", "MemoryError"),  # which has no text
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
    ],
)
def test_templates_that_fail(demo, template, reason):
    with refuses(f"the model's chat template cannot take these messages: {reason}"):
        demo.chat(HI, use_tqdm=False, chat_template=template)


def test_where_templates_are_written(tmp_path):
    """Several by name in tokenizer_config.json, or in files, which win."""
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    of_tools = "t{% set _ = tools %}"
    config["chat_template"] = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": of_tools}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def rendered(**options):
        tokenizer = AsyncTokenizer(str(tmp_path), skip=False, trust_remote_code=False)
        try:
            return tokenizer.apply_chat_template(HI, **options)
        finally:
            tokenizer.close()

    assert (rendered(), rendered(tools=[TOOL]), rendered(chat_template="tool_use")) == ("d", "t", "t")
    assert rendered(chat_template="tool_use", tools=[TOOL]) == "t"
    with pytest.raises(RequestError, match=r"the chat template reads no tools"):
        rendered(chat_template="default", tools=[TOOL])
    (tmp_path / "chat_template.jinja").write_text("é {{ messages[0].content }}", encoding="utf-8")
    assert rendered() == "é hi"


OF_TOOLS = "t{% set _ = tools %}"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": "own"}, "own"),
        ({"chat_template.json": "json"}, "json"),
        ({"chat_template.json": "json", "tokenizer_config.json": "own"}, "json"),
        ({"chat_template.json": "json", "chat_template.jinja": "jinja"}, "json"),
        ({"chat_template.jinja": "jinja", "tokenizer_config.json": "own"}, "jinja"),
        ({"processor_config.json": "config", "chat_template.json": "json", "chat_template.jinja": "jinja"}, "config"),
        ({"processor_config.json": None, "chat_template.json": "json"}, "json"),
        ({"processor_config.json": None, "tokenizer_config.json": "own"}, "own"),
        ({"preprocessor_config.json": "pre", "tokenizer_config.json": "own"}, "own"),
        ({"preprocessor_config.json": "pre"}, "pre"),
    ],
    ids=str,
)
def test_where_templates_of_images_are_written(tmp_path, files, expected):
    """A processor's files have one in place of the tokenizer's, in the order of transformers' AutoProcessor."""
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer_config.json", "config.json"):
        raw = json.loads((tmp_path / name).read_text())
        raw.pop("chat_template", None)
        (tmp_path / name).write_text(json.dumps({**raw, "vision_config": {"depth": 1}}))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    for name, template in files.items():
        path = tmp_path / name
        raw = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(template if path.suffix == ".jinja" else json.dumps({**raw, "chat_template": template}))

    def rendered(**options):
        tokenizer = AsyncTokenizer(str(tmp_path), skip=False, trust_remote_code=False)
        try:
            return tokenizer.apply_chat_template(HI, **options)
        finally:
            tokenizer.close()

    assert rendered() == expected
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if files.get("tokenizer_config.json"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": OF_TOOLS}))
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        assert rendered(tools=[TOOL]) == "t"  # it alone can tell the model of them
    (tmp_path / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    if files.get("tokenizer_config.json"):
        assert rendered() == "t"  # a model of text


def test_a_damaged_template_of_images(tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"vision_config": {"depth": 1}}')
    (tmp_path / "chat_template.json").write_text('{"chat_template": 5}')
    tokenizer = AsyncTokenizer(str(tmp_path), skip=False, trust_remote_code=False)
    with pytest.raises(CheckpointError, match=r"chat_template.json: chat_template must be a string, not 5\."):
        tokenizer.apply_chat_template(HI)
    tokenizer.close()


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


def test_texts_that_are_too_long_are_not_tokenized(demo, monkeypatch):
    """80 MB took 14 GB and a minute before they were refused."""
    monkeypatch.setattr(tokenizer, "LONG", 1000)
    long, cut = "word " * 20_000, SamplingParams(max_tokens=1, truncate_prompt_tokens=4)
    assert len(demo.tokenize([long])[0]) == len(demo.tokenize([long], True, cut)[0]) > 4096
    assert len(demo.generate(["a", long], [NONE, cut], use_tqdm=False)[1].prompt_token_ids) == 4
    text = "the text has 100,000 characters, which are at least 6,153 tokens; at most max_model_len=4096 fit. Shorten"
    for use in (demo.add_request, demo.submit, demo.embed, lambda x: next(demo.stream(x)), lambda x: demo.rerank(
            "hi", [x], template="{document}", tokens=("1", "2")), lambda x: demo.tokenize([x], sampling_params=NONE)):
        with refuses(text):
            use(long)
    with refuses(f"prompt 1: {text}"):
        demo.generate(["a", long], NONE, use_tqdm=False)
    with refuses("the text has 100,"):
        demo.chat([{"role": "user", "content": long}], NONE, use_tqdm=False)
    monkeypatch.undo()
    with refuses("the text has 10,000,000 characters, which are at least 615,384 tokens; at most max_model_len=4096"):
        demo.generate("word " * 2_000_000, NONE, use_tqdm=False)
    assert demo.is_finished()


def charsmap(text):
    """SentencePiece's table, with an empty trie of four bytes, and two replacements."""
    return normalizers.Precompiled(b"\4\0\0\0" + bytes(4) + b"a\0" + text.encode() + b"\0")


TO_AA = normalizers.Sequence([normalizers.Replace("b", "aa")] * 5)


@pytest.mark.parametrize(
    ("part", "growth"),
    [
        (normalizers.Replace("a", "b" * 17), "17"),
        (normalizers.Sequence([normalizers.Replace("a", "bb"), TO_AA]), "64"),
        (normalizers.Replace("aa", "b" * 33), "16.5"),
        (normalizers.Replace(Regex("(?=.)"), "b" * 16), "17"),
        (normalizers.Replace("", "b" * 16), "17"),
        (normalizers.Prepend("b" * 16), "17"),
        (normalizers.Sequence([normalizers.Prepend("▁▁▁")] * 3), "64"),
        (normalizers.Sequence([normalizers.ByteLevel()] * 3), "64"),
        (pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(use_regex=False)] * 3), "64"),
        (decoders.Sequence([decoders.Replace("a", "aaaaa"), decoders.Fuse()] * 2), "25"),
        (charsmap("é" * 18 * 17), "17"),
        (charsmap("é" * 18 * 16), None),
        (normalizers.Replace("a", "b" * 16), None),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFC()]), None),
        (normalizers.Sequence([normalizers.Replace(Regex(" +"), " "), normalizers.Replace("long" * 9, "")] * 4), None),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]), None),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), None),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("is_fast", [True, False])
def test_tokenizers_that_multiply_texts(tmp_path, part, growth, is_fast):
    """A few bytes of a file made a prompt of one line gigabytes long."""
    backend = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    name = next(n for n in ("normalizer", "pre_tokenizer", "decoder") if type(part).__module__.endswith(f"{n}s"))
    setattr(backend, name, part)
    backend.save(str(tmp_path / "tokenizer.json"))
    for file in ("config.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, tmp_path)
    if not is_fast:
        (tmp_path / "added_tokens.json").write_text("{}")
    loaded = AsyncTokenizer(str(tmp_path), skip=False, trust_remote_code=False)
    try:
        if growth is None:
            assert isinstance(loaded.tokenizer, FastTokenizer) == is_fast
        else:
            text = f"the {name} of the tokenizer in {tmp_path} may make texts {growth} times as long; at most 16 times"
            with refuses(text, CheckpointError):
                _ = loaded.tokenizer
    finally:
        loaded.close()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Its normalizer panics at some texts, and its decoder at a short text of Q."""
    path = tmp_path_factory.mktemp("hostile")
    shutil.copytree(DEMO_MODEL, path, dirs_exist_ok=True)
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.normalizer = normalizers.Replace(Regex("(a+)+$"), "")
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("Q", 5, 5)])
    backend.save(str(path / "tokenizer.json"))
    with LLM(str(path), device="cpu", num_kvcache_blocks=8) as llm:
        yield llm


PANIC, BAD = "this request fails with PanicException: ", "a" * 40 + "!"


def test_a_panic_while_a_text_is_encoded(hostile):
    """A panic of tokenizers is a BaseException: it passed every ``except Exception`` of those who caught errors."""
    for use in (hostile.generate, hostile.add_request, hostile.submit, hostile.embed, lambda x: next(hostile.stream(x)),
                lambda x: hostile.tokenize([x]), lambda x: hostile.rerank("hi", [x], tokens=("1", "2")),
                lambda x: hostile.chat([{"role": "user", "content": x}], chat_template="{{ messages[0].content }}"),
                lambda x: hostile.generate("x", SamplingParams(bad_words=[x]))):
        with refuses(PANIC):
            use(BAD)
    with refuses(f"prompt 2: {PANIC}"):
        hostile.generate(["a", [5], BAD, BAD], NONE, use_tqdm=False)
    errors = {}
    outputs = list(hostile.stream(["x", BAD, "y"], NONE, on_error=errors.__setitem__))
    assert len(outputs) == 2 and [*errors] == [1] and hostile.is_finished()


def test_a_panic_while_a_text_is_decoded(hostile):
    """It ends its own request with an error, and no other: with a stop string it dropped those of everybody."""
    q = hostile.tokenizer.convert_tokens_to_ids("Q")
    bad, good = (SamplingParams(max_tokens=3, allowed_token_ids=[i], ignore_eos=True) for i in (q, 300))
    for params in (bad, replace(bad, stop=["x"])):
        outputs = hostile.generate(["hi"] * 3, [good, params, good], use_tqdm=False)
        outputs += list(hostile.stream(iter(["hi"] * 3), params)), hostile.submit("hi", params).result()
        for failed in (outputs[1], *outputs[3], outputs[4]):
            assert (failed["finish_reason"], failed["text"]) == ("error", "") and PANIC in failed.outputs[0].stop_reason
        assert outputs[0]["text"] == outputs[2]["text"] != "" and outputs[2]["finish_reason"] == "length"
    (output,) = hostile.generate("hi", replace(bad, logprobs=0, detokenize=True), use_tqdm=False)
    for use in (lambda: output.outputs[0].logprobs, lambda: hostile.detokenize([[q]]), lambda: [*hostile.stream(
            "hi", bad)], lambda: hostile.stream("hi", bad, on_error=print).__next__()):
        with refuses(PANIC):
            use()
    assert hostile.is_finished() and hostile.generate("hi", good, use_tqdm=False)[0]["text"]


def test_a_panic_while_a_tokenizer_is_loaded(tmp_path, monkeypatch):
    def panics(*_, **__):
        raise BaseException("index out of bounds")

    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(tokenizer, "load_fast", panics)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", panics)
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* cannot be loaded: index out of bounds"):
        LLM(str(tmp_path), device="cpu")


def test_no_tokenizer(make_checkpoint):
    text = "Add it, or use skip_tokenizer_init=True and give prompts as token ids."
    with pytest.raises(CheckpointError, match=re.escape(text)):
        LLM(make_checkpoint(), device="cpu")


def test_damaged_tokenizer(make_checkpoint, tmp_path):
    shutil.copytree(make_checkpoint(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=re.escape(f"the tokenizer in {tmp_path} cannot be loaded: ")):
        LLM(tmp_path, device="cpu", kvcache_block_size=16)


# ---------------------------------------------------------------- end of sequence


@pytest.fixture
def with_tokenizer(make_checkpoint, tmp_path):
    """with_tokenizer(eos, generation_eos) -> the tiny checkpoint with a tokenizer of words "t0" ... "t511"."""

    def make(eos, generation_eos):
        path = tmp_path / "with_tokenizer"
        shutil.copytree(make_checkpoint(), path)
        tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{eos}", unk_token="t0")
        fast.save_pretrained(path)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
        return str(path)

    return make


def until(tokens, stops):
    return tokens[: min(i for i, token in enumerate(tokens) if token in stops) + 1]


def test_tokenizer_and_generation_config_disagree(make_llm, with_tokenizer, reference):
    """A chat model has end-of-turn in one file and end-of-text in the other; one of them did not stop."""
    first, second, third = (prompt_of(n) for n in (7, 8, 9))
    eos = {reference(first, 20)[4], reference(second, 20)[6], reference(third, 20)[2]}
    path = with_tokenizer(reference(first, 20)[4], [reference(second, 20)[6], reference(third, 20)[2]])
    llm = make_llm(model=path, skip_tokenizer_init=False)
    assert llm.scheduler.eos_token_ids == eos
    prompts = [" ".join(f"t{i}" for i in first), second, third]  # text and ids, mixed
    outputs = llm.generate(prompts, greedy(20, ignore_eos=False), use_tqdm=False)
    assert tokens_of(outputs) == [until(reference(prompt, 20), eos) for prompt in (first, second, third)]
    assert {output["finish_reason"] for output in outputs} == {"stop"}
    assert [output.prompt for output in outputs] == [prompts[0], None, None]
    # special tokens are no text; this tokenizer joins words by a space
    assert outputs[1]["text"] == " ".join(f"t{i}" for i in outputs[1]["token_ids"] if i != reference(first, 20)[4])
    assert generate(llm, prompts, greedy(20)) == [reference(prompt, 20) for prompt in (first, second, third)]
    with refuses("prompt 0: the prompt is empty"):
        llm.generate([""], use_tqdm=False)


def test_a_tokenizer_that_begins_texts(demo, tmp_path):
    """Llama's: a prompt gets a BOS; a chat template that writes it gets no second one."""
    shutil.copytree(DEMO_MODEL, tmp_path / "bos")
    file = tmp_path / "bos" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    bos, bos_id = "<|im_start|>", tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    tokenizer.save(str(file))
    with LLM(str(tmp_path / "bos"), device="cpu", num_kvcache_blocks=4) as llm:
        ids = [llm.generate("hi", NONE, use_tqdm=False)[0].prompt_token_ids]
        ids.append(llm.chat(HI, NONE, use_tqdm=False)[0].prompt_token_ids)
    plain = [demo.generate("hi", NONE, use_tqdm=False)[0].prompt_token_ids]
    plain.append(demo.chat(HI, NONE, use_tqdm=False)[0].prompt_token_ids)
    assert ids == [[bos_id, *plain[0]], plain[1]] and plain[1][:2] != [bos_id, bos_id]
