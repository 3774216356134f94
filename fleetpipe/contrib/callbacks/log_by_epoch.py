"""``LogMetricByEpoch``: prints a line for the training and the evaluation of each epoch."""

from __future__ import annotations

from typing import Any

from fleetpipe.fit.callbacks import rank_policy


class LogMetricByEpoch(rank_policy.Callback):
    """Prints the mean loss, the metrics and the learning rate of each epoch on the first rank.

    The lines are those of ColossalAI's hook of this name in its tutorial, but epochs count from 1,
    as in all of fleetpipe's texts: ``[Epoch 1 / Train]: Loss = 1.2345 | LR = 0.001``.
    """

    def __init__(self, digits: int = 5) -> None:
        super().__init__()
        self._digits = digits
        self._epoch = 0
        self._losses: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the number of the epoch, and drops the losses of the last one."""
        self._epoch = epoch
        self._losses = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Adds the loss of the batch to those of the epoch."""
        self._losses += logs["loss"]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Prints the line for the training of the epoch."""
        self._print("Train", logs, {"LR": self.model.learning_rate})

    def on_eval_end(self, logs: Any = None) -> None:
        """Prints the line for the evaluation of the epoch."""
        self._losses = logs.get("loss", [])
        self._print("Test", logs, {})

    def state_dict(self) -> dict[str, Any]:
        """Returns the losses of the epoch so far."""
        return {"losses": self._losses}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the losses of an epoch that goes on in its middle."""
        self._losses = state["losses"]

    def _print(self, what: str, logs: Any, more: dict[str, float]) -> None:
        if not self.model.is_rank("first"):
            return
        values: dict[str, float] = {}
        if self._losses:
            values["Loss"] = sum(self._losses) / len(self._losses)
        values.update({name: logs[name] for name in self.model.metric_names if name != "loss"})
        values.update(more)
        text = " | ".join(f"{name} = {value:.{self._digits}g}" for name, value in values.items())
        rank_policy.say(f"[Epoch {self._epoch + 1} / {what}]: {text}")
