"""Model ``nanovllm`` of lm-evaluation-harness: ``pip install '.[eval]'`` in the checkout, then

    python -m nanovllm.integrations.lm_eval run --model nanovllm --model_args pretrained=Qwen/Qwen3-0.6B --tasks ...

Owns the translation of the harness's requests to ``LLM.score`` and ``LLM.stream``. Windows, truncation, special tokens
and stops are those of the harness's own ``hf`` model, so that the two agree. A request that fails ends the run: the
harness knows no rows of errors, and its metrics would count an empty answer as a wrong one.
"""

import logging
from typing import Any

from tqdm import tqdm

from nanovllm import LLM, ConfigError, EngineError, RequestError, SamplingParams
from nanovllm.config import Config

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models import utils
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    remedy = "Install lm-evaluation-harness: pip install '.[eval]' in the checkout."
    raise ModuleNotFoundError(f"{error}. {remedy}") from error

SCORED_AT_ONCE = 2048  # requests; a run that is killed finds those before in the harness's cache
logger = logging.getLogger("nanovllm")


@register_model("nanovllm")
class NanoVLLM(TemplateLM):
    """An engine as the harness sees a model.

    Args:
        pretrained: as ``model`` of ``LLM``; None is the demo model.
        device: "cpu"; None, "cuda" or "cuda:0", which the harness says unasked, is CUDA if there is a device.
        max_gen_toks: limit on generated tokens, for tasks that set none.
        add_bos_token: whether prompts get the tokenizer's special tokens; None is the tokenizer's default.
        think_end_token: text or id. Text up to its last occurrence is cut; stop strings are looked for in the rest.
        enable_thinking, chat_template_args: variables of the chat template.
        batch_size, max_batch_size: accepted and without effect: the engine forms its batches.
        **options: of ``LLM``. ``max_model_len`` is by default the model's own limit, as with ``hf``.
    """

    def __init__(self, pretrained: str | None = None, device: str | None = None, max_gen_toks: int = 256,
                 add_bos_token: bool | None = None, think_end_token: str | int | None = None,
                 enable_thinking: bool | None = None, chat_template_args: dict[str, Any] | None = None,
                 batch_size: Any = None, max_batch_size: Any = None, **options: Any):
        super().__init__()
        if device not in (None, "cpu", "cuda", "cuda:0"):
            raise ConfigError(f"device={device!r} must be 'cpu' or 'cuda'; CUDA_VISIBLE_DEVICES chooses among GPUs.")
        options["device"] = "cpu" if device == "cpu" else "auto"
        if options.get("max_model_len") is None:
            model_config = Config.from_options(pretrained, options).model_config
            options["max_model_len"] = model_config.max_position_embeddings
        self.llm: Any = LLM(pretrained, **options)  # a copy of nanovllm may lack ``score``
        self.tokenizer = self.llm.tokenizer
        self.max_length: int = self.llm.config.max_model_len
        self.max_gen_toks, self.add_bos_token, self.think_end_token = max_gen_toks, add_bos_token, think_end_token
        if isinstance(think_end_token, int):
            self.think_end_token = self.tokenizer.decode([think_end_token])
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.chat_template_args = {**(chat_template_args or {}), **thinking}

    eot_token_id = property(lambda self: self.tokenizer.eos_token_id)
    tokenizer_name = property(lambda self: self.tokenizer.name_or_path.replace("/", "__"))

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            special = False  # the chat template wrote it
        options = {} if special is None else {"add_special_tokens": special}
        return self.tokenizer(string, verbose=False, **options)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        options |= self.chat_template_args
        try:
            return self.llm.apply_chat_template(chat_history, **options)
        except RequestError:
            logger.warning("The chat template refuses this conversation; trying without its system message.")
            rest = [message for message in chat_history if message["role"] != "system"]
            return self.llm.apply_chat_template(rest, **options)

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether greedy) of each (cache key, context ids, continuation ids)."""
        if self.chat_template_args.get("enable_thinking"):
            raise RequestError("enable_thinking=True is for tasks that generate; this one compares log-likelihoods.")
        lists = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        starts = [len(ids) - len(request[2]) for ids, request in zip(lists, requests, strict=True)]
        num_cut = sum(start < len(request[1]) for start, request in zip(starts, requests, strict=True))
        if num_cut:
            logger.warning("%d contexts are cut on the left to max_model_len=%d.", num_cut, self.max_length)
        answers: list[tuple[float, bool]] = []
        bar = tqdm(total=len(lists), desc="Log-likelihoods", disable=disable_tqdm)
        for begin in range(0, len(lists), SCORED_AT_ONCE):
            part = slice(begin, begin + SCORED_AT_ONCE)
            scores = self.llm.score(lists[part], starts[part], use_tqdm=False)
            for (key, *_), score in zip(requests[part], scores, strict=True):
                if score.error is not None:
                    raise EngineError(f"request {len(answers)}: {score.error}")
                answers.append((score.total, all(score.is_argmax)))
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answers[-1])
            bar.update(len(answers) - bar.n)
        bar.close()
        return answers

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        made, texts = [self._request(*request.args) for request in requests], [""] * len(requests)
        prompts = (prompt for prompt, _ in made)
        for output in tqdm(self.llm.stream(prompts), "Completions", len(made), disable=disable_tqdm):
            i = output.index
            if output["finish_reason"] == "error":
                raise EngineError(f"request {i}: {output.outputs[0].stop_reason}")
            texts[i] = utils.postprocess_generated_text(output["text"], made[i][1], self.think_end_token)
            self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def _request(self, context: str, given: dict) -> tuple[tuple[list[int], SamplingParams], list[str]]:
        """Token ids and parameters; and the strings that end the text."""
        kwargs, added = utils.normalize_gen_kwargs(given, self.max_gen_toks), self.tokenizer.get_added_vocab()
        until = utils.handle_stop_sequences(kwargs.pop("until"), self.tokenizer.decode([self.eot_token_id]))
        max_tokens = kwargs.pop("max_gen_toks")
        if max_tokens >= self.max_length:
            raise RequestError(f"max_gen_toks={max_tokens} must be less than max_model_len={self.max_length}.")
        ids, max_tokens = utils.maybe_truncate(self.tok_encode(context), max_tokens, self.max_length)
        kwargs.pop("do_sample")  # it is in the temperature now
        kwargs.setdefault("temperature", 0.0)
        kwargs["stop_token_ids"] = [added[text] for text in until if text in added]  # the text may lack these
        thinks = self.think_end_token is not None
        kwargs["stop"] = [] if thinks else [text for text in until if text and text not in added]
        return (ids, SamplingParams(max_tokens=max_tokens, skip_special_tokens=not thinks, **kwargs)), until
