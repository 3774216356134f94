"""The engines of a pipeline: one for training, and those that run forwards only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fleetpipe.dygraph.backward.own_state import OwnState
from fleetpipe.dygraph.batch.dygraph_stage import DygraphStage
from fleetpipe.dygraph.batch.outputs import Evaluation
from fleetpipe.dygraph.observe.hooks import HookCalls
from fleetpipe.dygraph.train.observers import observers_of
from fleetpipe.engine.engine import Engine, Walker
from fleetpipe.engine.observer import Observer, Observers
from fleetpipe.job.job import Job
from fleetpipe.schedules import Edge, Placement, Plan


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
