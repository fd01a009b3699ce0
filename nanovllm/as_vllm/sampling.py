"""vLLM's ``SamplingParams`` and structured outputs, and their translation to nanovllm's."""

import copy
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from typing import Any

import nanovllm.sampling_params as core
from nanovllm.errors import RequestError

MIN_TEMPERATURE = 1e-2  # vLLM raises lower ones, but for those it takes as greedy, to this


class RequestOutputKind(Enum):
    """What ``LLMEngine.step`` reports of a request: all tokens so far, the new ones, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


@dataclass
class StructuredOutputsParams(core.StructuredOutputsParams):
    """nanovllm's, with the fields that only vLLM has."""

    disable_additional_properties: bool = False
    disable_fallback: bool = False  # of the backend; there is one
    backend: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disable_additional_properties:
            raise RequestError(
                "disable_additional_properties=True is not supported; write 'additionalProperties': false into the "
                "JSON schema."
            )


class GuidedDecodingParams(StructuredOutputsParams):
    """The name of ``StructuredOutputsParams`` before vLLM 0.11."""

    @staticmethod
    def from_optional(**values: Any) -> "GuidedDecodingParams | None":
        """None if no constraint is given."""
        if all(values.get(kind) is None for kind in core.StructuredOutputsParams.KINDS):
            return None
        if hasattr(values.get("json"), "model_json_schema"):  # a pydantic class
            values["json"] = values["json"].model_json_schema()
        return GuidedDecodingParams(**{name: value for name, value in values.items() if value is not None})


def _strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else [] if value is None else value


@dataclass
class SamplingParams:
    """vLLM's fields, in its order and with its defaults. Checked when made and when submitted, not on assignment."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    logprob_token_ids: list[int] | None = None
    # of earlier versions
    truncate_prompt_tokens: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    best_of: int | None = None
    logits_processors: list[Any] | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if hasattr(self.stop_token_ids, "tolist"):
            self.stop_token_ids = self.stop_token_ids.tolist()  # type: ignore[union-attr]
        self.stop, self.bad_words = _strings(self.stop), _strings(self.bad_words)
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.seed = None if self.seed == -1 else self.seed
        self.to_nanovllm(is_new=True)

    def to_nanovllm(self, is_new: bool = False) -> core.SamplingParams:
        """nanovllm's parameters; raises RequestError for a value that it cannot honour.

        vLLM refuses n > 1 beside temperature 0 in the constructor only: later assigned, it gives n equal completions.
        """
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name)
            if value not in neutral and not (name == "best_of" and value == self.n):
                raise RequestError(
                    f"SamplingParams: {name}={value!r:.100} is not supported; "
                    f"allowed: {', '.join(map(repr, neutral))}{' or n' if name == 'best_of' else ''}."
                )
        if self.max_tokens is not None and self.max_tokens == 0:
            raise RequestError("SamplingParams: max_tokens=0 must be an integer >= 1 or None.")
        values = {name: getattr(self, name) for name in core.DEFAULTS}
        values["structured_outputs"] = self.structured_outputs or self.guided_decoding
        if not is_new and self.n > 1 and self.temperature < core.MIN_TEMPERATURE:
            values.update(temperature=1.0, top_k=1)
        params = core.SamplingParams(**values)
        if not params.is_greedy:
            params.temperature = max(params.temperature, MIN_TEMPERATURE)
        return params

    @staticmethod
    def from_optional(**values: Any) -> "SamplingParams":
        """None stands for a default; biases of tokens are clamped to [-100, 100], and their ids may be strings."""
        bias = values.get("logit_bias")
        if bias is not None:
            values["logit_bias"] = {int(i): min(100.0, max(-100.0, b)) for i, b in bias.items()}
        defaults = {field.name: field.default for field in fields(SamplingParams)}
        given = {name: value for name, value in values.items() if value is not None or name not in defaults}
        if "max_tokens" in values:
            given["max_tokens"] = values["max_tokens"]  # None: as many as fit
        return SamplingParams(**given)

    def clone(self) -> "SamplingParams":
        return copy.deepcopy(self)

    @property
    def sampling_type(self) -> SamplingType:
        if self.temperature < core.MIN_TEMPERATURE:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED


# values at which a field that nanovllm lacks changes nothing
NEUTRAL: dict[str, tuple] = {
    "extra_args": (None, {}),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None,),
    "logprob_token_ids": (None, []),
    "best_of": (None, 1),
    "logits_processors": (None, []),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
}
SamplingParams.__struct_fields__ = tuple(field.name for field in fields(SamplingParams))  # type: ignore[attr-defined]


def to_nanovllm(params: Any) -> Any:
    """One SamplingParams or a list of them; an object that is there many times is translated once."""
    known: dict[int, Any] = {}

    def translate(p: Any) -> core.SamplingParams:
        if isinstance(p, core.SamplingParams):
            return p
        if not isinstance(p, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, not {type(p).__name__}.")
        if id(p) not in known:
            known[id(p)] = p.to_nanovllm()
        return known[id(p)]

    return [translate(p) for p in params] if isinstance(params, (list, tuple)) else translate(params)
