"""What the nodes of a capture cost: seconds forward and backward, bytes held and received."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.memory import lent
from fleetpipe.capture.running.replay import entries
from fleetpipe.capture.tracing.capturing import Capturing, in_mode
from fleetpipe.capture.tracing.signature import signature_of
from fleetpipe.capture.tracing.tracer import state_kept
from fleetpipe.capture.tracing.value import Node, Trace
from fleetpipe.dygraph._paddle import allocated_bytes
from fleetpipe.dygraph.gradients import drop_gradients
from fleetpipe.dygraph.nest import differentiable, leaf_like, mapped

#: Runs of each node; the fastest counts.
RUNS = 3


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
    sizes = parameter_bytes(trace)
    costs = []
    with state_kept(model), in_mode(model, training=True):
        values: Nest = functions[0](capturing.example)
        for function, node, parameters in zip(functions[1:-1], trace.nodes, sizes):
            values = mapped(leaf_like, values)
            tensors = _state_of(node)
            runs = []
            with lent(tensors):
                for _ in range(RUNS):
                    output, *run = _run(function, values)
                    runs.append(run)
                drop_gradients(tensors)
            forward, backward, held = (min(found) for found in zip(*runs))
            costs.append(NodeCost(forward, backward, int(held), parameters))
            values = output
    return costs


def _run(function: object, values: Nest) -> tuple[Nest, float, float, float]:
    """Runs a node forward and backward; returns its output, both times and the bytes it held."""
    assert callable(function)
    before = allocated_bytes()
    begin = time.perf_counter()
    output = function(values)
    forward = time.perf_counter() - begin
    held = max(allocated_bytes() - before, 0)
    given = {id(tensor) for tensor in differentiable(values)}
    made: list[Tensor] = [t for t in differentiable(output) if id(t) not in given]
    ones = [paddle.ones_like(tensor) for tensor in made]
    begin = time.perf_counter()
    if made:
        paddle.autograd.backward(made, ones)
    return output, forward, time.perf_counter() - begin, held


def _state_of(node: Node) -> list[Tensor]:
    """Returns the parameters and buffers that a node has or takes."""
    layer: Layer = node.function
    tensors = list(layer.state_dict().values()) if node.is_layer else []
    return tensors + [getattr(owned.layer, owned.name) for owned in node.owned]


def parameter_bytes(trace: Trace) -> list[int]:
    """Returns, for each node, the bytes of the parameters and buffers that none before it uses."""
    seen: set[int] = set()
    sizes = []
    for node in trace.nodes:
        new = {id(tensor): tensor for tensor in _state_of(node) if id(tensor) not in seen}
        seen.update(new)
        sizes.append(sum(4 * math.prod(tensor.shape) for tensor in new.values()))
    return sizes


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
