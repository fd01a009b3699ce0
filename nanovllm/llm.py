"""``LLM``: the engine with the methods that people call."""

import os
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from nanovllm.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from nanovllm.engine.futures import RequestFuture
from nanovllm.engine.guard import Guard
from nanovllm.engine.input_processor import Params
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.pooling import (
    RERANK_INSTRUCTION,
    RERANK_TEMPLATE,
    Head,
    as_embedding,
    pooled_output,
    rerank_prompts,
)
from nanovllm.engine.prompts import NON_SEQUENCES, Prompt, as_list, as_prompts, is_one_prompt
from nanovllm.engine.readout_requests import make_pooling, make_scoring
from nanovllm.engine.request import Request
from nanovllm.engine.stream import DeltaStream
from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.models.sentence_pooling import read_pooling
from nanovllm.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    LogprobsAt,
    PoolingRequestOutput,
    RequestOutput,
    Score,
    ScoringOutput,
)
from nanovllm.readouts.prompt_logprobs import PromptLogprobs
from nanovllm.sampling_params import DEFAULTS as SAMPLING_DEFAULTS
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import BOOLEAN, check, did_you_mean, integer, optional

if TYPE_CHECKING:
    from nanovllm.runner.weights import Source, Weights

Conversation = ListLike[dict[str, Any]]
UNCHANGED: Any = object()  # the adapter, where None is none


class LLM(LLMEngine):
    __doc__ = LLMEngine.__doc__

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
        self._require_ready()
        texts = [self.apply_chat_template(conversation, **options) for conversation in conversations]
        encoded = zip(texts, self.tokenize(texts, add_special_tokens=False), strict=True)
        prompts: list[Prompt] = [{"prompt": text, "prompt_token_ids": ids} for text, ids in encoded]
        return self.generate(prompts, sampling_params, use_tqdm)

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
        copy_of = self._inputs.copy_of
        default = copy_of(self.get_default_sampling_params() if sampling_params is None else sampling_params)
        if is_one_prompt(prompts):
            with Guard(self):
                request = self._inputs.make(prompts, default)  # type: ignore[arg-type]
            deltas: DeltaStream | None = None
            for _ in self._run([request]):
                deltas = deltas or DeltaStream(request)  # its sequences are made by now
                if (delta := deltas.delta()) is not None:
                    yield delta
            return
        if isinstance(prompts, NON_SEQUENCES) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts must be a prompt or an iterable of prompts, not {prompts!s:.100}.")

        def requests() -> Iterator[Request]:
            for index, item in enumerate(cast(Iterable[Any], prompts)):
                is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams)
                prompt, params = item if is_pair else (item, None)
                try:
                    request = self._inputs.make(prompt, default if params is None else copy_of(params), index)
                except RequestError as error:
                    if on_error is None:
                        raise RequestError(f"prompt {index}: {error}") from None
                    on_error(index, error)
                else:
                    yield request

        for _, finished in self._run([], requests()):
            for request in finished:
                yield request.output()

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestFuture:
        """Queue one prompt; return a ``concurrent.futures.Future`` of its ``RequestOutput``.

        The engine has no thread of its own: the request advances whenever somebody steps the engine, by any method, or
        asks the future for its ``result()``. Like every method, this one is for one thread at a time.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        with Guard(self):
            request = self._make(prompt, sampling_params)
            request.future = future = RequestFuture(self, request.request_id)
            self._queue([request], self._submitted)
        return future
    def deltas(self, request_id: int) -> DeltaStream:
        """What a request of ``add_request`` generates, to be asked after any step until it is finished.

        Raises:
            RequestError: no unfinished request has this id.
        """
        if (request := self._added.unfinished.get(request_id)) is None:
            raise RequestError(f"deltas: request_id={request_id!r} is of no unfinished request of add_request.")
        return DeltaStream(request)

    def score(self, token_id_lists: ListLike[ListLike[int]], start: int | ListLike[int] | None = None,
              use_tqdm: bool | Callable = False) -> list[Score]:
        """Log-probabilities of given tokens, each after those before it, in one prefill. Where the model's logits are
        NaN, they are NaN, and ``error`` says so.

        Args:
            token_id_lists: at least two ids each, at most ``max_model_len + 1``.
            start: the first token to score, for all lists or one for each; at least 1, the default. What stands
                before it may come from the prefix cache.

        Raises:
            RequestError: a list can never be scored; nothing was computed.
        """
        lists = as_list("token_id_lists must be a list of lists of token ids", token_id_lists)
        starts = start if isinstance(start, (list, tuple)) else [1 if start is None else start] * len(lists)
        if len(starts) != len(lists):
            raise RequestError(f"{len(lists)} lists but {len(starts)} starts; give one, or one for each list.")
        with Guard(self):
            self._require_ready()
            requests = make_scoring(self._inputs, lists, starts)
            return self._collect(requests, lambda request: cast(PromptLogprobs, request.readout).score(), use_tqdm)

    def embed(self, prompts: Prompt | ListLike[Prompt], normalize: bool | None = None, dimensions: int | None = None,
              use_tqdm: bool | Callable = False) -> list[PoolingRequestOutput]:
        """The embedding of one prompt or many: ``output.embedding``, an array, or ``output.outputs.embedding``, a list.

        It is made of the hidden state of the last token, or as sentence-transformers' files in the checkpoint say.
        Texts are tokenized while the device works on those before. Where the hidden states are NaN, ``outputs`` is None
        and ``error`` says so; from ``classify`` and ``rerank``, too.

        Args:
            prompts: as in ``generate``. Texts get the special tokens that the tokenizer adds.
            normalize: divide by the L2 norm; None is as the checkpoint says, or True.
            dimensions: keep the first so many, before the norm: for models that were trained for it (Matryoshka).

        Raises:
            RequestError: a prompt can never be served; the others of this call are dropped.
            CheckpointError: the checkpoint's pooling is not supported.
        """
        pooling, hidden_size = read_pooling(self.config.model_path), self.config.model_config.hidden_size
        rule = optional(integer(f"an integer from 1 to {hidden_size}", lambda n: 1 <= n <= hidden_size))
        dimensions = check("embed", "dimensions", dimensions, rule, RequestError)
        normalize = check("embed", "normalize", normalize, optional(BOOLEAN), RequestError)
        normalize = pooling.normalize if normalize is None else normalize
        scale = np.float32(1 / self.config.model_config.logit_scale)  # which the weight of the last norm contains
        return self._pool(
            as_prompts(prompts), pooling.kind, use_tqdm,
            lambda state: EmbeddingOutput(as_embedding(state * scale, dimensions, normalize)),
        )  # fmt: skip

    def classify(self, prompts: Prompt | ListLike[Prompt],
                 use_tqdm: bool | Callable = False) -> list[PoolingRequestOutput]:
        """The probabilities of a classification model's labels, ``output.outputs.probs``, for one prompt or many.

        Raises:
            RequestError: the model has no classification head; or as from ``embed``.
            EngineError: the weights of the head are NaN.
        """
        if not self.config.model_config.num_labels:
            raise RequestError(
                "classify: this model has no classification head (architecture ...ForSequenceClassification). "
                "See LLM.embed, and LLM.rerank for rerankers that answer yes or no."
            )
        head = self._head()
        return self._pool(
            as_prompts(prompts), "last", use_tqdm, lambda state: ClassificationOutput(head.probabilities(state))
        )

    def rerank(self, query: str | ListLike[str], documents: ListLike[str], *, template: str = RERANK_TEMPLATE,
               instruction: str = RERANK_INSTRUCTION, tokens: tuple[str, str] = ("no", "yes"),
               use_tqdm: bool | Callable = False) -> list[PoolingRequestOutput]:
        """How well each document answers the query: ``output.outputs.score``, in [0, 1], in the order of the documents.

        Args:
            query: one, or one for each document.
            template: of the prompt, with {query}, {document} and perhaps {instruction}. Default: Qwen3-Reranker's.
            instruction: what it means that a document answers a query.
            tokens: of a model without a classification head the negative and the positive answer. The score is the
                probability of the positive one of both.

        Raises:
            RequestError: the model has several labels, or no head at all; or as from ``embed``.
            EngineError: the weights of the head are NaN.
        """
        documents = as_list("documents must be a list of strings", documents)
        head = self._head(self.config.model_config.label_tokens or tokens)
        if len(head.weight) != 1:
            raise RequestError(f"rerank: this model has {len(head.weight)} labels, not one. See LLM.classify.")
        return self._pool(
            list[Prompt](rerank_prompts(query, documents, template, instruction)), "last", use_tqdm,
            lambda state: ScoringOutput(head.probabilities(state)[0]),
        )  # fmt: skip

    def _head(self, tokens: ListLike[str] = ()) -> Head:
        """The classification head; where there is none, the difference of the logits of two tokens."""
        config = self.config.model_config
        if not (config.num_labels or config.has_lm_head):
            raise RequestError(
                "rerank: this model has neither a classification head nor an LM head; compare the embeddings of query "
                "and documents, see LLM.embed."
            )
        token_ids = None
        if not config.num_labels:
            encoded = self.tokenize(tokens, add_special_tokens=False)
            if [len(ids) for ids in encoded] != [1, 1]:
                raise RequestError(f"tokens={tokens!r} must be two texts of one token each, the negative answer first.")
            token_ids = [ids[0] for ids in encoded]
        with Guard(self):
            self._require_ready()
            weight = self.model_runner.call("head", token_ids)
        if not np.isfinite(weight).all():
            raise EngineError("the weights of this model's head hold NaN, or overflow in this dtype.")
        return Head(weight, config.activation) if token_ids is None else Head(weight[1:] - weight[:1], "sigmoid")

    def _pool(self, prompts: list[Prompt], kind: str, use_tqdm: bool | Callable,
              make: Callable[[Any], Any]) -> list[PoolingRequestOutput]:
        """``make`` of the pooled hidden state, fp32 [C], of each prompt."""
        with Guard(self):
            self._require_ready()
            requests = make_pooling(self._inputs, prompts, kind)
            return self._collect([], lambda request: pooled_output(request, make), use_tqdm, requests, len(prompts))

    def beam_search(self, prompts: Prompt | ListLike[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The most probable completions that a beam of ``params.beam_width`` finds; see ``BeamSearchParams``."""
        with Guard(self):
            self._require_ready()
            token_ids = [ids for _, ids in self._inputs.encode(as_prompts(prompts))]
            tokenizer, eos = self._tokenizer.tokenizer, self.scheduler.eos_token_ids
            return beam_search(self._most_probable, token_ids, params, eos, self.config.max_model_len, tokenizer)

    def _most_probable(self, token_lists: list[list[int]], k: int) -> list[LogprobsAt]:
        """The k most probable next tokens of each list, the best first; ``max_logprobs`` is a limit for users only."""
        k = min(k, self.config.model_config.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=k, detokenize=False)
        prompts = [(None, ids) for ids in token_lists]
        outputs = self._collect(self._inputs.make_all(prompts, params, is_checked=True), Request.output)
        for output in outputs:
            if output["finish_reason"] == "error":
                raise EngineError(str(output.outputs[0].stop_reason))
        return [output.outputs[0].logprobs[0] for output in outputs]  # type: ignore[index]

    # ---------------------------------------------------------------- between rollouts of a training loop

    def update_weights(self, weights: "Source | None" = None, partial: bool = False, *,
                       lora: str | os.PathLike | None = UNCHANGED) -> set[str]:
        """Replace the weights in place, and forget cached prefixes.

        Args:
            weights: pairs (name in the checkpoint, tensor on any device, of any float dtype), such as
                ``model.named_parameters()`` or a state dict; or a path of safetensors, which each rank reads. For an
                FP8 weight data (e4m3) and scale (``X.weight_scale``), or a tensor that is quantized here.
            partial: False: every tensor of the model must be given.
            lora: given in place of weights, a directory or hub id of a PEFT adapter: the weights become those of the
                model's checkpoint with this adapter, and no other; None: without any. Only what differs is read.

        Returns:
            The names of the tensors written; copies of tied weights are passed over.

        Raises:
            CheckpointError: a tensor is unknown, given twice, of another shape or, unless ``partial``, missing. If
                some were written by then, no request is taken until all of them are.
            EngineError: requests are unfinished, or the weights sleep.
        """
        if lora is not UNCHANGED and (weights is not None or partial):
            raise ConfigError("update_weights: give weights, or lora, which is merged into the checkpoint's weights.")
        with self._idle("update_weights") as of_runner:
            return of_runner.update(weights, partial) if lora is UNCHANGED else of_runner.merge(lora)

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory: weights, KV cache and CUDA graphs. Requests are refused until ``wake_up``.

        Args:
            level: 1 moves the weights to pinned memory of the host; 2 drops them, to be pushed by ``update_weights``
                after ``wake_up``.

        Raises:
            EngineError: requests are unfinished.
        """
        with self._idle("sleep") as weights:
            weights.call("sleep", level)

    def wake_up(self, tags: ListLike[str] | None = None) -> None:
        """Take the device's memory again.

        Args:
            tags: "weights", "kv_cache", or both, the default. Graphs are captured when both are back.

        Raises:
            OutOfMemoryError: there is no room; what slept sleeps on.
        """
        with self._idle("wake_up") as weights:
            weights.call("wake_up", tags)

    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are not in the device's memory."""
        self._require_running()
        return bool(self.model_runner.weights.sleeping)

    @contextmanager
    def _idle(self, what: str) -> Iterator["Weights"]:
        """For work on weights and memory between requests. No cached prefix outlives it."""
        with Guard(self):
            if not self.is_finished():
                raise EngineError(f"{what} needs an idle engine; finish or abort its requests first.")
            while self._in_flight:  # a surplus launch
                self._take_in()
            self.reset_prefix_cache()
            try:
                yield self.model_runner.weights
            except BaseException:
                workers = self.model_runner.workers
                if workers is not None and workers.are_lost:
                    self._drop_all()
                raise

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, as is needed after a change of the weights; False while requests run."""
        if not self.is_finished():
            return False
        self.scheduler.block_manager.forget_prefixes()
        return True

    def metrics(self) -> dict[str, Any]:
        """Counters since the engine was made, and its state now, under vLLM's names; any thread may read them."""
        return self.scheduler.metrics.read(self.scheduler, self._outputs.num_not_queued)

    # ---------------------------------------------------------------- tokenizer

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, loaded when first asked for; None with ``skip_tokenizer_init``."""
        return self._tokenizer.of_transformers()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, loaded now, which may be changed; None with ``skip_tokenizer_init``."""
        return self.tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer of the same vocabulary from now on."""
        self._tokenizer.replace(tokenizer)

    def apply_chat_template(self, conversation: Conversation, **options: Any) -> str:
        """A conversation as text. ``options``: variables of the template, and ``tools``, ``chat_template``,
        ``add_generation_prompt``, ``continue_final_message`` as in ``chat``; any thread may call it."""
        return self._tokenizer.apply_chat_template(conversation, **options)  # type: ignore[arg-type]

    def tokenize(self, texts: ListLike[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each text; any thread may call it."""
        return self._tokenizer.encode(texts, add_special_tokens)
