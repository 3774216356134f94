"""Layers without memory as entries of a ``PipelineLayer``: copied, and filled, where they run.

Layers that share parameters, and one that stands in a sequence twice, become entries with one key,
so that they are tied on whatever ranks they are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from fleetpipe.aliases import Layer
from fleetpipe.compat.colossalai.pipeline.calls import Called, RecordedCall
from fleetpipe.compat.colossalai.pipeline.sequence import SequenceStep
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle_fleet
from fleetpipe.paddle_api.tensor import has_memory

_descriptions: Any = paddle_fleet.meta_parallel


class LazyLayer(_descriptions.LayerDesc):  # type: ignore[misc]
    """Describes a layer that was made without memory."""

    def __init__(self, layer: Layer, call: RecordedCall) -> None:
        """Takes the layer, and how it is called."""
        super().__init__(type(layer))
        self._layer = layer
        self._call = call

    def build_layer(self, **_extra: object) -> Called:
        """Returns a copy of the layer with fresh weights."""
        return Called(_with_memory(self._layer), self._call)

    def blueprint(self) -> Called:
        """Returns the layer as it is, for names and shapes."""
        return Called(self._layer, self._call)


class LazyTiedLayer(_descriptions.SharedLayerDesc):  # type: ignore[misc]
    """Describes a layer that was made without memory and shares weights with other entries."""

    def __init__(
        self, key: str, name: str, layer: Layer, call: RecordedCall, attributes: Sequence[str]
    ) -> None:
        """Takes the layer.

        Args:
            key: The key of all entries that share a weight.
            name: What tells the layer from others of its class.
            layer: The layer.
            call: How it is called.
            attributes: The weights that it shares with other layers.
        """
        super().__init__(key, type(layer), call, list(attributes), name)
        self._layer = layer

    def build_layer(self, **_extra: object) -> Layer:
        """Returns a copy of the layer with fresh weights."""
        return _with_memory(self._layer)

    def blueprint(self) -> Layer:
        """Returns the layer as it is, for names and shapes."""
        return self._layer


def described(steps: Sequence[SequenceStep]) -> list[Any]:
    """Returns the entries of a ``PipelineLayer``, one for each step.

    Raises:
        ConfigError: Two layers share a parameter that has not the same name in both.
    """
    calls = _calls(steps)
    tied = _tied(steps)
    entries: list[Any] = []
    for step, call in zip(steps, calls):
        members = tied[id(step.layer)]
        if len(members) == 1:
            entries.append(LazyLayer(step.layer, call))
            continue
        first = members[0]
        layer_name = next(member.name for member in members if member.layer is step.layer)
        attributes = _shared_attributes(first, step, members)
        key = first.name.replace(".", "/")
        entries.append(LazyTiedLayer(key, layer_name, step.layer, call, attributes))
    return entries


def _calls(steps: Sequence[SequenceStep]) -> list[RecordedCall]:
    """Returns how each step is called; it passes on what names of arguments later ones have."""
    calls: list[RecordedCall] = []
    later: frozenset[str] = frozenset()
    for step in reversed(steps):
        takes_batch = step is steps[0]
        calls.append(RecordedCall(step.layer, step.front, step.behind, takes_batch, later))
        later |= calls[-1].names()
    return calls[::-1]


def _tied(steps: Sequence[SequenceStep]) -> dict[int, list[SequenceStep]]:
    """Returns, by the id of each layer, the steps that share a tensor with it, itself included."""
    groups: dict[int, list[SequenceStep]] = {}
    user: dict[int, int] = {}
    for step in steps:
        group = [step]
        for tensor in step.layer.state_dict().values():
            other = groups.get(user.setdefault(id(tensor), id(step.layer)), group)
            if other is not group:
                other += group
                group = other
        for member in group:
            groups[id(member.layer)] = group
    return groups


def _shared_attributes(
    first: SequenceStep, step: SequenceStep, members: Sequence[SequenceStep]
) -> list[str]:
    """Returns the parameters that a tied layer shares with others, by their names in it."""
    if step.layer is not first.layer:
        return _common(first, step)
    common = (_common(first, other) for other in members if other.layer is not first.layer)
    return sorted({name for names in common for name in names})


def _common(first: SequenceStep, other: SequenceStep) -> list[str]:
    """Returns the names of the parameters that two layers share.

    Raises:
        ConfigError: One of them has not the same name in both, or is deeper than an attribute.
    """
    names = {id(tensor): name for name, tensor in first.layer.named_parameters()}
    shared = []
    for name, tensor in other.layer.named_parameters():
        if id(tensor) not in names:
            continue
        if names[id(tensor)] != name or "." in name:
            raise ConfigError(
                "two layers of exec_seq share a parameter under different names",
                got=f"{first.name}.{names[id(tensor)]} and {other.name}.{name}",
                fix="name the sublayers that hold it, of one class or with the attribute of one "
                "name, or fleetpipe.pipeline, which needs no exec_seq",
            )
        shared.append(name)
    if not shared:
        raise ConfigError(
            "three layers of exec_seq are tied in a chain, with no parameter in all of them",
            got=f"{first.name} and {other.name} share none",
            fix="tie the others to the first of them",
        )
    return shared


def _with_memory(recorded: Layer) -> Layer:
    """Returns a copy of a layer whose parameters have values, and the names of the recorded."""
    layer = copy.deepcopy(recorded)
    for parameter, before in zip(layer.parameters(), recorded.parameters()):
        parameter.name = before.name
        if not has_memory(parameter):
            parameter.initialize()
    return layer
