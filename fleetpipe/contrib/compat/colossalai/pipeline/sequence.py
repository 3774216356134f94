"""Turns a user's ``exec_seq`` into layers in order, each with the functions around it.

Each entry gets the output of the entry before it; a tuple becomes several arguments, as in
ColossalAI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Nest
from fleetpipe.errors import ConfigError, nearest
from fleetpipe.paddle_api import paddle

#: Where an execution sequence is cut by the policy "customized".
SPLIT_NODE = "SPLIT_NODE"
_OPENED = (paddle.nn.LayerList, paddle.nn.Sequential)
_UNCALLABLE = (paddle.nn.LayerList, paddle.nn.LayerDict, paddle.nn.ParameterList)


class LayerCall(NamedTuple):
    """How a layer is called.

    Attributes:
        front: The functions that run before it.
        behind: The functions that run after it.
    """

    front: tuple[Callable[..., Any], ...] = ()
    behind: tuple[Callable[..., Any], ...] = ()

    def __call__(self, layer: Layer, value: Nest) -> Nest:
        """Returns the value for the next entry, from that of the entry before."""
        for function in (*self.front, layer, *self.behind):
            value = function(*value) if isinstance(value, tuple) else function(value)
        return value


class SequenceStep(NamedTuple):
    """A layer of an execution sequence: its name in the model, itself, and its call."""

    name: str
    layer: Layer
    call: LayerCall


class ExecutionSequence(NamedTuple):
    """A model as layers in the order of their execution.

    Attributes:
        steps: The layers.
        splits: Number of layers before each SPLIT_NODE.
    """

    steps: tuple[SequenceStep, ...]
    splits: tuple[int, ...]


def read(model: Layer, exec_seq: Iterable[object] | None) -> ExecutionSequence:
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
    reader = _Reader(model)
    for entry in _children(model) if exec_seq is None else exec_seq:
        reader.take(entry)
    sequence = reader.finish()
    _require_cover(model, sequence.steps)
    return sequence


class _Reader:
    """Reads the entries of an ``exec_seq`` one after another."""

    def __init__(self, model: Layer) -> None:
        self._model = model
        self._sublayers = dict(model.named_sublayers())
        self._steps: list[SequenceStep] = []
        self._front: list[Callable[..., Any]] = []
        self._splits: list[int] = []

    def take(self, entry: object) -> None:
        if isinstance(entry, str) and entry == SPLIT_NODE:
            self._splits.append(len(self._steps))
        elif isinstance(entry, str):
            call = LayerCall(front=tuple(self._front))
            self._steps.append(SequenceStep(entry, self._layer(entry), call))
            self._front = []
        elif isinstance(entry, tuple) and len(entry) == 2:
            self._take_function(*entry)
        else:
            self._take_function(entry, "behind" if self._steps else "front")

    def finish(self) -> ExecutionSequence:
        if self._front:
            raise ConfigError(
                "exec_seq ends with a function that stands in front of nothing",
                got=", ".join(map(_name, self._front)),
                fix='write (function, "behind"), or name the layer that it stands in front of',
            )
        return ExecutionSequence(tuple(self._steps), tuple(self._splits))

    def _take_function(self, function: Any, place: object) -> None:
        _require_function(function, place)
        if place == "front":
            self._front.append(function)
            return
        if not self._steps:
            raise ConfigError(
                "exec_seq begins with a function that stands behind nothing",
                got=f'({_name(function)}, "behind")',
                fix='write (function, "front"), or the function alone: it is given the inputs',
            )
        last = self._steps[-1]
        call = last.call._replace(behind=(*last.call.behind, function))
        self._steps[-1] = last._replace(call=call)

    def _layer(self, name: str) -> Layer:
        layer: Layer = self._sublayers.get(name)
        if layer is None:
            # A layer that the model has twice is known by its first name.
            layer = _sublayer_at(self._model, name)
        if layer is None:
            raise ConfigError(
                f"exec_seq names {name!r}, and the model has no such sublayer",
                fix=nearest(name, self._sublayers),
            )
        if isinstance(layer, _UNCALLABLE):
            raise ConfigError(
                f"exec_seq names {name!r}, which cannot be called",
                got=type(layer).__name__,
                fix=f"name what is in it, as in {name + '.0'!r}",
            )
        return layer


def _children(model: Layer) -> list[str]:
    names = []
    for name, child in model.named_children():
        opened = child.named_children() if isinstance(child, _OPENED) else ()
        names += [f"{name}.{inner}" for inner, _ in opened] or [name]
    return names


def _sublayer_at(model: Layer, name: str) -> Layer:
    """Returns the sublayer at a dotted path; None if there is none."""
    layer = model
    for part in name.split("."):
        layer = getattr(layer, part, None)
        if not isinstance(layer, paddle.nn.Layer):
            return None
    return layer


def _require_function(function: object, place: object) -> None:
    """Refuses an entry that cannot be in an execution sequence."""
    if place not in ("front", "behind") or not callable(function) or isinstance(function, type):
        raise ConfigError(
            "an entry of exec_seq is neither the name of a sublayer nor a function",
            expected='a name, a function, (function, "front"), (function, "behind") or '
            f"{SPLIT_NODE!r}",
            got=repr((function, place)),
            fix='write (function, "behind") for what runs after the layer named before it',
        )
    if isinstance(function, paddle.nn.Layer) and function.state_dict():
        raise ConfigError(
            "a function of exec_seq is a layer with parameters, which no optimizer would train",
            got=type(function).__name__,
            fix="make it a sublayer of the model, and write its name",
        )


def _require_cover(model: Layer, steps: Sequence[SequenceStep]) -> None:
    """Refuses a sequence that leaves out a parameter or buffer of the model."""
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


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)
