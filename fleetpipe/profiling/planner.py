"""``fleetpipe.plan``: from a model's costs to the way it runs on some ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from fleetpipe.errors import ConfigError, nearest, require_whole
from fleetpipe.partition import LayerInfo, Partition
from fleetpipe.profiling.candidates import Boundaries, Lack, PlanTask
from fleetpipe.profiling.cost_model import StageCost
from fleetpipe.profiling.explaining import shown_range
from fleetpipe.profiling.plan import PipelinePlan
from fleetpipe.profiling.profile import Profile
from fleetpipe.profiling.recomputing import Recompute
from fleetpipe.profiling.search import best_plan
from fleetpipe.profiling.sizes import read_bytes, show_bytes
from fleetpipe.schedules import Placement, Schedule

#: All that may be chosen.
SEARCH = ("partition", "placement", "schedule", "recompute")


def plan(
    profile: Profile | str | Path,
    ranks: int,
    micro_batches: int,
    memory_cap: float | str | None = None,
    search: Iterable[str] = SEARCH,
    optimizer_copies: float = 2,
    ep_degree: int | None = None,
    sep_degree: int | None = None,
    cp_degree: int | None = None,
) -> PipelinePlan:
    """Returns the fastest plan that fits into memory. Runs nothing.

    Of plans whose times differ by less than 1 %, as two profiles of one model do, it is the one
    that needs least memory. The same profile gives the same plan anywhere.

    Args:
        profile: A result of ``model.profile(batch)``, or its file.
        ranks: Ranks of the pipeline, p.
        micro_batches: Micro-batches of a batch, m.
        memory_cap: Bytes that the tensors of a rank may take, as a number or as ``"2GiB"``:
            parameters, gradients, the optimizer's state, buffers and activations. A process takes
            more: see ``plan.predicted.process_bytes``. None: no cap.
        search: The parts of the plan to choose. Without ``"partition"`` the cut is even in layers,
            without ``"placement"`` each rank has one chunk, without ``"schedule"`` it is 1F1B, and
            without ``"recompute"`` nothing is recomputed.
        optimizer_copies: Tensors of the size of a gradient in the optimizer's state: 2 for Adam, 1
            with momentum, 0 for SGD.
        ep_degree: Ranks that share experts; None: as in the profile. See
            :meth:`Profile.with_degrees`.
        sep_degree: Ranks that share sequences along sep; None: as in the profile.
        cp_degree: Ranks that share sequences along cp; None: as in the profile.

    Returns:
        The plan; print it, or its ``explain()``.

    Raises:
        ConfigError: An argument is not valid; or the cap is too small: the message says which rank
            needs how much, and the least cap that works.
        PartitionError: There are fewer layers than ranks.
    """
    if not isinstance(profile, Profile):
        profile = Profile.read(profile)
    ranks = require_whole("ranks", ranks)
    micro_batches = require_whole("micro_batches", micro_batches)
    chosen = [search] if isinstance(search, str) else list(search)
    for name in chosen:
        if name not in SEARCH:
            raise ConfigError(f"a plan has no {name!r} to search", fix=nearest(str(name), SEARCH))
    if not 0 <= optimizer_copies < 100:
        raise ConfigError(
            "`optimizer_copies` is a number of tensors for each parameter",
            expected="0 or more",
            got=repr(optimizer_copies),
            fix="give 2 for Adam, 1 with momentum, 0 for SGD",
        )
    profile.require_cuts_for(ranks)
    profile = profile.with_degrees(ep_degree, sep_degree, cp_degree)
    cap = None if memory_cap is None else read_bytes(memory_cap)
    task = PlanTask(
        profile,
        ranks,
        micro_batches,
        math.inf if cap is None else cap,
        frozenset(chosen),
        optimizer_copies,
    )
    best = best_plan(task)
    if isinstance(best, Lack):
        raise _too_small(best, task)
    names = tuple(LayerInfo(layer.name) for layer in profile.layers)
    best.schedule.verify()
    partition = Partition(best.boundaries, "plan", names)
    return _plan_of(task, best.schedule, partition, best.recompute)


def fastest_cut(
    profile: Profile, stages: int, memory_cap: float | str | None = None
) -> tuple[Boundaries, tuple[StageCost, ...]]:
    """Returns the cut whose slowest stage is fastest, and the costs of its stages. Runs nothing.

    :func:`plan` begins its search with the same one: see :meth:`PlanTask.fastest`.

    Args:
        profile: The costs of the layers.
        stages: Number of stages, each on a rank of its own.
        memory_cap: Bytes that a stage may use under 1F1B, with nothing recomputed and two tensors
            of the size of a gradient for the optimizer.

    Raises:
        PartitionError: There are too few places for a cut, or none fits.
    """
    cap = math.inf if memory_cap is None else read_bytes(memory_cap)
    task = PlanTask(profile, stages, stages, cap, frozenset(("partition",)), 2)
    shape = Placement("loop", stages)
    boundaries = task.fastest(shape, cap).boundaries
    return boundaries, task.with_transfers(shape, task.stages.cut(boundaries))


def recosted(plan: PipelinePlan, profile: Profile) -> PipelinePlan:
    """Returns the same plan with the costs of another profile of the model.

    Args:
        plan: The plan that runs.
        profile: Measured on another day, or on other machines.

    Raises:
        ConfigError: The profile is of another model, or of other slices than the plan's.
    """
    plan.require_layers([layer.name for layer in profile.layers])
    profile = profile.with_degrees(*plan.degrees or ())
    slices = plan.schedule.slices
    if slices > 1 and len(profile.slices) != slices:
        raise ConfigError(
            "the plan cuts sequences into slices whose costs are not known",
            expected=f"a profile of {slices} slices",
            got=f"one of {len(profile.slices)} slices",
            fix='profile the model under the plan, or with schedule_mode="Seq1F1B" and as many '
            "slices",
        )
    copies = plan.optimizer_copies
    cap = math.inf if plan.memory_cap is None else plan.memory_cap
    task = PlanTask(profile, plan.ranks, plan.micro_batches, cap, frozenset(SEARCH), copies)
    return _plan_of(task, plan.schedule, plan.partition, plan.recompute)


def _plan_of(
    task: PlanTask, schedule: Schedule, partition: Partition, recompute: Recompute
) -> PipelinePlan:
    """Returns the plan of a schedule and a cut, with its predicted costs."""
    placement, boundaries = schedule.placement, partition.boundaries
    layers = task.profile.layers
    stages = task.with_transfers(placement, task.stages.cut(boundaries, recompute))
    slices = tuple(
        task.with_transfers(placement, of_slice.cut(boundaries))
        for of_slice in (task.of_slices if schedule.slices > 1 else ())
    )
    return PipelinePlan(
        schedule,
        partition,
        recompute,
        stages,
        task.comm(placement, stages),
        None if math.isinf(task.cap) else task.cap,
        task.optimizer_copies,
        task.bound(),
        slices,
        tuple(task.comm(placement, part) for part in slices),
        task.profile.degrees if any(one.loads or one.queries for one in layers) else None,
        task.profile.process,
    )


def _too_small(lack: Lack, task: PlanTask) -> ConfigError:
    owned = lack.schedule.placement.stages_of(lack.rank)
    stages = " and ".join(str(stage) for stage in owned)
    layers = ", ".join(
        shown_range(range(lack.boundaries[stage], lack.boundaries[stage + 1])) for stage in owned
    )
    least = math.ceil(lack.peak)
    return ConfigError(
        f"no plan keeps within a memory cap of {show_bytes(task.cap)}",
        where=f"rank {lack.rank}, which has stage {stages} (layers {layers}) under "
        f"{lack.schedule.name}"
        + (", all recomputed" if "recompute" in task.search and lack.schedule.slices == 1 else ""),
        expected=f"a cap of at least {least} bytes ({show_bytes(least)})",
        fix=f"raise the cap to {least}, use more ranks, or smaller micro-batches",
    )
