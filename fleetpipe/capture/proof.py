"""Runs an untouched model and its captured stages on one batch, and compares them bit by bit.

Both get other numbers than those that the capture saw, so that what it took for a constant, and is
none, shows. Where the model draws random numbers, both draw them under the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from fleetpipe import schedules
from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.forms import Forms
from fleetpipe.capture.running.stages import CapturedStages
from fleetpipe.capture.running.untouched import called
from fleetpipe.capture.tracing.capturing import Capturing, in_mode
from fleetpipe.capture.tracing.tracer import state_kept
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
    model, inputs = capturing.model, mapped(_moved, capturing.example)
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
                    layer = _first_layer(model, inputs, plain, captured)
                    raise _refuted(culprit, layer, forms)
            found.append((ours, theirs))
    return _proof(found, _summed(forms), keys is not None)


def _moved(tensor: Tensor) -> Tensor:
    """Returns other numbers of the same kind: rows and columns in another order."""
    moved = tensor.detach().roll(1) if tensor.ndim else tensor.detach()
    return moved * 0.75 if moved.is_floating_point() else moved


def _draws(model: Layer, inputs: Nest) -> bool:
    """Whether a model draws random numbers in training."""
    args, named = arguments_of(inputs)
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
        output = run(inputs, _projected)
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
            gap = _gap(one.get(name), other.get(name))
            if gap > (_ROUNDING if kind == "gradients" else 0.0):
                return name if kind == "outputs" else f"{kind.removesuffix('s')} of {name}"
    return None


def _gap(one: Tensor | None, other: Tensor | None) -> float:
    """Returns the largest difference over the largest value; 0 where the bits are the same."""
    if one is None or other is None or list(one.shape) != list(other.shape):
        return float("inf")
    if one.dtype != other.dtype:
        return float("inf")
    if one.dtype == paddle.bfloat16:
        # NumPy has none.
        one, other = one.astype("float32"), other.astype("float32")
    ours, theirs = one.numpy(), other.numpy()
    if ours.tobytes() == theirs.tobytes():
        return 0.0
    gaps = np.abs(ours.astype("float64") - theirs.astype("float64"))
    largest = float(np.abs(theirs.astype("float64")).max())
    relative = float(gaps.max()) / largest if largest else float("inf")
    return relative if relative == relative else float("inf")


def _first_layer(model: Layer, inputs: Nest, plain: _Run, captured: _Run) -> str | None:
    """Names the first node of the captured run whose output the untouched model has not."""
    outputs = []
    for run in (plain, captured):
        with state_kept(model), _recorded(model) as calls, paddle.no_grad():
            run(inputs, lambda output: paddle.zeros([]))
        outputs.append(calls)
    theirs, ours = outputs
    for call, tensors in ours.items():
        others = theirs.get(call)
        if others is None or any(_gap(*pair) for pair in zip(tensors, others)):
            return call
    return None


@contextmanager
def _recorded(model: Layer) -> Iterator[dict[str, list[Tensor]]]:
    """Within it what the layers without sublayers return is kept, by path and number of call."""
    calls: dict[str, list[Tensor]] = {}
    removers = []
    for path, layer in model.named_sublayers():
        if layer._sub_layers:
            continue

        def note(_: Layer, __: Nest, output: Nest, path: str = path) -> None:
            count = sum(name.split(", ")[0] == path for name in calls)
            calls[f"{path}, call {count + 1}"] = [t.clone() for t in tensors_of(output)]

        removers.append(layer.register_forward_post_hook(note))
    try:
        yield calls
    finally:
        for remover in removers:
            remover.remove()


def _refuted(what: str, layer: str | None, forms: Forms) -> CaptureError:
    return CaptureError(
        f"the captured stages do not do what the model does: the {what} differs",
        where=f"first in {layer}" if layer else "in no layer's output: in glue, or in backward",
        expected="the bits of the untouched model, on a batch that looks like the example",
        cause="the forward does something that is no operation of Paddle's on tensors: it keeps "
        "something from call to call, or computes outside of Paddle",
        fix="put that code into a sublayer, or its layer's class into no_split",
    )


def _proof(found: list[tuple[_Seen, _Seen]], summed: tuple[str, ...], keyed: bool) -> Proof:
    ours, theirs = found[0]
    gaps = {name: _gap(grad, theirs.gradients[name]) for name, grad in ours.gradients.items()}
    return Proof(
        sum(len(seen.outputs) for seen, _ in found),
        len(gaps),
        len(ours.buffers),
        {name: gap for name, gap in gaps.items() if gap},
        summed,
        keyed,
    )


def _summed(forms: Forms) -> tuple[str, ...]:
    """Names what has three uses or more, in several stages: parts of its gradient are summed."""
    form = forms.example(training=True)
    uses: dict[str, list[int]] = {}
    for stage in range(len(form.starts) + 1):
        for node in form.nodes(stage):
            for owned in node.owned:
                uses.setdefault(owned.path, []).append(stage)
            for value in node.uses:
                maker = form.trace.maker(value)
                if maker is not None and form.trace.likes[value].dtype.startswith(("f", "b")):
                    uses.setdefault(form.trace.nodes[maker].name, []).append(stage)
    return tuple(name for name, at in uses.items() if len(at) > 2 and len({*at}) > 1)
