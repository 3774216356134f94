"""Translates between the names of a pipeline's parameters and of a whole model's.

A parameter's fully qualified name is its path in the whole model by global layer index,
``3.weight``. A state dict has these names for any number of stages. A model written as one class
has other names: its parameters are matched by order and shape, which it shares with the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph import layer_kinds, tensor_parallel
from fleetpipe.errors import CheckpointError, listed
from fleetpipe.job.job import mp_shard
from fleetpipe.mesh.parts import PartOfWhole, attached_part, parted
from fleetpipe.paddle_api import paddle


class ModelWithParts(paddle.nn.Layer):
    """A model that holds some weights in parts, such as a vocabulary head, and loads whole ones."""

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> Any:
        """Loads a state like ``nn.Layer.set_state_dict``; it may have wholes for parts."""
        state = parted(state_dict, paddle.nn.Layer.state_dict(self), mp_shard)
        return super().set_state_dict(state, use_structured_name)

    set_dict = load_dict = set_state_dict


class Slot(NamedTuple):
    """One parameter or buffer of the whole model.

    Attributes:
        name: The fully qualified name.
        shape: The shape, whole along mp.
        part: The part of a whole parameter that it is; None if it is whole itself.
    """

    name: str
    shape: tuple[int, ...]
    part: PartOfWhole | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Slot:
        """Describes a tensor."""
        return cls(name, tensor_parallel.whole_shape(tensor), attached_part(tensor))

    @property
    def whole(self) -> Slot:
        """The whole that it is a part of; itself if it is whole."""
        if self.part is None:
            return self
        return Slot(self.part.whole_name(self.name), self.part.cut.whole(self.shape))

    def value_in(self, state: Mapping[str, Any]) -> Any:
        """Returns its value from a state of whole tensors by name."""
        whole = state[self.whole.name]
        return whole if self.part is None else self.part.cut.taken_from(whole)


def wholes_of(slots: Iterable[Slot]) -> list[Slot]:
    """Returns slots in which one slot of the whole replaces those of its parts."""
    return list(dict.fromkeys(slot.whole for slot in slots))


def fitting(slots: Sequence[Slot], source: Layer | Mapping[str, Any]) -> list[Slot]:
    """Returns the slots that match a model or its state dict: with parts, or with their wholes.

    Args:
        slots: All parameters and buffers of the whole pipeline, in the order of its layers.
        source: As for :func:`to_pipeline_names`.
    """
    state, wholes = _state_of(source), wholes_of(slots)
    if len(state) > len(wholes) and len(state) != len(slots):
        state = _each_tensor_once(state)
    return wholes if len(state) == len(wholes) else list(slots)


def slots_of(layer: Layer, index: int) -> list[Slot]:
    """Returns the parameters and buffers of layer ``index`` under their fully qualified names."""
    if not isinstance(layer, paddle.nn.Layer):
        return []
    state = layer_kinds.whole_state(layer)
    return [Slot.of(f"{index}.{name}", tensor) for name, tensor in state.items()]


def names_in(
    slots: Sequence[Slot], model: Mapping[str, Any], plain_names: Mapping[str, str]
) -> dict[str, str]:
    """Returns the pipeline's name of each parameter and buffer of a whole model.

    A tensor that the model has under several names, such as a shared weight, has one name in the
    pipeline.

    Args:
        slots: All parameters and buffers of the whole pipeline, in the order of its layers.
        model: The state of the whole model.
        plain_names: The pipeline's name for each name of the model from which the pipeline was
            made; empty if it was made from none.

    Raises:
        CheckpointError: ``model`` does not fit the pipeline in names, or in order and shape.
    """
    state = dict(model)
    if state.keys() == plain_names.keys():
        _match(slots, _rename(state, plain_names))
        return dict(plain_names)
    pairs = _match(slots, state)
    names = {name: slot.name for slot, (name, _) in zip(slots, pairs)}
    by_tensor = {id(tensor): names[name] for name, tensor in pairs}
    return {name: names.get(name, by_tensor[id(tensor)]) for name, tensor in state.items()}


def to_pipeline_names(
    slots: Sequence[Slot], source: Layer | Mapping[str, Any], plain_names: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the tensors of a whole model under the pipeline's names.

    Args:
        slots: All parameters and buffers of the whole pipeline, in the order of its layers.
        source: A state dict or a Layer: with the pipeline's names, with those of the model from
            which the pipeline was made, or with the same tensors in the same order.
        plain_names: As for :func:`names_in`.

    Raises:
        CheckpointError: The source has other names and does not fit in order and shape.
    """
    state = _state_of(source)
    if state.keys() == plain_names.keys():
        state = _rename(state, plain_names)
    pairs = _match(slots, state)
    return {slot.name: tensor for slot, (_, tensor) in zip(slots, pairs)}


def _state_of(source: Layer | Mapping[str, Any]) -> dict[str, Any]:
    return dict(source.state_dict() if isinstance(source, paddle.nn.Layer) else source)


def _rename(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names[name]: tensor for name, tensor in state.items()}


def _match(slots: Sequence[Slot], state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    if len(state) > len(slots):
        state = _each_tensor_once(state)
    if {slot.name for slot in slots} == set(state):
        pairs = [(slot.name, state[slot.name]) for slot in slots]
    else:
        pairs = list(state.items())
    if len(pairs) != len(slots):
        raise CheckpointError(
            "the model and the pipeline do not hold the same number of parameters and buffers",
            expected=f"{len(slots)}: {listed([slot.name for slot in slots], 6)}",
            got=f"{len(pairs)}: {listed([name for name, _ in pairs], 6)}",
            fix="build both from the same layers",
        )
    for slot, (name, tensor) in zip(slots, pairs):
        if tuple(tensor.shape) != slot.shape:
            raise CheckpointError(
                f"{name!r} does not fit the pipeline's {slot.name!r}",
                expected=f"shape {list(slot.shape)}",
                got=f"shape {list(tensor.shape)}",
                cause="the model's layers are declared in another order than the pipeline's list",
                fix="declare the model's layers in the order of the pipeline's list",
            )
    return pairs


def _each_tensor_once(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state in which each tensor has only the first of its names."""
    first = {id(tensor): name for name, tensor in reversed(list(state.items()))}
    return {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}
