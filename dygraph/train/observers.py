"""The observers of a pipeline's batches, and the engines whose operations they watch.

There is one engine for training, and some that run forwards only. Observers stand in a table, whose
modules are loaded only if needed. An observer of single values or actions is innermost; guards
publish while a receive is blocked, so trace and meter are around them; the meter is outermost.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fleetpipe.dygraph.backward.layer_state import OwnState
from fleetpipe.dygraph.batch.dygraph_stage import DygraphStage
from fleetpipe.dygraph.batch.micro_batches import Evaluation
from fleetpipe.dygraph.observe.hooks import HookCalls
from fleetpipe.engine.engine import Engine, Walker
from fleetpipe.engine.observer import Observer, Observers
from fleetpipe.job.job import Job
from fleetpipe.schedules import Edge, Placement, Plan


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
        "fleetpipe.dygraph.observe.refusals:FiniteSends.asked_for",
        lambda of: () if "FLAGS_pp_check_naninf" in os.environ else None,
    ),
    "order": ObserverRow(
        "fleetpipe.dygraph.observe.refusals:BackwardState",
        lambda of: (
            (of.layers,)
            if of.config.order == "ready" and of.job.degrees.pp > 1 and not of.job.local
            else None
        ),
    ),
    "users": ObserverRow("fleetpipe.engine.observer:Observers", lambda of: ()),
    "timers": ObserverRow(
        "fleetpipe.dygraph.observe.hooks:TimedActions",
        lambda of: (of.reductions.timers,) if of.reductions.timers else None,
    ),
    "hooks": ObserverRow(
        "fleetpipe.dygraph.observe.hooks:HookCalls",
        lambda of: (of.schedule, of.bubbles, of.job.connect()),
        by_plan=True,
    ),
    "companion": ObserverRow("fleetpipe.engine.observer:Observers", lambda of: ()),
    "guards": ObserverRow(
        "fleetpipe.contrib.guards:Guards",
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


class Engines:
    """Runs a plan in a job, with observers around its operations.

    Attributes:
        observers: All observers of training batches.
        hook_calls: The observer that calls the user's hooks.
        training: Walks the plan of a training batch.
        evaluation: The engines that run forwards only.
    """

    observers: Observers
    hook_calls: HookCalls
    training: Engine
    evaluation: Evaluation

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows: dict[str, Any] = {}

    def begin(
        self,
        runtime: Any,
        plan: Plan,
        stage: DygraphStage,
        evaluated: tuple[Placement, Sequence[Edge] | None],
        overlaps: bool,
        walker: Callable[..., Walker] = Walker,
    ) -> None:
        """Makes the engines of a plan. Collective over the pipeline the first time in a job.

        Args:
            runtime: The ``Runtime`` from which the rows of ``observers.py`` take their arguments.
            plan: The plan of a training batch.
            stage: Runs the actions.
            evaluated: The placement and the edges of an evaluation.
            overlaps: Whether a fused forward and backward take turns while they exchange values.
            walker: Makes the walker of a training batch.
        """
        self._rows = observers_of(runtime, self._rows)
        self.hook_calls = self._rows["hooks"]
        self._plan, self._stage, self._evaluated = plan, stage, evaluated
        self._overlapping, self._walker = OwnState() if overlaps else None, walker
        self._compile()

    def observer(self, name: str) -> Any:
        """Returns an observer by its row of ``observers.py``; None if it is not needed."""
        return self._rows.get(name)

    def observe(self, observer: Observer) -> None:
        """Makes ``observer`` watch later batches, or only their operations.

        Args:
            observer: A :class:`BatchObserver`, for training batches; anything else that has a
                ``wrap`` watches the operations of all batches.
        """
        self._rows["users"].members.append(observer)
        self._compile()

    def accompany(self, companion: Observer | None) -> None:
        """Makes ``companion`` watch each of the next batches; None ends that. There is one at most.

        The optimizer steps within the companion's ``step``, and guards verify that step later.
        """
        self._rows["companion"].members[:] = [] if companion is None else [companion]

    def _compile(self) -> None:
        """Builds the engines, with all observers around their operations."""
        self.observers = Observers(*self._rows.values())
        evaluating = [*self.observers.in_evaluations()]
        training = (self._overlapping, self._walker)
        self.training = self._engine(self._plan, [self.observers], *training)
        self.evaluation = Evaluation(*self._evaluated, lambda plan: self._engine(plan, evaluating))

    def _engine(self, plan: Plan, observers: Sequence[Observer], *training: Any) -> Engine:
        connections, timeout = self._job.connect(), self._job.timeout
        return Engine(plan, self._stage, connections, timeout, observers, *training)
