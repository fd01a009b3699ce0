"""``LLM.chat`` and the tokenizer: conversations to prompts."""

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import Any

from nanovllm.engine.input_processor import Params
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.text.prompts import Prompt, as_list, as_token_ids
from nanovllm.engine.text.reasoning import ReasoningMarks
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams, keyword_hint

Conversation = ListLike[dict[str, Any]]


class Chat(LLMEngine):
    """Answers conversations, and lends the tokenizer."""

    def chat(self, messages: Conversation | ListLike[Conversation], sampling_params: Params = None,
             use_tqdm: bool | Callable = True, *, add_generation_prompt: bool | None = None,
             continue_final_message: bool = False, tools: list[dict] | None = None, chat_template: str | None = None,
             chat_template_kwargs: dict[str, Any] | None = None, chat_template_content_format: str | None = None,
             **template_variables: Any) -> list[RequestOutput]:
        """Answer one conversation, or a list of conversations.

        Args:
            messages: ``[{"role": "user", "content": "..."}]``, or a list of such lists.
            sampling_params, use_tqdm: as in ``generate``.
            add_generation_prompt: begin an answer; default True unless ``continue_final_message``.
            continue_final_message: go on with the last message.
            tools: JSON schemas of functions, for templates that can tell the model about them.
            chat_template: Jinja source, instead of the tokenizer's.
            chat_template_kwargs, **template_variables: variables of the template, e.g. ``enable_thinking=False``.
            chat_template_content_format: "openai" gives the template every content as a list of parts, "string" as a
                string; default "auto": as parts where it loops over them.

        Raises:
            RequestError: as in ``generate``; or the template reads no variable of that name.
        """
        conversations = as_conversations(messages)
        if not isinstance(chat_template_kwargs, (dict, type(None))):
            raise RequestError(f"chat_template_kwargs must be a dict or None, not {chat_template_kwargs!r:.100}.")
        if template_variables:
            known = self._tokenizer.template_variables(chat_template)
            for name in template_variables:
                if name not in known:
                    hint = keyword_hint(name, [*known, "chat_template_kwargs", "add_generation_prompt"])
                    raise RequestError(
                        f"chat() has no argument {name!r}, and the chat template reads no such variable.{hint}"
                    )
        arguments = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message or None,
            "tools": tools,
            "chat_template": chat_template,
            "chat_template_content_format": chat_template_content_format,
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        options = {**(chat_template_kwargs or {}), **template_variables, **given}
        self.require_ready()
        prompts = self.chat_prompts(conversations, sampling_params or SamplingParams(), **options)
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompts(self, conversations: Conversation | ListLike[Conversation], sampling_params: Params = None,
                     **options: Any) -> list[Prompt]:
        """Conversations as prompts for ``generate``: text, token ids, and images; any thread may call it.

        Args:
            conversations: one, or a list of them, as in ``chat``.
            sampling_params: parameters of the later requests, as in ``tokenize``.
            **options: of ``apply_chat_template``, by default ``add_generation_prompt=True``.
        """
        options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
        images = self._inputs.attachments
        split = [images.split(conversation) for conversation in as_conversations(conversations)]
        rendered = self._tokenizer.apply_chat_templates([talk for talk, _ in split], images.placeholder, **options)
        texts = [images.placed(text) if others else text for text, (_, others) in zip(rendered, split, strict=True)]
        encoded = zip(texts, self.tokenize(texts, False, sampling_params), split, strict=True)
        return [{"prompt": text, "prompt_token_ids": ids, **others} for text, ids, (_, others) in encoded]

    def load_parts(self, prompt: Prompt) -> Prompt:
        """A prompt that is to be used several times, with its images loaded; raises RequestError."""
        return self._inputs.attachments.loaded(prompt)

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, loaded when first asked for; None with ``skip_tokenizer_init``."""
        return self._tokenizer.of_transformers()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, loaded now, which may be changed; None with ``skip_tokenizer_init``."""
        return self.tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer with the same vocabulary from now on."""
        self._tokenizer.replace(tokenizer)

    @property
    def reasoning_marks(self) -> ReasoningMarks:
        """The texts around the model's thinking, where outputs are split into ``reasoning`` and ``content``.

        By default a pair that the tokenizer has tokens for, or ``<think>`` and ``</think>``; another pair may be set.
        """
        return self._tokenizer.reasoning_marks

    @reasoning_marks.setter
    def reasoning_marks(self, marks: ListLike[str] | None) -> None:
        is_pair = isinstance(marks, (tuple, list)) and len(marks) == 2 and all(isinstance(m, str) and m for m in marks)
        if marks is not None and not is_pair:
            raise RequestError(
                'reasoning_marks must be two non-empty strings, such as ("<think>", "</think>"), or None for the '
                f"tokenizer's, not {marks!r:.100}."
            )
        self._tokenizer.reasoning_marks = None if marks is None else ReasoningMarks(*marks)

    def apply_chat_template(self, conversation: Conversation, **options: Any) -> str:
        """A conversation as text. ``options``: variables of the template, and ``tools``, ``chat_template``,
        ``add_generation_prompt``, ``continue_final_message``, ``chat_template_content_format`` as in ``chat``; any
        thread may call it."""
        (conversation,) = as_conversations([conversation])
        return self._tokenizer.apply_chat_template(conversation, self._inputs.attachments.placeholder, **options)

    def tokenize(self, texts: str | ListLike[str], add_special_tokens: bool = True,
                 sampling_params: Params = None) -> list[list[int]]:
        """The token ids of each text, of one or a list; any thread may call it.

        ``sampling_params``: parameters of the later requests; a text that cannot fit raises an error, untokenized.
        """
        fit = None if sampling_params is None else (sampling_params, self.config.max_model_len)
        rule = "texts must be a string or a list of strings"
        texts = [texts] if isinstance(texts, str) else as_list(rule, texts)
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise RequestError(f"{rule}, not {wrong[0]!r:.100}.")
        return self._tokenizer.encode(texts, add_special_tokens, fit=fit)

    def detokenize(self, token_id_lists: ListLike[ListLike[int]], skip_special_tokens: bool = True) -> list[str]:
        """The text of each list of token ids; any thread may call it."""
        rule = "token_id_lists must be a list of lists of integer token ids"
        lists = [as_token_ids(ids, rule).tolist() for ids in as_list(rule, token_id_lists)]
        return self._tokenizer.decode(lists, skip_special_tokens)


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or many as a list of them; raises RequestError for anything else."""
    rule = 'messages must be a list such as [{"role": "user", "content": "..."}], or a list of such lists'
    conversations = as_list(rule, messages)
    if conversations and isinstance(conversations[0], dict):
        conversations = [conversations]
    for conversation in conversations:
        if not isinstance(conversation, (list, tuple)) or not all(isinstance(m, dict) for m in conversation):
            raise RequestError(f"{rule}, not {messages!s:.100}.")
    return conversations
