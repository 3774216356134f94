"""Runs an untouched model and its captured stages on one batch, and compares them bit by bit.

Both get other numbers than those that the capture saw, so that what it took for a constant, and is
none, shows. Where the model draws random numbers, both draw them under the same keys.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from fleetpipe import schedules
from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.cutting.costs import state_of
from fleetpipe.capture.difference import first_difference, gap
from fleetpipe.capture.repeated import moved
from fleetpipe.capture.running.forms import Forms
from fleetpipe.capture.running.stages import CapturedStages
from fleetpipe.capture.running.untouched import called
from fleetpipe.capture.tracing.capturing import Capturing, in_mode
from fleetpipe.capture.tracing.tracer import state_kept
from fleetpipe.capture.tracing.value import Node
from fleetpipe.capture.tracing.walk import Unopened, arguments_of
from fleetpipe.dygraph import has_memory, random_keys, state_slots
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.losses import Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.stage import Batch, DygraphStage
from fleetpipe.dygraph.gradients import drop_gradients
from fleetpipe.dygraph.nest import differentiable, mapped, tensors_of
from fleetpipe.engine.stage import Values
from fleetpipe.errors import CaptureError
from fleetpipe.schedules.action import GlobalMicroBatch
from fleetpipe.transport import SoleGroup

#: A gradient is off by the order of a sum where it is off by less of its largest value.
_ROUNDING = 1e-5

_ALONE = GlobalMicroBatch(0)


class Proof(NamedTuple):
    """What was compared, all in bits but for gradients that are ``rounded``.

    Attributes:
        outputs: The number of tensors that the model returns, in training and in evaluation.
        gradients: The number of parameters with a gradient.
        buffers: The number of buffers, running statistics among them.
        rounded: By parameter, the largest difference over the largest value, where a gradient is
            off by the order of a sum.
        summed: The values and parameters whose gradients are added up stage by stage.
        keyed: Whether the model drew random numbers, under keys.
    """

    outputs: int
    gradients: int
    buffers: int
    rounded: dict[str, float]
    summed: tuple[str, ...]
    keyed: bool

    def __str__(self) -> str:
        text = (
            f"equal in bits: {self.outputs} outputs, {self.gradients - len(self.rounded)} "
            f"gradients, {self.buffers} buffers"
        )
        if self.rounded:
            largest = max(self.rounded.values())
            text += (
                f"; {len(self.rounded)} gradients to rounding (at most {largest:.1e}), where "
                f"that of {', '.join(self.summed) or 'a value'} is added up stage by stage"
            )
        return text + (", under the same random keys" if self.keyed else "")


class _Seen(NamedTuple):
    """What came of a run: tensors by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


#: Runs the model on inputs, and hands the output to what computes a loss.
_Run = Callable[[Nest, Callable[[Nest], Tensor]], Nest]


def prove(capturing: Capturing, forms: Forms, stages: int) -> Proof:
    """Compares a model with its captured stages; leaves parameters, buffers and random states.

    Gradients are cleared.

    Args:
        capturing: The model, with an example of its inputs.
        forms: Its runs, cut.
        stages: The number of stages.

    Raises:
        CaptureError: They differ; it names the first layer that does.
    """
    model, inputs = capturing.model, mapped(moved, capturing.example)
    with random_keys.random_states_kept():
        keys = random_keys.Keys(1) if _draws(model, inputs) else None
        found = []
        for training in (True, False):
            plain = _plain(model, capturing.unopened, keys)
            captured = _captured(forms, stages, training, keys)
            with in_mode(model, training):
                theirs = _seen(model, inputs, plain, training)
                ours = _seen(model, inputs, captured, training)
                culprit = _first_difference(ours, theirs)
                if culprit is not None:
                    form = forms.example(training)
                    node = first_difference(capturing, form, _copied(inputs), keys)
                    raise _refuted(culprit, node)
            found.append((ours, theirs))
    return _proof(found, _summed(forms), keys is not None)


def _copied(inputs: Nest) -> Nest:
    """Returns inputs into which a forward may write."""
    return mapped(lambda tensor: tensor.clone(), inputs)


def _draws(model: Layer, inputs: Nest) -> bool:
    """Whether a model draws random numbers in training."""
    args, named = arguments_of(_copied(inputs))
    paddle.seed(1)
    untouched = paddle.rand([1])
    paddle.seed(1)
    with state_kept(model), in_mode(model, True), paddle.no_grad():
        # Its own states are put back within: what is drawn next tells.
        model(*args, **named)
        after = paddle.rand([1])
    return bool((after != untouched).item())


def _plain(model: Layer, unopened: Unopened, keys: random_keys.Keys | None) -> _Run:
    """Returns what runs the model itself."""

    def run(inputs: Nest, loss: Callable[[Nest], Tensor]) -> Nest:
        output = called(model, inputs, unopened, keys, _ALONE)
        _backward(loss(output))
        return output

    return run


def _captured(forms: Forms, stages: int, training: bool, keys: random_keys.Keys | None) -> _Run:
    """Returns what runs the captured stages, one after another, and back."""
    parts = CapturedStages(forms, lambda: training)
    split = SplitBackward(schedules.build("1F1B", ranks=stages, micro_batches=1), lambda _: {})
    stage = DygraphStage(parts.function, stages, split, parts)
    edges = parts.edges(training)

    def run(inputs: Nest, loss: Callable[[Nest], Tensor]) -> Nest:
        outputs: list[Nest] = []
        computed: list[Tensor] = []

        def kept(output: Nest, _: Nest) -> Tensor:
            outputs.append(output)
            computed.append(loss(output))
            return computed[0]

        losses = Losses([kept], [Fraction(1)])
        stage.begin(Batch(MicroBatches([inputs], [None]), losses))
        values: Values = {}
        with random_keys.keyed(keys, SoleGroup()):
            for number in range(stages):
                into = {edge: values[edge] for edge in edges if edge.target == number}
                values = {**values, **stage.forward(number, _ALONE, into)}
        grads: Values = {}
        for number in reversed(range(0 if computed[0].stop_gradient else stages)):
            out = {edge: grads[edge] for edge in edges if edge.source == number}
            grads = {**grads, **stage.backward(number, _ALONE, out)}
        stage.end()
        return outputs[0]

    return run


def _seen(model: Layer, inputs: Nest, run: _Run, training: bool) -> _Seen:
    """Runs a model once and returns what came of it; leaves no trace."""
    parameters = dict(model.named_parameters())
    drop_gradients(parameters.values())
    with state_kept(model), paddle.set_grad_enabled(training):
        output = run(_copied(inputs), _projected)
        outputs = {f"output {i}": t.detach() for i, t in enumerate(tensors_of(output))}
        buffers = {
            f"{path}.{name}" if path else name: holder[name].clone()
            for path, layer in model.named_sublayers(include_self=True)
            for holder, name in state_slots(layer)
            if has_memory(holder[name])
        }
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    drop_gradients(parameters.values())
    return _Seen(outputs, gradients, buffers)


def _projected(output: Nest) -> Tensor:
    """Returns a number on which every number that a model returns has another influence."""
    numbers = np.random.default_rng(0)
    total = paddle.zeros([])
    for tensor in differentiable(output):
        weights = paddle.to_tensor(numbers.uniform(0.5, 1.5, tensor.shape).astype("float32"))
        total = total + (tensor.astype("float32") * weights).sum()
    return total


def _backward(loss: Tensor) -> None:
    if not loss.stop_gradient:
        loss.backward()


def _first_difference(ours: _Seen, theirs: _Seen) -> str | None:
    """Names the first quantity that is off by more than the order of a sum."""
    for kind, one, other in zip(_Seen._fields, ours, theirs):
        for name in {**other, **one}:
            off = gap(one.get(name), other.get(name))
            if off > (_ROUNDING if kind == "gradients" else 0.0):
                return name if kind == "outputs" else f"{kind.removesuffix('s')} of {name}"
    return None


def _refuted(what: str, node: Node | None) -> CaptureError:
    return CaptureError(
        f"the captured stages do not do what the model does: the {what} differs",
        where="in no node's output: between stages, in backward, or in a buffer"
        if node is None
        else f"first in {node.name}, {node.place}",
        expected="the bits of the untouched model, on a batch that looks like the example",
        cause="the forward does something that is no operation of Paddle's on tensors: it keeps "
        "something from call to call, or computes outside of Paddle",
        fix="put that code into a sublayer, or its layer's class into no_split",
    )


def _proof(found: list[tuple[_Seen, _Seen]], summed: tuple[str, ...], keyed: bool) -> Proof:
    ours, theirs = found[0]
    gaps = {name: gap(grad, theirs.gradients[name]) for name, grad in ours.gradients.items()}
    return Proof(
        sum(len(seen.outputs) for seen, _ in found),
        len(gaps),
        len(ours.buffers),
        {name: off for name, off in gaps.items() if off},
        summed,
        keyed,
    )


def _summed(forms: Forms) -> tuple[str, ...]:
    """Names the values and parameters whose gradients are sums in another order than the model's.

    Each stage adds up its own uses first. Of a value two uses make one sum, whichever comes first;
    that of a parameter goes on from micro-batch to micro-batch.
    """
    form = forms.example(training=True)
    names = {id(p): name for name, p in forms.capturing.model.named_parameters()}
    weights: dict[str, set[int]] = {}
    values: dict[str, list[int]] = {}
    for stage in range(len(form.starts) + 1):
        for node in form.nodes(stage):
            for tensor in state_of(node):
                if not tensor.stop_gradient and id(tensor) in names:
                    weights.setdefault(names[id(tensor)], set()).add(stage)
            for value in node.uses:
                maker = form.trace.maker(value)
                if maker is not None and form.trace.likes[value].dtype.startswith(("f", "b")):
                    values.setdefault(form.trace.nodes[maker].name, []).append(stage)
    return (
        *(name for name, stages in weights.items() if len(stages) > 1),
        *(name for name, at in values.items() if len(at) > 2 and len({*at}) > 1),
    )
