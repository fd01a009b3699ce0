"""Tokenizers read from their files, against AutoTokenizer on the same files."""

import json
import random
import subprocess
import sys
from threading import Thread

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from nanovllm import LLM, RequestError, SamplingParams
from nanovllm.engine import fast_tokenizer
from nanovllm.engine.detokenizer import IncrementalDetokenizer
from nanovllm.engine.fast_tokenizer import CLASSES, QWEN_SPLIT, FastTokenizer, load_fast
from nanovllm.engine.tokenizer import AsyncTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it? We've 1234 of 56,789 'quoted' things.",
    "def f(x):\n    return x ** 2  # squares\n\n\n", "Größe, naïve café, ﬁne e\u0301; 中文字符 and 日本語 ünïcode",
] * 20  # fmt: skip
TEXTS = [
    "", " ", "  ", "\n\n", "The quick brown fox.", " The fox", "  two  spaces  ", "isn't it ? We've , no .",
    "x\t\ty \r\n z",
    "Größe e\u0301 ﬁ 中文 🙂🙂 \u200b \x00", "1234567 3.14", "</s>a", "a<s>b </s> c</s>",
    "<|im_start|>user\nhi<|im_end|> <|im_end|>",
    "<bos>x<eos> <pad><mask>", "a <mask> b<mask>c", "<tool>x </tool> <TOOL>", "wordy worde word",
    "▁x ▁▁y", "<0x41>é<0x0A>",
    "<|endoftext|>The<|endoftext|> The", "THE FOX Café", "a" * 300, " <extra> z<extra>",
]  # fmt: skip
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>", "<bos>", "<eos>", "<pad>", "<mask>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = [
    AddedToken("<tool>", lstrip=True), AddedToken("</tool>", rstrip=True, normalized=False),
    AddedToken("word", single_word=True), AddedToken("<|extra|>", special=True),
]  # fmt: skip
TURN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}{{ bos_token }}"


def trained(model, trainer, pre_tokenizer=None, normalizer=None):
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_tokens(tokenizer):
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens(ADDED)
    return tokenizer


def byte_level(split=QWEN_SPLIT, normalizer=None, first=(), **flags):
    """Qwen, GPT-2, Llama 3, ..."""
    steps = [*first, *([pre_tokenizers.Split(Regex(split), "isolated")] if split else [])]
    pre = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=not split)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    spec = json.loads(trained(models.BPE(), trainer, pre, normalizer).to_str())
    spec["model"] |= flags
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.ByteLevel()
    return with_tokens(tokenizer)


def sentencepiece(prepend=True, unk="<unk>"):
    """Llama 2, Mistral, Gemma: byte fallback."""
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[*SPECIAL[:3], *BYTES], show_progress=False)
    replace = normalizers.Replace(" ", "▁")
    steps = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepend else replace
    trained_one = trained(models.BPE(), trainer, pre_tokenizers.Metaspace(), None)
    model = json.loads(trained_one.to_str())["model"]
    vocab = model["vocab"] | {"<0x0A>": model["vocab"]["<0x0A>"]}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = steps
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps if prepend else steps[:3])
    return with_tokens(tokenizer)


def begins(tokenizer, bos="<s>", eos=None):
    tokens = [(name, tokenizer.token_to_id(name)) for name in (bos, eos) if name]
    single = f"{bos} $A {eos}" if eos else f"{bos} $A"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    return tokenizer


def unigram():
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer = trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.NFKC())
    tokenizer.decoder = decoders.Metaspace()
    return begins(with_tokens(tokenizer), "<s>", "</s>")


def word_piece():
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    model, pre = models.WordPiece(unk_token="<unk>"), pre_tokenizers.BertPreTokenizer()
    tokenizer = trained(model, trainer, pre, normalizers.BertNormalizer(lowercase=True))
    tokenizer.decoder = decoders.WordPiece()
    return with_tokens(tokenizer)


def words():
    names = dict.fromkeys(["<unk>", *" ".join(CORPUS).split()])
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=7, pad_token="<pad>")
    return with_tokens(tokenizer)


def decoder_of(tokenizer):
    """``added_tokens_decoder`` of tokenizer_config.json."""
    return {
        str(i): {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        | {"content": token.content}
        for i, token in tokenizer.get_added_tokens_decoder().items()
    }  # fmt: skip


def save(path, tokenizer, model_type=None, others=(), **config):
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    files = {"tokenizer_config.json": config, **dict(others)}
    if model_type is not None:
        files["config.json"] = {"model_type": model_type}
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    return path


def auto(path, **options):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, **options)


def check(path):
    """Equal to AutoTokenizer's."""
    fast, slow = load_fast(str(path)), auto(path)
    assert fast is not None, "transformers would be imported"
    for special in (True, False):
        assert fast(TEXTS, special)["input_ids"] == slow(TEXTS, add_special_tokens=special)["input_ids"]
        for text in TEXTS:
            assert fast.encode(text, special) == slow.encode(text, add_special_tokens=special)
    ids = list(range(len(slow)))
    lists = [*slow(TEXTS)["input_ids"], ids, ids[::-1], ids[::7], [len(ids) + 5, *ids[::11]]]
    for skip in (True, False):
        expected = [slow.decode(x, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for x in lists]
        assert [fast.decode(x, skip_special_tokens=skip) for x in lists] == expected
    assert len(fast) == len(slow) and fast.get_vocab() == slow.get_vocab()
    assert fast.eos_token_id == slow.eos_token_id and fast.special_tokens_map == slow.special_tokens_map
    assert fast.chat_template == slow.chat_template
    assert json.loads(fast.backend_tokenizer.to_str())["added_tokens"] == \
        json.loads(slow.backend_tokenizer.to_str())["added_tokens"]  # fmt: skip
    return fast


LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA_2 = LLAMA | {"add_bos_token": True, "clean_up_tokenization_spaces": True, "chat_template": TURN}
BARE = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
DIGITS = [pre_tokenizers.Digits(individual_digits=True)]
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None,
        "add_bos_token": False, "add_prefix_space": False, "additional_special_tokens": ["<|im_start|>"]}  # fmt: skip
GEMMA = {"tokenizer_class": "GemmaTokenizerFast", "bos_token": {"__type": "AddedToken", "content": "<bos>"}}
GPT2 = {"tokenizer_class": "GPT2Tokenizer"}
NEOX = {"tokenizer_class": "GPTNeoXTokenizerFast", "pad_token": "<pad>"}
KINDS = {
    "qwen": (lambda: byte_level(normalizer=normalizers.NFC()), "qwen3", QWEN),
    "qwen2 of another pipeline": (lambda: byte_level(split="", first=DIGITS), "qwen2", QWEN),
    "qwen2 forced": (lambda: byte_level(split=""), "qwen2", BARE),
    "gpt2": (lambda: byte_level(split=""), None, GPT2 | {"clean_up_tokenization_spaces": True}),
    "gpt2 with digits": (lambda: byte_level(split="", first=DIGITS), "llama", {"tokenizer_class": "GPT2TokenizerFast"}),
    "gpt2 spaced": (lambda: byte_level(split=""), "llama", GPT2 | {"add_prefix_space": True}),
    "granite": (lambda: byte_level(split="", first=DIGITS), "granite", GPT2),
    "neox": (lambda: byte_level(split=""), "olmoe", NEOX),
    "llama 3": (lambda: begins(byte_level(ignore_merges=True)), "llama", BARE),
    "llama 3, eos": (lambda: begins(byte_level(), "<s>", "</s>"), "llama", BARE | {"add_bos_token": False}),
    "llama 2": (lambda: begins(sentencepiece()), "llama", LLAMA_2),
    "llama 2, new": (lambda: begins(sentencepiece()), "llama", LLAMA | {"legacy": False, "add_bos_token": False}),
    "llama 2, old": (lambda: sentencepiece(), "llama", LLAMA | {"legacy": True, "add_eos_token": True}),
    "llama 2, unspaced": (lambda: sentencepiece(), None, LLAMA | {"add_prefix_space": False}),
    "mistral": (lambda: begins(sentencepiece()), "mistral", LLAMA_2),
    "gemma": (lambda: begins(sentencepiece(False), "<bos>"), "gemma3_text", GEMMA),
    "unigram": (unigram, "llama", BARE | {"unk_token": "<unk>"}),
    "word piece": (word_piece, None, BARE | {"clean_up_tokenization_spaces": True}),
    "words": (words, "smollm3", {"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}),
    "split special": (lambda: byte_level(), "llama", BARE | {"split_special_tokens": True}),
    "named tokens": (lambda: byte_level(), "qwen3", QWEN | {"image_token": "<|extra|>", "extra_special_tokens": {}}),
    "tokens by name": (lambda: byte_level(), "llama", BARE | {"extra_special_tokens": {"tool_token": "<tool>"}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_decoder", [False, True])
def test_kinds(kind, with_decoder, tmp_path):
    make, model_type, config = KINDS[kind]
    tokenizer = make()
    decoder = {"added_tokens_decoder": decoder_of(tokenizer)} if with_decoder else {}
    fast = check(save(tmp_path / "first", tokenizer, model_type, **config, **decoder))
    assert len({tuple(ids) for ids in fast(TEXTS)["input_ids"]}) > len(TEXTS) // 2
    auto(tmp_path / "first").save_pretrained(tmp_path / "second")  # as transformers 5 writes it
    if model_type:
        (tmp_path / "second" / "config.json").write_text(json.dumps({"model_type": model_type}))
    check(tmp_path / "second")


def test_classes(tmp_path):
    """Which class reads the file depends on the model and the name of a class; some ignore the file's pipeline."""
    files = {"bytes": byte_level(split="", first=DIGITS), "pieces": begins(sentencepiece())}
    named = {"Qwen2Tokenizer": "bytes", "GPT2TokenizerFast": "bytes", "LlamaTokenizerFast": "pieces",
             "PreTrainedTokenizerFast": "bytes"}  # fmt: skip
    for model_type in CLASSES:
        for name, file in named.items():
            path = save(tmp_path / f"{model_type}-{name}", files[file], model_type, tokenizer_class=name)
            fast = load_fast(str(path))
            assert fast is not None, (model_type, name)
            assert fast(TEXTS)["input_ids"] == auto(path)(TEXTS)["input_ids"], (model_type, name)


def unsure(tmp_path, tokenizer=None, model_type="llama", others=(), **config):
    path = save(tmp_path / "unsure", tokenizer or byte_level(), model_type, others, **{**BARE, **config})
    return load_fast(str(path)) is None


def test_left_to_transformers(tmp_path):
    """Where the files do not tell what transformers would do."""
    assert not unsure(tmp_path)
    for name in ("T5TokenizerFast", "CohereTokenizer", "PreTrainedTokenizer", "MyTokenizer", None):
        assert unsure(tmp_path, tokenizer_class=name), name
    assert unsure(tmp_path, model_type="qwen3_5") and unsure(tmp_path, auto_map={"AutoTokenizer": ["x.Tok", None]})
    assert unsure(tmp_path, tokenizer_class="LlamaTokenizer")  # a file of bytes
    assert unsure(tmp_path, unigram(), tokenizer_class="LlamaTokenizer", unk_token="<unk>")
    assert unsure(tmp_path, bos_token="<new>") and unsure(tmp_path, additional_special_tokens=["<new>"])
    assert unsure(tmp_path, model_type="qwen3", **{**QWEN, "additional_special_tokens": ["<new>"]})
    assert not unsure(tmp_path, others={"added_tokens.json": {"<s>": byte_level().token_to_id("<s>")}})
    assert unsure(tmp_path, others={"added_tokens.json": {"<new>": 900}})
    (tmp_path / "unsure" / "tokenizer.json").unlink()
    assert load_fast(str(tmp_path / "unsure")) is None


def test_transformers_4_builds_other_pipelines(tmp_path, monkeypatch):
    monkeypatch.setattr(fast_tokenizer, "version", {"transformers": "4.57.1"}.get)
    assert unsure(tmp_path)


def test_special_tokens_map(tmp_path):
    """Read where there is no added_tokens_decoder."""
    legacy = {"eos_token": {"content": "<eos>", "lstrip": False}, "bos_token": "<bos>", "pad_token": "<pad>"}
    path = save(tmp_path, byte_level(), "llama", {"special_tokens_map.json": legacy}, **BARE)
    assert check(path).special_tokens_map["eos_token"] == "<eos>"
    path = save(tmp_path, byte_level(), "llama", **BARE, added_tokens_decoder=decoder_of(byte_level()))
    assert check(path).special_tokens_map["eos_token"] == "</s>"


def test_tokens_of_the_config_win(tmp_path):
    """added_tokens_decoder has other flags, and fewer tokens, than tokenizer.json."""
    tokenizer = byte_level()
    decoder = decoder_of(tokenizer)
    del decoder[str(tokenizer.token_to_id("<tool>"))]
    decoder[str(tokenizer.token_to_id("</s>"))] |= {"lstrip": True, "special": False}
    decoder[str(tokenizer.token_to_id("<|im_end|>"))] |= {"rstrip": True, "special": False, "normalized": True}
    for config in (BARE, QWEN):
        tokenizer = byte_level()
        if config is QWEN:  # a class that builds anew would give the others new ids
            decoder = {i: token for i, token in decoder.items() if int(i) < tokenizer.token_to_id("<tool>")}
        check(save(tmp_path, tokenizer, "qwen3", **config, added_tokens_decoder=decoder))


@pytest.mark.parametrize("kind", ["qwen", "llama 2", "unigram", "word piece"])
def test_incremental_detokenization(kind, tmp_path):
    make, model_type, config = KINDS[kind]
    path = save(tmp_path, make(), model_type, **config)
    fast, slow, rng = load_fast(str(path)), auto(path), random.Random(0)
    for skip in (True, False):
        ids = rng.choices(range(len(slow)), k=300) + slow.encode("The end.", add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(fast, skip)
        for token_id in ids:
            detokenizer.feed([token_id])
        expected = slow.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert detokenizer.text_now == expected


# ---------------------------------------------------------------- chat

TEMPLATES = [
    TURN,
    "{%- for m in messages -%}\n    {{- m['role'] | upper }}: {{ m.content | trim }}\n  {% endfor %}\n {# note #}\n x",
    "{{ tools | tojson(indent=2) }}{{ messages | tojson }}"
    "{{ documents | tojson(separators=(',', ':'), sort_keys=true) }}",
    "{% if messages[0].role != 'system' %}{{ raise_exception('only <system> first') }}{% endif %}{{ messages|length }}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{{ strftime_now('%Y')[:2] }}{{ bos_token }}{{ unk_token }}{{ pad_token is defined }}{{ add_generation_prompt }}",
    "{% set ns = namespace(last='', n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = m.content %}{% endfor %}{{ ns.n }}{{ ns.last }}{{ dict(a=1) }}{{ range(3) | list }}",
    "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}{{ loop.index }}"
    "{% endgeneration %}{{ x }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ undefined_name }}{{ date_string }}{{ eos_token }}",
    "{% for m in messages if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{% endfor %}{{ messages[-1]['content'].split('</think>')[-1].lstrip('\\n') }}<&'>",
    "{{ messages.append(1) }}", "{{ messages.__class__ }}", "{{ messages[0].missing.more }}", "{% if %}",
    "{{ namespace(_x=1) }}{{ ''.__class__.__mro__ }}",
]  # fmt: skip
SYSTEM = [{"role": "system", "content": " Größe <b> "}]
HI = [{"role": "user", "content": "hi\n"}, {"role": "assistant", "content": "<think>a</think>\n Hel "}]
CALLS = [{"function": {"name": "f", "arguments": {"x": [1, 2.5, None, True, "é"]}}, "type": "function"}]
CHATS = [
    (HI, {}), (SYSTEM + HI, {"add_generation_prompt": True}), (SYSTEM + HI, {"continue_final_message": True}),
    ([{"role": "assistant", "content": "Hel"}], {"continue_final_message": True, "enable_thinking": False}),
    ([*HI, {"role": "assistant", "content": "", "tool_calls": CALLS}], {"tools": CALLS}),
    (HI, {"documents": [{"title": "<t>", "text": ""}]}),
    (SYSTEM, {"enable_thinking": False, "source": "", "date_string": "1 May", "eos_token": "<over>"}),
    (HI, {"continue_final_message": True, "add_generation_prompt": True}),
    ([{"role": "user"}], {}), ([{"role": "user"}], {"continue_final_message": True}),
]  # fmt: skip


def rendered(tokenizer, messages, options):
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        return type(error)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    path = save(tmp_path_factory.mktemp("pair"), begins(byte_level()), "llama", **BARE, unk_token="<unk>")
    return load_fast(str(path)), auto(path)


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates(template, pair):
    fast, slow = pair
    for messages, options in CHATS:
        options = {"chat_template": template, **options}
        assert fast.can_render(messages, options)
        expected, given = rendered(slow, messages, options), rendered(fast, messages, options)
        assert given == expected or (isinstance(given, type) and isinstance(expected, type)), (messages, options)


def test_names_cannot_leave_the_sandbox(pair):
    for template in ("{{ namespace(_x=1) }}", "{% set n = namespace() %}{% set n._x = 1 %}", "{{ messages.clear() }}"):
        with pytest.raises(Exception, match=r"_x|unsafe"):
            pair[0].apply_chat_template(HI, chat_template=template)


def test_where_templates_are_written(tmp_path):
    """As a string, as a list of names, in a file, in a folder; the files win."""
    several = [{"name": "default", "template": "d{{ bos_token }}"}, {"name": "tool_use", "template": "t"}]
    for number, template in enumerate([None, "one", several, [{"name": "other", "template": "o"}]]):
        path = tmp_path / str(number)
        for file in (None, "chat_template.jinja", "additional_chat_templates/rag.jinja"):
            save(path, byte_level(), "llama", **BARE, chat_template=template)
            if file is not None:
                (path / file).parent.mkdir(exist_ok=True)
                (path / file).write_text(f"{file} é", encoding="utf-8")
            fast, slow = load_fast(str(path)), auto(path)
            assert fast.chat_template == slow.chat_template
            for options in ({}, {"tools": CALLS}, {"chat_template": "rag"}, {"chat_template": "other"}):
                assert rendered(fast, HI, options) == rendered(slow, HI, options), (template, file, options)


class Odd(str):
    pass


def search(query: str):
    """Search.

    Args:
        query: what to look for.
    """


@pytest.mark.parametrize("messages, options", [
    (HI, {"tools": [search]}), ([{"role": "user", "content": "x", "name": None}], {}), ([], {}),
    ([{"role": "assistant", "content": "x", "reasoning_content": "y"}], {}), (HI, {"documents": ["text"]}),
    ([{"role": "user", "content": "x", "when": Odd()}], {}), (HI, {"continue_final_message": "content"}),
    (HI, {"max_length": 5}), (HI, {"tools": 5}), (HI, {"tokenize": False}),
])  # fmt: skip
def test_chats_left_to_transformers(messages, options, pair, tmp_path):
    """What its versions treat differently, and what needs its code."""
    assert not pair[0].can_render(messages, options)
    path = save(tmp_path, byte_level(), "llama", **BARE, chat_template=TEMPLATES[2])
    tokenizer = AsyncTokenizer(str(path), False, False)
    try:
        given = tokenizer.apply_chat_template(messages, **options)
    except RequestError as error:
        given = type(error)
    expected = rendered(auto(path), messages, options)
    assert given == expected or (given is RequestError and isinstance(expected, type))
    assert not isinstance(tokenizer.tokenizer, FastTokenizer)
    tokenizer.close()


# ---------------------------------------------------------------- in the engine


def test_the_engine_starts_without_transformers():
    code = """
import sys
from nanovllm import LLM, SamplingParams
from nanovllm.llm import BeamSearchParams
llm = LLM(device="cpu", num_kvcache_blocks=4, max_num_seqs=4)
greedy = SamplingParams(temperature=0, max_tokens=8, stop=["zzz"], bad_words=["bad"], logprobs=1)
assert llm.generate(["hi", "1 + 1 ="], greedy, use_tqdm=False)[0]["text"]
assert llm.chat([{"role": "user", "content": "hi"}], greedy, use_tqdm=False)[0]["text"]
assert list(llm.stream("hi", greedy)) and llm.beam_search("hi", BeamSearchParams(2, 4))[0].sequences[0].text
loaded = {name.split(".")[0] for name in sys.modules}
assert "transformers" not in loaded and "torch" in loaded
assert type(llm.tokenizer).__module__.startswith("transformers") and llm.get_tokenizer() is llm.tokenizer
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)


def test_who_asks_gets_a_real_tokenizer_that_is_used_from_then_on():
    none = SamplingParams(max_tokens=0)
    with LLM(device="cpu", num_kvcache_blocks=4) as llm:
        before = llm.generate("who is it", none, use_tqdm=False)[0].prompt_token_ids
        assert isinstance(llm._tokenizer.tokenizer, FastTokenizer)
        seen: list = []
        threads = [Thread(target=lambda: seen.append(llm.tokenizer)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 4 and all(tokenizer is llm.get_tokenizer() for tokenizer in seen)
        assert seen[0].is_fast and seen[0].name_or_path == llm.config.tokenizer_path
        assert llm.generate("who is it", none, use_tqdm=False)[0].prompt_token_ids == before
        seen[0].chat_template = "changed"
        assert llm.chat(HI, none, use_tqdm=False)[0].prompt == "changed"
