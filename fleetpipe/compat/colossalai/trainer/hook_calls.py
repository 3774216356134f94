"""From the events of ``fit`` to those of hooks, and what hooks are given of a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.callbacks import Progress
from fleetpipe.compat.colossalai.trainer.hooks.base import BaseHook, Trainer
from fleetpipe.compat.colossalai.utils import MultiTimer
from fleetpipe.dygraph.batch.outputs import joined
from fleetpipe.paddle_api import paddle


class Hooked(Trainer, Protocol):
    """A ``Trainer`` with the hooks that it has at the time."""

    hooks: list[BaseHook]


class Seen:
    """Stands among the metrics of ``fit``, and keeps outputs and labels where they are."""

    def __init__(self) -> None:
        """Begins without any."""
        self._parts: list[tuple[Nest, Tensor]] = []

    def compute(self, *columns: Tensor) -> list[Tensor]:
        """Keeps those of a micro-batch: the model's outputs, then the label."""
        self._parts.append((one_of(columns[:-1]), columns[-1]))
        return []

    def update(self) -> None:
        """Counts nothing."""

    def accumulate(self) -> list[float]:
        """Returns no value."""
        return []

    def name(self) -> list[str]:
        """Returns no name."""
        return []

    def reset(self) -> None:
        """Has nothing to forget."""

    def take(self) -> tuple[Nest, Nest]:
        """Returns those of the batch, and forgets them; None and None where there are none."""
        parts, self._parts = self._parts, []
        if not parts:
            return None, None
        outputs, labels = zip(*parts)
        return joined(outputs), joined(labels)


def one_of(columns: Sequence[Tensor]) -> Nest:
    """Returns the one column, or a tuple of several."""
    return columns[0] if len(columns) == 1 else tuple(columns)


class TrainerHookCalls(paddle.callbacks.Callback):
    """Calls the hooks of a trainer, in the order of their priorities, on every rank."""

    model: Any

    def __init__(self, trainer: Hooked, seen: Seen, timer: MultiTimer | None) -> None:
        """Takes what is called."""
        super().__init__()
        self._trainer = trainer
        self._seen = seen
        self._timer = timer or MultiTimer(on=False)
        self._begun = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins the training."""
        self._trainer.cur_step = self.model.global_step
        self._call("before_train")

    def on_train_end(self, logs: Any = None) -> None:
        """Ends it."""
        self._trainer.cur_epoch += 1
        self._call("after_train")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins an epoch."""
        self._trainer.cur_epoch = epoch
        self._call("before_train_epoch")
        self._timer.start("Train-epoch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends it."""
        self._timer.stop("Train-epoch", keep_in_history=True)
        self._call("after_train_epoch")
        self._timer.reset("Train-epoch")

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Begins a batch."""
        self._begin("Train")

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Ends it."""
        self._end("Train", logs)
        self._trainer.cur_step += 1

    def on_eval_begin(self, logs: Any = None) -> None:
        """Begins an evaluation."""
        self._call("before_test")
        self._call("before_test_epoch")
        self._timer.start("Test-epoch")

    def on_eval_batch_begin(self, step: int, logs: Any = None) -> None:
        """Begins a batch of it."""
        self._begin("Test")

    def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
        """Ends that."""
        self._end("Test", logs)

    def on_eval_end(self, logs: Any = None) -> None:
        """Ends the evaluation."""
        self._timer.stop("Test-epoch", keep_in_history=True)
        # For callbacks that write what they are told.
        metrics = self._trainer.metrics("test").items()
        logs.update({name: metric.get_accumulated_value() for name, metric in metrics})
        self._call("after_test_epoch")
        self._call("after_test")
        self._timer.reset("Test-step")
        self._timer.reset("Test-epoch")

    def state_dict(self) -> dict[str, Any]:
        """Returns what hooks have counted in the middle of an epoch."""
        states = ((str(n), hook) for n, hook in enumerate(self._trainer.hooks))
        return {n: hook.state_dict() for n, hook in states if hasattr(hook, "state_dict")}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Has the hooks go on with it."""
        for number, counted in state.items():
            hook: Any = self._trainer.hooks[int(number)]
            hook.set_state_dict(counted)

    def _begin(self, mode: str) -> None:
        self._call(f"before_{mode.lower()}_iter")
        self._timer.start(f"{mode}-step")
        self._begun = time.perf_counter()

    def _end(self, mode: str, logs: Any) -> None:
        trainer = self._trainer
        trainer.step_seconds = time.perf_counter() - self._begun
        trainer.batch_size = logs["batch_size"]
        self._timer.stop(f"{mode}-step", keep_in_history=True)
        output, label = self._seen.take()
        loss = paddle.to_tensor(logs["loss"][0], "float32")
        for hook in trainer.hooks:
            getattr(hook, f"after_{mode.lower()}_iter")(trainer, output, label, loss)

    def _call(self, event: str) -> None:
        for hook in self._trainer.hooks:
            getattr(hook, event)(self._trainer)


class StepProgress(Progress):
    """The progress of ``fit``, with what ``LogMetricByStepHook`` notes."""

    def __init__(self, trainer: Trainer) -> None:
        """Takes the trainer that has it."""
        super().__init__(verbose=1)
        self._trainer = trainer

    def _figures(self, logs: Any) -> str:
        noted = self._trainer.states.get("step_metrics", {})
        shown = [f"{name} {value}" for name, value in noted.items() if name not in self._names]
        return ", ".join([*shown, super()._figures(logs)])
