"""``Trainer``: trains an engine epoch by epoch, and calls hooks around batches and epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.contrib.compat.colossalai.engine import Engine, RecordedLoss
from fleetpipe.contrib.compat.colossalai.logging import DistributedLogger
from fleetpipe.contrib.compat.colossalai.utils import MultiTimer
from fleetpipe.dygraph.batch.outputs import join_outputs
from fleetpipe.errors import StateError, UsageError
from fleetpipe.fit.model import Model
from fleetpipe.paddle_api import paddle


class Trainer:
    """The loop of :class:`fleetpipe.Model` around an engine, with hooks.

    Attributes:
        engine: The engine that is trained.
        states: The values that hooks share: ``metrics``, by mode and name, and their own.
        hooks: The hooks of the ``fit`` that runs, in their order.
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
            timer: Gets the times ``Train-step``, ``Train-epoch``, ``Test-step``, ``Test-epoch``.
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
            test_dataloader: As ``train_dataloader``; it is evaluated after epochs 0,
                ``test_interval``, twice that and so on.
            test_interval: Epochs from one evaluation to the next.
            hooks: Called in the order of their priorities.
            display_progress: Whether the first rank shows the progress.

        Raises:
            UsageError: The data has no length, or one of the hooks is none.
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
        model.prepare(self.engine.optimizer, _on_columns(loss))
        try:
            with loss.recording() as recorded:
                savers = self._attach(hooks)
                # Hooks step the learning rate; fit would do so by itself after each batch.
                still = paddle.callbacks.LRScheduler(by_step=False, by_epoch=False)
                model.fit(
                    train_dataloader,
                    test_dataloader,
                    epochs=epochs,
                    eval_freq=test_interval,
                    num_iters=None if max_steps is None else min(max_steps, steps),
                    verbose=int(display_progress),
                    callbacks=[TrainerHookCalls(self, recorded, self._timer), still, *savers],
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

    def _attach(self, hooks: Sequence[BaseHook] | None) -> list[Any]:
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
        if self._model is None:
            raise StateError("this is known while a Trainer trains", fix="ask for it within a hook")
        return self._model


class BaseHook:
    """Acts at events of a ``Trainer``; every hook runs on every rank.

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
        """Called after a batch of an evaluation, as :meth:`after_train_iter`."""


class TrainerHookCalls(paddle.callbacks.Callback):
    """Calls the hooks of a trainer, in the order of their priorities, on every rank."""

    model: Any

    def __init__(
        self, trainer: Trainer, recorded: list[tuple[Nest, Nest]], timer: MultiTimer
    ) -> None:
        super().__init__()
        self._trainer = trainer
        self._recorded = recorded
        self._timer = timer

    def on_train_begin(self, logs: Any = None) -> None:
        """Calls ``before_train`` of the hooks."""
        self._trainer.cur_step = self.model.global_step
        self._call("before_train")

    def on_train_end(self, logs: Any = None) -> None:
        """Calls ``after_train`` of the hooks."""
        self._trainer.cur_epoch += 1
        self._call("after_train")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Calls ``before_train_epoch`` of the hooks."""
        self._trainer.cur_epoch = epoch
        self._call("before_train_epoch")
        self._timer.start("Train-epoch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Calls ``after_train_epoch`` of the hooks."""
        self._timer.stop("Train-epoch", keep_in_history=True)
        self._call("after_train_epoch")
        self._timer.reset("Train-epoch")

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Calls ``before_train_iter`` of the hooks."""
        self._begin("Train")

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Calls ``after_train_iter`` of the hooks."""
        self._end("Train", logs)
        self._trainer.cur_step += 1

    def on_eval_begin(self, logs: Any = None) -> None:
        """Calls ``before_test`` and ``before_test_epoch`` of the hooks."""
        self._call("before_test")
        self._call("before_test_epoch")
        self._timer.start("Test-epoch")

    def on_eval_batch_begin(self, step: int, logs: Any = None) -> None:
        """Calls ``before_test_iter`` of the hooks."""
        self._begin("Test")

    def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
        """Calls ``after_test_iter`` of the hooks."""
        self._end("Test", logs)

    def on_eval_end(self, logs: Any = None) -> None:
        """Calls ``after_test_epoch`` and ``after_test`` of the hooks."""
        self._timer.stop("Test-epoch", keep_in_history=True)
        # For callbacks that write what they are told.
        metrics = self._trainer.states["metrics"]["test"].items()
        logs.update({name: metric.get_accumulated_value() for name, metric in metrics})
        self._call("after_test_epoch")
        self._call("after_test")
        self._timer.reset("Test-step")
        self._timer.reset("Test-epoch")

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the hooks in the middle of an epoch."""
        states = ((str(n), hook) for n, hook in enumerate(self._trainer.hooks))
        return {n: hook.state_dict() for n, hook in states if hasattr(hook, "state_dict")}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the states of the hooks."""
        for number, counted in state.items():
            hook: Any = self._trainer.hooks[int(number)]
            hook.set_state_dict(counted)

    def _begin(self, mode: str) -> None:
        self._call(f"before_{mode.lower()}_iter")
        self._timer.start(f"{mode}-step")

    def _end(self, mode: str, logs: Any) -> None:
        self._timer.stop(f"{mode}-step", keep_in_history=True)
        output = label = None
        if self._recorded:
            output, label = map(join_outputs, zip(*self._recorded))
            self._recorded.clear()
        loss = paddle.to_tensor(logs["loss"][0], "float32")
        for hook in self._trainer.hooks:
            getattr(hook, f"after_{mode.lower()}_iter")(self._trainer, output, label, loss)

    def _call(self, event: str) -> None:
        for hook in self._trainer.hooks:
            getattr(hook, event)(self._trainer)


def _on_columns(loss: RecordedLoss) -> Callable[..., Tensor]:
    """Turns a loss into one that takes the columns one by one, as ``fit`` calls it."""

    def on_columns(*columns: Tensor) -> Tensor:
        *outputs, label = columns
        return loss(outputs[0] if len(outputs) == 1 else tuple(outputs), label)

    return on_columns
