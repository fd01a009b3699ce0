"""vLLM's logits processors, ``LLM(logits_processors=[...])``, as nanovllm's, which belong to a request.

vLLM's work on a batch. Here each request has an instance of its own, which sees a batch of one: its row is added once,
and is there in the steps that sample the request. An instance serves another request when one is finished.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, Optional
from weakref import finalize

from nanovllm.errors import ConfigError, RequestError

RequestLogitsProcessor = Callable[..., Any]  # (output ids, logits) or (prompt ids, output ids, logits) -> logits


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of the batch since the last step, to be taken in this order: removed, added, moved.

    Attributes:
        batch_size: rows now.
        removed: rows.
        added: (row, parameters, prompt ids, output ids: a list that grows).
        moved: (from, to, direction); there are none here.
    """

    batch_size: int
    removed: list[int]
    added: list[tuple[int, Any, list[int] | None, list[int]]]
    moved: list[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """To derive from. ``apply`` gets f32 [1, V] and returns it, changed in place or not."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """May raise ValueError, when a request comes."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool): ...

    @abstractmethod
    def apply(self, logits: Any) -> Any: ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool: ...

    @abstractmethod
    def update_state(self, batch_update: Optional[BatchUpdate]) -> None: ...  # noqa: UP045


class AdapterLogitsProcessor(LogitsProcessor):
    """To derive from: ``new_req_logits_processor(params)`` gives a request its own function, or None."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool):
        self.req_info: dict[int, RequestLogitsProcessor] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None: ...

    def _new_state(self, params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> Callable | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        ids = [prompt_ids, output_ids] if len(signature(function).parameters) == 3 else [output_ids]
        return lambda logits: function(*ids, logits)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: Any) -> Any:
        for row, function in self.req_info.items():
            logits[row] = function(logits[row])
        return logits


def process_dict_updates(req_entries: dict[int, Any], batch_update: BatchUpdate | None,
                         new_state: Callable[[Any, Any, list[int]], Any]) -> bool:
    """Bring a dictionary of states by row up to date; whether it has changed. ``new_state``: None for a row without."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for row in batch_update.removed:
        req_entries.pop(row, None)
    for row, params, prompt_ids, output_ids in batch_update.added:
        req_entries.pop(row, None)
        if (state := new_state(params, prompt_ids, output_ids)) is not None:
            req_entries[row] = state
    for source, target, direction in batch_update.moved:
        moved, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        back = replaced if direction is MoveDirectionality.SWAP else None
        req_entries.update({row: x for row, x in ((target, moved), (source, back)) if x is not None})
    return req_entries != before


class EngineProcessor:
    """A class of the engine's, and its instances that serve no request."""

    def __init__(self, kind: Any, vllm_config: Any, device: Any):
        self.kind, self.make = kind, partial(kind, vllm_config, device, device.type == "cuda")
        self.idle = [self.make()]  # now: its errors are the engine's
        self.is_argmax_invariant = self.idle[0].is_argmax_invariant()

    def give_back(self, instance: Any) -> None:
        instance.update_state(BatchUpdate(0, [0], [], []))
        self.idle.append(instance)

    def of_request(self, params: Any, core_params: Any) -> "Row":
        """For a request with vLLM's ``params``, which are ``core_params`` for nanovllm."""
        self.kind.validate_params(params)
        if self.is_argmax_invariant and (core_params.has_penalties or core_params.logit_bias):
            raise RequestError(
                f"penalties and logit_bias beside the logits processor {self.kind.__name__}, whose "
                "is_argmax_invariant() is True, are not supported by nanovllm, which would apply them after it."
            )
        return Row(self, params, 1.0 if core_params.is_greedy else core_params.temperature)


class Row:
    """A request's part in an ``EngineProcessor``; its clones serve its completions."""

    def __init__(self, owner: EngineProcessor, params: Any, temperature: float):
        self._owner, self._params, self._temperature = owner, params, temperature
        self._instance: Any = None
        self._output_ids: list[int] = []

    def clone(self) -> "Row":
        return Row(self._owner, self._params, self._temperature)

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
        update, owner = None, self._owner
        self._output_ids[:] = output_ids
        if self._instance is None:
            self._instance = owner.idle.pop() if owner.idle else owner.make()
            finalize(self, owner.give_back, self._instance).atexit = False
            update = BatchUpdate(1, [], [(0, self._params, prompt_ids, self._output_ids)], [])
        self._instance.update_state(update)
        if owner.is_argmax_invariant:  # vLLM applies these after the temperature
            return self._instance.apply(logits[None] / self._temperature)[0] * self._temperature
        return self._instance.apply(logits[None])[0]


def load(given: Any, vllm_config: Any, device: Any) -> list[EngineProcessor]:
    """``logits_processors`` of the engine: classes, or names "module:Class" or "module.Class"."""
    kinds = [imported("logits_processors", each) if isinstance(each, str) else each for each in given or ()]
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, LogitsProcessor)):
            raise ConfigError(f"LLM: logits_processors={kind!r:.200} must be a class derived from LogitsProcessor.")
    return [EngineProcessor(kind, vllm_config, device) for kind in kinds]


def imported(keyword: str, name: str) -> Any:
    """The class "module.Class" or "module:Class" that a keyword names."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"LLM: {keyword}={name!r} cannot be imported: {error}.") from error
