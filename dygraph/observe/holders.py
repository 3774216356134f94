"""Who holds the same parameters in a job, and who counts a gradient in the norm of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.broadcast import is_spread
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.job.job import Job
from fleetpipe.mesh import COPIES
from fleetpipe.mesh.axes import SHARDS
from fleetpipe.mesh.groups import Group

#: The groups of guards take no messages of other groups with the same ranks.
PURPOSE = "guards"


class Holders(NamedTuple):
    """Parameters, and the ranks that hold them alike.

    Attributes:
        group: These ranks.
        ranks: Their numbers in the job.
        parameters: By name.
        tied: Whether they are weights that several stages have.
    """

    group: Group
    ranks: Sequence[int]
    parameters: Mapping[str, Tensor]
    tied: bool


def all_holders(layers: PipelineLayer, job: Job) -> list[Holders]:
    """Returns what this rank shares with others, in an order that is the same on all of these.

    The ranks with this one's stages are among them, with whatever they share.
    """
    if job.local:
        return []
    stage = tuple(job.mesh.along(job.coordinate, (*COPIES, *SHARDS)))
    shared: dict[tuple[int, ...], dict[str, Tensor]] = {stage: {}}
    for name, parameter in named_parameters(layers).items():
        ranks = tuple(job.mesh.along(job.coordinate, _axes_of(parameter, job)))
        shared.setdefault(ranks, {})[name] = parameter
    tied: dict[tuple[int, ...], dict[str, Tensor]] = {}
    pipeline, tensors = job.pipeline_ranks(), layers.state.local_tensors()
    for weight in layers.shared_weights:
        ranks = tuple(pipeline[rank] for rank in weight.holders)
        tied.setdefault(ranks, {})[weight.name] = tensors[weight.name]
    return [
        Holders(job.members(ranks, PURPOSE), ranks, parameters, of is tied)
        for of in (shared, tied)
        for ranks, parameters in sorted(of.items(), key=lambda item: item[0])
        if len(ranks) > 1
    ]


def named_parameters(layers: PipelineLayer) -> dict[str, Tensor]:
    """Returns what is trained of this rank's stages and of the losses by lasting names.

    What is not trained may be the running statistics of a replica, which are parameters too.
    """
    named: dict[str, Tensor] = dict(layers.state.own_parameters())
    for number, layer in enumerate(layers.loss_layers()):
        named.update({f"loss {number}.{n}": p for n, p in layer.named_parameters()})
    return {name: p for name, p in named.items() if not p.stop_gradient}


def counted(parameters: Iterable[Tensor], layers: PipelineLayer, job: Job) -> list[Tensor]:
    """Returns those whose gradients are in the norm of all because of this rank."""
    tensors, place = layers.state.local_tensors(), job.coordinate
    elsewhere = {id(tensors[w.name]) for w in layers.shared_weights if w.holders[0] != place.pp}
    # The rank that owns a parameter's state alone has its gradient then.
    scattered = {*job.degrees.state_axes, "moe_sharding"} if job.scatters_gradients else set()
    return [
        parameter
        for parameter in parameters
        if getattr(parameter, "need_clip", True) and id(parameter) not in elsewhere
        if not any(getattr(place, a) for a in _axes_of(parameter, job) if a not in scattered)
    ]


def axis_between(job: Job, differing: Sequence[int], ranks: Sequence[int]) -> str:
    """Returns an axis on whose place it depends which of some ranks differ from the others."""

    def places(axis: str, wrong: Iterable[bool]) -> set[int]:
        return {
            getattr(job.mesh.coordinate(rank), axis)
            for rank in ranks
            if (rank in differing) in wrong
        }

    axes = [a for a in (*COPIES, *SHARDS, "pp") if len(places(a, (True, False))) > 1]
    return next((a for a in axes if not places(a, [True]) & places(a, [False])), axes[0])


def _axes_of(parameter: Tensor, job: Job) -> tuple[str, ...]:
    sharded = bool(getattr(parameter, "is_distributed", False))
    return job.copy_axes(is_spread(parameter), sharded)
