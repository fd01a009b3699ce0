"""What ``embed``, ``classify`` and ``rerank`` make of a prompt's pooled hidden state; on the host, in fp32."""

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.engine.request import Request
from nanovllm.errors import RequestError
from nanovllm.outputs import PoolingRequestOutput
from nanovllm.readouts.pooled_state import PooledState

# the prompt of Qwen3-Reranker, whose answer is one token; and its default instruction
RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def pooled_output(request: Request, make: Callable[[np.ndarray], Any]) -> PoolingRequestOutput:
    """The output of a finished prompt, with what ``make`` makes of its pooled hidden state, fp32 [C]."""
    readout = request.readout
    assert isinstance(readout, PooledState)
    return PoolingRequestOutput(
        str(request.request_id), make(readout.mean()) if readout.error is None else None, request.prompt_ids.tolist,
        request.completions[0].seq.num_cached_tokens, prompt=request.prompt, index=request.index, error=readout.error,
    )  # fmt: skip


def as_embedding(state: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
    """The first ``dimensions`` of a state [C], divided by their L2 norm."""
    state = state[:dimensions]
    return state / max(float(np.sqrt(state @ state)), 1e-12) if normalize else state


@dataclass(frozen=True)
class Head:
    """A classification head. ``weight``: fp32 [n, C]; ``activation`` of its logits: "softmax", "sigmoid" or ""."""

    weight: np.ndarray
    activation: str

    def probabilities(self, state: np.ndarray) -> list[float]:
        """Of a pooled state fp32 [C], for each of the n labels."""
        logits = self.weight @ state
        if self.activation == "sigmoid":
            logits = 1 / (1 + np.exp(-logits.clip(-80)))  # fp32 overflows at 88
        elif self.activation == "softmax":
            exponentials = np.exp(logits - logits.max())
            logits = exponentials / exponentials.sum()
        return logits.tolist()


def rerank_prompts(query: Any, documents: ListLike[Any], template: str, instruction: str) -> list[str]:
    """The prompt of each document, with the query, or a query for each."""
    queries = [query] * len(documents) if isinstance(query, str) else list(query)
    if len(queries) != len(documents):
        raise RequestError(f"{len(queries)} queries but {len(documents)} documents; give one, or as many.")
    for what, texts in (("query", queries), ("document", documents)):
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise RequestError(f"{what} {i} must be a string, not {text!s:.100}.")
    try:
        return [
            template.format(instruction=instruction, query=query, document=document)
            for query, document in zip(queries, documents, strict=True)
        ]
    except (LookupError, ValueError) as error:
        raise RequestError(
            f"template={template!r:.200} may have {{query}}, {{document}} and {{instruction}} in braces: {error!r}."
        ) from None
