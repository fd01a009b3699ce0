"""vLLM's ``SamplingParams``, with its order of arguments, its defaults, and the fields that nanovllm lacks."""

import copy
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, make_dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import nanovllm.sampling_params as core
from nanovllm.contrib.as_vllm.processors import EngineProcessor
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput

UNLIMITED = 1 << 40  # tokens of thoughts
MIN_TEMPERATURE = 1e-2  # vLLM raises lower ones, but for those it takes as greedy, to this


class RequestOutputKind(Enum):
    """Reports of ``LLMEngine.step`` on a request: all tokens so far, the new ones, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams(core.StructuredOutputsParams):
    """nanovllm's, with the fields that only vLLM has. Before vLLM 0.11 it was ``GuidedDecodingParams``."""

    disable_additional_properties: bool = False
    disable_fallback: bool = False  # changes nothing: there is one backend
    backend: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disable_additional_properties:
            raise RequestError(
                "disable_additional_properties=True is not supported; write 'additionalProperties': false into the "
                "JSON schema."
            )

    @classmethod
    def from_optional(cls, **values: Any) -> "StructuredOutputsParams | None":
        """None if no constraint is given."""
        given = {name: value for name, value in values.items() if value is not None}
        return cls(**given) if given.keys() & set(cls.KINDS) else None


# fields that nanovllm lacks: the values at which they change nothing, the default first
NEUTRAL: dict[str, tuple] = {
    "best_of": (None, 1),
    "use_beam_search": (False,), "length_penalty": (1.0,), "early_stopping": (False,),
    "watermarking": (None, False), "prompt_logprob_token_ids": (None, []), "prompt_logprob_start": (None, 0),
    "trace_decode_token_ids": (None, []), "routed_experts_prompt_start": (0, None),
}  # fmt: skip
# vLLM's order of positional arguments
ORDER = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
         "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs",
         "prompt_logprobs")  # fmt: skip
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(ORDER), **core.DEFAULTS, "stop_token_ids": None, "max_tokens": 16, "flat_logprobs": False,
    "output_kind": RequestOutputKind.CUMULATIVE, "skip_clone": False, "skip_reading_prefix_cache": None,
    "guided_decoding": None, "extra_args": None, "stream_interval": None, "output_text_buffer_length": 0,
    **{name: neutral[0] for name, neutral in NEUTRAL.items()},
}  # fmt: skip


class _SamplingParams:
    """nanovllm's, made as vLLM's are. Checked when made and when submitted; values stay as they were given."""

    __struct_fields__ = tuple(DEFAULTS)

    def __post_init__(self) -> None:
        values = vars(self)
        for name, value in values.items():
            if name in ("stop", "stop_token_ids", "bad_words"):
                value = [] if value is None else [value] if isinstance(value, str) else value
            values[name] = value.tolist() if hasattr(value, "tolist") else value
        values["seed"] = None if values["seed"] == -1 else values["seed"]
        self.as_core()

    def as_core(self, **others: Any) -> core.SamplingParams:
        """A checked copy of nanovllm's own class; RequestError for a value that it cannot honour."""
        values = {**vars(self), **others}
        for name, neutral in NEUTRAL.items():
            if values[name] not in neutral and not (name == "best_of" and values[name] == values["n"]):
                raise RequestError(
                    f"SamplingParams: {name}={values[name]!r:.100} is not supported; "
                    f"allowed: {', '.join(map(repr, neutral))}{' or n' if name == 'best_of' else ''}."
                )
        if values["max_tokens"] is not None and values["max_tokens"] == 0:
            raise RequestError("SamplingParams: max_tokens=0 must be an integer >= 1 or None.")
        values["logprob_token_ids"] = values["logprob_token_ids"] or None
        values["structured_outputs"] = values["structured_outputs"] or values["guided_decoding"]  # its old name
        params = core.SamplingParams(**{name: values[name] for name in core.DEFAULTS})
        if not params.is_greedy:
            params.temperature = max(params.temperature, MIN_TEMPERATURE)
        return params

    @staticmethod
    def from_optional(**values: Any) -> Any:
        """None stands for a default, but in ``max_tokens``. Biases are cut to [-100, 100]; their ids may be text."""
        if values.get("logit_bias") is not None:
            values["logit_bias"] = {int(i): min(100.0, max(-100.0, b)) for i, b in values["logit_bias"].items()}
        unset = {name for name, value in values.items() if value is None and name in DEFAULTS} - {"max_tokens"}
        return SamplingParams(**{name: value for name, value in values.items() if name not in unset})

    clone = copy.deepcopy


SamplingParams: Any = make_dataclass("SamplingParams", [(n, Any, DEFAULTS[n]) for n in DEFAULTS],
                                     bases=(_SamplingParams,), namespace={"__module__": __name__})  # fmt: skip


def snapshots(params: Any, processors: ListLike[EngineProcessor] = (), thinks_first: bool = False) -> Any:
    """Copies of one SamplingParams or of a list, with the engine's logits processors; an object that occurs several
    times is copied once.

    ``thinks_first``: structured outputs begin after the thinking.
    """
    if isinstance(params, (list, tuple)):
        copies = {key: snapshots(p, processors, thinks_first) for key, p in {id(p): p for p in params}.items()}
        return [copies[id(p)] for p in params]
    if not isinstance(params, SamplingParams):
        return params  # refused by the engine
    # vLLM refuses n > 1 beside temperature 0 in the constructor only: later assigned, it gives n equal completions
    are_equal = params.n > 1 and params.temperature < core.MIN_TEMPERATURE
    copied = params.as_core(temperature=1.0, top_k=1) if are_equal else params.as_core()
    if thinks_first and copied.structured_outputs is not None and copied.thinking_token_budget is None:
        copied.thinking_token_budget = UNLIMITED
    rows = [processor.of_request(params, copied) for processor in processors]
    copied.logits_processors = [*(copied.logits_processors or ()), *rows] or None
    return copied


class FlatLogprobs(list):
    """Log-probabilities by position, as a list of dictionaries, and as columns over all their entries."""

    token_ids = property(lambda self: [token_id for at in self for token_id in at or ()])
    logprobs = property(lambda self: [entry.logprob for entry in self._entries])
    ranks = property(lambda self: [entry.rank for entry in self._entries])
    decoded_tokens = property(lambda self: [entry.decoded_token for entry in self._entries])
    end_indices = property(lambda self: list(accumulate(len(at or ()) for at in self)))
    start_indices = property(lambda self: [0, *self.end_indices][:-1])
    _entries = property(lambda self: [entry for at in self for entry in (at or {}).values()])


def flatten_logprobs(outputs: list[RequestOutput], params: Any) -> list[RequestOutput]:
    """Flatten the outputs' log-probabilities if ``flat_logprobs`` asks for it."""
    params = params if isinstance(params, (list, tuple)) else [params] * len(outputs)
    for output, asked in zip(outputs, params, strict=True):
        if getattr(asked, "flat_logprobs", False):
            for holder, name in [(output, "prompt_logprobs"), *((c, "logprobs") for c in output.outputs)]:
                if (logprobs := getattr(holder, name)) is not None:
                    setattr(holder, name, FlatLogprobs(logprobs))
    return outputs
