"""The observers of a pipeline's batches: a table, whose modules are loaded only if needed.

The order of the table is that of :class:`fleetpipe.engine.observer.Observers`, for these reasons:

- An observer of single values or actions is innermost: the check for NaN and the user's own.
- The companion trains before the batch, and steps within the step that the guards check.
- Guards publish while a receive is blocked: trace and meter, around them, count that as waiting.
- The meter is outermost. It begins last and ends first, so that neither a plain model's training
  nor the exchange of a trace is a part of the step; the trace ends with the number of that step.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from fleetpipe.engine.observer import Observer


class ObserverRow(NamedTuple):
    """An observer that a pipeline may have.

    Attributes:
        make: The function that makes it, as ``module:name``; it may return None, for none.
        arguments: Takes a ``Runtime`` and returns the arguments of ``make``; None if it is not
            needed.
        by_plan: Whether each new plan needs a new one.
    """

    make: str
    arguments: Callable[[Any], tuple[Any, ...] | None]
    by_plan: bool = False


OBSERVERS: Mapping[str, ObserverRow] = {
    "finite": ObserverRow(
        "fleetpipe.dygraph.observe.finite:FiniteSends.asked_for",
        lambda of: () if "FLAGS_pp_check_naninf" in os.environ else None,
    ),
    "order": ObserverRow(
        "fleetpipe.dygraph.observe.backward_state:BackwardState",
        lambda of: (
            (of.layers,)
            if of.config.order == "ready" and of.job.degrees.pp > 1 and not of.job.local
            else None
        ),
    ),
    "users": ObserverRow("fleetpipe.engine.observer:Observers", lambda of: ()),
    "timers": ObserverRow(
        "fleetpipe.dygraph.observe.timers:TimedActions",
        lambda of: (of.reductions.timers,) if of.reductions.timers else None,
    ),
    "hooks": ObserverRow(
        "fleetpipe.dygraph.observe.hooks:HookCalls",
        lambda of: (of.schedule, of.bubbles, of.job.connect()),
        by_plan=True,
    ),
    "companion": ObserverRow("fleetpipe.engine.observer:Observers", lambda of: ()),
    "guards": ObserverRow(
        "fleetpipe.contrib.guards.guards:Guards",
        lambda of: (of.layers, of.job, of.config.guards) if of.config.guards else None,
    ),
    "trace": ObserverRow(
        "fleetpipe.engine.trace:JobTrace",
        lambda of: (
            (of.config.trace, of.schedule, of.job)
            if of.config.trace is not None and of.job.leads("pp")
            else None
        ),
    ),
    "meter": ObserverRow(
        "fleetpipe.engine.step_meter:StepMeter",
        lambda of: (of.plan, of.job.pipeline_ranks(), of.job.progress, not of.job.local),
        by_plan=True,
    ),
}


def observers_of(runtime: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the observers of a pipeline by their rows. Collective if one of them is.

    Args:
        runtime: The pipeline's ``Runtime``.
        before: The result for the plan before; empty for the first one.

    Raises:
        ConfigError: An option of an observer is wrong.
    """
    observers: dict[str, Any] = {}
    for name, row in OBSERVERS.items():
        observer = before.get(name)
        if row.by_plan or not before:
            arguments = row.arguments(runtime)
            observer = None if arguments is None else pkgutil.resolve_name(row.make)(*arguments)
        if observer is not None:
            observers[name] = observer
    return observers


#: Makes an observer of each pipeline that is wrapped.
of_all: list[Callable[[Any], Observer]] = []


@contextmanager
def observing_all(make: Callable[[Any], Observer]) -> Iterator[None]:
    """While it is open, ``make(pipeline)`` observes each pipeline that is wrapped."""
    of_all.append(make)
    try:
        yield
    finally:
        of_all.remove(make)
