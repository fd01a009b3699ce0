"""Text to token ids and back, on a thread of its own.

Owns the tokenizer. Detokenizing thousands of outputs takes seconds, which the device should not wait for. transformers
is imported for chats, for whoever asks for its tokenizer, and for checkpoints that ``fast_tokenizer.py`` is not certain
of.
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nanovllm.engine.text.chat_templates import FORMATS, best_template, takes_parts, variables, with_contents
from nanovllm.engine.text.detokenizer import TokenText, decode, decode_completion, decode_tokens
from nanovllm.engine.text.fast_tokenizer import FastTokenizer, load_fast
from nanovllm.engine.text.limits import LONG, MAX_CHARACTERS, check_growth, check_length
from nanovllm.engine.text.reasoning import THINK, ReasoningMarks, finder_of, marks_of
from nanovllm.engine.text.template_worker import TemplateWorker
from nanovllm.errors import CheckpointError, RequestError, as_request_error
from nanovllm.outputs import ReasoningBlock
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import LOADING_LOCK

T = TypeVar("T")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
TEMPLATE_SECONDS = 20.0  # limit for one conversation; most take a millisecond


class AsyncTokenizer:
    """A tokenizer that loads in the background.

    Args:
        model_path: directory of the checkpoint.
        skip: load none; text prompts are refused and outputs have no text.
        trust_remote_code: let the tokenizer run code from the checkpoint.
    """

    def __init__(self, model_path: str, skip: bool, trust_remote_code: bool):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-tokenizer")
        self._loading: Future | None = None
        self._source = model_path, trust_remote_code
        self._marks: ReasoningMarks | None = None  # marks that the user has set
        self._no_text = done("")  # shared, because making one takes as long as the rest of an output
        self._templates = TemplateWorker()
        if not skip:
            if not any((Path(model_path) / name).exists() for name in TOKENIZER_FILES):
                raise CheckpointError(
                    f"{model_path} holds no tokenizer ({', '.join(TOKENIZER_FILES)}). "
                    "Add it, or use skip_tokenizer_init=True and give prompts as token ids."
                )
            self._loading = self._thread.submit(_load, *self._source)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that encodes and decodes, transformers' or an equal one; None if it was skipped."""
        return None if self._loading is None else self._loading.result()

    def of_transformers(self) -> Any:
        """The transformers tokenizer, loaded now if it was not; None if it was skipped. It is used from now on."""
        if isinstance(self.tokenizer, FastTokenizer):  # outside the lock, which loading it may take
            with LOADING_LOCK:
                if isinstance(self.tokenizer, FastTokenizer):
                    self.replace(_load_with_transformers(*self._source))
        return self.tokenizer

    def _required(self) -> Any:
        if self._loading is None:
            raise RequestError("text needs a tokenizer, but the engine was made with skip_tokenizer_init=True.")
        return self._loading.result()

    def eos_token_ids(self) -> list[int]:
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return [] if eos is None else [eos]

    def encode(self, texts: ListLike[str | None], add_special_tokens: bool = True,
               first: int = 0, fit: tuple[Any, int] | None = None) -> list[list[int]]:
        """The token ids of each text; None, a prompt given as token ids, is left out. ``first``: its index, for errors.

        Raises:
            RequestError: there is no tokenizer, or a text cannot be encoded, or is so long that it cannot ``fit``
                (parameters, max_model_len); of several it says which one.
        """
        given = [text for text in texts if text is not None]
        if not given:
            return []
        tokenizer = self._required()
        for i, text in enumerate(texts, first):
            which = f"prompt {i}: " if first + len(texts) > 1 else ""
            if text and len(text) > LONG:
                check_length(which, text, fit, tokenizer)
            try:
                (text or "").encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"{which}the text cannot be encoded as UTF-8: {error}") from None
        try:
            return _token_ids(tokenizer, given, add_special_tokens)
        except RequestError:
            for i, text in enumerate(texts, first):  # find the text at fault
                if text is not None and first + len(texts) > 1:
                    _token_ids(tokenizer, [text], add_special_tokens, f"prompt {i}: ")
            raise

    def decode(self, token_id_lists: ListLike[ListLike[int]], skip_special_tokens: bool = True) -> list[str]:
        """The text of each list of token ids; raises RequestError without a tokenizer."""
        tokenizer = self._required()
        return [decode(tokenizer, list(ids), skip_special_tokens) for ids in token_id_lists]

    def apply_chat_template(self, messages: list[dict], placeholder: str = "", /, **kwargs: Any) -> str:
        """One conversation as text; see ``apply_chat_templates``."""
        return self.apply_chat_templates([messages], placeholder, **kwargs)[0]

    def apply_chat_templates(self, conversations: ListLike[ListLike[dict]], placeholder: str = "", /, *,
                             chat_template_content_format: str = "auto", **kwargs: Any) -> list[str]:
        """The text of each conversation, all with the same options.

        Args:
            conversations: with IMAGE in the place of each image.
            placeholder: the text of an image, for templates that take strings.
            chat_template_content_format: "openai" gives contents as parts, "string" as strings, and "auto" as parts
                where the template loops over them.
            **kwargs: of transformers; those it does not know, of the template.
        """
        tokenizer = self._required()
        if chat_template_content_format not in FORMATS:
            allowed = " or ".join(map(repr, FORMATS))
            raise RequestError(f"chat_template_content_format={chat_template_content_format!r:.100} must be {allowed}.")
        if isinstance(tokenizer, FastTokenizer):
            self._templates.start()  # in the background, while this process imports transformers too
            tokenizer = self.of_transformers()
        if kwargs.get("tools") and "tools" not in self.template_variables(kwargs.get("chat_template")):
            raise RequestError("the chat template reads no tools, so the model would not be told of them.")
        if not (kwargs.get("chat_template") or tokenizer.chat_template):
            raise RequestError(
                "chat() needs a tokenizer with a chat template; this model has none. Use generate(), or give "
                "chat_template."
            )
        are_parts = chat_template_content_format == "openai"
        if chat_template_content_format == "auto":
            are_parts = takes_parts(self._template(kwargs.get("chat_template"), kwargs.get("tools")))
        with_form = [with_contents(messages, are_parts, placeholder) for messages in conversations]
        return self._templates.render(tokenizer, with_form, kwargs, TEMPLATE_SECONDS, MAX_CHARACTERS)

    def _template(self, chat_template: str | None, tools: Any) -> str:
        """The source that transformers renders, perhaps one of several with names; "" where it would raise."""
        own = self.of_transformers().chat_template
        if isinstance(own, dict) and not chat_template:
            chat_template = "tool_use" if tools is not None and "tool_use" in own else "default"
        source = own.get(chat_template, chat_template) if isinstance(own, dict) else chat_template or own
        return source if isinstance(source, str) else ""

    def template_variables(self, chat_template: str | None) -> set[str]:
        """Names in the code of the chat template, such as "enable_thinking"."""
        self._required()
        own = self.of_transformers().chat_template  # it may be several, by name
        template = (own.get(chat_template, chat_template) if isinstance(own, dict) else chat_template) or own
        sources = template.values() if isinstance(template, dict) else [template or ""]
        return {name for source in sources for name in variables(source)}

    def decode_later(self, token_ids: list[int], params: SamplingParams) -> "Future[str]":
        """The text of the ids; "" without a tokenizer or with ``detokenize=False``."""
        if self._loading is not None and params.detokenize:
            return self._thread.submit(
                self._decode, token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        return self._no_text

    def _decode(self, token_ids: list[int], skip_special_tokens: bool, spaces_between: bool) -> str:
        return decode_completion(self.tokenizer, token_ids, skip_special_tokens, spaces_between)

    @property
    def reasoning_marks(self) -> ReasoningMarks:
        """Two texts that enclose the model's thinking: the user's, or a pair that the tokenizer has tokens for."""
        return self._marks or (THINK if self.tokenizer is None else marks_of(self.tokenizer))

    @reasoning_marks.setter
    def reasoning_marks(self, marks: ReasoningMarks | None) -> None:
        self._marks = marks

    def reasoning_finder(self, prompt_ids: Any, params: SamplingParams) -> "CompletionReasoning":
        """Make the finder of the thinking in completions of a prompt, integers [num_prompt_tokens]."""
        return CompletionReasoning(self, self._marks, prompt_ids, params)

    def decoded(self, text: "Future[str]") -> tuple[str, str | None]:
        """Wait for the text; returns it, or "" and why the tokenizer failed."""
        error = text.exception()
        return (text.result(), None) if error is None else ("", str(as_request_error(error)))

    def texts(self, token_ids: Iterable[int]) -> dict[int, TokenText]:
        """The text and the bytes of each id, decoded alone; {} without a tokenizer."""
        distinct, tokenizer = sorted(set(token_ids)), self.tokenizer
        return {} if tokenizer is None else dict(zip(distinct, decode_tokens(tokenizer, distinct), strict=True))

    def replace(self, tokenizer: Any) -> None:
        """Use this tokenizer from now on."""
        self._loading = done(tokenizer)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._templates.close()


@dataclass(slots=True)
class CompletionReasoning:
    """Finds the thinking in completions of one prompt; one small object for all of them, since most never ask."""

    tokenizer: AsyncTokenizer
    marks: ReasoningMarks | None
    prompt_ids: Any
    params: SamplingParams

    def __call__(self, text: str, token_ids: ListLike[int]) -> ReasoningBlock | None:
        if (tokenizer := self.tokenizer.tokenizer) is None:
            return None
        params = self.params
        flags = params.skip_special_tokens, params.spaces_between_special_tokens
        finder, constraint = finder_of(tokenizer, len(tokenizer), self.marks), params.structured_outputs
        thinks_first = params.thinking_token_budget is not None
        if constraint is not None and not thinks_first and not finder.is_named_in(constraint):
            return None  # the model could not think, whatever its prompt has opened
        must_open = constraint is not None and thinks_first
        return finder.find(self.prompt_ids, text, list(token_ids), *flags, must_open=must_open)


def done(result: T) -> "Future[T]":
    """A future that has its result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _token_ids(tokenizer: Any, texts: list[str], add_special_tokens: bool, which: str = "") -> list[list[int]]:
    try:  # verbose would warn of the tokenizer's length limit; the engine checks max_model_len instead
        return tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    except BaseException as error:
        refused = as_request_error(error, which)
        raise refused from refused.__cause__


def _load(model_path: str, trust_remote_code: bool) -> Any:
    try:
        tokenizer = load_fast(model_path)
    except BaseException:  # a damaged file may raise anything; transformers decides what to make of it
        tokenizer = None
    tokenizer = _load_with_transformers(model_path, trust_remote_code) if tokenizer is None else tokenizer
    check_growth(tokenizer, model_path)
    return tokenizer


def _load_with_transformers(model_path: str, trust_remote_code: bool) -> Any:
    with LOADING_LOCK:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a damaged file may raise anything, a panic of tokenizers included
            raise CheckpointError(f"the tokenizer in {model_path} cannot be loaded: {error}") from None
        tokenizer.chat_template = best_template(model_path, tokenizer.chat_template)
        return tokenizer
