"""Text to token ids and back. Owns the tokenizer; loads it beside the model and decodes beside the engine.

Both happen on a thread of their own: importing transformers and turning thousands of results into
text cost seconds that the device need not wait for.
"""

from collections.abc import Sequence as ListLike
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from nanovllm.errors import CheckpointError, RequestError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
LOADING_LOCK = Lock()  # one at a time: transformers, imported by two threads at once, is found without its classes


class AsyncTokenizer:
    """A tokenizer that is being loaded, or none.

    Args:
        model_path: directory of the checkpoint.
        skip: load none; text is refused and results have no text.
        trust_remote_code: let the tokenizer run code from the checkpoint.
    """

    def __init__(self, model_path: str, skip: bool, trust_remote_code: bool):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-tokenizer")
        self._loading: Future | None = None
        if not skip:
            if not any((Path(model_path) / name).exists() for name in TOKENIZER_FILES):
                raise CheckpointError(
                    f"{model_path} holds no tokenizer ({', '.join(TOKENIZER_FILES)}). "
                    "Add it, or use skip_tokenizer_init=True and give prompts as token ids."
                )
            self._loading = self._thread.submit(_load, model_path, trust_remote_code)

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; None if it was skipped."""
        return None if self._loading is None else self._loading.result()

    def _required(self) -> Any:
        if self._loading is None:
            raise RequestError("text needs a tokenizer, but the engine was made with skip_tokenizer_init=True.")
        return self._loading.result()

    def eos_token_ids(self) -> set[int]:
        tokenizer = self.tokenizer
        eos = None if tokenizer is None else tokenizer.eos_token_id
        return set() if eos is None else {eos}

    def encode(self, texts: ListLike[str | None], add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each text; None, a prompt that is no text, is left out.

        Raises:
            RequestError: there is no tokenizer, or a text is not Unicode; it says which one of several.
        """
        given = [text for text in texts if text is not None]
        if not given:
            return []
        tokenizer = self._required()
        for i, text in enumerate(texts):
            try:
                (text or "").encode()
            except UnicodeEncodeError as error:
                which = f"prompt {i}: " if len(texts) > 1 else ""
                raise RequestError(f"{which}the text cannot be encoded as UTF-8: {error}") from None
        # not verbose: what is too long is refused by the engine, whose limit is another than the tokenizer's
        return tokenizer(given, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def apply_chat_template(self, messages: list[dict], **kwargs: Any) -> str:
        tokenizer = self._required()
        if not (kwargs.get("chat_template") or tokenizer.chat_template):
            raise RequestError(
                "chat() needs a tokenizer with a chat template; this model has none. Use generate(), or give "
                "chat_template."
            )
        kwargs.setdefault("add_generation_prompt", not kwargs.get("continue_final_message"))
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        except Exception as error:  # whatever the model's template makes of them
            raise RequestError(f"the model's chat template cannot take these messages: {error}") from error

    def decode_later(self, token_ids: list[int]) -> "Future[str]":
        """The text of the ids, special tokens left out; "" without a tokenizer."""
        if self._loading is not None:
            return self._thread.submit(self._decode, token_ids)
        nothing: Future[str] = Future()
        nothing.set_result("")
        return nothing

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _load(model_path: str, trust_remote_code: bool) -> Any:
    with LOADING_LOCK:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        except Exception as error:  # whatever a damaged file makes the library raise
            raise CheckpointError(f"the tokenizer in {model_path} cannot be loaded: {error}") from error
