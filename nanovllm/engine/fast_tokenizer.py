"""A tokenizer from ``tokenizer.json`` and its neighbours, without importing transformers, which takes seconds.

Owns what transformers 5.17 and later make of these files: ids, text and chats are the same. Where that is not certain
(other classes, tokens that only Python code adds, inputs that its versions treat differently), transformers does the
work.
"""

import json
from collections.abc import Sequence as ListLike
from importlib.metadata import version
from pathlib import Path
from typing import Any

OLDEST_TRANSFORMERS = (5, 17)  # whose pipelines are these; with older ones transformers does the work
AS_IS = "TokenizersBackend"  # transformers' class that takes the whole pipeline of tokenizer.json
# Model type in config.json -> the class that transformers takes: None, the one that tokenizer_config.json names
CLASSES: dict[str | None, str | None] = {
    **dict.fromkeys(("llama", "smollm3", "seed_oss", "exaone4", "qwen3", "qwen3_moe", "qwen2_moe", "gemma", "gemma3",
                     "gemma3_text", "olmoe", None)),
    **dict.fromkeys(("mistral", "mixtral", "phi3", "granite", "ernie4_5", "glm4", "glm4_moe", "olmo2", "olmo3"), AS_IS),
    "qwen2": "Qwen2Tokenizer",
}  # fmt: skip
# Classes that take vocabulary, merges and post-processor of tokenizer.json, and build the rest of the pipeline anew ->
# their special tokens where tokenizer_config.json names none
END = "<|endoftext|>"
REBUILT: dict[str, dict[str, str | None]] = {
    "Qwen2Tokenizer": {"unk_token": END, "eos_token": END, "pad_token": END},
    "GPT2Tokenizer": {"unk_token": END, "bos_token": END, "eos_token": END, "pad_token": None},
    "GPTNeoXTokenizer": {"unk_token": END, "bos_token": END, "eos_token": END, "pad_token": "<|padding|>"},
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
}
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Keys of tokenizer_config.json that ask for code or files which only transformers has
PYTHON_ONLY = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "init_inputs")


class FastTokenizer:
    """What the engine needs of a transformers tokenizer, under the same names; for any number of threads.

    Args:
        backend: of the ``tokenizers`` library.
        chat_template: Jinja source; a dictionary of them by name; or None.
        special_tokens: as in "eos_token" -> "</s>".
    """

    def __init__(self, backend: Any, chat_template: str | dict[str, str] | None, special_tokens: dict[str, str]):
        self.backend_tokenizer, self.chat_template, self.special_tokens_map = backend, chat_template, special_tokens
        eos = special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else backend.token_to_id(eos)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def __call__(self, texts: list[str], add_special_tokens: bool = True, **_: Any) -> dict[str, list[list[int]]]:
        encodings = self.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self([text], add_special_tokens)["input_ids"][0]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Without the clean-up of spaces; the ``tokenizers`` library does not put spaces between special tokens."""
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def can_render(self, messages: ListLike[dict], options: dict[str, Any]) -> bool:
        """Whether ``apply_chat_template`` gives what every version of transformers gives."""
        from nanovllm.engine.chat_template import is_plain

        return is_plain(messages, options)

    def apply_chat_template(self, messages: ListLike[dict], tokenize: bool = False, **options: Any) -> str:
        from nanovllm.engine.chat_template import choose, render

        source = choose(self.chat_template, options.pop("chat_template", None), options.get("tools"))
        return render(source, messages, **self.special_tokens_map | options)


# ---------------------------------------------------------------- from files


def load_fast(model_path: str) -> FastTokenizer | None:
    """The tokenizer of a directory; None if transformers has to load it."""
    folder = Path(model_path)
    files = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
    config, legacy_special, legacy_added, model = (_read_json(folder / name) for name in files)
    name = _class_name(folder, config, model)
    if name is None or tuple(map(int, version("transformers").split(".")[:2])) < OLDEST_TRANSFORMERS:
        return None
    from tokenizers import AddedToken, Tokenizer

    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if "added_tokens_decoder" in config:
        added = {int(i): AddedToken(**token) for i, token in config["added_tokens_decoder"].items()}
    else:
        config, added = config | legacy_special, loaded.get_added_tokens_decoder()
        if not legacy_added.items() <= {token.content: i for i, token in added.items()}.items():
            return None
    tokens = REBUILT.get(name, {}) | {key: token for key, token in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    tokens |= extra if isinstance(extra, dict) else config.get("model_specific_special_tokens") or {}
    if loaded.padding is not None:
        tokens.setdefault("pad_token", loaded.padding["pad_token"])
    special = {key: text for key, token in tokens.items() if isinstance(text := _content(token), str)}

    backend = _rebuild(name, config, loaded, special) if name in REBUILT else loaded
    if backend is None:
        return None
    for token in added.values():
        token.special = token.special or token.content in special.values()
    backend.add_tokens([added[i] for i in sorted(added)])
    all_special = {*special.values(), *map(_content, () if isinstance(extra, dict) else extra)}
    if not all_special <= {token.content for token in backend.get_added_tokens_decoder().values()}:
        return None  # transformers would give them ids
    if name == "Qwen2Tokenizer":  # without the flags of the files
        backend.add_tokens([AddedToken(token, special=True) for token in all_special])
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    return FastTokenizer(backend, _chat_template(folder, config), special)


def _class_name(folder: Path, config: dict, model: dict) -> str | None:
    """The class that transformers takes; None if that is not certain, or not one we know."""
    file, named, model_type = folder / "tokenizer.json", config.get("tokenizer_class"), model.get("model_type")
    needs_python = any(config.get(key) for key in PYTHON_ONLY) or (folder / "tekken.json").exists()
    if not file.is_file() or named is None or needs_python or model_type not in CLASSES or "model_name" in model:
        return None
    name = CLASSES[model_type] or named.removesuffix("Fast")
    if name == AS_IS or (name, named) == ("PreTrainedTokenizer", "PreTrainedTokenizerFast"):
        return AS_IS
    # of files of bytes that name Llama's class, some versions take the class and others the file
    is_unclear = name == "LlamaTokenizer" and '"ByteLevel"' in file.read_text(encoding="utf-8")
    return name if name in REBUILT and not is_unclear else None


def _rebuild(name: str, config: dict, loaded: Any, special: dict[str, str]) -> Any:
    """The pipeline that the class ``name`` builds around the model of tokenizer.json; None if it is no such model."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    model, space = loaded.model, config.get("add_prefix_space")
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    model.dropout, model.ignore_merges = None, False
    model.unk_token = special.get("unk_token") if name == "GemmaTokenizer" else None
    model.fuse_unk = model.byte_fallback = name in ("LlamaTokenizer", "GemmaTokenizer")
    backend = Tokenizer(model)
    backend.post_processor = loaded.post_processor
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if name == "LlamaTokenizer":
        is_spaced = space is None or bool(space)
        scheme = ("always" if config.get("legacy") else "first") if is_spaced else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        backend.decoder = decoders.Sequence(steps if is_spaced else steps[:-1])
    elif name == "GemmaTokenizer":
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence(steps[:-1])
    else:
        backend.normalizer = None if name == "GPT2Tokenizer" else normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(bool(space), use_regex=name != "Qwen2Tokenizer")
        if name == "Qwen2Tokenizer":
            split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
            backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    return backend


def _chat_template(folder: Path, config: dict) -> str | dict[str, str] | None:
    default = folder / "chat_template.jinja"
    found = {"default": default.read_text(encoding="utf-8")} if default.is_file() else {}
    for file in folder.glob("additional_chat_templates/*.jinja"):
        found[file.name.removesuffix(".jinja")] = file.read_text(encoding="utf-8")
    if not found:
        given = config.get("chat_template")
        return {x["name"]: x["template"] for x in given} if isinstance(given, list) else given
    return found["default"] if len(found) == 1 and "default" in found else found


def _content(token: Any) -> Any:
    """The text of a special token, which may be written as a dictionary."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
