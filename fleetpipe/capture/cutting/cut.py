"""The cut of a captured model, as the user gave it or as costs choose it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fleetpipe.capture.cutting.auto import Choice, choose, measure_once, places
from fleetpipe.capture.cutting.cuts import Border
from fleetpipe.capture.cutting.node_meter import measure_nodes
from fleetpipe.capture.cutting.split_spec import AUTO, SplitSpec, borders_of
from fleetpipe.capture.tracing.capturing import Capturing
from fleetpipe.capture.tracing.value import Capture
from fleetpipe.errors import ConfigError, PartitionError
from fleetpipe.job.job import current_job
from fleetpipe.profiling import PipelinePlan


class Cut(NamedTuple):
    """The cut of a model.

    Attributes:
        borders: The places at which a stage begins, in order.
        choice: The chosen cut with its costs; None if the user gave the cut.
    """

    borders: tuple[Border, ...]
    choice: Choice | None = None

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.borders) + 1

    def __str__(self) -> str:
        return ", ".join(map(str, self.borders))


def cut_of(
    capturing: Capturing,
    spec: SplitSpec | PipelinePlan,
    stages: int | None,
    memory_cap: float | str | None = None,
    head: Sequence[str] = (),
) -> Cut:
    """Returns the cut for a user's ``split_spec``. Collective over the job for "auto".

    Args:
        capturing: The model.
        spec: See :func:`fleetpipe.pipeline`.
        stages: The number of stages, if it is known.
        memory_cap: With "auto", the bytes that a stage may use.
        head: The names of the layers after the model's nodes: the parts of its head, and the loss.

    Raises:
        ConfigError: It names something that does not exist, needs the number of stages, or is a
            plan of another model.
        PartitionError: "auto" finds no cut.
    """
    look = capturing.look
    training = capturing(look, True)
    if isinstance(spec, PipelinePlan):
        return Cut(_borders_of_plan(training, capturing(look, False), spec, head))
    if not isinstance(spec, str) or spec != AUTO:
        return Cut(tuple(borders_of(spec, capturing.model, training, stages)))
    if stages is None:
        raise ConfigError(
            'split_spec="auto" needs the number of stages',
            fix="call fleet.init with a pp_degree first, or pass num_stages",
        )
    evaluation = capturing(look, False)
    named, _ = places(training, evaluation)
    if len(named) < stages - 1:
        raise PartitionError(
            f"{stages} stages need {stages - 1} places to cut at",
            got=f"{len(named)} places",
            cause="a place is before or after the call of a sublayer, as self.block(x); "
            "self.block.forward(x) is no call of it",
            fix="call sublayers so, or use fewer ranks or chunks; fleetpipe.explain(model, "
            "example) shows what is called",
        )
    profile = measure_once(current_job(), lambda: measure_nodes(capturing, training, named))
    choice = choose(profile, named, stages, memory_cap)
    return Cut(choice.borders, choice)


def _borders_of_plan(
    training: Capture, evaluation: Capture, plan: PipelinePlan, head: Sequence[str]
) -> tuple[Border, ...]:
    """Returns the borders of a plan; raises ConfigError for a plan of another model."""
    # The inputs come first, and the outputs last.
    plan.require_layers(["inputs", *(node.name for node in training.nodes), "outputs", *head])
    named, _ = places(training, evaluation)
    borders = plan.partition.boundaries[1 : plan.schedule.placement.body]
    return tuple(named[first - 1] for first in borders)
