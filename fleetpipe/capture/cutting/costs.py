"""What the nodes of a capture cost: seconds forward and backward, bytes held and received."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.memory import lent
from fleetpipe.capture.running.replay import entries
from fleetpipe.capture.tracing._paddle import Function
from fleetpipe.capture.tracing.capturing import Capturing, in_mode
from fleetpipe.capture.tracing.kept import state_kept
from fleetpipe.capture.tracing.signature import signature_of
from fleetpipe.capture.tracing.value import Node, Trace
from fleetpipe.dygraph._paddle import allocated_bytes
from fleetpipe.dygraph.gradients import drop_gradients
from fleetpipe.dygraph.nest import differentiable, leaf_like, mapped
from fleetpipe.dygraph.observe.layer_meter import first_uses, tensor_bytes

#: Runs of all nodes; the fastest of each node counts.
RUNS = 5


class NodeCost(NamedTuple):
    """What a node costs, for one micro-batch.

    Attributes:
        forward: Seconds of its forward.
        backward: Seconds of its backward.
        held: Bytes that stay allocated from forward to backward.
        parameters: Bytes of the parameters and buffers that no node before it uses.
    """

    forward: float
    backward: float
    held: int
    parameters: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def measured(capturing: Capturing, trace: Trace) -> list[NodeCost]:
    """Measures each node by itself, on the example; leaves the model as it was.

    Args:
        capturing: The model.
        trace: The run of its forward in training.
    """
    look = signature_of(capturing.example)
    functions = entries(trace, look)
    model = capturing.model
    with state_kept(model), in_mode(model, training=True):
        # Whole runs one after another: what slows a node seldom does so in each.
        passes = [_pass(capturing, trace, functions) for _ in range(RUNS)]
    return [
        NodeCost(min(forward), min(backward), int(min(held)), parameters)
        for (forward, backward, held), parameters in zip(
            (zip(*runs) for runs in zip(*passes)), parameter_bytes(trace)
        )
    ]


def _pass(
    capturing: Capturing, trace: Trace, functions: Sequence[Function]
) -> list[tuple[float, float, float]]:
    """Runs all nodes; returns, for each, both times and the bytes it held."""
    runs: list[tuple[float, float, float]] = []
    values: Nest = functions[0](capturing.example)
    for function, node in zip(functions[1:-1], trace.nodes):
        values = mapped(leaf_like, values)
        tensors = state_of(node)
        with lent(tensors):
            # The first makes room for gradients, which stays from micro-batch to micro-batch.
            _run(function, values)
            values, *run = _run(function, mapped(leaf_like, values))
            drop_gradients(tensors)
        forward, backward, held = run
        runs.append((forward, backward, held))
    return runs


def _run(function: Function, values: Nest) -> tuple[Nest, float, float, float]:
    """Runs a node forward and backward; returns its output, both times and the bytes it held."""
    before = allocated_bytes()
    begin = _now()
    output = function(values)
    forward = _now() - begin
    held = max(allocated_bytes() - before, 0)
    given = {id(tensor) for tensor in differentiable(values)}
    made: list[Tensor] = [t for t in differentiable(output) if id(t) not in given]
    ones = [paddle.ones_like(tensor) for tensor in made]
    begin = _now()
    if made:
        paddle.autograd.backward(made, ones)
    return output, forward, _now() - begin, held


def _now() -> float:
    """Returns the seconds that this thread has had a processor: other load does not count.

    Where kernels run on a GPU it is the clock, once they are done.
    """
    if not paddle.device.is_compiled_with_cuda():
        return time.thread_time()
    paddle.device.synchronize()
    return time.perf_counter()


def state_of(node: Node) -> list[Tensor]:
    """Returns the parameters and buffers that a node has or takes."""
    layer: Layer = node.function
    tensors = [*layer.parameters(), *layer.buffers()] if node.is_layer else []
    return tensors + [getattr(owned.layer, owned.name) for owned in node.owned]


def parameter_bytes(trace: Trace) -> list[int]:
    """Returns, for each node, the bytes of the parameters and buffers that none before it uses."""
    return [sum(map(tensor_bytes, new)) for new in first_uses(map(state_of, trace.nodes))]


def received(trace: Trace, start: int) -> Sequence[tuple[int, int]]:
    """Returns what a stage that begins at a node receives, by where it ends.

    Args:
        trace: The run.
        start: The first node of the stage.

    Returns:
        For each end from ``start`` to the number of nodes: the bytes of the values that the nodes
        before it take of other stages, and their number.
    """
    seen: set[int] = set()
    total = 0
    found = [(0, 0)]
    inputs = set(trace.input_values)
    for number in range(start, len(trace.nodes)):
        for value in trace.nodes[number].uses - seen:
            maker = trace.maker(value)
            outside = (value in inputs and start > 0) or (maker is not None and maker < start)
            if outside:
                seen.add(value)
                total += trace.likes[value].nbytes
        found.append((total, len(seen)))
    return found
