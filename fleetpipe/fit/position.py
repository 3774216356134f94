"""The position of a training beside its tensors: epoch, batch, metrics and callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from fleetpipe.checkpoint.contents.training_state import plain
from fleetpipe.fit.criterion import Metric
from fleetpipe.fit.runner import Runner
from fleetpipe.fit.sources import BatchSource
from fleetpipe.io.position import Pass
from fleetpipe.paddle_api import paddle

_ARRAY = "dtype"


class Position:
    """The position of ``fit`` in its data, which checkpoints save; the same on every rank.

    Attributes:
        epoch: The epoch that runs or comes next.
        step: How many batches of that epoch were trained.
        taken: How many batches all epochs and their evaluations took, for ``num_iters``.
        stopped: Whether a callback has ended the training.
        logs: The logs of the last batch: loss and metrics.
    """

    def __init__(self, runner: Runner, source: BatchSource, callbacks: Sequence[Any]) -> None:
        """Starts at the begin of the data.

        Args:
            runner: Counts the batches of all trainings, and holds the metrics.
            source: Yields the batches.
            callbacks: Those with ``state_dict`` and ``set_state_dict``, and Paddle's own, resume.
                Those of this rank alone are :meth:`own_callbacks`.
        """
        self._runner = runner
        self._source = source
        self._callbacks = callbacks
        #: Saved states of callbacks, which they get after their own begin.
        self._waiting: dict[str, Any] = {}
        self.epoch = self.step = self.taken = 0
        self.stopped = False
        self.logs: Mapping[str, Any] = {}
        self._held: list[dict[str, Any]] | None = None
        for metric in runner.metrics:
            metric.reset()

    def hold_metrics(self) -> None:
        """Copies the metrics' counts for the checkpoint: later batches do not belong to it."""
        self._held = self._counts()

    def advance(self, batches: int) -> None:
        """Counts trained batches."""
        self.step += batches
        self.taken += batches

    def next_epoch(self) -> None:
        """Moves to the begin of the next epoch."""
        self.epoch, self.step = self.epoch + 1, 0
        self._source.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as values of JSON."""
        states = ((name, callback_state(one)) for name, one in self._callbacks_by_name().items())
        return {
            "epoch": self.epoch,
            "step": self.step,
            "taken": self.taken,
            "trained": self._runner.trained,
            "stopped": self.stopped,
            "loader": self._source.state_dict(),
            "metrics": self._counts() if self._held is None else self._held,
            "told": plain(self.logs, "the logs"),
            "callbacks": {name: plain(state, name) for name, state in states if state},
        }

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved position; :meth:`put_callbacks_back` restores the callbacks.

        Raises:
            CheckpointError: The position belongs to other data; nothing has changed.
        """
        self._source.set_state_dict(state["loader"], state["epoch"])
        self.epoch, self.step, self.taken = state["epoch"], state["step"], state["taken"]
        self.stopped, self._runner.trained = state["stopped"], state["trained"]
        for metric, counted in zip(self._runner.metrics, state["metrics"]):
            for name, value in counted.items():
                setattr(metric, name, _value(value))
        self.logs = state["told"]
        self._waiting.update(state["callbacks"])

    @property
    def random_of_pass(self) -> Pass:
        """The random states with which the pass over the data began."""
        return getattr(self._source.loader, "random_of_pass", None) or self._source.random_of_pass

    def own_callbacks(self) -> dict[str, Any]:
        """Returns those with a state that run on this rank alone, by name, as objects to save."""
        return {
            name: SimpleNamespace(
                state_dict=partial(callback_state, one),
                set_state_dict=partial(self._waiting.__setitem__, name),
            )
            for name, one in self._callbacks_by_name(here_alone=True).items()
            if hasattr(one, "state_dict") or _names_of(one)
        }

    def put_callbacks_back(self) -> None:
        """Gives the callbacks their saved states, once, after their own begin."""
        here = self._callbacks_by_name(here_alone=True)
        for name, callback in {**self._callbacks_by_name(), **here}.items():
            if name in self._waiting:
                set_callback_state(callback, self._waiting[name])
        self._waiting.clear()

    def _counts(self) -> list[dict[str, Any]]:
        return [_metric_state(metric) for metric in self._runner.metrics]

    def _callbacks_by_name(self, here_alone: bool = False) -> dict[str, Any]:
        """Returns the callbacks that run on all ranks, or those on this rank alone, by name."""
        named: dict[str, Any] = {}
        for callback in self._callbacks:
            place = getattr(callback, "on_rank", "all")
            if (place != "all") == here_alone:
                kind = type(callback).__name__ + (f" on the {place} rank" if here_alone else "")
                named[f"{kind} {sum(name.startswith(f'{kind} ') for name in named)}"] = callback
        return named


def _metric_state(metric: Metric) -> dict[str, Any]:
    """Returns the state of a metric: its attributes that are numbers, arrays or lists of these."""
    return {
        name: _plain(value)
        for name, value in vars(metric).items()
        if isinstance(value, (bool, int, float, np.generic, np.ndarray))
        or (
            isinstance(value, list)
            and all(isinstance(item, (int, float, np.generic, np.ndarray)) for item in value)
        )
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return {_ARRAY: str(value.dtype), "values": value.tolist()}
    return value


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if isinstance(plain, dict):
        # [()] makes a number of an array of no axes, and leaves others as they are.
        return np.asarray(plain["values"], plain[_ARRAY])[()]
    return plain


#: Where Paddle's callbacks keep what they know; they have no state dicts.
_KEPT: dict[type, tuple[str, ...]] = {
    paddle.callbacks.EarlyStopping: ("wait_epoch", "best_value", "stopped_epoch"),
    paddle.callbacks.ReduceLROnPlateau: ("cooldown_counter", "wait", "best", "epoch"),
}


def callback_state(callback: Any) -> dict[str, Any]:
    """Returns the state of a callback; empty if it has none."""
    if hasattr(callback, "state_dict"):
        return dict(callback.state_dict())
    return {name: getattr(callback, name) for name in _names_of(callback)}


def set_callback_state(callback: Any, state: Mapping[str, Any]) -> None:
    """Restores what :func:`callback_state` returned."""
    if hasattr(callback, "set_state_dict"):
        callback.set_state_dict(state)
    for name in _names_of(callback):
        setattr(callback, name, state[name])


def _names_of(callback: Any) -> tuple[str, ...]:
    """Returns the attributes that are the state of one of Paddle's callbacks."""
    return next((names for kind, names in _KEPT.items() if isinstance(callback, kind)), ())
