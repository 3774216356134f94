"""``colossalai.trainer.hooks``: the ``Trainer``, and the hooks that it calls.

``Trainer`` trains an engine epoch by epoch, and calls hooks around batches and epochs. A program's
own hooks derive from ``BaseHook``. The other hooks measure figures, log them, step the learning
rate and save checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

from fleetpipe.aliases import Nest, Scheduler, Tensor
from fleetpipe.callbacks import PipelineCheckpoint
from fleetpipe.contrib.compat.colossalai.context import Engine, RecordedLoss
from fleetpipe.contrib.compat.colossalai.logging import DistributedLogger
from fleetpipe.contrib.compat.colossalai.utils import MultiTimer
from fleetpipe.dygraph.batch.micro_batches import join_outputs
from fleetpipe.errors import StateError, UsageError
from fleetpipe.fit.model import Model
from fleetpipe.paddle_api import paddle

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LogMetricByEpochHook",
    "LossHook",
    "SaveCheckpointHook",
]


class Trainer:
    """Trains an engine by the loop of :class:`fleetpipe.Model`, and calls hooks.

    Attributes:
        engine: The engine that is trained.
        states: The values that hooks share: ``metrics``, by mode and name, and others.
        hooks: The hooks of the running ``fit``, in their order.
        cur_epoch: Epochs that have ended.
        cur_step: Batches that were trained.
    """

    def __init__(
        self,
        engine: Engine,
        timer: MultiTimer | None = None,
        logger: DistributedLogger | None = None,
    ) -> None:
        """Takes an engine.

        Args:
            engine: The engine that ``initialize`` returned.
            timer: Receives the times ``Train-step``, ``Train-epoch``, ``Test-step``,
                ``Test-epoch``.
            logger: Logs which hooks there are.
        """
        self.engine = engine
        self.states: dict[str, Any] = {}
        self.hooks: list[BaseHook] = []
        self.cur_epoch = self.cur_step = 0
        self._timer = timer or MultiTimer(on=False)
        self._logger = logger
        self._model: Model | None = None

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
    ) -> None:
        """Trains for some epochs. Collective over the job.

        Args:
            train_dataloader: Yields batches ``(input, label)`` of this replica, two Tensors, and
                has a length; all ranks of a pipeline read the same.
            epochs: Passes over the data.
            max_steps: The most batches in all epochs together.
            test_dataloader: The data to evaluate, in the same form, after epochs 0,
                ``test_interval``, twice that and so on.
            test_interval: Epochs from one evaluation to the next.
            hooks: Called in the order of their priorities.
            display_progress: Whether the first rank shows the progress.

        Raises:
            UsageError: The data has no length, or an item of ``hooks`` is no hook.
            ConfigError: The engine has no optimizer, or the data does not fit.
            CheckpointError: A checkpoint does not fit.
        """
        if not isinstance(train_dataloader, Sized):
            raise UsageError(
                "Trainer.fit counts the steps of an epoch",
                expected="data with a length",
                got=type(train_dataloader).__name__,
                fix="pass a DataLoader over a dataset with a length, or a list of batches",
            )
        steps, loss = epochs * len(train_dataloader), self.engine.loss
        self.engine.zero_grad()
        self._model = model = Model(self.engine.model)
        model.prepare(self.engine.optimizer, _with_separate_arguments(loss))
        try:
            with loss.recording() as recorded:
                savers = self._attach_hooks(hooks)
                # Hooks step the learning rate; fit would do so by itself after each batch.
                no_steps = paddle.callbacks.LRScheduler(by_step=False, by_epoch=False)
                model.fit(
                    train_dataloader,
                    test_dataloader,
                    epochs=epochs,
                    eval_freq=test_interval,
                    num_iters=None if max_steps is None else min(max_steps, steps),
                    verbose=int(display_progress),
                    callbacks=[TrainerHookCalls(self, recorded, self._timer), no_steps, *savers],
                    resume="auto" if savers else None,
                )
        finally:
            self._model = None
            self.engine.model.layers.take_loss(loss)
            self.engine.zero_grad()
            self.engine.train()

    @property
    def is_rank_to_log(self) -> bool:
        """Whether this process owns the last stage of the first replica."""
        return self._require_model().is_rank("loss")

    def from_last_stage(self, value: Nest) -> list[Nest]:
        """Returns the values that the owners of the last stage pass, by replica. Collective.

        Args:
            value: Tensors and plain values; other ranks may pass None.
        """
        return self._require_model().pipeline.from_last_stage(value)

    def add_metric(self, mode: str, name: str, metric: Any) -> None:
        """Adds a metric of a hook to ``states``, for the hooks that log it.

        Args:
            mode: ``"train"`` or ``"test"``.
            name: The name of the metric.
            metric: An object with ``get_accumulated_value()``.
        """
        self.states["metrics"][mode][name] = metric

    def _attach_hooks(self, hooks: Sequence[BaseHook] | None) -> list[Any]:
        """Attaches hooks to this trainer; returns the callbacks that save its checkpoints."""
        for hook in hooks or ():
            if not isinstance(hook, BaseHook):
                raise UsageError(
                    "hooks are objects of hooks.BaseHook",
                    got=repr(hook) if isinstance(hook, type) else type(hook).__name__,
                    fix=f"{hook.__name__}(..)"
                    if isinstance(hook, type)
                    else "derive it from fleetpipe.compat.colossalai.trainer.hooks.BaseHook",
                )
        self.states = {"metrics": {"train": {}, "test": {}}}
        self.hooks = sorted(hooks or (), key=lambda hook: hook.priority)
        for hook in self.hooks:
            if self._logger is not None:
                name = type(hook).__name__
                self._logger.info(f"hook {name}, priority {hook.priority}", ranks=[0])
            hook.after_hook_is_attached(self)
        return [hook.callback for hook in self.hooks if hook.callback is not None]

    def _require_model(self) -> Model:
        """Returns the model that trains; raises StateError outside of :meth:`fit`."""
        if self._model is None:
            raise StateError("this is known while a Trainer trains", fix="ask for it within a hook")
        return self._model


class BaseHook:
    """Its methods are called at events of a ``Trainer``; every hook runs on every rank.

    Attributes:
        priority: Hooks with a smaller number run first.
        callback: The callback of :mod:`fleetpipe.callbacks` that does the work of the hook, if any.
    """

    callback: Any = None

    def __init__(self, priority: int) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Called when a ``fit`` begins, before all else."""

    def before_train(self, trainer: Trainer) -> None:
        """Called before the first epoch."""

    def after_train(self, trainer: Trainer) -> None:
        """Called after the last epoch."""

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Called before an epoch."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Called after an epoch, before its evaluation."""

    def before_train_iter(self, trainer: Trainer) -> None:
        """Called before a batch."""

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Called after a batch.

        Args:
            trainer: The trainer.
            output: The output of this replica's whole batch, on the owner of the last stage; None
                elsewhere.
            label: The labels of the batch, likewise.
            loss: The mean loss of all replicas, on every rank; float32 [].
        """

    def before_test(self, trainer: Trainer) -> None:
        """Called before an evaluation."""

    def after_test(self, trainer: Trainer) -> None:
        """Called after an evaluation."""

    def before_test_epoch(self, trainer: Trainer) -> None:
        """Called after :meth:`before_test`."""

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Called before :meth:`after_test`."""

    def before_test_iter(self, trainer: Trainer) -> None:
        """Called before a batch of an evaluation."""

    def after_test_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Called after a batch of an evaluation, with the arguments of :meth:`after_train_iter`."""


class TrainerHookCalls(paddle.callbacks.Callback):
    """Calls the hooks of a trainer, in the order of their priorities, on every rank."""

    model: Any

    def __init__(
        self, trainer: Trainer, recorded: list[tuple[Nest, Nest]], timer: MultiTimer
    ) -> None:
        """Prepares the calls.

        Args:
            trainer: The trainer whose hooks are called.
            recorded: Receives the output and the label of each micro-batch of the running batch; it
                is emptied after each batch.
            timer: Receives the times of batches and epochs.
        """
        super().__init__()
        self._trainer = trainer
        self._recorded = recorded
        self._timer = timer

    def on_train_begin(self, logs: Any = None) -> None:
        """Calls ``before_train`` of the hooks."""
        self._trainer.cur_step = self.model.global_step
        self._call_hooks("before_train")

    def on_train_end(self, logs: Any = None) -> None:
        """Calls ``after_train`` of the hooks."""
        self._trainer.cur_epoch += 1
        self._call_hooks("after_train")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Calls ``before_train_epoch`` of the hooks."""
        self._trainer.cur_epoch = epoch
        self._call_hooks("before_train_epoch")
        self._timer.start("Train-epoch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Calls ``after_train_epoch`` of the hooks."""
        self._timer.stop("Train-epoch", keep_in_history=True)
        self._call_hooks("after_train_epoch")
        self._timer.reset("Train-epoch")

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Calls ``before_train_iter`` of the hooks."""
        self._begin_batch("Train")

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Calls ``after_train_iter`` of the hooks."""
        self._end_batch("Train", logs)
        self._trainer.cur_step += 1

    def on_eval_begin(self, logs: Any = None) -> None:
        """Calls ``before_test`` and ``before_test_epoch`` of the hooks."""
        self._call_hooks("before_test")
        self._call_hooks("before_test_epoch")
        self._timer.start("Test-epoch")

    def on_eval_batch_begin(self, step: int, logs: Any = None) -> None:
        """Calls ``before_test_iter`` of the hooks."""
        self._begin_batch("Test")

    def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
        """Calls ``after_test_iter`` of the hooks."""
        self._end_batch("Test", logs)

    def on_eval_end(self, logs: Any = None) -> None:
        """Calls ``after_test_epoch`` and ``after_test`` of the hooks."""
        self._timer.stop("Test-epoch", keep_in_history=True)
        # Other callbacks log the values of logs.
        metrics = self._trainer.states["metrics"]["test"].items()
        logs.update({name: metric.get_accumulated_value() for name, metric in metrics})
        self._call_hooks("after_test_epoch")
        self._call_hooks("after_test")
        self._timer.reset("Test-step")
        self._timer.reset("Test-epoch")

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the hooks that have one, by the hook's number in ``hooks``."""
        states = ((str(n), hook) for n, hook in enumerate(self._trainer.hooks))
        return {n: hook.state_dict() for n, hook in states if hasattr(hook, "state_dict")}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the states of the hooks."""
        for number, state_of_hook in state.items():
            hook: Any = self._trainer.hooks[int(number)]
            hook.set_state_dict(state_of_hook)

    def _begin_batch(self, mode: str) -> None:
        """Calls the hooks before a batch; ``mode`` is "Train" or "Test"."""
        self._call_hooks(f"before_{mode.lower()}_iter")
        self._timer.start(f"{mode}-step")

    def _end_batch(self, mode: str, logs: Any) -> None:
        """Calls the hooks after a batch, with output and labels where this process has them.

        Args:
            mode: "Train" or "Test".
            logs: The values that ``fit`` logs; under "loss" a list with the loss of the batch.
        """
        self._timer.stop(f"{mode}-step", keep_in_history=True)
        output = label = None
        if self._recorded:
            output, label = map(join_outputs, zip(*self._recorded))
            self._recorded.clear()
        loss = paddle.to_tensor(logs["loss"][0], "float32")
        for hook in self._trainer.hooks:
            getattr(hook, f"after_{mode.lower()}_iter")(self._trainer, output, label, loss)

    def _call_hooks(self, event: str) -> None:
        """Calls the method of each hook that is named ``event``, such as ``before_train``."""
        for hook in self._trainer.hooks:
            getattr(hook, event)(self._trainer)


def _with_separate_arguments(loss: RecordedLoss) -> Callable[..., Tensor]:
    """Returns a loss that takes outputs and label as separate arguments, as ``fit`` passes them."""

    def loss_of_arguments(*outputs_and_label: Tensor) -> Tensor:
        *outputs, label = outputs_and_label
        return loss(outputs[0] if len(outputs) == 1 else tuple(outputs), label)

    return loss_of_arguments


class Metric:
    """A quotient of two sums, such as a mean loss or an accuracy."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sets the sums to 0, for a new epoch."""
        self._sum = self._count = 0.0

    def update(self, value: float, count: float = 1.0) -> None:
        """Adds a value to the dividend, and a number to the divisor."""
        self._sum += value
        self._count += count

    def get_accumulated_value(self) -> float:
        """Returns the value of the epoch so far; 0 before its first step."""
        return self._sum / self._count if self._count else 0.0

    def state_dict(self) -> dict[str, float]:
        """Returns the sums so far."""
        return {"sum": self._sum, "count": self._count}

    def set_state_dict(self, state: dict[str, float]) -> None:
        """Restores the sums in the middle of an epoch."""
        self._sum, self._count = state["sum"], state["count"]


class LossHook(BaseHook):
    """Measures the mean loss of each epoch and each evaluation."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self.train_loss, self.test_loss = Metric(), Metric()

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Adds the losses to the trainer's metrics."""
        trainer.add_metric("train", "Loss", self.train_loss)
        trainer.add_metric("test", "Loss", self.test_loss)

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Resets the loss of the training."""
        self.train_loss.reset()

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Adds the loss of a batch."""
        self.train_loss.update(float(loss))

    def before_test_epoch(self, trainer: Trainer) -> None:
        """Resets the loss of the evaluation."""
        self.test_loss.reset()

    def after_test_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Adds the loss of a batch of the evaluation."""
        self.test_loss.update(float(loss))

    def state_dict(self) -> dict[str, float]:
        """Returns the losses of the epoch so far."""
        return self.train_loss.state_dict()

    def set_state_dict(self, state: dict[str, float]) -> None:
        """Restores the losses in the middle of an epoch."""
        self.train_loss.set_state_dict(state)


class AccuracyHook(BaseHook):
    """Measures the fraction of right outputs in an evaluation, over all replicas."""

    def __init__(self, accuracy_func: Callable[..., Any], priority: int = 0) -> None:
        """Sets the function that counts right rows.

        Args:
            accuracy_func: ``accuracy_func(output, label)`` returns how many rows are right.
            priority: See :class:`BaseHook`.
        """
        super().__init__(priority)
        self.accuracy_func = accuracy_func
        self.metric = Metric()

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Adds the accuracy to the trainer's metrics."""
        trainer.add_metric("test", "Accuracy", self.metric)

    def before_test(self, trainer: Trainer) -> None:
        """Resets the accuracy."""
        self.metric.reset()

    def after_test_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Adds the right rows of a batch. Collective over the job."""
        # Of this replica the right rows and all rows, on the owner of the last stage.
        counts = None
        if output is not None:
            first = output[0] if isinstance(output, (list, tuple)) else output
            counts = [float(self.accuracy_func(first, label)), first.shape[0]]
        rights, rows = zip(*trainer.from_last_stage(counts))
        self.metric.update(sum(rights), sum(rows))


class LRSchedulerHook(BaseHook):
    """Steps a scheduler of the learning rate, and makes the learning rate a metric."""

    def __init__(
        self,
        lr_scheduler: Scheduler,
        by_epoch: bool,
        store_lr_in_state: bool = True,
        priority: int = 1,
    ) -> None:
        """Takes the scheduler.

        Args:
            lr_scheduler: The scheduler of Paddle's that the optimizer has.
            by_epoch: Whether to step the scheduler after each epoch, else after each batch.
            store_lr_in_state: Whether the learning rate is a metric of the trainer.
            priority: See :class:`BaseHook`.
        """
        super().__init__(priority)
        self.lr_scheduler = lr_scheduler
        self.by_epoch = by_epoch
        self.store_lr_in_state = store_lr_in_state
        self.metric = Metric()

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Adds the learning rate to the trainer's metrics, if ``store_lr_in_state`` is True."""
        self._measure_rate()
        if self.store_lr_in_state:
            trainer.add_metric("train", "LR", self.metric)

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Steps the scheduler after a batch, unless ``by_epoch``."""
        if not self.by_epoch:
            self.lr_scheduler.step()
            self._measure_rate()

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Steps the scheduler after an epoch, if ``by_epoch``."""
        if self.by_epoch:
            self.lr_scheduler.step()
            self._measure_rate()

    def _measure_rate(self) -> None:
        """Sets ``metric`` to the present learning rate."""
        self.metric.reset()
        self.metric.update(self.lr_scheduler.last_lr)


class LogMetricByEpochHook(BaseHook):
    """Logs a line for each epoch and each evaluation, on the owner of the last stage.

    ``[Epoch 0 / Train]: Loss = 2.0123 | LR = 0.001``.
    """

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        """Sets the logger and how often to log.

        Args:
            logger: A logger of ``get_dist_logger``.
            interval: Epochs from one line to the next.
            priority: See :class:`BaseHook`.
        """
        super().__init__(priority)
        self.logger = logger
        self._interval = interval

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Logs the line for the training of an epoch."""
        self._log_epoch(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Logs the line for an evaluation."""
        self._log_epoch(trainer, "test")

    def _log_epoch(self, trainer: Trainer, mode: str) -> None:
        """Logs a line with the metrics of a mode ("train" or "test"), if the interval is over."""
        if trainer.cur_epoch % self._interval == 0 and trainer.is_rank_to_log:
            values = trainer.states["metrics"][mode].items()
            shown = (f"{name} = {metric.get_accumulated_value():.5g}" for name, metric in values)
            head = f"[Epoch {trainer.cur_epoch} / {mode.title()}]"
            self.logger.info(f"{head}: {' | '.join(shown)}")


class SaveCheckpointHook(BaseHook):
    """Saves model, optimizer, random states and the position in the data, on all ranks together.

    A program with this hook goes on from the newest checkpoint of the folder, if there is one, even
    in the middle of an epoch. A :class:`fleetpipe.callbacks.PipelineCheckpoint` does the work.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        model: Any = None,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        """Sets how often and where to save.

        Args:
            interval: Epochs from one checkpoint to the next, or batches.
            checkpoint_dir: A folder that every rank sees; None for the folder of ``fleetpipe
                launch``, else ``checkpoints``.
            model: Accepted without effect: the engine's model is saved.
            save_by_iter: Whether ``interval`` is in batches.
            priority: See :class:`BaseHook`.

        Raises:
            ConfigError: ``interval`` is below 1.
        """
        super().__init__(priority)
        steps, epochs = (interval, None) if save_by_iter else (None, interval)
        self.callback = PipelineCheckpoint(checkpoint_dir, every_steps=steps, every_epochs=epochs)
