"""Makes the functions that a pipeline runs from the nodes of a capture; see `entry_functions`.

The functions are the entries of a list as a ``PipelineLayer`` has it. Each takes and returns a dict
of the values that later entries need. The first entry makes the dict from the model's inputs, the
last makes the model's outputs from the dict.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from fleetpipe.aliases import Nest
from fleetpipe.capture.tracing.signature import Signature
from fleetpipe.capture.tracing.value import Capture, Mode, Node, Ref, StateRef, ValueId
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.paddle_api import paddle

#: The values that later entries need, by name.
Values = Mapping[str, Nest]

#: A function that returns an argument of a call: its placeholders replaced by values.
_Filler = Callable[[Values], Any]

#: The names of two further items of a dict of values: the signature of the batch, and the text of
#: the first batch with this signature.
SIGNATURE, FIRST_BATCH = "signature", "first batch"


def value_name(value: ValueId) -> str:
    """Returns the name of a value in the dicts that a stage's functions, and stages, pass on."""
    return f"v{value}"


def entry_functions(trace: Capture, signature: Signature) -> list[Callable[[Nest], Nest]]:
    """Returns functions of one argument which, called one after another, repeat a captured run.

    The first takes the model's inputs; one for each node follows; the last makes the outputs. The
    function of a node that calls a layer, or takes parameters of layers, is a ``partial`` with
    these layers as arguments.

    Args:
        trace: The captured run.
        signature: The signature of its batch.
    """
    needed_after_inputs, *needed_after_nodes = _needed_after(trace)
    names = [value_name(value) for value in trace.input_values]

    def inputs(tensors: Nest) -> Nest:
        """Makes the dict of values from the model's inputs."""
        pairs = zip(names, tensors_of(tensors))
        values = {name: tensor for name, tensor in pairs if name in needed_after_inputs}
        return {SIGNATURE: signature, **values}

    fill_outputs = _make_filler(trace.outputs)

    def outputs(values: Nest) -> Nest:
        """Makes the model's outputs from the dict of values."""
        return fill_outputs(values)

    functions: list[Callable[[Nest], Nest]] = [inputs]
    for node, needed_later in zip(trace.nodes, needed_after_nodes):
        layers = [node.function] if node.is_layer else [ref.layer for ref in node.state_refs]
        call = _NodeFunction(node, needed_later, node.modes if trace.switched else ())
        function: Any = functools.partial(call, *layers)
        function.__name__ = node.name
        # The called function tells whether the entry draws random numbers.
        function.stands_for = node.function
        # An entry is recomputed as a layer would be.
        function.counts_as_layer = True
        functions.append(function)
    return [*functions, outputs]


def _needed_after(trace: Capture) -> list[frozenset[str]]:
    """Returns the names of the values that are needed after the inputs, and after each node."""
    needed = {SIGNATURE, *(value_name(value) for value in trace.output_values)}
    after = [frozenset(needed)]
    for node in reversed(trace.nodes):
        needed |= {value_name(value) for value in node.uses}
        after.append(frozenset(needed))
    return after[::-1]


class _NodeFunction:
    """Repeats the captured call of a node, and returns the values that later functions need.

    The last argument is the dict of values; the layers before come from a ``partial``.
    """

    def __init__(self, node: Node, needed: frozenset[str], modes: Sequence[Mode]) -> None:
        self._function = node.function
        self._args = [_make_filler(arg) for arg in node.args]
        self._named = {name: _make_filler(arg) for name, arg in node.named.items()}
        self._outputs = [name if name in needed else None for name in map(value_name, node.outputs)]
        self._written = [
            (value_name(old), value_name(new))
            for old, new in node.written
            if value_name(new) in needed
        ]
        self._needed = needed
        self._has_context = node.casts is not None or not node.grad
        self._grad, self._casts = node.grad, node.casts or nullcontext
        self._modes = modes

    def __call__(self, *arguments: Any) -> Nest:
        values: Values = arguments[-1]
        for mode in self._modes:
            mode.put_back()
        args, named, needed_values = [], {}, {}
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
                needed_values[name] = value
        outputs = (output,) if isinstance(output, paddle.Tensor) else tensors_of(output)
        for name_of_output, tensor in zip(self._outputs, outputs):
            if name_of_output is not None:
                needed_values[name_of_output] = tensor
        for old, new in self._written:
            needed_values[new] = values[old]
        return needed_values


def _make_filler(value: Nest) -> _Filler:
    """Returns a function that makes an argument of a captured call from the values of a batch.

    ``value`` is the argument as it was captured, nested, with placeholders for the values.
    """
    if isinstance(value, Ref):
        return operator.itemgetter(value_name(value.value))
    if isinstance(value, StateRef):
        layer, attribute = value.layer, value.name
        return lambda values: getattr(layer, attribute)
    if isinstance(value, (tuple, list)):
        kind, items = type(value), [_make_filler(item) for item in value]
        if hasattr(kind, "_fields"):
            return lambda values: kind(*(item(values) for item in items))
        return lambda values: kind(item(values) for item in items)
    if isinstance(value, slice):
        ends = [_make_filler(end) for end in (value.start, value.stop, value.step)]
        return lambda values: slice(*(end(values) for end in ends))
    if isinstance(value, dict):
        parts = {key: _make_filler(item) for key, item in value.items()}
        return lambda values: {key: item(values) for key, item in parts.items()}
    return lambda values: value
