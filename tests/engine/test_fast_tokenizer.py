"""Tokenizers read from their files, against AutoTokenizer on the same files."""

import json
from random import Random

import pytest
from helpers import in_threads, run_python
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from nanovllm import LLM, SamplingParams
from nanovllm.engine.text import fast_tokenizer
from nanovllm.engine.text.detokenizer import decode
from nanovllm.engine.text.fast_tokenizer import CLASSES, QWEN_SPLIT, FastTokenizer, load_fast
from nanovllm.engine.text.limits import fewest_tokens

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


def trained(model, trainer, pre_tokenizer, normalizer=None):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
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


def sentencepiece():
    """Mistral: byte fallback."""
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[*SPECIAL[:3], *BYTES], show_progress=False)
    model = json.loads(trained(models.BPE(), trainer, pre_tokenizers.Metaspace()).to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
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
        assert [decode(fast, x, skip) for x in lists] == expected
    assert len(fast) == len(slow) and fast.eos_token_id == slow.eos_token_id
    added = (json.loads(tokenizer.backend_tokenizer.to_str())["added_tokens"] for tokenizer in (fast, slow))
    assert next(added) == next(added)
    return fast


BARE = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
END = {"__type": "AddedToken", "content": "</s>", "special": True}
DIGITS = [pre_tokenizers.Digits(individual_digits=True)]
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None,
        "add_bos_token": False, "add_prefix_space": False, "additional_special_tokens": ["<|im_start|>"]}  # fmt: skip
KINDS = {
    "qwen": (lambda: byte_level(normalizer=normalizers.NFC()), "qwen3", QWEN),
    "qwen of another pipeline": (lambda: byte_level(split="", first=DIGITS), "qwen2", QWEN),
    "qwen spaced": (lambda: byte_level(split=""), "qwen3_moe", QWEN | {"add_prefix_space": True}),
    "qwen forced": (lambda: byte_level(split=""), "qwen2", BARE),
    "llama 3": (lambda: begins(byte_level(ignore_merges=True)), "llama", BARE),
    "llama 3, eos": (lambda: begins(byte_level(), "<s>", "</s>"), "llama", BARE | {"add_bos_token": False}),
    "granite": (lambda: byte_level(split="", first=DIGITS), "granite", {"tokenizer_class": "GPT2Tokenizer"}),
    "mistral": (lambda: begins(sentencepiece()), "mistral",
                BARE | {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}),
    "unigram": (unigram, "llama", BARE | {"unk_token": "<unk>"}),
    "word piece": (word_piece, None, BARE | {"clean_up_tokenization_spaces": True}),
    "words": (words, "smollm3", {"tokenizer_class": "TokenizersBackend", "eos_token": END}),
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


PIECES = [
    *"aé中🙂▁ﬁ\u0301\u0323\n\u2003\x00", *SPECIAL, "<tool>", "</tool>", "word", "squares", "quick", "<0x41>", " " * 9,
    "e\u0323\u0302", "\u03b1\u0313\u0300\u0345",
]  # fmt: skip
WITH_BOUND = [
    *(KINDS[kind][0] for kind in ("qwen", "llama 3", "granite", "mistral")),
    lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("    ", "a")])),
    lambda: byte_level(normalizer=normalizers.Sequence([normalizers.Replace(Regex(" +"), " "), normalizers.Strip()])),
    lambda: byte_level(first=[pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit()])]),
]  # fmt: skip


@pytest.mark.parametrize("make", WITH_BOUND)
def test_the_fewest_tokens_of_a_text(make):
    """Texts of spaces, accents and repeated tokens have no fewer, and every token can be the longest."""
    backend, rng = make(), Random(0)
    tokenizer = FastTokenizer(backend, None)
    texts = ["a" * 1000, "a " * 500, *(piece * 300 for piece in [*PIECES, *backend.get_vocab()])]
    texts += ["".join(rng.choices(rng.sample(PIECES, 3), k=200)) for _ in range(300)]
    for text in texts:
        assert fewest_tokens(text, tokenizer) <= len(tokenizer.encode(text, add_special_tokens=False)), text[:50]
    assert fewest_tokens("a" * 1000, tokenizer) > 10


@pytest.mark.parametrize("make", [unigram, word_piece, words])
def test_tokens_of_any_length(make):
    """An unknown word, or a run of unknown characters, is one token."""
    tokenizer = FastTokenizer(make(), None)
    assert len(tokenizer.encode("ω" * 9000, False)) <= 2 and fewest_tokens("ω" * 9000, tokenizer) == 0


def test_classes(tmp_path):
    """Which class reads the file depends on the model and the name of a class; some ignore the file's pipeline."""
    tokenizer = byte_level(split="", first=DIGITS)
    for model_type in CLASSES:
        for name in ("Qwen2Tokenizer", "GPT2TokenizerFast", "LlamaTokenizerFast", "PreTrainedTokenizerFast"):
            path = save(tmp_path / f"{model_type}-{name}", tokenizer, model_type, tokenizer_class=name)
            fast = load_fast(str(path))
            assert (fast is None) == (name[0] in "GL" and CLASSES[model_type] is None), (model_type, name)
            if fast is not None:
                assert fast(TEXTS)["input_ids"] == auto(path)(TEXTS)["input_ids"], (model_type, name)


def unsure(tmp_path, tokenizer=None, model_type="llama", others=(), **config):
    path = save(tmp_path / "unsure", tokenizer or byte_level(), model_type, others, **{**BARE, **config})
    return load_fast(str(path)) is None


def test_left_to_transformers(tmp_path):
    """Where the files do not tell what transformers would do, or ask for more."""
    assert not unsure(tmp_path)
    for name in ("T5TokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "PreTrainedTokenizer", "MyTokenizer", None):
        assert unsure(tmp_path, tokenizer_class=name), name
    assert unsure(tmp_path, model_type="qwen3_5") and unsure(tmp_path, auto_map={"AutoTokenizer": ["x.Tok", None]})
    assert unsure(tmp_path, split_special_tokens=True)
    for name in ("extra_special_tokens", "model_specific_special_tokens"):
        assert unsure(tmp_path, **{name: {"tool_token": "<|extra|>"}})
    assert unsure(tmp_path, sentencepiece(), model_type="qwen3", **QWEN)  # not the model of this class
    padded = words()
    padded.enable_padding(length=7, pad_token="<pad>")
    assert unsure(tmp_path, padded)
    for config in (BARE, QWEN):
        for new in ("<new>", "<tool>"):  # the latter is not special
            assert unsure(tmp_path, model_type="qwen3", **{**config, "pad_token": new})
            assert unsure(tmp_path, model_type="qwen3", **{**config, "additional_special_tokens": [new]})
    decoder = decoder_of(byte_level())
    assert not unsure(tmp_path, added_tokens_decoder=decoder)
    decoder[str(byte_level().token_to_id("</s>"))]["lstrip"] = True  # the config's flags win
    assert unsure(tmp_path, added_tokens_decoder=decoder)
    (tmp_path / "unsure" / "tokenizer.json").unlink()
    assert load_fast(str(tmp_path / "unsure")) is None


def test_transformers_4_builds_other_pipelines(tmp_path, monkeypatch):
    monkeypatch.setattr(fast_tokenizer, "version", {"transformers": "4.57.1"}.get)
    assert unsure(tmp_path)


def test_legacy_files(tmp_path):
    """Read where there is no added_tokens_decoder."""
    legacy = {"special_tokens_map.json": {"eos_token": "<eos>"}, "added_tokens.json": {"<new>": 900}}
    for file in legacy.items():
        path = save(tmp_path / file[0], byte_level(), "llama", [file], **BARE)
        assert load_fast(str(path)) is None
        decoder = decoder_of(byte_level())
        check(save(tmp_path / file[0], byte_level(), "llama", [file], **BARE, added_tokens_decoder=decoder))


# ---------------------------------------------------------------- in the engine


def test_the_engine_starts_without_transformers():
    code = """
import sys
from nanovllm import LLM, SamplingParams
from nanovllm.llm import BeamSearchParams
llm = LLM(device="cpu", num_kvcache_blocks=4, max_num_seqs=4)
greedy = SamplingParams(temperature=0, max_tokens=8, stop=["zzz"], bad_words=["bad"], logprobs=1)
assert llm.generate(["hi", "1 + 1 ="], greedy, use_tqdm=False)[0]["text"]
assert list(llm.stream("hi", greedy)) and llm.beam_search("hi", BeamSearchParams(2, 4))[0].sequences[0].text
loaded = {name.split(".")[0] for name in sys.modules}
assert "transformers" not in loaded and "torch" in loaded
assert llm.chat([{"role": "user", "content": "hi"}], greedy, use_tqdm=False)[0]["text"]
assert type(llm.tokenizer).__module__.startswith("transformers") and llm.get_tokenizer() is llm.tokenizer
"""
    run_python("-W", "error", "-c", code)


def test_who_asks_gets_a_real_tokenizer_that_is_used_from_then_on():
    none, messages = SamplingParams(max_tokens=0), [{"role": "user", "content": "hi"}]
    with LLM(device="cpu", num_kvcache_blocks=4) as llm:
        before = llm.generate("who is it", none, use_tqdm=False)[0].prompt_token_ids
        assert isinstance(llm._tokenizer.tokenizer, FastTokenizer)
        seen: list = []
        in_threads(*[lambda: seen.append(llm.tokenizer)] * 4)
        assert len(seen) == 4 and all(tokenizer is llm.get_tokenizer() for tokenizer in seen)
        assert seen[0].is_fast and seen[0].name_or_path == llm.config.tokenizer_path
        assert llm.generate("who is it", none, use_tqdm=False)[0].prompt_token_ids == before
        seen[0].chat_template = "changed"
        assert llm.chat(messages, none, use_tqdm=False)[0].prompt == "changed"
