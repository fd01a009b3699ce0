"""``LLM``: the engine with the methods that people call, each in a mixin of its subject."""

import gc
from collections.abc import Sequence as ListLike
from typing import Any

from nanovllm.config import Config
from nanovllm.contrib.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from nanovllm.engine.callers import collect
from nanovllm.engine.guard import Guard
from nanovllm.engine.request import Request
from nanovllm.engine.text.prompts import Prompt, as_prompts, is_one_prompt
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.outputs import RequestOutput
from nanovllm.runner.worker import start_runner
from nanovllm.sampling_params import SamplingParams
from nanovllm.verbs.arguments import refuses_unknown_keywords
from nanovllm.verbs.chat import Chat
from nanovllm.verbs.pooling import Pooling
from nanovllm.verbs.scoring import Scoring
from nanovllm.verbs.streaming import Streaming
from nanovllm.verbs.weights import WeightVerbs

__all__ = ["LLM", "Prompt", "is_one_prompt"]


DOCS = """The engine with its methods for requests.

    Args:
        model: a local directory, a hub id such as "Qwen/Qwen3-0.6B", or None for the bundled demo model.
        **options: see ``nanovllm.config.Config``.

    Raises:
        ConfigError, CheckpointError, OutOfMemoryError: an option, the model's files or the memory at hand forbid it.
        WorkerError: a tensor-parallel rank failed. Any method may raise it; the engine is then shut down.

    Use it as a context manager, or call ``exit()``, to free the device's memory at a time of your choice.
    """


@refuses_unknown_keywords
class LLM(
    Chat,
    Streaming,
    Scoring,
    Pooling,
    WeightVerbs,
):
    __doc__ = f"{DOCS}\n    {Config.__doc__}"  # ``help`` shows the options, too

    def __init__(self, model: str | None = None, **options: Any):
        config = Config.from_options(model, options)
        with Guard():
            tokenizer = AsyncTokenizer(config.tokenizer_path, config.skip_tokenizer_init, config.trust_remote_code)
            runner = start_runner(config)  # its config's max_num_seqs is what memory has room for
            from nanovllm.runner.device import translate_oom  # imports torch, as the runner has by now

            with translate_oom():
                super().__init__(runner.config, runner, tokenizer)
        gc.collect()  # full collections were off during the start; one here spares the first call

    def beam_search(self, prompts: Prompt | ListLike[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search the most probable completions with a beam; see ``BeamSearchParams``."""
        with Guard(self):
            return beam_search(self, as_prompts(prompts), params)

    def most_probable(self, prompts: Prompt | ListLike[Prompt], k: int) -> list[RequestOutput]:
        """Compute the ``k`` most probable next tokens of one prompt or many, the best first.

        ``output.outputs[0].logprobs[0]`` maps their ids, in this order, to ``Logprob`` objects without texts;
        ``max_logprobs`` is no limit here. Where the logits are NaN, the ``finish_reason`` is "error".

        Raises:
            RequestError: a prompt can never be served; nothing was computed.
        """
        with Guard(self):
            self.require_ready()
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=k, detokenize=False)
            params.logprobs = min(k, self.config.model_config.vocab_size)
            requests = self._inputs.make_all(as_prompts(prompts), params, is_checked=True)
            return collect(self, requests, Request.output)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion, unless its request has ``ignore_eos``."""
        return tuple(self.scheduler.eos_token_ids)

    def metrics(self) -> dict[str, Any]:
        """Counters since the engine was made, and its state now, under vLLM's names; any thread may read them."""
        return self.scheduler.metrics.read(self.scheduler, self._outputs.num_not_queued)
