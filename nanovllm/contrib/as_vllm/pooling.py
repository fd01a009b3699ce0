"""vLLM's ``PoolingParams`` and ``PoolerConfig``, and the checks of its pooling methods' arguments and outputs."""

from dataclasses import dataclass, replace
from typing import Any

from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.llm import LLM
from nanovllm.outputs import PoolingRequestOutput
from nanovllm.sampling_params import Parameters

VERBS: Any = LLM  # a copy of nanovllm may lack those used here
REFUSED = ("truncate_prompt_tokens", "step_tag_id", "returned_token_ids", "requires_token_ids",
           "late_interaction_params", "late_chunking_params", "extra_kwargs")  # fmt: skip


@dataclass
class PoolingOutput:
    """Result of ``encode``. ``data``: a torch tensor."""

    data: Any


@dataclass
class PoolingParams(Parameters):
    """``dimensions`` of an embedding; whether it is normalized, under the three names that it has had; its ``task``."""

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    skip_reading_prefix_cache: bool | None = None
    output_kind: Any = None
    requires_token_ids: bool = False
    late_interaction_params: Any = None
    late_chunking_params: Any = None
    extra_kwargs: dict | None = None

    def clone(self) -> "PoolingParams":
        return replace(self)

    @property
    def is_active(self) -> bool | None:
        flags = (self.use_activation, self.activation, self.normalize, self.softmax)
        return next((flag for flag in flags if flag is not None), None)


@dataclass
class PoolerConfig(Parameters):
    """How hidden states are pooled. nanovllm does what the checkpoint says, and refuses anything else."""

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    dimensions: int | None = None
    task: str | None = None

    def check(self, model_path: str) -> None:
        """Raise ConfigError if the checkpoint says something else."""
        (kind, normalize), given = VERBS.read_pooling(model_path), self.pooling_type or self.seq_pooling_type
        if given is not None and given.lower() != kind:
            raise ConfigError(f"LLM: pooling_type={given!r} is not supported; this checkpoint has {kind!r}.")
        flags = [flag for flag in (self.normalize, self.use_activation, self.activation) if flag is not None]
        if flags and flags[0] != normalize:
            raise ConfigError(f"LLM: a pooler config with normalize={flags[0]} is not supported; give it to embed(), "
                              f"in PoolingParams. This checkpoint has {normalize}.")  # fmt: skip


def checked(method: str, params: Any) -> PoolingParams:
    """The parameters of a call; RequestError for a value that would change the result and is not supported."""
    every = params if isinstance(params, (list, tuple)) else [params or PoolingParams()]
    for each in every:
        if not isinstance(each, PoolingParams):
            raise RequestError(f"{method}: pooling_params must be a PoolingParams, not {each!r:.100}.")
        if each != every[0]:
            raise RequestError(f"{method}: pooling_params that differ from prompt to prompt are not supported.")
        for name in REFUSED:
            if getattr(each, name) not in (None, False, {}):
                raise RequestError(f"{method}: PoolingParams({name}={getattr(each, name)!r:.100}) is not supported.")
    return every[0] if every else PoolingParams()


def usable(outputs: list[PoolingRequestOutput]) -> list[PoolingRequestOutput]:
    """The outputs of a call; EngineError if one has no result, for which vLLM's have no place."""
    for output in outputs:
        if output.error is not None:
            raise EngineError(f"prompt {output.index}: {output.error}")
    return outputs
