"""The bytes that each rank uses at its peak, and the layers to recompute so that they fit.

Also reads and writes numbers of bytes as people do: ``2GiB``, ``500 MB``, 1048576. Activations that
a forward leaves allocated for its backward are *held*.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe.errors import ConfigError
from fleetpipe.profiling.cost_model import LayerCost, StageCost, Stages
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.action import flatten

#: The bytes of each unit, by its name in small letters; "" is a number without a unit.
_UNITS = {
    "": 1,
    "b": 1,
    **{name: 1000**power for power, name in enumerate(("kb", "mb", "gb", "tb"), 1)},
    **{name: 1024**power for power, name in enumerate(("kib", "mib", "gib", "tib"), 1)},
}

#: The costs of some stages, by the number of the stage.
Costed = Mapping[int, StageCost] | Sequence[StageCost]

#: For each stage the layers that are recomputed.
Recompute = tuple[tuple[int, ...], ...]


def read_bytes(value: object) -> float:
    """Reads a number of bytes from a number or from a text such as ``"2GiB"`` or ``"500MB"``.

    Raises:
        ConfigError: The value is neither, or not above 0.
    """
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match is not None and match[2] in _UNITS:
            number = float(match[1]) * _UNITS[match[2]]
    if not number > 0:
        raise ConfigError(
            "a cap of memory is a number of bytes above 0",
            got=repr(value),
            fix='write "2GiB", "500MB" or 2147483648',
        )
    return number


def show_bytes(size: float) -> str:
    """Writes bytes as ``1.25 GiB``, in the largest unit that gives at least one."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.lower()]
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


def show_seconds(seconds: float) -> str:
    """Writes seconds as ``1.25 s`` or ``3.42 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


class Peak(NamedTuple):
    """The moment at which a rank has the most bytes of activations.

    Attributes:
        bytes: Bytes used at that moment.
        whole: By stage, the number of forwards whose B has not run.
        split: By stage, the number of forwards whose I has not run.
        waiting: By stage, the number of backwards whose W has not run.
    """

    bytes: int
    whole: dict[int, int]
    split: dict[int, int]
    waiting: dict[int, int]


class _Moments(NamedTuple):
    """What a rank holds while each of its actions runs, equal moments once.

    The activations of each stage of the rank, and of each slice of a micro-batch, are counted
    apart. The pairs (stage, index of the slice), in ascending order, are called columns below.

    Attributes:
        counts: One row for each moment, with three numbers for each column: first for all columns
            the forwards whose whole B has not run, then for all columns the forwards whose I has
            not run, then for all columns the backwards whose W has not run.
        stages: For each moment the column of the action that runs.
    """

    counts: np.ndarray
    stages: np.ndarray


def static_bytes(stages: Sequence[StageCost], optimizer_copies: float) -> int:
    """Returns the bytes that some stages of a rank need at any time.

    Those are the bytes of parameters, gradients, buffers and the optimizer's state.

    Args:
        stages: The costs of the stages.
        optimizer_copies: Tensors of the size of a gradient in the optimizer's state.
    """
    return sum(
        stage.parameters + stage.gradients + stage.buffers + int(optimizer_copies * stage.gradients)
        for stage in stages
    )


def peak_bytes(
    schedule: Schedule,
    stages: Sequence[StageCost],
    optimizer_copies: float,
    slices: Sequence[Costed] = (),
) -> tuple[int, ...]:
    """Returns the most bytes that each rank uses at once.

    Args:
        schedule: The schedule that runs.
        stages: The costs of its stages.
        optimizer_copies: Tensors of the size of a gradient in the optimizer's state.
        slices: For each slice of a micro-batch, the costs of each stage; empty without slices.
    """
    return tuple(
        static_bytes([stages[s] for s in schedule.placement.stages_of(rank)], optimizer_copies)
        + activation_peak(schedule, rank, stages, slices).bytes
        for rank in range(schedule.placement.ranks)
    )


def activation_peak(
    schedule: Schedule, rank: int, stages: Costed, slices: Sequence[Costed] = ()
) -> Peak:
    """Returns the moment at which a rank uses the most bytes of activations.

    Args:
        schedule: The schedule that runs.
        rank: The rank.
        stages: The costs of a micro-batch by the number of the stage; those of this rank's stages
            are read.
        slices: For each slice of a micro-batch, the same costs of the slice; empty if the schedule
            has no slices.
    """
    moments = _moments_of(schedule)[rank]
    owned = schedule.placement.stages_of(rank)
    # A cost for each column of the moments, and the bytes of each of the counts in their rows.
    costs = [part[stage] for stage in owned for part in slices or [stages]]
    bytes_of_counts = [
        *(cost.held for cost in costs),
        *(cost.held_split for cost in costs),
        *(cost.waiting for cost in costs),
    ]
    working = np.array([cost.working for cost in costs])
    sums = moments.counts @ np.array(bytes_of_counts) + working[moments.stages]
    most = int(sums.argmax())
    # The three kinds of counts by stage: those of its slices are added up.
    counts = moments.counts[most].reshape(3, len(owned), -1).sum(axis=2).tolist()
    whole, split, waiting = (dict(zip(owned, of_stages)) for of_stages in counts)
    return Peak(int(sums[most]), whole, split, waiting)


def _moments_of(schedule: Schedule) -> list[_Moments]:
    """Returns for each rank what it holds while its actions run, cached with the schedule."""
    cache = vars(schedule)
    if "_moments" not in cache:
        cache["_moments"] = [
            _moments_of_rank(schedule, rank) for rank in range(schedule.placement.ranks)
        ]
    moments: list[_Moments] = cache["_moments"]
    return moments


def _moments_of_rank(schedule: Schedule, rank: int) -> _Moments:
    """Counts what a rank holds while each action of its row runs.

    The actions are F, B (a whole backward), I and W (the two parts of a split one).
    """
    row = list(flatten(schedule.actions[rank]))
    # The backwards that are split: their forwards are counted apart.
    split = {(action.stage, action.micro_batch) for action in row if action.kind == "I"}
    owned = schedule.placement.stages_of(rank)
    columns = len(owned) * schedule.slices
    counts = [0] * (3 * columns)
    # The keys are the moments, in order, without repetitions: the counts, then the column.
    seen: dict[tuple[int, ...], None] = {}
    for kind, stage, micro_batch in row:
        column = owned.index(stage) * schedule.slices + micro_batch % schedule.slices
        forward = column + columns if (stage, micro_batch) in split else column
        counts[forward] += kind == "F"
        moment = (*counts, column)
        seen[moment] = None
        counts[forward] -= kind in "BI"
        counts[2 * columns + column] += (kind == "I") - (kind == "W")
    table = np.array(list(seen), dtype=np.int64)
    return _Moments(table[:, :-1], table[:, -1])


def choose_recompute(
    schedule: Schedule,
    layers: Sequence[LayerCost],
    stages: Stages,
    boundaries: Sequence[int],
    free: float,
    optimizer_copies: float,
) -> Recompute:
    """Chooses the layers to recompute, so that each rank's memory keeps within a limit.

    A rank recomputes layers in the order of their time for each byte saved, until it fits; all of
    them if it does not fit.

    Args:
        schedule: The schedule that runs.
        layers: The layers of the model.
        stages: The costs of stages of these layers.
        boundaries: The first layer of each stage, then the number of layers.
        free: Bytes that a rank may use.
        optimizer_copies: Tensors of the size of a gradient in the optimizer's state.

    Returns:
        For each stage the layers to recompute, ascending.
    """
    plain, ranges = stages.cut(boundaries), list(itertools.pairwise(boundaries))
    chosen: list[tuple[int, ...]] = [()] * len(plain)
    for rank in range(schedule.placement.ranks):
        costs = {stage: plain[stage] for stage in schedule.placement.stages_of(rank)}
        left = free - static_bytes([*costs.values()], optimizer_copies)
        peak = activation_peak(schedule, rank, costs)
        # By stage and number of a layer: what its recompute costs for each byte that it saves.
        prices = {
            (stage, number): _seconds_per_byte(layers[number], stage, peak)
            for stage in costs
            for number in range(*ranges[stage])
            if layers[number].saved
        }
        for stage, number in sorted(prices, key=prices.__getitem__):
            if peak.bytes <= left:
                break
            chosen[stage] = tuple(sorted((*chosen[stage], number)))
            costs[stage] = stages.stage(*ranges[stage], chosen[stage])
            peak = activation_peak(schedule, rank, costs)
    return tuple(chosen)


def _seconds_per_byte(layer: LayerCost, stage: int, peak: Peak) -> float:
    """Returns the seconds that recompute of a layer takes for each byte that it saves at a peak.

    ``stage`` is the layer's stage, and ``peak`` that of the stage's rank.
    """
    gain = (
        peak.whole[stage] * layer.saved
        + peak.split[stage] * layer.saved_split
        + peak.waiting[stage] * layer.waiting
    )
    return layer.forward / gain if gain > 0 else math.inf
