"""Turns a user's ``exec_seq`` into layers in order, each with the functions around it.

Each entry gets the output of the entry before it; a tuple becomes several arguments, as in
ColossalAI. A batch that is a dict gives named arguments: they go along with the output, in a dict
that has the output under :data:`OUTPUT`, as long as a later entry takes one of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Nest
from fleetpipe.errors import BoundaryError, ConfigError, nearest
from fleetpipe.paddle_api import paddle

#: Where an execution sequence is cut by the policy "customized".
SPLIT_NODE = "SPLIT_NODE"
_OPENED = (paddle.nn.LayerList, paddle.nn.Sequential)
_UNCALLABLE = (paddle.nn.LayerList, paddle.nn.LayerDict, paddle.nn.ParameterList)

Functions = tuple[Callable[..., Any], ...]


class SequenceStep(NamedTuple):
    """A layer of an execution sequence.

    Attributes:
        name: The name of the layer in the model.
        layer: The layer.
        front: The functions that run before it.
        behind: The functions that run after it.
    """

    name: str
    layer: Layer
    front: Functions = ()
    behind: Functions = ()


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
            self._steps.append(SequenceStep(entry, self._layer(entry), tuple(self._front)))
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
        self._steps[-1] = last._replace(behind=(*last.behind, function))

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
    state: Mapping[str, Any] = model.state_dict()
    missing = [name for name, tensor in state.items() if id(tensor) not in listed]
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


#: The key of an output that named arguments go along with.
OUTPUT = "stage_output"


class Signature(NamedTuple):
    """The arguments that a function takes.

    Attributes:
        names: The names of its arguments, in order.
        most: How many it takes by position; None for any number.
    """

    names: tuple[str, ...]
    most: int | None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Reads the signature of ``function``; a function that shows none takes one argument."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            return cls((), 1)
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, _EITHER)]
        any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        named = tuple(p.name for p in parameters if p.kind in (_EITHER, p.KEYWORD_ONLY))
        return cls(named, None if any_number else len(by_position))


_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


class Function:
    """A function of an execution sequence: it maps the output, or changes named arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.signature = Signature.of(function)

    def __call__(self, output: Nest, named: dict[str, Nest]) -> Nest:
        """Returns the output for the next entry; it may change ``named``.

        Args:
            output: The output of the entry before; None at the beginning of a batch that is a dict.
            named: The named arguments of the batch. A function with arguments of these names gets
                them and returns their new values, as a tuple if there are several.

        Raises:
            BoundaryError: There is no value that the function could get.
        """
        matching = [name for name in self.signature.names if name in named]
        if matching:
            values = self._function(**{name: named[name] for name in matching})
            if not isinstance(values, tuple):
                values = (values,) * len(matching)
            named.update(zip(matching, values))
            return output
        if output is None:
            raise BoundaryError(
                "a function of exec_seq stands before the first output",
                expected=f"an argument called {', '.join(named)}",
                got=f"arguments {', '.join(self.signature.names) or 'without names'}",
                fix="name its arguments after keys of the batch, or let it stand behind a layer",
            )
        return self._function(*arguments_of(output)[: self.signature.most])


class RecordedCall:
    """Calls the layer of one entry, and the functions in front of it and behind it."""

    def __init__(
        self,
        layer: Layer,
        front: Sequence[Callable[..., Any]],
        behind: Sequence[Callable[..., Any]],
        takes_batch: bool,
        later: frozenset[str],
    ) -> None:
        """Reads all signatures.

        Args:
            layer: The layer, or one like it.
            front: The functions before it, in order.
            behind: The functions after it, in order.
            takes_batch: Whether this is the first entry, which gets the batch's inputs.
            later: The names of arguments that later entries take.
        """
        self._signature = Signature.of(layer.forward)
        self._front = [Function(function) for function in front]
        self._behind = [Function(function) for function in behind]
        self._takes_batch = takes_batch
        self._later = later

    def names(self) -> frozenset[str]:
        """Returns the names of all arguments of the layer and the functions."""
        functions = (f.signature.names for f in (*self._front, *self._behind))
        return frozenset(self._signature.names).union(*functions)

    def __call__(self, layer: Layer, value: Nest) -> Nest:
        """Returns the value for the next entry.

        Args:
            layer: The layer, with its weights.
            value: The inputs of the batch, or the value from the entry before.

        Raises:
            BoundaryError: There is no value that a function of exec_seq could get.
        """
        output, named = self._take_apart(value)
        for function in self._front:
            output = function(output, named)
        arguments = arguments_of(output)[: self._signature.most]
        more = {n: named[n] for n in self._signature.names[len(arguments) :] if n in named}
        output = layer(*arguments, **more)
        for function in self._behind:
            output = function(output, named)
        going_on = {name: item for name, item in named.items() if name in self._later}
        return {OUTPUT: output, **going_on} if going_on else output

    def _take_apart(self, value: Nest) -> tuple[Nest, dict[str, Nest]]:
        if isinstance(value, dict) and (self._takes_batch or OUTPUT in value):
            named = dict(value)
            return named.pop(OUTPUT, None), named
        return value, {}


class Called(paddle.nn.Layer):
    """A layer of the model with its call, as one layer of a ``PipelineLayer``."""

    def __init__(self, layer: Layer, call: RecordedCall) -> None:
        super().__init__()
        self.layer = layer
        self._call = call

    def forward(self, value: Nest) -> Nest:
        """Returns the value for the next entry."""
        return self._call(self.layer, value)


def arguments_of(output: Nest) -> tuple[Nest, ...]:
    """Returns the arguments of a layer after ``output``; a tuple becomes several arguments."""
    if output is None:
        return ()
    return output if isinstance(output, tuple) else (output,)
