"""Layers with states: the interface of their kinds. ``models/kinds.py`` has the table; imports no torch.

A recurrent layer keeps a state of fixed size for each sequence, in a row of a table on the device. A kind is a folder
here and one in ``kernels/``:

    config.py                the fields of ``config.json``, the shape of a state, and the units that ranks divide
    mixer.py                 the layer's weights, a subclass of ``mixer.RecurrentMixer``
    kernels/KIND/            ``prefill`` and ``decode`` over the rows, and their reference

The rows themselves, snapshots, chunks and copies are the same for all kinds (``runner/recurrent.py``).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from nanovllm.validation import Rule


class StateShape(NamedTuple):
    """A tensor of the state of one sequence, in one layer of one rank."""

    shape: tuple[int, ...]
    accumulates: bool  # its dtype is the option ``state_dtype``; False: it holds inputs, in the model's dtype


@dataclass(frozen=True)
class RecurrentConfig:
    """The recurrent layers of a model; a subclass for each kind.

    Attributes:
        operations: folder in ``kernels/``.
        mixers: name in ``layer_types`` of ``config.json`` -> mixer, a key of ``MIXERS``, or "" for none.
        rules: fields of ``config.json`` that only models of this kind may have.
        mlps: name in ``layer_types`` -> MLP, a key of ``MLPS``, or "" for none; the others have the model's usual MLP.
        layers_field: the field that gives the kinds of layers if ``layer_types`` is absent.
    """

    operations: ClassVar[str]
    mixers: ClassVar[dict[str, str]]
    rules: ClassVar[dict[str, Rule]]
    layers_field: ClassVar[str]
    mlps: ClassVar[dict[str, str]] = {}

    @classmethod
    def read(cls, given: dict[str, Any]) -> Self:
        """Build the configuration from the fields; raise CheckpointError if they contradict each other."""
        raise NotImplementedError

    @classmethod
    def layer_type(cls, given: dict[str, Any], layer: int) -> str:
        """The entry of ``layer_types`` for a layer, derived from ``layers_field``."""
        raise NotImplementedError

    def state_shapes(self, num_ranks: int) -> tuple[StateShape, ...]:
        """The tensors of a state, in the order of the kind's ``States``."""
        raise NotImplementedError

    def divided(self) -> tuple[tuple[str, int], ...]:
        """(noun, number) of the units that ``tensor_parallel_size`` must divide."""
        raise NotImplementedError
