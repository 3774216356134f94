"""``fleetpipe.plan``: searches for the plan with the least time, from a model's costs.

Cut, placement, schedule and recompute are chosen. As in AdaPtis (arXiv:2509.23722) each is
improved in turn until nothing helps: first cuts are tried with the schedules of all families, the
boundaries of the best cuts are moved, all schedules are tried on the resulting cut, and its
boundaries are moved again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from fleetpipe.errors import ConfigError, nearest, require_whole
from fleetpipe.partition import LayerInfo, Partition
from fleetpipe.profiling.candidates import Boundaries, Candidate, Lack, PlanTask
from fleetpipe.profiling.cost_model import StageCost
from fleetpipe.profiling.memory import Recompute, read_bytes, show_bytes
from fleetpipe.profiling.plan import PipelinePlan, show_range
from fleetpipe.profiling.profile import Profile
from fleetpipe.schedules import Placement, Schedule

#: The number of actions that a search simulates, so that one of any size takes some seconds.
_BUDGET = 1_500_000

#: The number of plans that are improved: the fastest ones, each of another placement or family.
_STARTS = 8

#: How often the schedules are tried on a cut whose boundaries were moved.
_ROUNDS = 3

#: Times whose relative difference is below this count as equal: two profiles of one model differ by
#: as much.
_NOISE = 0.01

#: By how many possible cuts neighbouring boundaries between stages are moved at once.
_DISTANCES = (1, -1, 2, -2, 4, -4)

#: A plan that was tried: one that fits into memory, or one that does not.
Outcome = Candidate | Lack

#: The parts of a plan that a search may choose.
SEARCH = ("partition", "placement", "schedule", "recompute")


class _Search:
    """The search for the best plan of a task.

    A plan that was tried is a ``Candidate`` if it fits into memory, else a ``Lack``.

    Attributes:
        task: Model, ranks, memory cap and choices.
        actions_left: The number of actions that may still be simulated; below 0 after the last.
        fitting: All plans so far that fit into memory.
        unit: The seconds of a rank's even share of a batch's work.
    """

    def __init__(self, task: PlanTask) -> None:
        self.task = task
        self.actions_left = _BUDGET
        self.fitting: list[Candidate] = []
        # Times are rounded as multiples of this, so that rounding errors do not decide.
        self.unit = task.micro_batches * task.stages.least() / task.ranks or 1

    def run(self) -> Outcome:
        """Returns the best plan; if none fits, the one that exceeds the memory cap the least."""
        # The best plan of each placement and family of schedules.
        starts: dict[tuple[Placement, str], Outcome] = {}
        for shape in self.task.shapes():
            cuts = self.task.cuts(shape)
            for schedule in self.task.schedules(shape):
                outcome = min((self._try(schedule, cut) for cut in cuts), key=self._score)
                start = shape, schedule.name
                starts[start] = min(starts.get(start, outcome), outcome, key=self._score)
        fastest = sorted(starts.values(), key=self._score)[:_STARTS]
        best = min(map(self._improve, fastest), key=self._score)
        if isinstance(best, Lack):
            return best
        # Of plans that are as fast within the noise, the one of the smallest peak.
        limit = best.seconds * (1 + _NOISE)
        fast = [candidate for candidate in self.fitting if candidate.seconds <= limit]
        return min([best, *fast], key=lambda candidate: (candidate.peak, candidate.seconds))

    def _try(self, schedule: Schedule, boundaries: Boundaries) -> Outcome:
        """Evaluates a schedule on a cut; returns the plan, and stores it if it fits into memory."""
        self.actions_left -= sum(map(len, schedule.actions))
        outcome = self.task.evaluate(schedule, boundaries)
        if isinstance(outcome, Candidate):
            self.fitting.append(outcome)
        return outcome

    def _score(self, candidate: Outcome) -> tuple[float, float, int]:
        """Returns a tuple that is smaller for a better plan.

        Plans that do not fit into memory come last, the one with the smallest peak first of them;
        the others are compared by the time of a batch, and then by the peak bytes.
        """
        if isinstance(candidate, Lack):
            return candidate.peak, math.inf, 0
        return 0, round(candidate.seconds / self.unit, 9), candidate.peak

    def _improve(self, first: Outcome) -> Outcome:
        """Returns a better plan: moves the cut and changes the schedule while that helps."""
        best = self._move_cut(first)
        for _ in range(_ROUNDS):
            better = self._change_schedule(best)
            if better is best:
                break
            best = self._move_cut(better)
        return best

    def _change_schedule(self, candidate: Outcome) -> Outcome:
        """Returns the best plan with the cut and the placement of a plan, among all schedules.

        The plan itself is returned if no schedule is better, or no actions are left to simulate.
        """
        if self.actions_left <= 0:
            return candidate
        schedules = self.task.schedules(candidate.schedule.placement)
        tried = (self._try(schedule, candidate.boundaries) for schedule in schedules)
        return min([candidate, *tried], key=self._score)

    def _move_cut(self, candidate: Outcome) -> Outcome:
        """Returns the best plan with the schedule of a plan, moving boundaries while that helps.

        The plan itself is returned if nothing is better, or if the search may not choose the cut.
        """
        if "partition" not in self.task.search:
            return candidate
        best, before = candidate, None
        while best is not before:
            before = best
            for boundaries in self._moved_cuts(best.boundaries):
                if self.actions_left <= 0:
                    return best
                tried = self._try(best.schedule, boundaries)
                if self._score(tried) < self._score(best):
                    best = tried
                    break
        return best

    def _moved_cuts(self, boundaries: Boundaries) -> Iterator[Boundaries]:
        """Yields cuts in which one boundary, or several neighbouring ones together, are moved.

        All are moved by the same number of possible cuts.
        """
        cuts = self.task.profile.cuts
        index = {cut: number for number, cut in enumerate(cuts)}
        # The first boundary that is no possible cut: the model's end, or that of a head's parts,
        # whose boundaries do not move.
        last = next(n for n in range(1, len(boundaries)) if boundaries[n] not in index)
        inner = [index[boundary] for boundary in boundaries[1:last]]
        for width in range(1, len(inner) + 1):
            for first in range(len(inner) - width + 1):
                for step in _DISTANCES:
                    moved = list(inner)
                    for number in range(first, first + width):
                        moved[number] += step
                    exist = moved[first] >= 0 and moved[first + width - 1] < len(cuts)
                    if exist and all(one < after for one, after in itertools.pairwise(moved)):
                        yield (0, *(cuts[number] for number in moved), *boundaries[last:])


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
    best = _Search(task).run()
    if isinstance(best, Lack):
        raise _cap_error(best, task)
    names = tuple(LayerInfo(layer.name) for layer in profile.layers)
    best.schedule.verify()
    partition = Partition(best.boundaries, "plan", names)
    return _finish_plan(task, best.schedule, partition, best.recompute)


def fastest_cut(
    profile: Profile, stages: int, memory_cap: float | str | None = None
) -> tuple[Boundaries, tuple[StageCost, ...]]:
    """Returns the cut whose slowest stage is fastest, and the costs of its stages. Runs nothing.

    :func:`plan` begins its search with this cut.

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
    boundaries = task.fastest_cut(shape, cap).boundaries
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
    return _finish_plan(task, plan.schedule, plan.partition, plan.recompute)


def _finish_plan(
    task: PlanTask, schedule: Schedule, partition: Partition, recompute: Recompute
) -> PipelinePlan:
    """Returns the plan of a schedule, a cut and recompute, with the costs that it predicts."""
    placement, boundaries = schedule.placement, partition.boundaries
    layers = task.profile.layers
    stages = task.with_transfers(placement, task.stages.cut(boundaries, recompute))
    # For each slice of a sequence, the costs of all stages; () if sequences are not cut.
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


def _cap_error(lack: Lack, task: PlanTask) -> ConfigError:
    """Returns the error of a memory cap in which no plan fits, with a cap that works."""
    # The stages of the rank that needs most.
    owned = lack.schedule.placement.stages_of(lack.rank)
    stages = " and ".join(str(stage) for stage in owned)
    layers = ", ".join(
        show_range(range(lack.boundaries[stage], lack.boundaries[stage + 1])) for stage in owned
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
