"""``Trainer``: trains and evaluates an engine, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.callbacks import PipelineCheckpoint, Progress
from fleetpipe.contrib.compat.colossalai.engine import Engine
from fleetpipe.contrib.compat.colossalai.logging import DistributedLogger
from fleetpipe.contrib.compat.colossalai.trainer.hooks.base import BaseHook, Metric
from fleetpipe.contrib.compat.colossalai.utils import MultiTimer
from fleetpipe.dygraph.batch.outputs import join_outputs
from fleetpipe.errors import StateError, UsageError
from fleetpipe.fit.model import Model
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_clock


class OutputRecorder:
    """Keeps the outputs and labels of a batch, as one of the metrics of ``fit``."""

    def __init__(self) -> None:
        self._parts: list[tuple[Nest, Tensor]] = []

    def compute(self, *columns: Tensor) -> list[Tensor]:
        """Keeps the outputs and the label of a micro-batch; the label is the last column."""
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
        """Does nothing."""

    def take(self) -> tuple[Nest, Nest]:
        """Returns and drops the outputs and labels of the batch; None and None without any."""
        parts, self._parts = self._parts, []
        if not parts:
            return None, None
        outputs, labels = zip(*parts)
        return join_outputs(outputs), join_outputs(labels)


def one_of(columns: Sequence[Tensor]) -> Nest:
    """Returns the one column, or a tuple of several."""
    return columns[0] if len(columns) == 1 else tuple(columns)


class TrainerHookCalls(paddle.callbacks.Callback):
    """Calls the hooks of a trainer, in the order of their priorities, on every rank."""

    model: Any

    def __init__(self, trainer: Trainer, seen: OutputRecorder, timer: MultiTimer | None) -> None:
        super().__init__()
        self._trainer = trainer
        self._seen = seen
        self._timer = timer or MultiTimer(on=False)
        self._begun = 0.0

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
        metrics = self._trainer.metrics("test").items()
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
        self._begun = device_clock()()

    def _end(self, mode: str, logs: Any) -> None:
        trainer = self._trainer
        trainer.step_seconds = device_clock()() - self._begun
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
    """The progress of ``fit``, with the metrics of ``LogMetricByStepHook``."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(verbose=1)
        self._trainer = trainer

    def _texts(self, logs: Any) -> list[str]:
        noted = self._trainer.states.get("step_metrics", {})
        shown = [f"{name} {value}" for name, value in noted.items() if name not in self._names]
        return [*shown, *super()._texts(logs)]


class Trainer:
    """The loop of :class:`fleetpipe.Model` around an engine, with hooks.

    Attributes:
        engine: The engine that is trained.
        states: The values that hooks share: ``metrics``, ``step_metrics`` and their own.
        hooks: The hooks of the ``fit`` or ``evaluate`` that runs, in their order.
        cur_epoch: Epochs that have ended.
        cur_step: Batches that were trained.
        batch_size: Rows of the last batch, of all replicas.
        step_seconds: Seconds of the last batch.
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
        self.batch_size = 0
        self.step_seconds = 0.0
        self.max_epochs = self.steps_per_epoch = 0
        self.max_steps: int | None = None
        self._timer = timer
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
        return_output_label: bool = True,
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
            return_output_label: Whether hooks get outputs and labels.

        Raises:
            UsageError: The data has no length, or one of the hooks is none.
            ConfigError: The engine has no loss or no optimizer, or the data does not fit.
            CheckpointError: A checkpoint does not fit.
        """
        if not isinstance(train_dataloader, Sized):
            raise UsageError(
                "Trainer.fit counts the steps of an epoch",
                expected="data with a length",
                got=type(train_dataloader).__name__,
                fix="pass a DataLoader over a dataset with a length, or a list of batches",
            )
        self.max_epochs, self.max_steps = epochs, max_steps
        self.steps_per_epoch = len(train_dataloader)
        steps = epochs * self.steps_per_epoch
        with self._prepare_model(return_output_label) as (model, calls):
            callbacks = self._attach(hooks)
            saves = any(isinstance(callback, PipelineCheckpoint) for callback in callbacks)
            # Hooks step the learning rate; fit would do so by itself after each batch.
            still = paddle.callbacks.LRScheduler(by_step=False, by_epoch=False)
            model.fit(
                train_dataloader,
                test_dataloader,
                epochs=epochs,
                eval_freq=test_interval,
                num_iters=None if max_steps is None else min(max_steps, steps),
                verbose=0,
                callbacks=[calls, *self._progress(display_progress), still, *callbacks],
                resume="auto" if saves else None,
            )

    def evaluate(
        self,
        test_dataloader: Iterable[Any],
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Evaluates the model; the hooks get the figures. Collective over the job.

        Args:
            test_dataloader: The same as for :meth:`fit`.
            hooks: The same as for :meth:`fit`.
            display_progress: The same as for :meth:`fit`.
            return_output_label: The same as for :meth:`fit`.

        Raises:
            UsageError: One of the hooks is none.
        """
        with self._prepare_model(return_output_label) as (model, calls):
            attached = self._attach(hooks)
            callbacks = [calls, *self._progress(display_progress), *attached]
            model.evaluate(test_dataloader, verbose=0, callbacks=callbacks)

    def predict(self, data: Nest) -> Nest:
        """Returns the outputs for a batch, on the owner of the last stage; None elsewhere.

        Collective over the pipeline.

        Args:
            data: The inputs, of any number of rows.
        """
        self.engine.eval()
        return self.engine.execute_schedule(iter([(data, None)]), True, return_loss=False)[0]

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

    def metrics(self, mode: str) -> Mapping[str, Metric]:
        """Returns the metrics of the hooks by name.

        Args:
            mode: ``"train"`` or ``"test"``.
        """
        return self.states.get("metrics", {}).get(mode, {})  # type: ignore[no-any-return]

    @contextmanager
    def _prepare_model(self, return_output_label: bool) -> Iterator[tuple[Model, TrainerHookCalls]]:
        """While it is open, a :class:`Model` has the engine's model, loss and optimizer."""
        self.engine.zero_grad()
        seen = OutputRecorder()
        model = Model(self.engine.model)
        criterion = self.engine.criterion
        loss = None if criterion is None else _on_columns(criterion)
        model.prepare(self.engine.optimizer, loss, [seen] if return_output_label else None)
        self._model = model
        try:
            yield model, TrainerHookCalls(self, seen, self._timer)
        finally:
            self._model = None
            self.engine.take_back()

    def _attach(self, hooks: Sequence[BaseHook] | None) -> list[Any]:
        """Attaches hooks to this trainer; returns the callbacks that do their work."""
        for hook in hooks or ():
            if not isinstance(hook, BaseHook):
                raise UsageError(
                    "hooks are objects of hooks.BaseHook",
                    got=repr(hook) if isinstance(hook, type) else type(hook).__name__,
                    fix=f"{hook.__name__}(..)"
                    if isinstance(hook, type)
                    else "derive it from fleetpipe.compat.colossalai.trainer.hooks.BaseHook",
                )
        self.states = {}
        self.hooks = sorted(hooks or (), key=lambda hook: hook.priority)
        for hook in self.hooks:
            if self._logger is not None:
                name = type(hook).__name__
                self._logger.info(f"hook {name}, priority {hook.priority}", ranks=[0])
            hook.after_hook_is_attached(self)
        return [callback for hook in self.hooks for callback in hook.callbacks()]

    def _progress(self, wanted: bool) -> list[StepProgress]:
        return [StepProgress(self)] if wanted else []

    def _require_model(self) -> Model:
        if self._model is None:
            raise StateError(
                "this is known while a Trainer trains or evaluates", fix="ask for it within a hook"
            )
        return self._model


def _on_columns(criterion: Callable[[Nest, Nest], Tensor]) -> Callable[..., Tensor]:
    """Turns a loss into one that takes the columns one by one, as ``fit`` calls it."""
    return lambda *columns: criterion(one_of(columns[:-1]), columns[-1])
