"""Builds the observers of a pipeline's batches, and the engines whose operations they watch.

``OBSERVERS`` is the table of observers; their modules are loaded only if needed. Each observer
wraps the operations that those before it have wrapped, so those of single values or actions come
first. Guards publish while a receive is blocked, so the trace and the meter are around them, the
meter outermost. :class:`Engines` has one engine for training, and a few that run forwards only.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fleetpipe.dygraph.backward.layer_state import OwnState
from fleetpipe.dygraph.batch.dygraph_stage import DygraphStage
from fleetpipe.dygraph.observe.hooks import HookCalls
from fleetpipe.engine.engine import Engine, Walker
from fleetpipe.engine.observer import Observer, Observers
from fleetpipe.job.job import Job
from fleetpipe.schedules import Edge, Placement, Plan, forward_only

#: Functions that make an observer of each pipeline that is wrapped; see :func:`observing_all`.
observer_makers: list[Callable[[Any], Observer]] = []

#: The most engines of evaluations to store: for full batches, a smaller last one, and some spare.
_MOST_ENGINES = 8


class ObserverRow(NamedTuple):
    """A row of ``OBSERVERS``: an observer that a pipeline may have.

    Attributes:
        make: The function that builds the observer, as ``module:name``; it may return None.
        arguments: Takes a ``Runtime`` and returns the arguments of ``make``; None if the pipeline
            needs no such observer.
        by_plan: Whether a new observer is built for each new plan.
    """

    make: str
    arguments: Callable[[Any], tuple[Any, ...] | None]
    by_plan: bool = False


#: The observers of a pipeline by name, the innermost first.
#: "users" and "companion" are empty at first: ``Engines.observe`` and ``accompany`` fill them.
OBSERVERS: Mapping[str, ObserverRow] = {
    "finite": ObserverRow(
        "fleetpipe.dygraph.observe.refusals:FiniteSends.asked_for",
        lambda runtime: () if "FLAGS_pp_check_naninf" in os.environ else None,
    ),
    "order": ObserverRow(
        "fleetpipe.dygraph.observe.refusals:BackwardState",
        lambda runtime: (
            (runtime.layers,)
            if runtime.config.order == "ready"
            and runtime.job.degrees.pp > 1
            and not runtime.job.local
            else None
        ),
    ),
    "users": ObserverRow("fleetpipe.engine.observer:Observers", lambda runtime: ()),
    "timers": ObserverRow(
        "fleetpipe.dygraph.observe.hooks:TimedActions",
        lambda runtime: (runtime.reductions.timers,) if runtime.reductions.timers else None,
    ),
    "hooks": ObserverRow(
        "fleetpipe.dygraph.observe.hooks:HookCalls",
        lambda runtime: (runtime.schedule, runtime.bubbles, runtime.job.connect()),
        by_plan=True,
    ),
    "companion": ObserverRow("fleetpipe.engine.observer:Observers", lambda runtime: ()),
    "guards": ObserverRow(
        "fleetpipe.contrib.guards:Guards",
        lambda runtime: (
            (runtime.layers, runtime.job, runtime.config.guards) if runtime.config.guards else None
        ),
    ),
    "trace": ObserverRow(
        "fleetpipe.engine.trace:JobTrace",
        lambda runtime: (
            (runtime.config.trace, runtime.schedule, runtime.job)
            if runtime.config.trace is not None and runtime.job.leads("pp")
            else None
        ),
    ),
    "meter": ObserverRow(
        "fleetpipe.engine.step_meter:StepMeter",
        lambda runtime: (
            runtime.plan,
            runtime.job.pipeline_ranks(),
            runtime.job.progress,
            not runtime.job.local,
        ),
        by_plan=True,
    ),
}


@contextmanager
def observing_all(make: Callable[[Any], Observer]) -> Iterator[None]:
    """A context in which ``make(pipeline)`` observes each pipeline that is wrapped."""
    observer_makers.append(make)
    try:
        yield
    finally:
        observer_makers.remove(make)


class Engines:
    """The engines of a pipeline, which run plans with observers around the operations.

    Attributes:
        observers: All observers of training batches.
        hook_calls: The observer that calls the user's hooks.
        training: Walks the plan of a training batch.
    """

    observers: Observers
    hook_calls: HookCalls
    training: Engine

    def __init__(self, job: Job) -> None:
        """Creates an object that has no engine until :meth:`begin`."""
        self._job = job
        self._observers_by_name: dict[str, Any] = {}
        #: The engines that run forwards only, by number of micro-batches.
        self._evaluation_engines: dict[int, Engine] = {}

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
            runtime: The ``Runtime`` of the pipeline, from which observers take their arguments.
            plan: The plan of a training batch.
            stage: Runs the actions.
            evaluated: The placement and the edges of an evaluation; edges None for a chain, in
                which each stage takes what the one before returns.
            overlaps: Whether a fused forward and backward run in turns, so that one computes while
                the other exchanges values.
            walker: Makes the walker of a training batch.
        """
        # Some observers stay when another plan follows.
        stays = bool(self._observers_by_name)
        for name, row in OBSERVERS.items():
            if row.by_plan or not stays:
                arguments = row.arguments(runtime)
                made = None if arguments is None else pkgutil.resolve_name(row.make)(*arguments)
                if made is not None:
                    self._observers_by_name[name] = made
        self.hook_calls = self._observers_by_name["hooks"]
        self._plan, self._stage, self._placement_and_edges = plan, stage, evaluated
        self._overlapping, self._walker = OwnState() if overlaps else None, walker
        self._build_engines()

    def observer(self, name: str) -> Any:
        """Returns an observer by its name in ``OBSERVERS``; None if the pipeline has none."""
        return self._observers_by_name.get(name)

    def observe(self, observer: Observer) -> None:
        """Makes ``observer`` watch the batches that follow.

        Args:
            observer: A :class:`BatchObserver` watches training batches; another object with a
                method ``wrap`` watches the operations of all batches.
        """
        self._observers_by_name["users"].members.append(observer)
        self._build_engines()

    def accompany(self, companion: Observer | None) -> None:
        """Sets the companion, the one observer that trains another model on the same batches.

        For a captured model it trains the plain model beside the pipeline, and compares the two.
        The optimizer steps within the companion's ``step``, and guards verify that step later.

        Args:
            companion: The companion of the batches that follow, in place of the one before; None
                for no companion.
        """
        self._observers_by_name["companion"].members[:] = [] if companion is None else [companion]

    def evaluation(self, micro_batches: int) -> Engine:
        """Returns the engine that runs ``micro_batches`` micro-batches forward only."""
        engines = self._evaluation_engines
        if micro_batches not in engines:
            if len(engines) == _MOST_ENGINES:
                del engines[next(iter(engines))]
            placement, edges = self._placement_and_edges
            plan = forward_only(placement, micro_batches).lower(edges)
            engines[micro_batches] = self._build_engine(plan, self._evaluation_observers)
        return engines[micro_batches]

    def _build_engines(self) -> None:
        """Builds the training engine with the current observers; drops evaluation engines."""
        self.observers = Observers(*self._observers_by_name.values())
        training = (self._overlapping, self._walker)
        self.training = self._build_engine(self._plan, [self.observers], *training)
        self._evaluation_observers = [*self.observers.in_evaluations()]
        self._evaluation_engines.clear()

    def _build_engine(self, plan: Plan, observers: Sequence[Observer], *training: Any) -> Engine:
        """Builds an engine of a plan.

        Args:
            plan: The plan.
            observers: The observers of its operations.
            training: For training batches, the state of overlapping computations (None if fused
                actions do not overlap) and the maker of the walker; nothing for evaluations.
        """
        connections, timeout = self._job.connect(), self._job.timeout
        return Engine(plan, self._stage, connections, timeout, observers, *training)
