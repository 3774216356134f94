"""Makes the list of functions that a pipeline runs from the nodes of a capture: :func:`entries`.

Each entry of the list takes and returns a dict of the values that later entries need. The first
entry makes the dict from the model's inputs, the last makes the model's outputs from it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from fleetpipe.aliases import Nest
from fleetpipe.capture.tracing.signature import Signature
from fleetpipe.capture.tracing.value import Capture, Mode, Node, Owned, Ref, ValueId
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.paddle_api import paddle

#: The values that later entries need, by name.
Values = Mapping[str, Nest]

#: Returns an argument with values in the place of the references to them.
_Fill = Callable[[Values], Any]

#: The names of two further items of such a dict: the signature of the batch, and in the first batch
#: with this signature its whole numbers.
LOOK, SAMPLE = "look", "sample"


def name_of(value: ValueId) -> str:
    """Returns the name of a value between entries, and on edges."""
    return f"v{value}"


def entries(trace: Capture, signature: Signature) -> list[Callable[[Nest], Nest]]:
    """Returns functions of one argument which, called one after another, repeat a captured run.

    The function of a node that calls a layer, or takes parameters of layers, is a ``partial`` with
    these layers as arguments.
    """
    needed = _needed_after(trace)
    functions: list[Callable[[Nest], Nest]] = [_Inputs(trace, needed[0], signature)]
    for node, later in zip(trace.nodes, needed[1:]):
        layers = [node.function] if node.is_layer else [owned.layer for owned in node.owned]
        call = _Call(node, later, node.modes if trace.switched else ())
        function: Any = functools.partial(call, *layers)
        function.__name__ = node.name
        # The called function tells whether the entry draws random numbers.
        function.stands_for = node.function
        # An entry is recomputed as a layer would be.
        function.counts_as_layer = True
        functions.append(function)
    return [*functions, _Outputs(trace)]


def _needed_after(trace: Capture) -> list[frozenset[str]]:
    """Returns the names of the values that are needed after the inputs, and after each node."""
    needed = {LOOK, *(name_of(value) for value in trace.output_values)}
    after = [frozenset(needed)]
    for node in reversed(trace.nodes):
        needed |= {name_of(value) for value in node.uses}
        after.append(frozenset(needed))
    return after[::-1]


class _Inputs:
    """Makes the first values from the model's inputs."""

    __name__ = "inputs"

    def __init__(self, trace: Capture, needed: frozenset[str], signature: Signature) -> None:
        self._signature = signature
        self._names = [name_of(value) for value in trace.input_values]
        self._needed = needed

    def __call__(self, inputs: Nest) -> Nest:
        pairs = zip(self._names, tensors_of(inputs))
        values = {name: tensor for name, tensor in pairs if name in self._needed}
        return {LOOK: self._signature, **values}


class _Outputs:
    """Makes the model's outputs from the last values."""

    __name__ = "outputs"

    def __init__(self, trace: Capture) -> None:
        self._fill = _fill(trace.outputs)

    def __call__(self, values: Values) -> Nest:
        return self._fill(values)


class _Call:
    """Makes the call of a node."""

    def __init__(self, node: Node, needed: frozenset[str], modes: Sequence[Mode]) -> None:
        self._function = node.function
        self._args = [_fill(arg) for arg in node.args]
        self._named = {name: _fill(arg) for name, arg in node.named.items()}
        self._outputs = [name if name in needed else None for name in map(name_of, node.outputs)]
        self._written = [
            (name_of(old), name_of(new)) for old, new in node.written if name_of(new) in needed
        ]
        self._needed = needed
        self._has_context = node.casts is not None or not node.grad
        self._grad, self._casts = node.grad, node.casts or nullcontext
        self._modes = modes

    def __call__(self, *arguments: Any) -> Nest:
        values: Values = arguments[-1]
        for mode in self._modes:
            mode.put_back()
        args, named, left = [], {}, {}
        for fill in self._args:
            args.append(fill(values))
        for name, fill in self._named.items():
            named[name] = fill(values)
        if self._has_context:
            with nullcontext() if self._grad else paddle.no_grad(), self._casts():
                output = self._function(*args, **named)
        else:
            output = self._function(*args, **named)
        for name, value in values.items():
            if name in self._needed:
                left[name] = value
        outputs = (output,) if isinstance(output, paddle.Tensor) else tensors_of(output)
        for made, tensor in zip(self._outputs, outputs):
            if made is not None:
                left[made] = tensor
        for old, new in self._written:
            left[new] = values[old]
        return left


def _fill(value: Nest) -> _Fill:
    """Returns a function that fills values into an argument with references to values."""
    if isinstance(value, Ref):
        return operator.itemgetter(name_of(value.value))
    if isinstance(value, Owned):
        layer, attribute = value.layer, value.name
        return lambda values: getattr(layer, attribute)
    if isinstance(value, (tuple, list)):
        kind, items = type(value), [_fill(item) for item in value]
        if hasattr(kind, "_fields"):
            return lambda values: kind(*(item(values) for item in items))
        return lambda values: kind(item(values) for item in items)
    if isinstance(value, slice):
        ends = [_fill(end) for end in (value.start, value.stop, value.step)]
        return lambda values: slice(*(end(values) for end in ends))
    if isinstance(value, dict):
        parts = {key: _fill(item) for key, item in value.items()}
        return lambda values: {key: item(values) for key, item in parts.items()}
    return lambda values: value
