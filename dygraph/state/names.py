"""The parameters and buffers of the whole model under their fully qualified names, on any ranks.

A fully qualified name begins with the number of the layer in the whole list, as ``3.weight``. A
weight of a shared layer has one name, ``shared_layers.<key>.weight``, on all ranks with copies. So
a state dict has the same names for any number of ranks. A slot describes a parameter or buffer.
Start with :class:`ModelState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph import layer_kinds, tensor_parallel
from fleetpipe.dygraph.layer_kinds import is_spread
from fleetpipe.dygraph.layers import entries as descriptions
from fleetpipe.dygraph.layers.tied import Built, SharedLayer, called_through, is_shared
from fleetpipe.dygraph.tensor_parallel import whole_value
from fleetpipe.errors import CheckpointError, listed
from fleetpipe.job.job import mp_shard
from fleetpipe.mesh.groups import Group
from fleetpipe.mesh.parts import (
    JoinedParts,
    LocalTensor,
    ModelParts,
    PartOfWhole,
    attached_part,
    local_tensor_of,
    split_into_parts,
)
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import set_data
from fleetpipe.paddle_api.layer import state_slots
from fleetpipe.paddle_api.tensor import has_memory, is_parameter
from fleetpipe.partition import Partition

#: The distance of the positions of two layers; no layer has as many parameters.
_POSITIONS_PER_LAYER = 2**32
#: Where a layer has a buffer: the dict that holds it, and its name there.
BufferSlot = tuple[dict[str, Tensor], str]


class ModelWithParts(paddle.nn.Layer):
    """A model that may hold parts of weights, such as a vocabulary head's; it loads whole ones."""

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> Any:
        """Loads a state dict as ``nn.Layer`` does, but takes only this rank's parts of weights."""
        state = split_into_parts(state_dict, paddle.nn.Layer.state_dict(self), mp_shard)
        return super().set_state_dict(state, use_structured_name)

    set_dict = load_dict = set_state_dict


class Slot(NamedTuple):
    """The description of one parameter or buffer of the whole model.

    Attributes:
        name: The fully qualified name.
        shape: The shape of the full tensor, from all shards along mp.
        part: Which part of a whole weight it is, such as a vocabulary head's; None if it is whole.
    """

    name: str
    shape: tuple[int, ...]
    part: PartOfWhole | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Slot:
        """Describes a parameter or buffer of this rank; ``name`` is its fully qualified name."""
        return cls(name, tensor_parallel.whole_shape(tensor), attached_part(tensor))

    @property
    def whole(self) -> Slot:
        """The description of the whole weight of which this is a part; itself if it is whole."""
        if self.part is None:
            return self
        return Slot(self.part.whole_name(self.name), self.part.cut.whole(self.shape))

    def value_in(self, state: Mapping[str, Any]) -> Any:
        """Returns this tensor's value, or part of a value, from a state dict of whole weights."""
        whole = state[self.whole.name]
        return whole if self.part is None else self.part.cut.taken_from(whole)


def join_parts(slots: Iterable[Slot]) -> list[Slot]:
    """Returns ``slots`` with one slot of each whole weight in place of the slots of its parts."""
    return list(dict.fromkeys(slot.whole for slot in slots))


def choose_slots(slots: Sequence[Slot], source: Layer | Mapping[str, Any]) -> list[Slot]:
    """Returns the slots of a model to load from, which may have a vocabulary head in one piece.

    Args:
        slots: All parameters and buffers of the whole pipeline, in the order of its layers.
        source: A single-device model, or its state dict.
    """
    state, wholes = _state_of(source), join_parts(slots)
    if len(state) > len(wholes) and len(state) != len(slots):
        state = _each_tensor_once(state)
    return wholes if len(state) == len(wholes) else list(slots)


def slots_in_layer(layer: Layer, index: int) -> list[Slot]:
    """Returns the slots of a layer's parameters and buffers; ``index`` is the layer's number."""
    if not isinstance(layer, paddle.nn.Layer):
        return []
    state = layer_kinds.whole_state(layer)
    return [Slot.of(f"{index}.{name}", tensor) for name, tensor in state.items()]


def names_in(
    slots: Sequence[Slot], model: Mapping[str, Any], plain_names: Mapping[str, str]
) -> dict[str, str]:
    """Returns the pipeline's name of each parameter and buffer of a whole model, by the latter's.

    A tensor that the model has under several names, such as a shared weight, has one name in the
    pipeline.

    Args:
        slots: All parameters and buffers of the whole pipeline, in the order of its layers.
        model: The state of the whole model.
        plain_names: The pipeline's name for each name of the plain model from which the pipeline
            was made; empty if it was not made from a plain model.

    Raises:
        CheckpointError: ``model`` does not fit the pipeline in names, or in order and shape.
    """
    state = dict(model)
    if state.keys() == plain_names.keys():
        _pair_with_slots(slots, {plain_names[name]: tensor for name, tensor in state.items()})
        return dict(plain_names)
    pairs = _pair_with_slots(slots, state)
    names = {name: slot.name for slot, (name, _) in zip(slots, pairs)}
    by_tensor = {id(tensor): names[name] for name, tensor in pairs}
    return {name: names.get(name, by_tensor[id(tensor)]) for name, tensor in state.items()}


def to_pipeline_names(
    slots: Sequence[Slot], source: Layer | Mapping[str, Any], plain_names: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the tensors of a whole model under the pipeline's names.

    Args:
        slots: All parameters and buffers of the whole pipeline, in the order of its layers.
        source: A state dict or a Layer: with the pipeline's names, with the names of the plain
            model from which the pipeline was made, or with the same tensors in the same order.
        plain_names: The pipeline's name for each name of that plain model; empty without one.

    Raises:
        CheckpointError: The source has other names and does not fit in order and shape.
    """
    state = _state_of(source)
    if state.keys() == plain_names.keys():
        state = {plain_names[name]: tensor for name, tensor in state.items()}
    pairs = _pair_with_slots(slots, state)
    return {slot.name: tensor for slot, (_, tensor) in zip(slots, pairs)}


def _state_of(source: Layer | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state dict of a layer, or a copy of a given state dict."""
    return dict(source.state_dict() if isinstance(source, paddle.nn.Layer) else source)


def _pair_with_slots(slots: Sequence[Slot], state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns for each slot the name and the tensor in ``state`` that belong to it.

    Tensors are matched with slots by name if the names are equal, else by order.

    Raises:
        CheckpointError: The state has another number of tensors, or other shapes.
    """
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
    """Returns a state in which each tensor appears once, under the first of its names."""
    first = {id(tensor): name for name, tensor in reversed(list(state.items()))}
    return {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}


class ModelState:
    """The parameters and buffers of a model whose layers are on several ranks.

    Attributes:
        plain_names: The fully qualified name of each parameter and buffer of the plain model from
            which the list was made, in the plain model's order; empty without a plain model.
    """

    plain_names: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        model: Layer,
        entries: Sequence[Any],
        blueprints: Sequence[Any],
        shared: Mapping[int, SharedLayer],
        built: Built,
        partition: Partition,
        group: Callable[[], Group],
    ) -> None:
        """Describes a model of which this process holds a part.

        Args:
            model: The part that this process holds: its sublayers are the layers built here.
            entries: The whole list of layers.
            blueprints: A layer like each entry's, for names and shapes.
            shared: The shared layers, by each of their numbers in the list.
            built: The layers built here.
            partition: The cut into stages.
            group: Returns the ranks that hold the stages.
        """
        self._model = model
        self._entries = entries
        self._blueprints = blueprints
        self._shared = shared
        self._names = built.names
        self._functions = built.functions
        self._partition = partition
        self._group = group
        self._built = frozenset(slot.name for slot in self._all_slots())
        # Models of PaddleNLP and PaddleFormers know the path of each layer in their plain model.
        if (prefixes := getattr(model, "get_sequential_name_prefixes", None)) is not None:
            self.plain_names = self._names_by_prefix(prefixes())

    def local_tensors(self) -> dict[str, Tensor]:
        """Returns this process's parameters and buffers by fully qualified name."""
        return {name: t for name, t in self._named_tensors() if not self._is_late(name, t)}

    def late_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers in this process's state dict that forwards have registered."""
        return {name: t for name, t in self._named_tensors() if self._is_late(name, t)}

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of this process's state dict with their fully qualified names."""
        # Layer's own method: a subclass of the model may override state_dict, with other keys.
        state = paddle.nn.Layer.state_dict(self._model)
        return ((self._qualified_name(name), tensor) for name, tensor in state.items())

    def _is_late(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor of the state dict is a buffer that a forward has registered."""
        return name not in self._built and not is_parameter(tensor)

    def own_parameters(self) -> dict[str, Tensor]:
        """Returns this process's parameters by fully qualified name, shared ones first."""
        parameters = paddle.nn.Layer.named_parameters(self._model)
        return {self._qualified_name(name): parameter for name, parameter in parameters}

    def hidden_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers of this process's layers that the first state dict did not have."""
        slots = hidden_buffers(self._functions)
        hidden = {name: holder[key] for name, (holder, key) in slots.items()}
        return {**hidden, **self.late_buffers()}

    def checkpoint_part(self) -> ModelParts:
        """Returns this process's part of the state, in the form that checkpoints save."""
        tensors = {
            name: local_tensor_of(tensor, mp_shard) for name, tensor in self.local_tensors().items()
        }
        late = {name: LocalTensor(t, differs=True) for name, t in self.late_buffers().items()}
        hidden = self.hidden_buffers().items()
        buffers = {name: LocalTensor(t, differs=True) for name, t in hidden if name not in late}
        shapes = {slot.name: tuple(slot.shape) for slot in self.whole_slots()}
        names = self.plain_names
        return ModelParts(tensors, shapes, buffers, late, self._model, names)

    @property
    def spreads_experts(self) -> bool:
        """Whether several ranks of a stage hold different experts of the model."""
        return any(
            kind.spreads(layer)
            for layer in self._blueprints
            for kind in layer_kinds.kinds_of(layer)
        )

    @property
    def adds_up_uses(self) -> bool:
        """Whether several stages use one weight, so that its gradient is summed stage by stage."""
        stages: dict[str, set[int]] = {}
        for index, layer in self._shared.items():
            stages.setdefault(layer.path, set()).add(self._partition.stage_of(index))
        return any(len(users) > 1 for users in stages.values())

    def has_several_calls(self, name: str) -> bool:
        """Whether several ranks may call the layer that has the parameter or buffer ``name``."""
        return is_shared(name) or is_spread(self.local_tensors()[name])

    def stage_of(self, name: str) -> int | None:
        """Returns the stage of a parameter or buffer; None for a weight of a shared layer."""
        if is_shared(name):
            return None
        return self._partition.stage_of(int(name.partition(".")[0]))

    def slots(self) -> list[Slot]:
        """Returns all parameters and buffers of the model in the order of its layers, each once."""
        # Slots of a layer that the user has built include buffers that a forward has registered,
        # on the rank that runs the layer only.
        late = self.late_buffers()
        return [slot for slot in self._all_slots() if slot.name not in late]

    def _all_slots(self) -> list[Slot]:
        """Returns :meth:`slots`, with buffers that forwards of this process have registered."""
        layers = range(len(self._entries))
        by_name = {slot.name: slot for index in layers for slot in self._slots_of(index)}
        return list(by_name.values())

    def whole_slots(self) -> list[Slot]:
        """Returns :meth:`slots`, with one slot for a whole weight, of which ranks hold parts."""
        return join_parts(self.slots())

    def positions(self) -> dict[str, int]:
        """Returns numbers that sort the tensors of this process as on one device, by name.

        Shared layers come first in a model, whatever their index in the list. Parameters that were
        added to a layer, such as adapters, are sorted by their current index.
        """
        shared = [name for layer in self._shared.values() for name in layer.names.values()]
        positions = {name: index for index, name in enumerate(dict.fromkeys(shared))}
        tensors = self.local_tensors()
        spread = any(map(is_spread, tensors.values()))
        whole = {slot.name: n for n, slot in enumerate(self.slots())} if spread else {}
        for number, name in enumerate(tensors):
            # Experts of other ranks are counted too: they stand between the experts of this rank.
            position = whole.get(name, number)
            if is_shared(name):
                positions.setdefault(name, _POSITIONS_PER_LAYER - 1)
            else:
                # Parameters beside the list, as of a loss that is an attribute, are last.
                first = name.partition(".")[0]
                layer = int(first) if first.isdecimal() else len(self._entries)
                positions[name] = (layer + 1) * _POSITIONS_PER_LAYER + position
        return positions

    def outlines(self) -> list[str]:
        """Describes each layer of the whole model: its class, and the shapes of its parameters."""
        return [
            " ".join(
                [
                    descriptions.class_name(entry),
                    *(f"{slot.name}{list(slot.shape)}" for slot in self._slots_of(index)),
                ]
            )
            for index, entry in enumerate(self._entries)
        ]

    def load(self, source: Layer | Mapping[str, Any]) -> None:
        """Loads this process's parameters and buffers from a whole model or its state dict.

        Raises:
            CheckpointError: The source does not fit. No tensor has changed then.
        """
        slots, local_tensors = choose_slots(self.slots(), source), self.local_tensors()
        state = to_pipeline_names(slots, source, self.plain_names)
        _check_and_assign(local_tensors, split_into_parts(state, local_tensors, mp_shard))

    def gather(self) -> dict[str, Tensor]:
        """Returns copies of all parameters and buffers of the model, shared ones first.

        Shards of tensor-parallel layers are put together, and so are the parts of a vocabulary
        head, which lie on several stages. Collective over the ranks that hold the model or shards.
        """
        local_tensors = {
            name: whole_value(tensor, parameter=tensor)
            for name, tensor in self.local_tensors().items()
        }
        merged: dict[str, Tensor] = {}
        for of_rank in self._group().all_gather(local_tensors):
            for name, tensor in of_rank.items():
                merged.setdefault(name, tensor)
        slots = sorted(self.slots(), key=lambda slot: not is_shared(slot.name))
        gone = [slot.name for slot in slots if slot.name not in merged]
        if gone:
            raise CheckpointError(
                "the model lacks parameters or buffers that it had when it was built",
                got=f"no {listed(gone)}",
                cause="a layer was changed in its place, as by nn.utils.remove_weight_norm",
                fix="leave the pipeline as it is, and change a copy: single = pipe.single_model(), "
                "pipe.copy_to(single), then remove_weight_norm of the layers of single",
            )
        parts = JoinedParts(
            (slot.whole.name, LocalTensor(merged[slot.name], slot.part and slot.part.cut))
            for slot in slots
        )
        return {name: local.tensor for name, local in parts.tensors.items()}

    def copy_to(self, model: Layer) -> None:
        """Copies all parameters and buffers to a single-device model.

        Collective like :meth:`gather`.

        Raises:
            CheckpointError: The model does not fit. No tensor has changed then.
        """
        target = self._state_in(model)
        slots = choose_slots(self.slots(), target)
        names, state = names_in(slots, target, self.plain_names), self.gather()
        values = {slot.name: slot.value_in(state) for slot in slots}
        for name, tensor in target.items():
            if not has_memory(tensor):
                set_data(tensor, values[names[name]])
        _check_and_assign(target, {name: values[names[name]] for name in target})

    def names_in(self, model: Layer) -> dict[str, str]:
        """Returns the fully qualified name of each parameter and buffer of a single-device model.

        Raises:
            CheckpointError: The model does not fit in names, or in order and shape.
        """
        return names_in(self.slots(), self._state_in(model), self.plain_names)

    def _state_in(self, model: Layer) -> Mapping[str, Tensor]:
        """Returns the state dict of a single-device model, under that model's names."""
        state: Mapping[str, Tensor] = model.state_dict()
        return state

    def _names_by_prefix(self, prefixes: Mapping[str, str]) -> dict[str, str]:
        """Returns the fully qualified name of each tensor, by its name in the plain model.

        The result is empty if ``prefixes`` lacks an entry of the list.

        Args:
            prefixes: The path of each entry's layer in the plain model, by the entry's number as
                text.
        """
        if len(prefixes) != len(self._entries):
            return {}
        names: dict[str, str] = {}
        for index, prefix in prefixes.items():
            slots, shared = self._slots_of(int(index)), self._shared.get(int(index))
            if shared is None:
                # A slot's name is "<number of the entry>.<path in the layer>".
                paths = {s.name.partition(".")[2]: s.name for s in join_parts(slots)}
            else:
                paths = {**shared.names}
            names.update({f"{prefix}.{path}".lstrip("."): name for path, name in paths.items()})
        return names

    def _qualified_name(self, name: str) -> str:
        """Returns the fully qualified name of the tensor ``name`` of this process's state dict."""
        return self._names.get(name, name)

    def _slots_of(self, index: int) -> list[Slot]:
        """Returns the slots (descriptions) of the parameters and buffers of layer ``index``."""
        shared = self._shared.get(index)
        if shared is None:
            return slots_in_layer(self._blueprints[index], index)
        shapes = paddle.nn.Layer.state_dict(self._blueprints[shared.indices[0]])
        return [Slot.of(name, shapes[path]) for path, name in shared.names.items()]


def _check_and_assign(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Sets each tensor to the value of the same name, if all dtypes are equal.

    Raises:
        CheckpointError: A dtype differs; no tensor has changed then.
    """
    for name, tensor in tensors.items():
        value = values[name]
        dtype = (value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)).dtype
        if dtype != tensor.dtype:
            raise CheckpointError(
                f"{name!r} does not fit",
                expected=str(tensor.dtype),
                got=str(dtype),
                fix="convert the values first: value.astype(dtype)",
            )
    for name, tensor in tensors.items():
        tensor.set_value(values[name])


def hidden_buffers(functions: Mapping[int, Callable[[Nest], Nest]]) -> dict[str, BufferSlot]:
    """Returns where layers have buffers that no state dict has, by fully qualified name.

    These are buffers with ``persistable=False``, and tensors set as attributes. The buffers of a
    layer that stands at several positions in the list have a name for each position.

    Args:
        functions: Layers and functions by their number in the whole list.
    """
    return {
        f"{index}.{path}": slot
        for index, function in functions.items()
        for layer in (function, *called_through(function))
        if isinstance(layer, paddle.nn.Layer)
        for path, slot in _find_hidden_buffers(layer)
    }


def _find_hidden_buffers(layer: Layer) -> Iterator[tuple[str, BufferSlot]]:
    """Yields the path of each buffer that a layer's state dict does not have, and where it is."""
    keys = paddle.nn.Layer.state_dict(layer).keys()
    for prefix, sublayer in layer.named_sublayers(include_self=True):
        for holder, name in state_slots(sublayer):
            path = f"{prefix}.{name}" if prefix else name
            if path not in keys:
                yield path, (holder, name)
