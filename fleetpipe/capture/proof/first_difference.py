"""Finds the first node whose captured call returns other values than the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.plain_model import Keyed
from fleetpipe.capture.running.replay import name_of
from fleetpipe.capture.running.variants import Form
from fleetpipe.capture.tracing.capturing import Capturing
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.capture.tracing.value import Node
from fleetpipe.capture.tracing.walk import NodeCall, Unopened, arguments_of
from fleetpipe.compare.differences import largest_gap
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.nest import map_tensors, tensors_of
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.operations import intercepting
from fleetpipe.paddle_api.tensor import has_memory


class _Recorded(Keyed):
    """Records the outputs of each node of the untouched model."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.outputs: list[list[Tensor]] = []

    def node(self, call: NodeCall) -> Any:
        """Calls a node under its key, if there are keys."""
        output = super().node(call)
        made = list(tensors_of(output))
        self.outputs.append([t.clone() if has_memory(t) else t for t in made])
        return output


def first_difference(
    capturing: Capturing, form: Form, inputs: Nest, keys: random_keys.Keys | None
) -> Node | None:
    """Returns the first node whose captured call returns other values than the model's.

    Both run forward in the current mode of the model.

    Args:
        capturing: The model.
        form: Its captured run.
        inputs: One micro-batch.
        keys: The random keys of both; None if nothing is drawn.
    """
    model, unopened = capturing.model, capturing.unopened
    with paddle.no_grad(), random_keys.under_keys(keys, SoleGroup()):
        with state_kept(model):
            expected = _of_model(model, unopened, inputs, keys)
        with state_kept(model):
            return _first(form, inputs, keys, expected)


def _of_model(
    model: Layer, unopened: Unopened, inputs: Nest, keys: random_keys.Keys | None
) -> list[list[Tensor]]:
    """Runs the untouched model, and returns the outputs of each node."""
    args, named = arguments_of(map_tensors(lambda tensor: tensor.clone(), inputs))
    recorded = _Recorded(model, unopened, keys)
    with intercepting(recorded):
        model(*args, **named)
    return recorded.outputs


def _first(
    form: Form, inputs: Nest, keys: random_keys.Keys | None, right: Sequence[list[Tensor]]
) -> Node | None:
    """Runs the captured calls, and returns the first whose outputs differ."""
    values: Nest = form.functions[0](inputs)
    calls = zip(form.functions[1:-1], form.trace.nodes, right)
    for number, (function, node, expected) in enumerate(calls):
        if keys is not None:
            keys.enter(number + 1)
        values = function(values)
        outputs = [values.get(name_of(value)) for value in node.outputs]
        if any(
            one is not None and has_memory(one) and largest_gap(one, other)
            for one, other in zip(outputs, expected)
        ):
            return node
    return None
