"""``LLM.embed``, ``classify`` and ``rerank``: a head on the pooled hidden state of each prompt.

Owns their requests and prompts, and the heads, in fp32 on the host. Knows neither how hidden states are read out
(``readouts/pooled_state.py``) nor how a checkpoint pools them (``sentence_transformers.py``).
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from functools import partial
from typing import Any

import numpy as np

from nanovllm.engine.callers import collect
from nanovllm.engine.guard import Guard
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.engine.text.prompts import Prompt, as_list, as_prompts, as_token_ids
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import ClassificationOutput, EmbeddingOutput, PoolingRequestOutput, ScoringOutput
from nanovllm.readouts.pooled_state import PooledState
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import BOOLEAN, Rule, check, integer, optional
from nanovllm.verbs.sentence_transformers import Texts, read_pooling, read_texts

SLICE = 256  # prompts that are tokenized at once, while the device works on those before
# the prompt of Qwen3-Reranker, whose answer is one token; and its default instruction
RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Pooling(LLMEngine):
    """Embeds, classifies and ranks prompts."""

    read_pooling = staticmethod(read_pooling)

    def embed(self, prompts: Prompt | ListLike[Prompt], normalize: bool | None = None, dimensions: int | None = None,
              use_tqdm: bool | Callable = True, *, instruction: str | None = None) -> list[PoolingRequestOutput]:
        """Embed one prompt or many: ``output.embedding`` is an array, ``output.outputs.embedding`` a list.

        An embedding is the last token's hidden state, unless sentence-transformers' files in the checkpoint say
        otherwise; these may also cut texts or lower their case. Texts are tokenized while the device works on earlier
        ones. If the hidden states are NaN, ``outputs`` is None and ``error`` says so; likewise in ``classify`` and
        ``rerank``.

        Args:
            prompts: as in ``generate``. Texts get the special tokens that the tokenizer adds.
            normalize: divide by the L2 norm; None is as the checkpoint says, or True.
            dimensions: keep this many leading dimensions, before the norm, for models trained for it (Matryoshka).
                None is the checkpoint's ``truncate_dim``, or all.
            use_tqdm: as in ``generate``; the same in ``classify`` and ``rerank``.
            instruction: put before each text; None is the checkpoint's default prompt, "" none.

        Raises:
            RequestError: a prompt can never be served; the others of this call are dropped.
            CheckpointError: the checkpoint's pooling is not supported.
        """
        kind, is_normalized = self.read_pooling(self.config.model_path)
        texts = read_texts(self.config.model_path)
        if instruction is not None:
            is_text = Rule("a string or None", lambda x: isinstance(x, str))
            texts = texts._replace(instruction=check("embed", "instruction", instruction, is_text, RequestError))
        hidden_size = self.config.model_config.hidden_size
        rule = optional(integer(f"an integer from 1 to {hidden_size}", lambda n: 1 <= n <= hidden_size))
        dimensions = check("embed", "dimensions", dimensions, rule, RequestError) or texts.dimensions
        normalize = check("embed", "normalize", normalize, optional(BOOLEAN), RequestError)
        normalize = is_normalized if normalize is None else normalize
        scale = np.float32(1 / self.config.model_config.logit_scale)  # the last norm's weight contains logit_scale

        def embedding(state: np.ndarray) -> EmbeddingOutput:
            state = (state * scale)[:dimensions]
            return EmbeddingOutput(state / max(float(np.sqrt(state @ state)), 1e-12) if normalize else state)

        return self._pool(as_prompts(prompts), kind, use_tqdm, "Embedding", embedding, texts)

    def classify(self, prompts: Prompt | ListLike[Prompt],
                 use_tqdm: bool | Callable = True) -> list[PoolingRequestOutput]:
        """Compute the probabilities of a classification model's labels, ``output.outputs.probs``.

        Raises:
            RequestError: the model has no classification head; or as from ``embed``.
            EngineError: the weights of the head are NaN.
        """
        if not self.config.model_config.num_labels:
            raise RequestError(
                "classify: this model has no classification head (architecture ...ForSequenceClassification). "
                "See LLM.embed, and LLM.rerank for rerankers that answer yes or no."
            )
        weight, activation = self._head()
        return self._pool(
            as_prompts(prompts), "last", use_tqdm, "Classifying",
            lambda state: ClassificationOutput(probabilities(weight, activation, state)),
        )  # fmt: skip

    def rerank(self, query: str | ListLike[str], documents: ListLike[str], *, template: str = RERANK_TEMPLATE,
               instruction: str = RERANK_INSTRUCTION, tokens: tuple[str, str] = ("no", "yes"),
               use_tqdm: bool | Callable = True) -> list[PoolingRequestOutput]:
        """Score how well each document answers the query: ``output.outputs.score``, in [0, 1], in their order.

        Args:
            query: one, or one for each document.
            template: the prompt, with {query}, {document} and perhaps {instruction}. Default: Qwen3-Reranker's.
            instruction: says when a document answers a query.
            tokens: for a model without a classification head, the negative and the positive answer. The score is the
                probability of the positive one, given one of the two.

        Raises:
            RequestError: the model has several labels, or no head at all; or as from ``embed``.
            EngineError: the weights of the head are NaN.
        """
        documents = as_list("documents must be a list of strings", documents)
        weight, activation = self._head(self.config.model_config.label_tokens or tokens)
        if len(weight) != 1:
            raise RequestError(f"rerank: this model has {len(weight)} labels, not one. See LLM.classify.")
        return self._pool(
            rerank_prompts(query, documents, template, instruction), "last", use_tqdm, "Ranking",
            lambda state: ScoringOutput(probabilities(weight, activation, state)[0]),
        )  # fmt: skip

    def _head(self, tokens: ListLike[str] = ()) -> tuple[np.ndarray, str]:
        """Weight, fp32 [n, C], and activation of the classification head; without a head, of the difference
        between two tokens' logits.
        """
        config = self.config.model_config
        if not (config.num_labels or config.has_lm_head):
            raise RequestError(
                "rerank: this model has neither a classification head nor an LM head; compare the embeddings of query "
                "and documents, see LLM.embed."
            )
        token_ids = None
        if not config.num_labels:
            encoded = self._tokenizer.encode(tokens, add_special_tokens=False)
            if [len(ids) for ids in encoded] != [1, 1] or encoded[0] == encoded[1]:
                raise RequestError(f"tokens={tokens!r} must be two texts of one token each, the negative answer first; "
                                   "not the same twice.")  # fmt: skip
            token_ids = [ids[0] for ids in encoded]
        with Guard(self):
            self.require_ready()
            from nanovllm.runner.readers.pooled_state import head_rows  # imports torch, as the runner has by now

            weight = self.model_runner.call("on_model", head_rows, token_ids)
        if not np.isfinite(weight).all():
            raise EngineError("the weights of this model's head hold NaN, or overflow in this dtype.")
        return (weight, config.activation) if token_ids is None else (weight[1:] - weight[:1], "sigmoid")

    def _pool(self, prompts: ListLike[Prompt], kind: str, use_tqdm: bool | Callable, desc: str,
              make: Callable[[Any], Any], texts: Texts = Texts()) -> list[PoolingRequestOutput]:
        """``make`` of the pooled hidden state, fp32 [C], of each prompt."""
        with Guard(self):
            self.require_ready()
            requests = make_pooling(self._inputs, prompts, kind, texts)
            return collect(self, [], partial(pooled_output, make), use_tqdm, requests, len(prompts), desc)


def make_pooling(inputs: InputProcessor, prompts: ListLike[Prompt], pooling: str, texts: Texts) -> Iterator[Request]:
    """Requests for the pooled hidden state of each prompt; made, and checked, as they are asked for."""
    params = SamplingParams(max_tokens=0, detokenize=False)
    for first in range(0, len(prompts), SLICE):
        encoded = texts.encode(inputs, prompts[first : first + SLICE], first)
        for i, (text, given) in enumerate(encoded, first):
            try:
                ids, _ = inputs.checks.resolve(as_token_ids(given), params, is_computed=True)
                inputs.checks.check_ids("token id", ids)
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from None
            yield inputs.request(text, ids, params, i, PooledState(pooling, len(ids)), given)


def pooled_output(make: Callable[[np.ndarray], Any], request: Request) -> PoolingRequestOutput:
    """The output of a finished prompt: ``make`` of its pooled hidden state, fp32 [C]."""
    readout = request.readout
    assert isinstance(readout, PooledState)
    return PoolingRequestOutput(
        str(request.request_id), make(readout.mean()) if readout.error is None else None, request.prompt_ids.tolist,
        request.completions[0].num_cached_tokens, prompt=request.prompt, index=request.index, error=readout.error,
    )  # fmt: skip


def probabilities(weight: np.ndarray, activation: str, state: np.ndarray) -> list[float]:
    """Probabilities of n labels for a pooled state, fp32 [C]; ``weight`` fp32 [n, C]."""
    logits = weight @ state
    if activation == "sigmoid":
        logits = 1 / (1 + np.exp(-logits.clip(-80)))  # fp32 overflows at 88
    elif activation == "softmax":
        exponentials = np.exp(logits - logits.max())
        logits = exponentials / exponentials.sum()
    return logits.tolist()


def rerank_prompts(query: Any, documents: ListLike[Any], template: str, instruction: str) -> list[str]:
    """Fill the template for each document, with the query, or a query for each."""
    queries = [query] * len(documents) if isinstance(query, str) else list(query)
    if len(queries) != len(documents):
        raise RequestError(f"{len(queries)} queries but {len(documents)} documents; give one, or as many.")
    for what, texts in (("query", queries), ("document", documents)):
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise RequestError(f"{what} {i} must be a string, not {text!s:.100}.")
    try:
        return [
            template.format(instruction=instruction, query=text, document=document)
            for text, document in zip(queries, documents, strict=True)
        ]
    except (LookupError, ValueError) as error:
        raise RequestError(
            f"template={template!r:.200} may have {{query}}, {{document}} and {{instruction}} in braces: {error!r}."
        ) from None
