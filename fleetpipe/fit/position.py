"""Where a training is, beside its tensors: epoch, batch, and what metrics and callbacks know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fleetpipe.checkpoint.contents.training_state import plain
from fleetpipe.fit.criterion import Metric
from fleetpipe.fit.runner import Runner
from fleetpipe.fit.sources import BatchSource
from fleetpipe.paddle_api import paddle

_ARRAY = "dtype"


class Position:
    """The place of ``fit`` in its data, as checkpoints save it: the same on every rank.

    Attributes:
        epoch: The epoch that runs, or comes next.
        step: How many batches of it were trained.
        taken: How many of all epochs, and of evaluations between them, for ``num_iters``.
        stopped: Whether a callback has ended the training.
        logs: What callbacks were given of the last batch: loss and metrics.
    """

    def __init__(self, runner: Runner, source: BatchSource, callbacks: Sequence[Any]) -> None:
        """Begins at the start.

        Args:
            runner: Counts the batches of all trainings, and has the metrics.
            source: Gives the batches.
            callbacks: Those with ``state_dict`` and ``set_state_dict``, and Paddle's own, go on
                where they were; on every rank alike, so those of one rank begin anew.
        """
        self._runner = runner
        self._source = source
        self._callbacks = callbacks
        self._waiting: Mapping[str, Any] = {}
        self.epoch = self.step = self.taken = 0
        self.stopped = False
        self.logs: Mapping[str, Any] = {}
        self._held: list[dict[str, Any]] | None = None

    def hold_metrics(self) -> None:
        """Keeps what the metrics have come to: they count something else from here on."""
        self._held = self._counts()

    def advance(self, batches: int) -> None:
        """Counts batches that were trained."""
        self.step += batches
        self.taken += batches

    def next_epoch(self) -> None:
        """Goes to the begin of the next epoch."""
        self.epoch, self.step = self.epoch + 1, 0
        self._source.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as values of JSON."""
        states = ((name, callback_state(one)) for name, one in self._named().items())
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
        """Goes to a position; that of the callbacks waits for :meth:`put_callbacks_back`.

        Raises:
            CheckpointError: It was saved for other data; nothing has changed.
        """
        self._source.set_state_dict(state["loader"])
        self.epoch, self.step, self.taken = state["epoch"], state["step"], state["taken"]
        self.stopped, self._runner.trained = state["stopped"], state["trained"]
        for metric, counted in zip(self._runner.metrics, state["metrics"]):
            for name, value in counted.items():
                setattr(metric, name, _value(value))
        self.logs, self._waiting = state["told"], state["callbacks"]

    def put_callbacks_back(self) -> None:
        """Makes the callbacks go on where they were, once, after their begin."""
        for name, callback in self._named().items():
            if name in self._waiting:
                set_callback_state(callback, self._waiting[name])
        self._waiting = {}

    def _counts(self) -> list[dict[str, Any]]:
        return [_counted(metric) for metric in self._runner.metrics]

    def _named(self) -> dict[str, Any]:
        """Returns the callbacks of all ranks by name."""
        named: dict[str, Any] = {}
        for callback in self._callbacks:
            if getattr(callback, "on_rank", "all") == "all":
                kind = type(callback).__name__
                named[f"{kind} {sum(name.startswith(f'{kind} ') for name in named)}"] = callback
        return named


def _counted(metric: Metric) -> dict[str, Any]:
    """Returns what a metric has counted: numbers and arrays among its attributes."""
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
    """Returns what a callback knows of the training so far; nothing of one that says nothing."""
    if hasattr(callback, "state_dict"):
        return dict(callback.state_dict())
    return {name: getattr(callback, name) for name in _names_of(callback)}


def set_callback_state(callback: Any, state: Mapping[str, Any]) -> None:
    """Gives a callback what :func:`callback_state` returned."""
    if hasattr(callback, "set_state_dict"):
        callback.set_state_dict(state)
    for name in _names_of(callback):
        setattr(callback, name, state[name])


def _names_of(callback: Any) -> tuple[str, ...]:
    """Returns the attributes in which one of Paddle's callbacks keeps what it knows."""
    return next((names for kind, names in _KEPT.items() if isinstance(callback, kind)), ())
