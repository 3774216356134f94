"""Schedules and plans as plain values: options, and a row of actions or operations for each rank.

Functions of other modules take these values; ``Schedule`` and ``Plan`` in ``api.py`` add methods
for users.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from fleetpipe.errors import ConfigError, ScheduleError, require_whole
from fleetpipe.schedules.action import Action, Fused, Item, Op, flatten
from fleetpipe.schedules.placement import Edge, Placement

#: The options of a schedule: pairs of a name and a value, sorted by name.
Options = tuple[tuple[str, Any], ...]


@contextmanager
def collector_paused() -> Iterator[None]:
    """A context without the cyclic garbage collector, to create many small values without cycles.

    A full collection visits all live values, and happens each time their number has grown by a
    quarter: lowering 262,144 actions took 1.8 times as long with it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def option_names_of(rows: Callable[..., object]) -> tuple[str, ...]:
    """Returns the names of a schedule's options.

    Args:
        rows: The function that builds its rows. Its parameters after the placement and the number
            of micro-batches are the options.
    """
    return tuple(inspect.signature(rows).parameters)[2:]


def options_to_store(
    name: str, rows: Callable[..., object], options: Mapping[str, object]
) -> Options:
    """Returns the options to store with a schedule: those that differ from their defaults.

    Args:
        name: The schedule, for the error.
        rows: The function that builds its rows; the defaults of its parameters are the default
            options.
        options: The options that it is built with.

    Raises:
        ConfigError: A value that has no text form.
    """
    parameters = inspect.signature(rows).parameters
    pairs = ((option, _storable_value(name, option, value)) for option, value in options.items())
    return tuple(sorted(pair for pair in pairs if pair[1] != parameters[pair[0]].default))


def _storable_value(name: str, option: str, value: object) -> Any:
    """Returns the value of an option with tuples for lists; refuses one without a text form."""
    if isinstance(value, (list, tuple)):
        return tuple(_storable_value(name, option, item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(
        f"the option {option!r} of {name} has a value that a schedule cannot keep",
        expected="a number, a word, or a list of them",
        got=repr(value),
        fix="let the function that makes the rows take such values",
    )


@dataclass(frozen=True, repr=False)
class ScheduleRows:
    """A placement and an ordered row of computations for each rank. Hashable.

    Args:
        name: Name for people and logs, without spaces; it decides nothing.
        placement: Which rank owns which stage.
        micro_batches: Micro-batches of a batch, m.
        actions: For each rank the actions (or fused units) in the order in which it runs them.
        forward_only: Whether there is no backward, as in evaluation and prediction.
        slices: Slices that each micro-batch's sequence is cut into. More than 1: actions have a
            :class:`SliceNumber` instead of the micro-batch.
        options: The options that differ from their defaults: pairs of a name and a number, a word
            or a tuple of them, sorted by name.

    Raises:
        ScheduleError: Not one row for each rank, or an action that names no slice.
        ConfigError: A name with a space, or fewer than one micro-batch or slice.
    """

    name: str
    placement: Placement
    micro_batches: int
    actions: tuple[tuple[Item, ...], ...]
    forward_only: bool = False
    slices: int = 1
    options: Options = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))
        if self.name.split() != [self.name]:
            raise ConfigError(
                "the name of a schedule is one word",
                got=repr(self.name),
                fix="join its words with hyphens",
            )
        for field in ("micro_batches", "slices"):
            object.__setattr__(self, field, require_whole(field, getattr(self, field)))
        if len(self.actions) != self.placement.ranks:
            raise ScheduleError(
                "a schedule has one row of actions for each rank",
                expected=f"{self.placement.ranks} rows",
                got=f"{len(self.actions)}",
                fix="give each rank a row, an empty one where it is idle",
            )
        for action in flatten(chain.from_iterable(self.actions)) if self.slices > 1 else ():
            if getattr(action.micro_batch, "slices", 1) != self.slices:
                raise ScheduleError(
                    f"{action} is of no slice",
                    expected=f"a SliceNumber of {self.slices} slices in the place of a micro-batch",
                    fix=f"name it with SliceNumber(micro_batch, index, {self.slices})",
                )

    @property
    def units(self) -> int:
        """The number of units of a batch: of its micro-batches, or of all their slices."""
        return self.micro_batches * self.slices

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule splits backwards into I and W."""
        return any(action.kind == "I" for row in self.actions for action in flatten(row))

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name}: {self.placement.ranks} ranks,"
            f" {self.micro_batches} micro-batches{in_slices(self.slices)},"
            f" {self.placement.chunks} chunks,"
            f" {self.placement.name}>"
        )


@dataclass(frozen=True, repr=False)
class PlanRows:
    """A plan: a schedule with sends, receives, releases and the step in its rows. Hashable.

    Args:
        name: Name of the schedule.
        placement: Which rank owns which stage.
        micro_batches: Micro-batches of a batch, m.
        edges: The values that pass between stages, sorted.
        ops: The operations of each rank, in order.
        forward_only: Whether there is no backward, as in evaluation and prediction.
        slices: Slices that each micro-batch's sequence is cut into.
        options: The same as in :class:`ScheduleRows`.
    """

    name: str
    placement: Placement
    micro_batches: int
    edges: tuple[Edge, ...]
    ops: tuple[tuple[Op, ...], ...]
    forward_only: bool = False
    slices: int = 1
    options: Options = ()

    @property
    def units(self) -> int:
        """The number of units of a batch, as :attr:`ScheduleRows.units`."""
        return self.micro_batches * self.slices

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name}: {self.placement.ranks} ranks,"
            f" {self.micro_batches} micro-batches{in_slices(self.slices)},"
            f" {sum(map(len, self.ops))} ops>"
        )


def computations(plan: PlanRows) -> ScheduleRows:
    """Returns the schedule of a plan: its rows with nothing but actions and fused units."""
    rows = tuple(tuple([op for op in row if isinstance(op, (Action, Fused))]) for row in plan.ops)
    return ScheduleRows(
        plan.name,
        plan.placement,
        plan.micro_batches,
        rows,
        plan.forward_only,
        plan.slices,
        plan.options,
    )


def in_slices(slices: int) -> str:
    """Returns `` of 4 slices``, to follow a number of micro-batches in a message; empty for 1."""
    return f" of {slices} slices" if slices > 1 else ""
