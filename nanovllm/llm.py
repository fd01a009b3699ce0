"""``LLM``: the engine with the methods that people call, each in a mixin of its subject."""

from collections.abc import Sequence as ListLike
from typing import Any

from nanovllm.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from nanovllm.engine.callers import collect
from nanovllm.engine.guard import Guard
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.prompts import Prompt, as_prompts
from nanovllm.engine.request import Request
from nanovllm.engine.stream import DeltaStream
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import LogprobsAt
from nanovllm.sampling_params import SamplingParams
from nanovllm.verbs.chat import Chat
from nanovllm.verbs.pooling import Pooling
from nanovllm.verbs.scoring import Scoring
from nanovllm.verbs.streaming import Streaming
from nanovllm.verbs.weights import WeightVerbs


class LLM(
    Chat,
    Streaming,
    Scoring,
    Pooling,
    WeightVerbs,
):
    __doc__ = LLMEngine.__doc__

    def deltas(self, request_id: int) -> DeltaStream:
        """What a request of ``add_request`` generates, to be asked after any step until it is finished.

        Raises:
            RequestError: no unfinished request has this id.
        """
        if (request := self._added.unfinished.get(request_id)) is None:
            raise RequestError(f"deltas: request_id={request_id!r} is of no unfinished request of add_request.")
        return DeltaStream(request)

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
        outputs = collect(self, self._inputs.make_all(prompts, params, is_checked=True), Request.output)
        for output in outputs:
            if output["finish_reason"] == "error":
                raise EngineError(str(output.outputs[0].stop_reason))
        return [output.outputs[0].logprobs[0] for output in outputs]  # type: ignore[index]

    def metrics(self) -> dict[str, Any]:
        """Counters since the engine was made, and its state now, under vLLM's names; any thread may read them."""
        return self.scheduler.metrics.read(self.scheduler, self._outputs.num_not_queued)
