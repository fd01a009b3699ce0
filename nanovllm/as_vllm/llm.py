"""vLLM's ``LLM``: its signatures over nanovllm's."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from nanovllm.as_vllm import options, sampling
from nanovllm.as_vllm.engine import LLMEngine
from nanovllm.as_vllm.prompts import as_prompts, refuse, refuse_lora
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import RequestOutput


class LLM:
    """vLLM's ``LLM`` served by nanovllm.

    Args:
        model: a local directory or a hub id.
        **keywords: vLLM's engine keywords; see ``nanovllm.as_vllm.options``.

    Raises:
        ConfigError: a keyword is unknown, or has a value that nanovllm cannot honour.
    """

    def __init__(self, model: str, **keywords: Any):
        self.llm_engine = LLMEngine(model, keywords)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLM":
        return cls(**{"model": options.PASSED["model"], **options.keywords_of(engine_args)})

    # ---------------------------------------------------------------- generation

    def generate(self, prompts: Any = None, sampling_params: Any = None, prompt_token_ids: Any = None,
                 use_tqdm: bool | Callable = True, lora_request: Any = None, prompt_adapter_request: None = None,
                 guided_options_request: None = None, priority: Any = None, *,
                 tokenization_kwargs: dict | None = None) -> list[RequestOutput]:
        """Complete one prompt or many; ``prompt_token_ids`` is how ids were given before prompt dictionaries."""
        refuse_lora(lora_request)
        refuse("generate", prompt_adapter_request=prompt_adapter_request, tokenization_kwargs=tokenization_kwargs,
               guided_options_request=guided_options_request, priority=priority)  # fmt: skip
        prompts = as_prompts(prompts, prompt_token_ids)
        outputs = self.llm_engine.awake().generate(prompts, self._params(sampling_params), use_tqdm)
        return flatten_logprobs(outputs, sampling_params)

    def chat(self, messages: list, sampling_params: Any = None, use_tqdm: bool | Callable = True,
             lora_request: Any = None, chat_template: str | None = None, chat_template_content_format: str = "auto",
             add_generation_prompt: bool = True, continue_final_message: bool = False,
             tools: list[dict] | None = None, chat_template_kwargs: dict | None = None,
             tokenization_kwargs: dict | None = None, mm_processor_kwargs: dict | None = None) -> list[RequestOutput]:
        """Answer one conversation or many."""
        refuse_lora(lora_request)
        refuse("chat", tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "chat: add_generation_prompt and continue_final_message cannot both be True; give "
                "add_generation_prompt=False to continue the final message."
            )
        template: dict[str, Any] = {
            "chat_template": chat_template, "tools": tools, "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
        }  # fmt: skip
        outputs = self.llm_engine.awake().chat(messages, self._params(sampling_params), use_tqdm, **template)
        return flatten_logprobs(outputs, sampling_params)

    def beam_search(self, prompts: Any, params: Any, lora_request: Any = None, use_tqdm: bool = False,
                    concurrency_limit: int | None = None) -> list[Any]:
        """``concurrency_limit`` changes no result: the engine batches by its memory."""
        refuse_lora(lora_request)
        return self.llm_engine.awake().beam_search(as_prompts(prompts), params)

    def _params(self, params: Any) -> Any:
        if params is None:
            params = self.get_default_sampling_params()
        return sampling.to_nanovllm(params)

    def get_default_sampling_params(self) -> sampling.SamplingParams:
        """vLLM's defaults, with those of the checkpoint's ``generation_config.json``."""
        return self.llm_engine.get_default_sampling_params()

    def _no_pooling(self, *_: Any, **__: Any) -> Any:
        raise EngineError("embed, encode, classify, reward and score of vLLM need a pooling model; nanovllm generates "
                          "text only.")  # fmt: skip

    embed = encode = classify = reward = score = _no_pooling

    # ---------------------------------------------------------------- the engine behind it

    @property
    def model_config(self) -> Any:
        return self.llm_engine.model_config

    def get_tokenizer(self, lora_request: Any = None) -> Any:
        refuse_lora(lora_request)
        return self.llm_engine.get_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        self.llm_engine.tokenizer = tokenizer

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.llm_engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.llm_engine.wake_up(tags)

    def collective_rpc(self, method: str | Callable, timeout: float | None = None, args: tuple = (),
                       kwargs: dict | None = None) -> list[Any]:
        """Call a method of the worker, or a function with the worker as first argument; a result for each rank."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable) -> list[Any]:
        return self.llm_engine.apply_model(func)

    def shutdown(self) -> None:
        self.llm_engine.shutdown()

    def get_metrics(self) -> list[Any]:
        return []  # as with disable_log_stats, the default

    def start_profile(self, profile_prefix: str | None = None) -> None:
        self.llm_engine.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        self.llm_engine.stop_profile()


class FlatLogprobs(list):
    """Log-probabilities by position, as a list of dictionaries, and as columns over all their entries."""

    def _column(self, of: Callable) -> list[Any]:
        return [of(token_id, entry) for at in self for token_id, entry in (at or {}).items()]

    token_ids = property(lambda self: self._column(lambda token_id, entry: token_id))
    logprobs = property(lambda self: self._column(lambda token_id, entry: entry.logprob))
    ranks = property(lambda self: self._column(lambda token_id, entry: entry.rank))
    decoded_tokens = property(lambda self: self._column(lambda token_id, entry: entry.decoded_token))
    end_indices = property(lambda self: list(accumulate(len(at or {}) for at in self)))
    start_indices = property(lambda self: [0, *self.end_indices][:-1])


def flatten_logprobs(outputs: list[RequestOutput], params: Any) -> list[RequestOutput]:
    """Where ``flat_logprobs`` asks for it."""
    params = params if isinstance(params, (list, tuple)) else [params] * len(outputs)
    for output, asked in zip(outputs, params, strict=True):
        if getattr(asked, "flat_logprobs", False):
            for holder in (output, *output.outputs):
                name = "prompt_logprobs" if holder is output else "logprobs"
                if getattr(holder, name) is not None:
                    setattr(holder, name, FlatLogprobs(getattr(holder, name)))
    return outputs
