"""``split_spec="auto"``: the cut whose slowest stage is fastest, from measured nodes.

The time of a stage is computed as by :func:`fleetpipe.plan`: its nodes forward and backward, and
its transfers in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fleetpipe.capture.cutting.cuts import AtCall, Border, SplitPoint
from fleetpipe.capture.cutting.in_place import spans, split_state
from fleetpipe.capture.tracing.value import Capture
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.profiling import Profile, fastest_cut


class Choice(NamedTuple):
    """A cut chosen by costs.

    Attributes:
        borders: The borders of the stages.
        seconds: The time of each stage for one micro-batch.
        bound: A lower bound for cuts into as many stages: the larger of the mean stage and the
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


def places(training: Capture, evaluation: Capture) -> tuple[dict[int, Border], dict[int, str]]:
    """Returns the nodes with which a stage may begin, and why it may not begin with others.

    Returns:
        The border of each place, and the reasons, by the number of the node.
    """
    written = spans((training, evaluation))
    borders: dict[int, Border] = {}
    refused: dict[int, str] = {}
    for number in range(1, len(training.nodes)):
        border = _border(training, number)
        if border is None:
            refused[number] = "no call of a sublayer is beside it, to name the place"
        elif not _is_in(evaluation, border):
            refused[number] = "in evaluation the forward does not come here"
        elif name := split_state(written, (number, border.start(evaluation))):
            refused[number] = f"{name!r} is used on both sides, and the forward writes into it"
        else:
            borders[number] = border
    return borders, refused


def _is_in(trace: Capture, border: Border) -> bool:
    try:
        return 0 < border.start(trace) < len(trace.nodes)
    except ConfigError:
        return False


def _border(trace: Capture, number: int) -> Border | None:
    """Returns the border before a node; None between two operations."""
    node, before = trace.nodes[number], trace.nodes[number - 1]
    if node.is_layer:
        path, call = node.scopes[-1]
        return AtCall(path, SplitPoint.BEGINNING, call)
    if before.is_layer:
        path, call = before.scopes[-1]
        return AtCall(path, SplitPoint.END, call)
    return None


def choose(
    profile: Profile,
    places: Mapping[int, Border],
    stages: int,
    memory_cap: float | str | None = None,
) -> Choice:
    """Returns the cut whose slowest stage is fastest.

    Args:
        profile: The costs of the inputs, the nodes and the outputs, in that order.
        places: The border at each place where a stage may begin, by node.
        stages: Number of stages.
        memory_cap: The bytes that a stage may use: its parameters with gradients and two moments,
            and all forwards in flight under 1F1B.

    Raises:
        PartitionError: There are too few places, or no cut fits into memory.
    """
    bounds, costs = fastest_cut(profile, stages, memory_cap)
    return Choice(
        # The inputs come first.
        tuple(places[first - 1] for first in bounds[1:-1]),
        tuple(stage.seconds for stage in costs),
        max(profile.stages.least() / stages, *(layer.seconds for layer in profile.layers)),
    )


def measure_once(job: Job | None, measure: Callable[[], Profile]) -> Profile:
    """Measures on one rank and returns the result on every rank. Collective over the job."""
    if job is None or job.local:
        return measure()
    with job.guarded(lambda: "measuring the nodes of the model"):
        # Those that compute a layer together measure together, each by its own clock.
        text = measure().dumps() if job.leads(*job.degrees.layer_axes) else None
        return Profile.loads(job.everyone().broadcast(text, 0))
