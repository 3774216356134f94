"""Measures the costs of a capture's nodes, with the meter of ``model.profile``."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.memory import lent
from fleetpipe.capture.running.replay import entries
from fleetpipe.capture.tracing.capturing import Capturing, in_mode
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.capture.tracing.signature import PLAIN
from fleetpipe.capture.tracing.value import Capture, Node, Owned, Ref, arguments, like
from fleetpipe.dygraph.gradients import cause_of_backward, drop_gradients
from fleetpipe.dygraph.observe import layer_meter
from fleetpipe.dygraph.observe.profile import TYPICAL
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import FULL_NAME
from fleetpipe.paddle_api.tensor import has_memory, tensor_bytes
from fleetpipe.profiling import Profile

#: Least and most runs of a node, of which the fastest counts.
LEAST_RUNS, MOST_RUNS = 5, 20

#: Most nodes that are run so often of those that do the same; of these the median counts.
MOST_ALIKE = 5

#: Seconds of a processor after which no more runs begin than the least.
SECONDS = 1.0


def measure_nodes(capturing: Capturing, trace: Capture, places: Iterable[int]) -> Profile:
    """Measures each node by itself on the example, and restores the model.

    Gradients are cleared.

    Args:
        capturing: The model.
        trace: The run of its forward in training.
        places: The nodes with which a stage may begin, without the first.

    Returns:
        The costs of inputs, nodes and outputs. Equal nodes have equal times.
    """
    model, functions = capturing.model, entries(trace, capturing.look)
    names = ["inputs", *(node.name for node in trace.nodes), "outputs"]
    uses = [[], *map(state_of, trace.nodes), []]
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for number, kind in enumerate(("inputs", *(_kind(trace, n) for n in trace.nodes), "outputs")):
        alike[kind].append(number)
    meter = layer_meter.LayerMeter(
        len(functions),
        lambda number, value: ({number: functions[number]}, value),
        lambda _: {},
        splits=False,
    )

    def run(number: int, value: Nest) -> Nest:
        borrowed = [tensor for tensor in uses[number] if not has_memory(tensor)]
        with lent(borrowed):
            try:
                output = meter.run_of(number)(value, None)
            except Exception as error:
                raise cause_of_backward(error)  # noqa: B904 (the error itself, or its cause)
            drop_gradients(borrowed)
        return output

    often = {number for numbers in alike.values() for number in numbers[:MOST_ALIKE]}
    inputs: dict[int, Nest] = {}
    with state_kept(model), in_mode(model, training=True), paddle.set_grad_enabled(True):
        begun, value = time.thread_time(), capturing.example
        for number in range(len(functions)):
            if number in often:
                inputs[number] = value
            value = run(number, value)
        # One run after another: what slows a node seldom does so in each.
        for count in range(1, MOST_RUNS):
            if count >= LEAST_RUNS and time.thread_time() - begun > SECONDS:
                break
            for number, value in inputs.items():
                run(number, value)
    drop_gradients(model.parameters())
    samples = [layer_meter.fastest(meter.samples[0, number]) for number in range(len(functions))]
    for numbers in alike.values():
        _share(samples, numbers)
    costs = layer_meter.layer_costs(
        names, samples, layer_meter.state_bytes(uses, dict(model.named_parameters()))
    )
    return Profile(tuple(costs), None, tuple(place + 1 for place in places), transfer=TYPICAL)


def _share(samples: list[layer_meter.Sample], numbers: Sequence[int]) -> None:
    """Gives each of some equal nodes the median times of the first ones, which ran most often."""
    part = [samples[number] for number in numbers[:MOST_ALIKE]]
    forward = statistics.median(one.forward for one in part)
    backward = statistics.median(one.backward for one in part)
    for number in numbers:
        samples[number] = samples[number]._replace(forward=forward, backward=backward)


def _kind(trace: Capture, node: Node) -> str:
    """Returns a text that is the same for nodes that compute the same with equal shapes."""

    def look(leaf: object) -> object:
        if isinstance(leaf, Ref):
            return trace.likes[leaf.value]
        if isinstance(leaf, Owned):
            return like(getattr(leaf.layer, leaf.name))
        return like(leaf) if isinstance(leaf, paddle.Tensor) else leaf

    layer: Layer = node.function
    plain = [
        (type(part), name, value)
        for part in (layer.sublayers(include_self=True) if node.is_layer else ())
        for name, value in vars(part).items()
        if isinstance(value, (*PLAIN, list, tuple)) and name != FULL_NAME
    ]
    called = "" if node.is_layer else getattr(node.function, "__name__", node.function)
    takes = [look(leaf) for leaf in arguments(node)]
    makes = [trace.likes[value] for value in node.outputs]
    return repr((called, plain, takes, makes, [like(tensor) for tensor in state_of(node)]))


def state_of(node: Node) -> list[Tensor]:
    """Returns the parameters and buffers that a node has or takes."""
    layer: Layer = node.function
    tensors = [*layer.parameters(), *layer.buffers()] if node.is_layer else []
    return tensors + [getattr(owned.layer, owned.name) for owned in node.owned]


def parameter_bytes(trace: Capture) -> list[int]:
    """Returns for each node the bytes of the state that no earlier node uses."""
    return [
        sum(map(tensor_bytes, new)) for new in layer_meter.first_uses(map(state_of, trace.nodes))
    ]
