"""``colossalai.pipeline``: makes a model without memory, cuts it, and builds its stages.

Start with ``pipelinable.py``. ``read_sequence`` turns a user's ``exec_seq`` into layers in order,
each with the functions around it. ``PipelinableModel`` is a ``PipelineLayer`` of these layers with
the plain model's keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph import PipelineLayer
from fleetpipe.errors import ConfigError, nearest
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.tensor import has_memory

#: The entry of an execution sequence at which the policy "customized" cuts.
SPLIT_NODE = "SPLIT_NODE"
#: Layers that are replaced by their children if a program gives no execution sequence.
_CONTAINERS = (paddle.nn.LayerList, paddle.nn.Sequential)
_UNCALLABLE_LAYERS = (paddle.nn.LayerList, paddle.nn.LayerDict, paddle.nn.ParameterList)

_descriptions: Any = paddle_fleet.meta_parallel


class LayerCall(NamedTuple):
    """The functions around the call of a layer.

    Attributes:
        front: The functions that run before the layer.
        behind: The functions that run after the layer.
    """

    front: tuple[Callable[..., Any], ...] = ()
    behind: tuple[Callable[..., Any], ...] = ()

    def __call__(self, layer: Layer, value: Nest) -> Nest:
        """Calls the functions and the layer on a value; a tuple is several arguments."""
        for function in (*self.front, layer, *self.behind):
            value = function(*value) if isinstance(value, tuple) else function(value)
        return value


class SequenceStep(NamedTuple):
    """A layer of an execution sequence: its name in the model, the layer, and its call."""

    name: str
    layer: Layer
    call: LayerCall


class ExecutionSequence(NamedTuple):
    """A model as layers in the order of their execution.

    Attributes:
        steps: The layers.
        splits: For each SPLIT_NODE, the number of layers before it.
    """

    steps: tuple[SequenceStep, ...]
    splits: tuple[int, ...]


def read_sequence(model: Layer, exec_seq: Iterable[object] | None) -> ExecutionSequence:
    """Returns the layers of a model in the order that ``exec_seq`` gives them.

    Args:
        model: The whole model.
        exec_seq: Names of sublayers, functions, pairs ``(function, "front")`` or ``(function,
            "behind")``, and SPLIT_NODE. None stands for the children in the order in which they
            were made; LayerLists and Sequentials are replaced by their children.

    Raises:
        ConfigError: An entry is none of these, names no sublayer, or has no layer before or after
            it; or a parameter or buffer of the model is in none of the layers.
    """
    steps: list[SequenceStep] = []
    front: list[Callable[..., Any]] = []
    splits: list[int] = []
    for entry in _children_names(model) if exec_seq is None else exec_seq:
        if isinstance(entry, str) and entry == SPLIT_NODE:
            splits.append(len(steps))
            continue
        if isinstance(entry, str):
            steps.append(
                SequenceStep(entry, _require_sublayer(model, entry), LayerCall(tuple(front)))
            )
            front = []
            continue
        function: Any = entry
        side: object = "behind" if steps else "front"
        if isinstance(entry, tuple) and len(entry) == 2:
            function, side = entry
        _require_function(function, side)
        if side == "front":
            front.append(function)
            continue
        if not steps:
            raise ConfigError(
                "exec_seq begins with a function that stands behind nothing",
                got=f'({_function_name(function)}, "behind")',
                fix='write (function, "front"), or the function alone: it is given the inputs',
            )
        call = steps[-1].call
        steps[-1] = steps[-1]._replace(call=call._replace(behind=(*call.behind, function)))
    if front:
        raise ConfigError(
            "exec_seq ends with a function that stands in front of nothing",
            got=", ".join(map(_function_name, front)),
            fix='write (function, "behind"), or name the layer that it stands in front of',
        )
    _require_cover(model, steps)
    return ExecutionSequence(tuple(steps), tuple(splits))


def _children_names(model: Layer) -> list[str]:
    """Returns the children's names; LayerLists and Sequentials are replaced by their children's."""
    names = []
    for name, child in model.named_children():
        inner = child.named_children() if isinstance(child, _CONTAINERS) else ()
        names += [f"{name}.{inner_name}" for inner_name, _ in inner] or [name]
    return names


def _require_sublayer(model: Layer, path: str) -> Layer:
    """Returns the sublayer at a dotted path; raises ConfigError if it cannot be called."""
    sublayers = dict(model.named_sublayers())
    layer = sublayers.get(path)
    if layer is None:  # a layer with two names is listed under one of them
        layer = model
        for part in path.split("."):
            layer = getattr(layer, part, None)
            if not isinstance(layer, paddle.nn.Layer):
                raise ConfigError(
                    f"exec_seq names {path!r}, and the model has no such sublayer",
                    fix=nearest(path, sublayers),
                )
    if isinstance(layer, _UNCALLABLE_LAYERS):
        raise ConfigError(
            f"exec_seq names {path!r}, which cannot be called",
            got=type(layer).__name__,
            fix=f"name what is in it, as in {path + '.0'!r}",
        )
    return layer


def _require_function(function: object, side: object) -> None:
    """Raises ConfigError unless an item of an execution sequence is a function with a side.

    Args:
        function: The function.
        side: Where it runs: ``"front"`` of the next layer, or ``"behind"`` the one before.
    """
    if side not in ("front", "behind") or not callable(function) or isinstance(function, type):
        raise ConfigError(
            "an entry of exec_seq is neither the name of a sublayer nor a function",
            expected='a name, a function, (function, "front"), (function, "behind") or '
            f"{SPLIT_NODE!r}",
            got=repr((function, side)),
            fix='write (function, "behind") for what runs after the layer named before it',
        )
    if isinstance(function, paddle.nn.Layer) and function.state_dict():
        raise ConfigError(
            "a function of exec_seq is a layer with parameters, which no optimizer would train",
            got=type(function).__name__,
            fix="make it a sublayer of the model, and write its name",
        )


def _require_cover(model: Layer, steps: Sequence[SequenceStep]) -> None:
    """Raises ConfigError if a parameter or buffer of the model is in no layer of the sequence."""
    if not steps:
        raise ConfigError("exec_seq names no layer", fix="name at least one for each stage")
    listed = {id(tensor) for step in steps for tensor in step.layer.state_dict().values()}
    missing = [name for name, tensor in model.state_dict().items() if id(tensor) not in listed]
    if missing:
        owners = dict.fromkeys(name.rpartition(".")[0] or name for name in missing)
        raise ConfigError(
            "exec_seq leaves out parameters of the model",
            expected="all sublayers with parameters, in the order in which forward calls them",
            got=f"nothing for {', '.join(owners)}",
            fix="name these sublayers; put a parameter of the model itself into a sublayer",
        )


def _function_name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


class LayerWithFunctions(paddle.nn.Layer):
    """A layer and the functions that run before and after it, as one layer of a pipeline."""

    def __init__(self, layer: Layer, call: LayerCall) -> None:
        super().__init__()
        self.layer = layer
        self._call = call

    def forward(self, value: Nest) -> Nest:
        """Returns the value for the next entry."""
        return self._call(self.layer, value)


class LazyLayer(_descriptions.LayerDesc):  # type: ignore[misc]
    """Describes a layer that was made without memory."""

    def __init__(self, layer: Layer, call: LayerCall) -> None:
        super().__init__(type(layer))
        self._layer = layer
        self._call = call

    def build_layer(self, **_extra: object) -> LayerWithFunctions:
        """Returns a copy of the layer with fresh weights."""
        return LayerWithFunctions(_copy_with_memory(self._layer), self._call)

    def blueprint(self) -> LayerWithFunctions:
        """Returns the layer without memory, for names and shapes."""
        return LayerWithFunctions(self._layer, self._call)


class LazyTiedLayer(_descriptions.SharedLayerDesc):  # type: ignore[misc]
    """Describes a layer that was made without memory and shares weights with other entries."""

    def __init__(
        self, key: str, name: str, layer: Layer, call: LayerCall, attributes: Sequence[str]
    ) -> None:
        """Describes ``layer`` as one of several entries that share weights.

        Args:
            key: The key of all entries that share a weight.
            name: The layer's name, unique among those of its class.
            layer: The layer.
            call: Calls the layer with the functions around it.
            attributes: The names of the weights that the layer shares with other layers.
        """
        super().__init__(key, type(layer), call, list(attributes), name)
        self._layer = layer

    def build_layer(self, **_extra: object) -> Layer:
        """Returns a copy of the layer with fresh weights."""
        return _copy_with_memory(self._layer)

    def blueprint(self) -> Layer:
        """Returns the layer without memory, for names and shapes."""
        return self._layer


def entries_of(steps: Sequence[SequenceStep]) -> list[Any]:
    """Returns the entries of a ``PipelineLayer``, one for each step.

    Raises:
        ConfigError: Two layers share a parameter under different names.
    """
    tied = _group_by_tensor(steps)
    entries: list[Any] = []
    for step in steps:
        members = tied[id(step.layer)]
        if len(members) == 1:
            entries.append(LazyLayer(step.layer, step.call))
            continue
        first = members[0]
        layer_name = next(member.name for member in members if member.layer is step.layer)
        attributes = _shared_attributes(first, step, members)
        key = first.name.replace(".", "/")
        entries.append(LazyTiedLayer(key, layer_name, step.layer, step.call, attributes))
    return entries


def _group_by_tensor(steps: Sequence[SequenceStep]) -> dict[int, list[SequenceStep]]:
    """Returns, by the id of each layer, the steps that share a tensor with it, itself included.

    Sharing is transitive: if a shares with b, and b with c, all three are in one group.
    """
    groups: dict[int, list[SequenceStep]] = {}
    first_user: dict[int, int] = {}  # by the id of a tensor that of the first layer that has it
    for step in steps:
        group = [step]
        for tensor in step.layer.state_dict().values():
            user = first_user.setdefault(id(tensor), id(step.layer))
            earlier_group = groups.get(user, group)
            if earlier_group is not group:
                earlier_group += group
                group = earlier_group
        for member in group:
            groups[id(member.layer)] = group
    return groups


def _shared_attributes(
    first: SequenceStep, step: SequenceStep, members: Sequence[SequenceStep]
) -> list[str]:
    """Returns the names of the parameters that a tied layer shares with other layers.

    Args:
        first: The first step of the group of layers that share parameters.
        step: The step of the layer.
        members: All steps of the group.
    """
    if step.layer is not first.layer:
        return _shared_parameters(first, step)
    names: set[str] = set()
    for member in members:
        if member.layer is not first.layer:
            names.update(_shared_parameters(first, member))
    return sorted(names)


def _shared_parameters(first: SequenceStep, second: SequenceStep) -> list[str]:
    """Returns the names of the parameters that two layers share.

    Raises:
        ConfigError: The layers share none, or one under different names.
    """
    names = {id(tensor): name for name, tensor in first.layer.named_parameters()}
    shared = []
    for name, tensor in second.layer.named_parameters():
        if id(tensor) not in names:
            continue
        if names[id(tensor)] != name or "." in name:
            raise ConfigError(
                "two layers of exec_seq share a parameter under different names",
                got=f"{first.name}.{names[id(tensor)]} and {second.name}.{name}",
                fix="name the sublayers that hold it, of one class or with the attribute of one "
                "name, or fleetpipe.pipeline, which needs no exec_seq",
            )
        shared.append(name)
    if not shared:
        raise ConfigError(
            "three layers of exec_seq are tied in a chain, with no parameter in all of them",
            got=f"{first.name} and {second.name} share none",
            fix="tie the others to the first of them",
        )
    return shared


def _copy_with_memory(without_memory: Layer) -> Layer:
    """Returns a copy of a layer, with initialized parameters of the same names."""
    layer = copy.deepcopy(without_memory)
    for parameter, original in zip(layer.parameters(), without_memory.parameters()):
        parameter.name = original.name
        if not has_memory(parameter):
            parameter.initialize()
    return layer


class PipelinableModel(PipelineLayer):
    """The stages of a model that this process owns; its state has the keys of the plain model."""

    def __init__(
        self,
        model: Layer,
        steps: Sequence[SequenceStep],
        bounds: Sequence[int],
        ranks: int,
        chunks: int,
    ) -> None:
        """Builds the layers of this process's stages.

        Args:
            model: The whole model, made without memory.
            steps: The model's layers in the order of their execution.
            bounds: The first layer of each stage, then the number of layers.
            ranks: Ranks of the pipeline.
            chunks: Chunks of each rank.
        """
        super().__init__(
            entries_of(steps),
            num_stages=ranks,
            seg_method=list(bounds),
            num_virtual_pipeline_stages=chunks,
        )
        self.state.plain_names = self._full_names_by_plain(model, steps)

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Tensor]:
        """Returns this process's parameters and buffers by their names in the plain model.

        Arguments are those of ``nn.Layer.state_dict`` and have no effect.
        """
        state = self.own_state()
        names = self.state.plain_names
        return {plain: state[full] for plain, full in names.items() if full in state}

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Sets this process's parameters and buffers from a state dict of the plain model.

        Args:
            state_dict: The state dict of the whole model, or of this rank.
            use_structured_name: Accepted without effect.

        Returns:
            The keys of this process that are missing, and the keys that the model does not have.
        """
        names = {id(tensor): name for name, tensor in paddle.nn.Layer.state_dict(self).items()}
        keys = {plain: names[id(tensor)] for plain, tensor in self.state_dict().items()}
        renamed = {keys[name]: value for name, value in state_dict.items() if name in keys}
        super().set_state_dict(renamed)
        unknown = [name for name in state_dict if name not in self.state.plain_names]
        return [name for name in keys if name not in state_dict], unknown

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns on every rank copies of all parameters and buffers, under the model's keys.

        Collective over the pipeline.
        """
        state = super().full_state_dict()
        return {plain: state[full] for plain, full in self.state.plain_names.items()}

    def _full_names_by_plain(self, model: Layer, steps: Sequence[SequenceStep]) -> dict[str, str]:
        """Returns the fully qualified name of each parameter and buffer of the plain model."""
        tied = {index: shared for shared in self._tied for index in shared.indices}
        full: dict[int, str] = {}
        for index, step in enumerate(steps):
            for path, tensor in step.layer.state_dict().items():
                name = tied[index].names[path] if index in tied else f"{index}.layer.{path}"
                full.setdefault(id(tensor), name)
        return {plain: full[id(tensor)] for plain, tensor in model.state_dict().items()}
