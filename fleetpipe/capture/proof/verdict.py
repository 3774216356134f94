"""Builds the errors for stages that train otherwise than the model, with the first such layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.cutting.node_meter import state_of
from fleetpipe.capture.proof.training import Calls, Course, Moment, TrainedStep
from fleetpipe.capture.running.plain_model import Keyed
from fleetpipe.capture.running.replay import name_of
from fleetpipe.capture.running.variants import Form, Forms
from fleetpipe.capture.tracing.capturing import Capturing
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.capture.tracing.place import forward_place
from fleetpipe.capture.tracing.value import Node
from fleetpipe.capture.tracing.walk import NodeCall, arguments_of
from fleetpipe.compare.differences import same_bits
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.nest import copy_tensors, tensors_of
from fleetpipe.errors import CaptureError
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.operations import intercepting
from fleetpipe.paddle_api.tensor import has_memory

OUTSIDE_OF_PADDLE = (
    "the forward does something that is no operation of Paddle's on tensors: it keeps something "
    "from call to call, or computes outside of Paddle"
)
_INTO_A_SUBLAYER = (
    "put that code into a sublayer, or its layer's class into no_split; where it is in one, "
    "keep what it counts in a buffer, written by set_value or paddle.assign"
)


def refutation(
    capturing: Capturing,
    forms: Forms,
    moment: Moment,
    differing: Sequence[str],
    course: Course,
    keys_of: Callable[[TrainedStep], random_keys.Keys | None],
) -> CaptureError:
    """Returns the error for a moment that differs.

    Args:
        capturing: The model, in the state of that moment.
        forms: Its captured runs.
        moment: The moment of the stages' training.
        differing: The names of the tensors that differ.
        course: The course of the training.
        keys_of: Returns the random keys of a step; None if nothing is drawn.
    """
    training = moment.step < len(course.steps)
    form = forms.example(training)
    node: Node | None = None
    if moment.quantity == "output":
        inputs = _inputs_of(differing[0], moment, course)
        form = forms.of(capturing.look_of(inputs), training)
        keys = keys_of(course.steps[moment.step]) if training else None
        node = first_difference(capturing, form, copy_tensors(inputs), keys)
    names = [re.sub("^the mode of ", "", name) for name in differing]
    # Backward comes to the last node first; what is written, the first one spoils.
    backwards = moment.quantity == "gradient"
    node = node or node_of(form, capturing.model, names, backwards)
    where = f"{node.name}, {node.place}" if node else forward_place(capturing.model)
    schedule = course.steps[moment.step].schedule.name if training else "evaluation"
    kind = {"output": "output ", "gradient": "gradient of "}.get(moment.quantity, "")
    return CaptureError(
        "the captured stages do not do what the model does: "
        f"{kind}{differing[0]} differs in step {moment.step}, {schedule}",
        where=f"first in {where}{_written_text(form)}",
        expected="the bits of the untouched model, trained by a plain loop",
        cause=OUTSIDE_OF_PADDLE,
        fix=_INTO_A_SUBLAYER,
    )


def unequal_hooks(model: Layer, calls: Calls, expected: Calls) -> CaptureError:
    """Returns the error for hooks that the stages call more or less often than the model."""
    path = next(path for path in [*expected, *calls] if calls[path] != expected[path])
    return CaptureError(
        f"the captured stages call the hooks of {path} "
        f"{calls[path]} times, and the model calls them {expected[path]} times",
        where=forward_place(dict(model.named_sublayers())[path]),
        cause="the layer is called in another way than by its name in the model",
        fix="put the hook on a sublayer, or the layer's class into no_split",
    )


def _inputs_of(name: str, moment: Moment, course: Course) -> Nest:
    """Returns the inputs of an output; the end of its name is their number."""
    number = int(name.rpartition(" ")[2])
    if moment.step == len(course.steps):
        return course.evaluations[number]
    return course.steps[moment.step].micro_batches[number]


def node_of(form: Form, model: Layer, names: Sequence[str], backwards: bool) -> Node | None:
    """Returns the first node, or the last, that uses one of these parameters or buffers."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {id(state[name]) for name in names if name in state}
    nodes = reversed(form.trace.nodes) if backwards else iter(form.trace.nodes)
    for node in nodes:
        if not tensors.isdisjoint(map(id, state_of(node))):
            return node
        if node.is_layer and node.scopes[-1].path in names:
            return node
    return None


def _written_text(form: Form) -> str:
    """Returns a text that names a tensor that the forward writes, since order matters there."""
    for node in form.trace.nodes:
        for name in node.state & form.trace.changed.keys():
            return f"; the forward writes into {name}, which {node.name} uses, {node.place}"
    return ""


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
    model, (args, named) = capturing.model, arguments_of(copy_tensors(inputs))
    recorded = _Recorded(model, capturing.unopened, keys)
    with paddle.no_grad(), random_keys.under_keys(keys, SoleGroup()):
        with state_kept(model), intercepting(recorded):
            model(*args, **named)
        with state_kept(model):
            return _first(form, inputs, keys, recorded.outputs)


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
            one is not None and has_memory(one) and not same_bits(one, other)
            for one, other in zip(outputs, expected)
        ):
            return node
    return None
