"""A tokenizer from ``tokenizer.json`` alone: importing transformers would take a start most of a second.

Owns which checkpoints this is certain for: where transformers 5.17 and later take the file as it is or, for Qwen's
class, all of it but the pipeline. Ids and text are theirs. With all others, and in chats, transformers does the work.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

OLDEST_TRANSFORMERS = (5, 17)  # older versions read the files in other ways
AS_IS, QWEN = "TokenizersBackend", "Qwen2Tokenizer"  # transformers' classes
# Model type in config.json -> transformers' class; None: the class that tokenizer_config.json names
CLASSES: dict[str | None, str | None] = {
    **dict.fromkeys(("llama", "smollm3", "seed_oss", "exaone4", "qwen3", "qwen3_moe", "qwen2_moe", "gemma", "gemma2",
                     "gemma3", "gemma3_text", "olmoe", None)),
    **dict.fromkeys(("mistral", "mixtral", "phi3", "granite", "ernie4_5", "glm4", "glm4_moe", "olmo2", "olmo3"), AS_IS),
    "qwen2": QWEN,
}  # fmt: skip
QWEN_DEFAULTS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Keys of tokenizer_config.json that need transformers
NEED_TRANSFORMERS = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "init_inputs", "split_special_tokens",
                     "model_specific_special_tokens")  # fmt: skip


class FastTokenizer:
    """The engine's part of a transformers tokenizer, under the same names; thread-safe.

    Args:
        backend: of the ``tokenizers`` library.
        eos_token_id: of the end-of-sequence token, if there is one.
    """

    def __init__(self, backend: Any, eos_token_id: int | None):
        self.backend_tokenizer, self.eos_token_id = backend, eos_token_id

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __call__(self, texts: list[str], add_special_tokens: bool = True, **_: Any) -> dict[str, list[list[int]]]:
        encodings = self.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self([text], add_special_tokens)["input_ids"][0]


def load_fast(model_path: str) -> FastTokenizer | None:
    """The tokenizer of a directory; None if transformers has to load it."""
    folder = Path(model_path)
    config = _read_json(folder / "tokenizer_config.json")
    name = _class_name(folder, config)
    if name is None or tuple(map(int, version("transformers").split(".")[:2])) < OLDEST_TRANSFORMERS:
        return None
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = {str(i): token.__getstate__() for i, token in backend.get_added_tokens_decoder().items()}
    given = config.get("added_tokens_decoder")
    if given is not None and {i: AddedToken(**token).__getstate__() for i, token in given.items()} != added:
        return None
    tokens = {key: _content(token) for key, token in config.items() if key.endswith("_token")}
    tokens = (QWEN_DEFAULTS if name == QWEN else {}) | tokens
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    # transformers would add other tokens or change their flags; a dictionary yields its keys, which are not tokens
    for content in {*tokens.values(), *map(_content, extra)}:
        if isinstance(content, str) and AddedToken(content, special=True).__getstate__() not in added.values():
            return None
    if backend.padding is not None or (name == QWEN and not _build_qwen(backend, config)):
        return None
    backend.no_truncation()
    return FastTokenizer(backend, tokens.get("eos_token") and backend.token_to_id(tokens["eos_token"]))


def _class_name(folder: Path, config: dict) -> str | None:
    """The class that transformers takes; None if that is not certain, or not one we know."""
    model, named = _read_json(folder / "config.json"), config.get("tokenizer_class")
    model_type = model.get("model_type")
    has_legacy = any((folder / name).exists() for name in ("special_tokens_map.json", "added_tokens.json"))
    if (
        not (folder / "tokenizer.json").is_file() or (folder / "tekken.json").exists()
        or named is None or model_type not in CLASSES or "model_name" in model
        or any(config.get(key) for key in NEED_TRANSFORMERS) or (has_legacy and "added_tokens_decoder" not in config)
    ):  # fmt: skip
        return None
    name = CLASSES[model_type] or {"PreTrainedTokenizerFast": AS_IS, "Qwen2TokenizerFast": QWEN}.get(named, named)
    return name if name in (AS_IS, QWEN) else None


def _build_qwen(backend: Any, config: dict) -> bool:
    """Replace the pipeline by that of Qwen's class; False if the model cannot be of it."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    model = backend.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if model.dropout or model.ignore_merges or model.unk_token or model.fuse_unk or model.byte_fallback:
        return False
    backend.normalizer, backend.decoder = normalizers.NFC(), decoders.ByteLevel()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(bool(config.get("add_prefix_space")), use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    return True


def _content(token: Any) -> Any:
    """The text of a special token, which may be written as a dictionary."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
