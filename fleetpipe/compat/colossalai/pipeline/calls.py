"""How an entry of an execution sequence is called: its layer, and the functions around it.

What goes from entry to entry is what the one before returned, and a tuple is taken apart, as
ColossalAI does it. A batch that is a dict gives arguments by name: they go along with the output,
in a dict with the output under :data:`OUTPUT`, as long as a later entry asks for one of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Nest
from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api import paddle

#: The key of an output that named arguments go along with.
OUTPUT = "stage_output"


class Signature(NamedTuple):
    """What a function can be given.

    Attributes:
        names: The names of its arguments, in order.
        most: How many it takes by position; None: any number.
    """

    names: tuple[str, ...]
    most: int | None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Reads the signature of ``function``; of one that does not show any: one argument."""
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
        """Returns the output for what comes next; ``named`` may be changed.

        Args:
            output: What the entry before returned; None at the beginning of a batch of names.
            named: The named arguments of the batch. Where the function has arguments of such names,
                it is given these, and returns their new values, as a tuple where they are several.

        Raises:
            BoundaryError: There is nothing that it could be given.
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
            takes_batch: Whether this is the first entry, which is given the batch's inputs.
            later: The names of arguments that later entries take.
        """
        self._signature = Signature.of(layer.forward)
        self._front = [Function(function) for function in front]
        self._behind = [Function(function) for function in behind]
        self._takes_batch = takes_batch
        self._later = later

    def names(self) -> frozenset[str]:
        """Returns the names of all arguments that the layer or one of the functions has."""
        functions = (f.signature.names for f in (*self._front, *self._behind))
        return frozenset(self._signature.names).union(*functions)

    def __call__(self, layer: Layer, value: Nest) -> Nest:
        """Returns what the next entry is given.

        Args:
            layer: The layer, with its weights.
            value: The inputs of the batch, or what the entry before returned.

        Raises:
            BoundaryError: A function of exec_seq has nothing that it could be given.
        """
        output, named = self._opened(value)
        for function in self._front:
            output = function(output, named)
        arguments = arguments_of(output)[: self._signature.most]
        more = {n: named[n] for n in self._signature.names[len(arguments) :] if n in named}
        output = layer(*arguments, **more)
        for function in self._behind:
            output = function(output, named)
        going_on = {name: item for name, item in named.items() if name in self._later}
        return {OUTPUT: output, **going_on} if going_on else output

    def _opened(self, value: Nest) -> tuple[Nest, dict[str, Nest]]:
        if isinstance(value, dict) and (self._takes_batch or OUTPUT in value):
            named = dict(value)
            return named.pop(OUTPUT, None), named
        return value, {}


class Called(paddle.nn.Layer):
    """A layer of the model and how it is called, as one layer of a ``PipelineLayer``."""

    def __init__(self, layer: Layer, call: RecordedCall) -> None:
        super().__init__()
        self.layer = layer
        self._call = call

    def forward(self, value: Nest) -> Nest:
        """Returns what the next entry is given."""
        return self._call(self.layer, value)


def arguments_of(output: Nest) -> tuple[Nest, ...]:
    """Returns what a layer is called with after ``output``: a tuple is taken apart."""
    if output is None:
        return ()
    return output if isinstance(output, tuple) else (output,)
