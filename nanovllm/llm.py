"""``LLM``: the engine with the methods that people call."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nanovllm.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from nanovllm.engine.llm_engine import LLMEngine, Prompt
from nanovllm.engine.prompts import NON_SEQUENCES, as_list
from nanovllm.engine.request import Call, Drafts, Request
from nanovllm.engine.stream import DeltaStream
from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.outputs import RequestOutput, Score
from nanovllm.sampling_params import DEFAULTS as SAMPLING_DEFAULTS
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.gc_pause import no_full_gc
from nanovllm.validation import did_you_mean

if TYPE_CHECKING:
    from nanovllm.runner.residency import Residency, Weights

T = TypeVar("T")
Params = SamplingParams | ListLike[SamplingParams] | None
Conversation = ListLike[dict[str, Any]]
TAGS = "weights", "kv_cache"  # of what sleeps
WINDOW = 2  # times max_num_seqs: requests of a stream that wait or run; enough to keep every step full


class LLM(LLMEngine):
    __doc__ = LLMEngine.__doc__

    def generate(self, prompts: Prompt | ListLike[Prompt], sampling_params: Params = None,
                 use_tqdm: bool | Callable = True) -> list[RequestOutput]:
        """Complete one prompt or many.

        Args:
            prompts: a string, a list of token ids, or ``{"prompt": ...}`` / ``{"prompt_token_ids": ...}``; or a list.
            sampling_params: one for all, or one for each prompt. Default ``get_default_sampling_params()``.
            use_tqdm: show a progress bar; or what makes one, called like ``tqdm``.

        Returns:
            One ``RequestOutput`` for each prompt, in their order.

        Raises:
            RequestError: a prompt can never be served, or the counts differ; nothing was computed.
        """
        self._require_ready()
        texts, token_ids = self._encode(as_prompts(prompts))
        return self._generate(texts, token_ids, sampling_params, use_tqdm)

    def chat(self, messages: Conversation | ListLike[Conversation], sampling_params: Params = None,
             use_tqdm: bool | Callable = True, *, add_generation_prompt: bool | None = None,
             continue_final_message: bool = False, tools: list[dict] | None = None, chat_template: str | None = None,
             chat_template_kwargs: dict[str, Any] | None = None, **template_variables: Any) -> list[RequestOutput]:
        """Answer one conversation, or a list of conversations.

        Args:
            messages: ``[{"role": "user", "content": "..."}]``, or a list of such lists.
            sampling_params, use_tqdm: as in ``generate``.
            add_generation_prompt: begin an answer; default True unless ``continue_final_message``.
            continue_final_message: go on with the last message.
            tools: JSON schemas of functions, for templates that can tell the model about them.
            chat_template: Jinja source, instead of the tokenizer's.
            chat_template_kwargs, **template_variables: variables of the template, e.g. ``enable_thinking=False``.

        Raises:
            RequestError: as in ``generate``; or the template reads no variable of that name.
        """
        self._require_ready()
        rule = 'messages must be a list such as [{"role": "user", "content": "..."}], or a list of such lists'
        conversations = as_list(rule, messages)
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]
        for conversation in conversations:
            if not isinstance(conversation, (list, tuple)) or not all(isinstance(m, dict) for m in conversation):
                raise RequestError(f"{rule}, not {messages!s:.100}.")
        if not isinstance(chat_template_kwargs, (dict, type(None))):
            raise RequestError(f"chat_template_kwargs must be a dict or None, not {chat_template_kwargs!r:.100}.")
        if template_variables:
            known = self._tokenizer.template_variables(chat_template)
            for name in template_variables:
                if name not in known:
                    hint = did_you_mean(name, [*known, "chat_template_kwargs", "add_generation_prompt"])
                    if name in SAMPLING_DEFAULTS:
                        hint = f" It is a parameter of a request: SamplingParams({name}=...)."
                    raise RequestError(
                        f"chat() has no argument {name!r}, and the chat template reads no such variable.{hint}"
                    )
        arguments = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message or None,
            "tools": tools,
            "chat_template": chat_template,
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        options = {**(chat_template_kwargs or {}), **template_variables, **given}
        options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
        texts = [self._tokenizer.apply_chat_template(conversation, **options) for conversation in conversations]
        token_ids = self._tokenizer.encode(texts, add_special_tokens=False)
        return self._generate(texts, token_ids, sampling_params, use_tqdm)

    def stream(self, prompts: Prompt | Iterable[Prompt | tuple[Prompt, SamplingParams]],
               sampling_params: SamplingParams | None = None, *,
               on_error: Callable[[int, RequestError], None] | None = None) -> Iterator[RequestOutput]:
        """Outputs as they arrive. Closed early (``break``, ``close()``), it aborts its own requests and no others.

        Args:
            prompts: one prompt: yields what is new whenever there is something new, ``finished`` with the last. An
                iterable of prompts, or of pairs (prompt, parameters), which may be endless: yields each
                ``RequestOutput`` when it is finished; its ``index`` tells the prompt. Prompts are taken as there is
                room for them.
            sampling_params: of prompts without their own.
            on_error: of an iterable, called with the index of a prompt that can never be served, and why; the others
                go on.

        Raises:
            RequestError: a prompt can never be served, and there is no ``on_error``; the others of this call are
                aborted.
        """
        self._require_ready()
        snapshot = self._requests.snapshot
        default = snapshot(self.get_default_sampling_params() if sampling_params is None else sampling_params)
        if is_one_prompt(prompts):
            yield from self._stream_one(prompts, default)  # type: ignore[arg-type]
            return

        def make(index: int, item: Any) -> Request | None:
            is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams)
            try:
                prompt, params = (item[0], snapshot(item[1])) if is_pair else (item, default)
                (text,), (token_ids,) = self._encode([prompt])
                request = self._requests.make(text, token_ids, params)
            except RequestError as error:
                if on_error is None:
                    raise RequestError(f"prompt {index}: {error}") from None
                on_error(index, error)
                return None
            request.index = index
            return request

        if isinstance(prompts, NON_SEQUENCES) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts must be a prompt or an iterable of prompts, not {prompts!s:.100}.")
        feed = (request for index, item in enumerate(prompts) if (request := make(index, item)) is not None)
        for request in self._run(feed, window=WINDOW * self.config.max_num_seqs):
            yield request.output()

    def _stream_one(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        (text,), (token_ids,) = self._encode([prompt])
        with self._exclusive():
            request, call = self._requests.make(text, token_ids, params), Call()
            self._add(request, call)
        deltas = DeltaStream(request)
        try:
            while call.unfinished:
                self._step()
                if call.unfinished and (delta := deltas.delta()) is not None:
                    yield delta
            for _ in self._take(call):  # none if it was aborted
                yield deltas.last()
        finally:
            self._abandon(call)

    @no_full_gc()
    def score(self, token_id_lists: ListLike[ListLike[int]], start: int | ListLike[int] | None = None,
              use_tqdm: bool | Callable = False) -> list[Score]:
        """Log-probabilities of given tokens, each after those before it, in one prefill.

        Args:
            token_id_lists: at least two ids each, at most ``max_model_len + 1``.
            start: the first token to score, for all lists or one for each; at least 1, the default. What stands
                before it may come from the prefix cache.

        Raises:
            RequestError: a list can never be scored; nothing was computed.
        """
        self._require_ready()
        lists = as_list("token_id_lists must be a list of lists of token ids", token_id_lists)
        starts = start if isinstance(start, (list, tuple)) else [1 if start is None else start] * len(lists)
        if len(starts) != len(lists):
            raise RequestError(f"{len(lists)} lists but {len(starts)} starts; give one, or one for each list.")
        drafts = Drafts()
        with self._exclusive():
            for i, (token_ids, first) in enumerate(zip(lists, starts, strict=True)):
                try:
                    drafts.left.append(self._requests.make_scoring(token_ids, first, i, i))
                except RequestError as error:
                    raise RequestError(f"list {i}: {error}") from None
            drafts.num_seqs = self._requests.give_ids(len(drafts.left))
            return self._drain(drafts, use_tqdm, Request.score)

    def beam_search(self, prompts: Prompt | ListLike[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The most probable completions that a beam of ``params.beam_width`` finds; see ``BeamSearchParams``."""
        self._require_ready()
        texts, token_ids = self._encode(as_prompts(prompts))
        return beam_search(self, texts, token_ids, params)

    # ---------------------------------------------------------------- between rollouts of a training loop

    def update_weights(self, weights: "Weights", partial: bool = False) -> set[str]:
        """Replace the weights in place, and forget cached prefixes.

        Args:
            weights: pairs (name in the checkpoint, tensor on any device, of any float dtype), such as
                ``model.named_parameters()`` or a state dict; or a path of safetensors, which each rank reads. For an
                FP8 weight data (e4m3) and scale (``X.weight_scale``), or a tensor that is quantized here.
            partial: False: every tensor of the model must be given.

        Returns:
            The names of the tensors written; copies of tied weights are passed over.

        Raises:
            CheckpointError: a tensor is unknown, given twice, of another shape or, unless ``partial``, missing. If
                some were written by then, no request is taken until all of them are.
            EngineError: requests are unfinished, or the weights sleep.
        """
        with self._idle("update_weights") as residency:
            return residency.update(weights, partial)

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory: weights, KV cache and CUDA graphs. Requests are refused until ``wake_up``.

        Args:
            level: 1 moves the weights to pinned memory of the host; 2 drops them, to be pushed by ``update_weights``
                after ``wake_up``.

        Raises:
            EngineError: requests are unfinished.
        """
        with self._idle("sleep") as residency:
            residency.call("sleep", level)

    @no_full_gc()
    def wake_up(self, tags: ListLike[str] | None = None) -> None:
        """Take the device's memory again.

        Args:
            tags: "weights", "kv_cache", or both, the default. Graphs are captured when both are back.

        Raises:
            OutOfMemoryError: there is no room; what slept sleeps on.
        """
        given = TAGS if tags is None else tags
        if not isinstance(given, (list, tuple, set)) or not all(tag in TAGS for tag in given):
            raise ConfigError(f"wake_up: tags={tags!r} must be None or a list of {', '.join(map(repr, TAGS))}.")
        with self._idle("wake_up") as residency:
            residency.call("wake_up", list(given))

    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are not in the device's memory."""
        self._require_running()
        return bool(self.model_runner.residency.asleep)

    @contextmanager
    def _idle(self, what: str) -> Iterator["Residency"]:
        """For work on weights and memory between requests. No cached prefix outlives it."""
        with self._exclusive():
            if not self.is_finished():
                raise EngineError(f"{what} needs an idle engine; finish or abort its requests first.")
            while self._in_flight:  # a surplus launch
                self._process()
            self.reset_prefix_cache()
            try:
                yield self.model_runner.residency
            except BaseException:
                workers = self.model_runner.workers
                if workers is not None and workers.are_lost:
                    self._abort()
                raise

    # ---------------------------------------------------------------- tokenizer

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, loaded now, which may be changed; None with ``skip_tokenizer_init``."""
        return self.tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer of the same vocabulary from now on."""
        self._tokenizer.replace(tokenizer)

    @no_full_gc()
    def _generate(self, texts: ListLike[str | None], token_ids: list[Any], sampling_params: Params,
                  use_tqdm: bool | Callable) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(token_ids)
        sampling_params = as_list("sampling_params must be a SamplingParams or a list of them", sampling_params)
        if len(sampling_params) != len(token_ids):
            raise RequestError(
                f"{len(token_ids)} prompts but {len(sampling_params)} sampling_params; "
                "give one, or one for each prompt."
            )
        with self._exclusive():
            drafts = self._requests.draft_all(texts, token_ids, sampling_params)
            return self._drain(drafts, use_tqdm, Request.output)

    @no_full_gc()
    def _complete(self, token_ids: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        """``generate`` for the library's own searches: ``max_logprobs``, a limit for users, does not apply."""
        num_prompts = len(token_ids)
        with self._exclusive():
            drafts = self._requests.draft_all([None] * num_prompts, token_ids, [params] * num_prompts, is_snapshot=True)
            return self._drain(drafts, False, Request.output)

    def _drain(self, drafts: Drafts, use_tqdm: bool | Callable, result: Callable[[Request], T]) -> list[T]:
        """``result`` of each request; most are made while the device works on the others, once their text is there."""
        number, results = len(drafts.left), dict[int, T]()
        finished: deque[Request] = deque()
        for request in self._run(drafts, use_tqdm=use_tqdm):
            finished.append(request)
            if finished[0].has_text:
                first = finished.popleft()
                results[first.index] = result(first)
        results |= {request.index: result(request) for request in finished}
        if len(results) < number:
            raise EngineError(f"{number - len(results)} of the {number} requests of this call were aborted.")
        return [results[index] for index in range(number)]


def as_prompts(prompts: Any) -> list[Prompt]:
    return [prompts] if is_one_prompt(prompts) else as_list("prompts must be a string or a list", prompts)


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a prompt and not a collection of prompts."""
    if isinstance(prompts, (str, dict)):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1 and prompts.dtype.kind in "iu"
    return isinstance(prompts, (list, tuple)) and len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))
