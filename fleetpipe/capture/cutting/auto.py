"""``split_spec="auto"``: the cut whose slowest stage is fastest, by what the nodes were measured.

A stage takes as long as its nodes forward and backward, and as what it receives: each value comes
over an edge, and its gradient goes back. The cut is exact: no other between calls of sublayers has
a faster slowest stage under these figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from fleetpipe.aliases import Nest
from fleetpipe.capture.cutting.costs import NodeCost, received
from fleetpipe.capture.cutting.cuts import AtCall, Border, SplitPoint
from fleetpipe.capture.cutting.written import parted, spans
from fleetpipe.capture.tracing.value import Trace
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.partition import fastest

#: What a value costs between two processes of one host: on its way, and by its size.
SECONDS_PER_VALUE, SECONDS_PER_BYTE = 3e-5, 3e-10

#: A parameter, its gradient, and two moments of an optimizer.
COPIES = 4


class Choice(NamedTuple):
    """A cut that was chosen.

    Attributes:
        borders: Where it is.
        seconds: Of each stage, for one micro-batch.
        bound: What no cut into as many stages can be below: the mean of the stages, and the
            slowest node.
    """

    borders: tuple[Border, ...]
    seconds: tuple[float, ...]
    bound: float

    @property
    def bottleneck(self) -> float:
        """The seconds of the slowest stage."""
        return max(self.seconds)

    def __str__(self) -> str:
        stages = ", ".join(f"{1e3 * seconds:.3g}" for seconds in self.seconds)
        return (
            f"cut {', '.join(map(str, self.borders)) or 'nowhere'}: stages of {stages} ms; the "
            f"slowest {1e3 * self.bottleneck:.3g} ms, no cut below {1e3 * self.bound:.3g} ms"
        )


def places(training: Trace, evaluation: Trace) -> tuple[dict[int, Border], dict[int, str]]:
    """Returns the nodes with which a stage may begin, and why it may not with others.

    Args:
        training: The run of the forward in training.
        evaluation: That in evaluation.

    Returns:
        What names each place, and the reasons, by the number of the node.
    """
    written = spans((training, evaluation))
    found: dict[int, Border] = {}
    refused: dict[int, str] = {}
    for number in range(1, len(training.nodes)):
        border = _border(training, number)
        if border is None:
            refused[number] = "no call of a sublayer is beside it, to name the place"
        elif not _is_in(evaluation, border):
            refused[number] = "in evaluation the forward does not come here"
        elif name := parted(written, (number, border.start(evaluation))):
            refused[number] = f"{name!r} is used on both sides, and the forward writes into it"
        else:
            found[number] = border
    return found, refused


def _is_in(trace: Trace, border: Border) -> bool:
    try:
        return 0 < border.start(trace) < len(trace.nodes)
    except ConfigError:
        return False


def _border(trace: Trace, number: int) -> Border | None:
    """Returns what names the place before a node; None between two operations."""
    node, before = trace.nodes[number], trace.nodes[number - 1]
    if node.is_layer:
        path, call = node.scopes[-1]
        return AtCall(path, SplitPoint.BEGINNING, call)
    if before.is_layer:
        path, call = before.scopes[-1]
        return AtCall(path, SplitPoint.END, call)
    return None


def chosen(
    training: Trace,
    evaluation: Trace,
    costs: Sequence[NodeCost],
    stages: int,
    memory_limit: float | None = None,
) -> Choice:
    """Returns the cut whose slowest stage is fastest.

    Args:
        training: The run of the forward in training.
        evaluation: That in evaluation.
        costs: What each node of the former costs.
        stages: Number of stages.
        memory_limit: The bytes that a stage may have: its parameters with gradients and two
            moments, and what as many forwards hold as are on their way under 1F1B.

    Raises:
        PartitionError: There are too few places, or no cut fits into memory.
    """
    total, held, parameters = [0.0], [0], [0]
    for cost in costs:
        total.append(total[-1] + cost.seconds)
        held.append(held[-1] + cost.held)
        parameters.append(parameters[-1] + cost.parameters)
    receives = cache(lambda start: received(training, start))

    def seconds(start: int, end: int) -> float:
        size, values = receives(start)[end - start]
        crossing = 2 * (size * SECONDS_PER_BYTE + values * SECONDS_PER_VALUE)
        return total[end] - total[start] + crossing

    def cost_of(stage: int, start: int, end: int) -> float:
        if memory_limit is not None:
            size = COPIES * (parameters[end] - parameters[start])
            size += (stages - stage) * (held[end] - held[start])
            if size > memory_limit:
                return math.inf
        return seconds(start, end)

    named, _ = places(training, evaluation)

    def floor(start: int, end: int) -> float:
        return total[end] - total[start]

    found = fastest(list(named), len(costs), stages, cost_of, floor)
    bounds = found.boundaries
    return Choice(
        tuple(named[start] for start in bounds[1:-1]),
        tuple(seconds(start, end) for start, end in zip(bounds, bounds[1:])),
        max(total[-1] / stages, *(cost.seconds for cost in costs)),
    )


def agreed(job: Job | None, measure: Callable[[], list[NodeCost]]) -> list[NodeCost]:
    """Returns what one rank measures, on every rank. Collective over the job.

    Args:
        job: The current job.
        measure: Measures the nodes.
    """
    if job is None or job.local:
        return measure()
    pipeline, replicas = job.group(), job.replicas()
    with job.guarded(lambda: "measuring the nodes of the model"):
        costs: Nest = None
        if pipeline.rank == replicas.rank == 0:
            costs = [tuple(map(float, cost)) for cost in measure()]
        costs = replicas.broadcast(pipeline.broadcast(costs, 0), 0)
        # The ranks that hold slices have measured together, each by its own clock.
        costs = job.model_parallel().broadcast(costs, 0)
    return [NodeCost(there, back, int(held), int(size)) for there, back, held, size in costs]
