"""Finds stages in which a pipeline adds gradients in another order than one graph of the model.

Autograd adds the gradients of a tensor up as they arrive. A stage that sends one tensor gets its
gradient as one sum, equal to that in one graph. A stage that sends several tensors gets all their
gradients at once, while in one graph they come one after another, with gradients from within the
stage in between. If three or more gradients meet in a tensor, the sum may differ in its last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetpipe.aliases import GradNode, Tensor
from fleetpipe.dygraph.backward.leaf import nodes_of, operands

#: The fields of a :class:`Meeting`.
Plain = tuple[int, tuple[int, ...], tuple[int, ...]]


class Meeting(NamedTuple):
    """A tensor of a stage, and the origins of the gradients that are added in it.

    Attributes:
        edges: The number of gradients from operations of the stage.
        outputs: The numbers of the stage's outputs that are this tensor.
        ways: The numbers of the outputs whose backward reaches this tensor.
    """

    edges: int
    outputs: tuple[int, ...]
    ways: tuple[int, ...]


class Crossing(NamedTuple):
    """The parts of a stage's graph in which the order of sums depends on other stages.

    Attributes:
        received: The received tensors that need a gradient.
        joined: The tensors and parameters that the backward of several outputs reaches and in which
            three gradients may meet; equal ones appear once.
    """

    received: tuple[Meeting, ...]
    joined: tuple[Meeting, ...]

    def plain(self) -> list[list[Plain]]:
        """Returns the crossing as lists and tuples, to send to other ranks."""
        return [[(part.edges, part.outputs, part.ways) for part in parts] for parts in self]

    @classmethod
    def from_plain(cls, parts: list[list[Plain]]) -> Crossing:
        """Builds a crossing from the result of :meth:`plain`."""
        return cls(*(tuple(Meeting(*part) for part in some) for some in parts))


def crossing_of(received: Sequence[Tensor], outputs: Sequence[Tensor]) -> Crossing:
    """Walks the graph of a stage whose backward has run, and returns its crossing.

    Args:
        received: The received tensors that need a gradient.
        outputs: The tensors that the stage sent, or its loss.
    """
    roots = [tensor.grad_fn for tensor in outputs]
    # Paddle never lets go of a node that Python has asked for: backward has emptied these.
    reach = [nodes_of([root], set()) for root in roots]
    below = [(node, other) for node in set().union(*reach) for other in operands(node)]
    edges = Counter(other for _, other in below)
    # The layers of a stage take a copy of what it received: there its gradients meet.
    copies = {other: node for node, other in below if node.name() == "AssignGradNode"}

    def meeting(node: GradNode, itself: Sequence[int]) -> Meeting:
        ways = tuple(index for index, nodes in enumerate(reach) if node in nodes)
        return Meeting(edges[node], tuple(itself), ways)

    meetings: set[Meeting] = set()
    for node in edges.keys() | set(roots):
        # Several outputs of one operation are different tensors.
        parts: dict[int, list[int]] = {}
        for index, tensor in enumerate(outputs):
            if tensor.grad_fn == node:
                parts.setdefault(id(tensor), []).append(index)
        meetings.update(meeting(node, itself) for itself in parts.values() or [[]])
    taken = [copies.get(leaf.grad_fn, leaf.grad_fn) for leaf in received]
    arrivals = [
        meeting(node, [i for i, root in enumerate(roots) if root == node]) for node in taken
    ]
    joined = (part for part in meetings if len(part.ways) > 1 and (part.outputs or part.edges > 2))
    return Crossing(tuple(arrivals), tuple(sorted(joined)))


def reordered(crossings: Mapping[int, Crossing]) -> list[int]:
    """Returns the stages that may add gradients in another order than one graph of the model.

    Args:
        crossings: The crossings of all stages of a chain, by stage.
    """
    stages = []
    # By output of the stage: how many gradients add up to its own in one graph of the model.
    sums: list[int] = []
    for stage in sorted(crossings, reverse=True):
        crossing, count = crossings[stage], sums or [1]
        outputs = 1 + max((i for parts in crossing for part in parts for i in part.ways), default=0)
        if outputs > len(count):
            # A captured model has edges to later stages too, whose gradients may all be sums.
            count = [2] * outputs
        if any(
            part.edges + sum(count[i] for i in part.outputs) > 2
            and sum(count[i] > 0 for i in part.ways) > 1
            for part in crossing.joined
        ):
            stages.append(stage)
        sums = [part.edges + sum(count[i] for i in part.outputs) for part in crossing.received]
    return stages[::-1]
