"""The wrapper that trains and evaluates a ``PipelineLayer``: Fleet's ``train_batch`` and kin."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable

from fleetpipe._paddle import paddle
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.batch.losses import Losses
from fleetpipe.dygraph.batch.micro_batches import (
    Cut,
    MicroBatches,
    ragged_weights,
    split,
    split_value,
    unwrapped,
)
from fleetpipe.dygraph.batch.outputs import joined, on_host, require_count
from fleetpipe.dygraph.batch.stage import Batch
from fleetpipe.dygraph.gradients import divide_gradients, drop_gradients
from fleetpipe.dygraph.observe import profile as profiling
from fleetpipe.dygraph.optimizer import replicas as data_parallel
from fleetpipe.dygraph.optimizer.optimizer import PipelineOptimizer
from fleetpipe.dygraph.optimizer.scaler import prepared
from fleetpipe.dygraph.train.runtime import PipelineEngines
from fleetpipe.errors import ConfigError


class PipelineParallel(PipelineEngines):
    """Runs the batches of a ``PipelineLayer`` through the stages of all ranks.

    Every method below that takes a batch is collective: each rank of the pipeline calls it the same
    number of times, in the same order. A batch that raises an error leaves no gradients and nothing
    else behind; where one process plays all ranks, the next may follow.
    """

    def profile(self, data: Any, path: str | Path | None = None) -> dict[str, Any]:
        """Measures what the actions of each stage cost. Collective.

        Parameters stay as they are; gradients are cleared.

        Args:
            data: As for :meth:`train_batch`.
            path: Where rank 0 writes the costs as JSON, for ``fleetpipe schedule auto --costs`` and
                ``fleetpipe_configs["costs"]``.

        Returns:
            Seconds of F, I and W of each stage, the latency of an edge, and the bytes that a
            forward of each stage holds: the form of ``fleetpipe.schedules.Costs.from_json``.
        """
        self._require_running()
        batches = split(data, self._cut())
        with self._job.guarded(lambda: "profiling"):
            measured = profiling.measure(self.layers, self._job, batches, self.weights)
        ranks = (self.stage_id, self.replicas.rank, self._job.model_parallel().rank)
        if path is not None and not any(ranks):
            Path(path).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        return measured

    def train_batch(
        self,
        data: Any,
        optimizer: Any,
        lr_scheduler: Any = None,
        scaler: Any = None,
        loss_fn_idx: int = 0,
        return_micro_batch_loss: bool = False,
    ) -> Any:
        """Trains on one batch: all micro-batches forward and backward, then one optimizer step.

        Args:
            data: ``[inputs, labels]`` of accumulate_steps x micro_batch_size rows, or an iterator
                of which accumulate_steps items ``(inputs, labels)`` are taken. Every rank may pass
                the same; only the owners of the first and the last stage need theirs.
            optimizer: What ``fleet.distributed_optimizer`` returned.
            lr_scheduler: Stepped once, after the optimizer.
            scaler: A ``paddle.amp.GradScaler``. All ranks agree on whether a gradient overflowed:
                all step, or none. On CPU Paddle switches it off.
            loss_fn_idx: Which of the model's loss functions backward starts from; all are computed.
            return_micro_batch_loss: Whether to return the micro-batches' losses one by one.

        Returns:
            The loss of the batch, a Tensor without gradient, with the shape, the dtype and the same
            bits on every rank: the mean over micro-batches, or the sum if so configured. With
            ``return_micro_batch_loss`` a Tensor [accumulate_steps], whose sum is that loss (whose
            mean it is, under ``delay_scale_loss``). A list of these where the model has more than
            one loss function.

        Raises:
            ConfigError: The batch, the optimizer, loss_fn_idx or the grad mode does not fit.
            BoundaryError: A value cannot cross between stages.
            PeerFailed: Another rank left.
            PipelineTimeout: A message did not come within the limit.
            StateError: ``fleet.shutdown`` ended the job of this model.
        """
        _require_methods("lr_scheduler", lr_scheduler, "an LRScheduler", ("step", "get_lr"))
        _require_methods("scaler", scaler, "a GradScaler", ("scale", "step", "update"))
        scaler = prepared(scaler)

        def step() -> None:
            if self._switches.delay_scale_loss:
                divide_gradients(self.layers.trained_parameters(), self.weights[0].denominator)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if self._switches.release_gradients:
                optimizer.clear_grad(set_to_zero=False)
            else:
                optimizer.clear_grad()

        bind = functools.partial(self._bind, optimizer)
        loss = self._train(data, scaler, step, loss_fn_idx, return_micro_batch_loss, bind)
        if lr_scheduler is not None:
            lr_scheduler.step()
        return loss

    def forward_backward_pipeline(
        self,
        data: Any,
        scaler: Any = None,
        static_scheduler: bool = False,
        return_micro_batch_loss: bool = False,
    ) -> Any:
        """Trains without the optimizer step: leaves the gradients on the parameters.

        Under ``delay_scale_loss`` they are not divided yet.

        Args:
            data: As for :meth:`train_batch`.
            scaler: As for :meth:`train_batch`.
            static_scheduler: Runs nothing, and returns :meth:`get_static_scheduler`.
            return_micro_batch_loss: As for :meth:`train_batch`.

        Returns:
            The loss, as :meth:`train_batch` does.
        """
        if static_scheduler:
            return self.get_static_scheduler()
        return self._train(data, scaler, lambda: None, 0, return_micro_batch_loss)

    def eval_batch(
        self,
        data: Any,
        compute_loss: bool = False,
        loss_fn_idx: int = 0,
        return_host_tensor: bool = False,
    ) -> Any:
        """Runs one batch forward without gradients; leaves the layers in ``eval()`` mode.

        The next :meth:`train_batch` puts them into ``train()`` mode again.

        Args:
            data: As for :meth:`train_batch`, and of any other number of rows: these become
                micro-batches of micro_batch_size rows, the last of which may be smaller and counts
                in the loss by its rows. Lists may have any number of values.
            compute_loss: Whether to compute the loss instead of returning outputs; only then are
                labels and a loss function needed.
            loss_fn_idx: Must be that of a loss function; all are computed.
            return_host_tensor: Whether outputs are moved to the host's memory.

        Returns:
            With ``compute_loss`` the loss, on every rank the same (a list where there are several
            loss functions). Else a list with the output of each micro-batch on the rank that owns
            the last stage, and an empty list elsewhere.
        """
        functions = self._loss_functions(loss_fn_idx) if compute_loss else None
        data = unwrapped(data)
        batches = split(data, self._cut(any_rows=True))
        # Only a whole batch knows of rows; an iterator's micro-batches all count alike.
        labels = data[1] if compute_loss and isinstance(data, (list, tuple)) else None

        def finish(batch: Batch) -> Any:
            if batch.losses is not None:
                return self._share_losses(batch.losses, by_micro_batch=False)
            outputs = [batch.outputs[index] for index in sorted(batch.outputs)]
            return [on_host(output) for output in outputs] if return_host_tensor else outputs

        return self._run_forward(batches, functions, labels, finish)

    def predict_batch(self, inputs: Any, broadcast: bool = True) -> Any:
        """Returns the model's output for a whole batch; leaves the layers in ``eval()`` mode.

        Args:
            inputs: What stands first in ``[inputs, labels]``, of any number of rows, as for
                :meth:`eval_batch`. Only the owner of the first stage needs it.
            broadcast: Whether every rank of the pipeline gets the output.

        Returns:
            The outputs of all micro-batches joined along axis 0, in the containers that the model
            returns. Without ``broadcast`` on the owner of the last stage; None elsewhere.
        """
        batches = MicroBatches(split_value(inputs, self._cut(any_rows=True), "inputs"), None)

        def finish(batch: Batch) -> Any:
            outputs = [batch.outputs[index] for index in sorted(batch.outputs)]
            output = joined(outputs) if outputs else None
            return self._job.group().broadcast(output, self._last_owner) if broadcast else output

        return self._run_forward(batches, None, None, finish)

    def _train(
        self,
        data: Any,
        scaler: Any,
        step: Callable[[], None],
        loss_fn_idx: int,
        by_micro_batch: bool,
        bind: Callable[[], None] | None = None,
    ) -> Any:
        self._require_running()
        functions = self._loss_functions(loss_fn_idx)
        _require_gradients()
        # First, so that it does not matter which ranks' data draw random numbers too.
        keys = random_keys.draw(self._config.rng)
        batches = self.micro_batches(data)
        self._require_data(batches, labelled=True)
        if bind is not None:
            # Last, for it may wait: what this rank can refuse by itself is refused by now.
            bind()
        self._layers.train()
        losses = Losses(functions, self.weights, loss_fn_idx, self._switches.delay_scale_loss)
        scale = None if scaler is None else scaler.scale
        batch = Batch(batches, losses, scale)
        results: list[Any] = []

        def reduce() -> None:
            # The loss goes out before the step, so that nobody waits for the last stage's update.
            results.append(self._share_losses(losses, by_micro_batch))
            self._reduce_gradients()

        with (
            self._working_on(batch, training=True),
            self._job.guarded(self._training.where),
            self._own_errors(),
            random_keys.keyed(keys, self._job.model_parallel()),
        ):
            if self._trace is not None:
                self._trace.begin_step()
            self._training.run({"REDUCE": reduce, "STEP": step}, self._first_micro_batch)
            if self._trace is not None:
                self._trace.end_step()
        self._hook_calls.end(self._job.connect())
        self.timer_printer()
        return results[0]

    def _reduce_gradients(self) -> None:
        """Adds up gradients over the replicas and over the copies of shared weights. Collective."""
        with self._timing("allreduce_gradients"):
            data_parallel.reduce_gradients(
                self.layers.trained_parameters(), self._job.replicas(), self._scale
            )
        # After the replicas: their sums differ in the last bit from stage to stage.
        with self._timing("allreduce_shared_weight_gradients"):
            self.layers.allreduce_shared_weight_gradients()

    def _run_forward(
        self, batches: MicroBatches, functions: Any, labels: Any, finish: Callable[[Batch], Any]
    ) -> Any:
        """Runs forwards only and returns what ``finish`` makes of them, still guarded."""
        self._require_running()
        self._require_data(batches, labelled=functions is not None)
        self._layers.eval()
        with self._job.guarded(lambda: "evaluating"):
            owner = self.schedule.placement.rank_of(0)
            # A rank without data cannot know how many micro-batches will come.
            given = batches.inputs and len(batches.inputs)
            count = self._job.group().broadcast(given, owner)
            require_count(batches, count)
        share = Fraction(1, count if self._config.loss_reduction == "mean" else 1)
        ragged = ragged_weights(labels, self._cut()) if share.denominator > 1 else None
        losses = None if functions is None else Losses(functions, ragged or [share] * count)
        batch = Batch(batches, losses)
        with self._working_on(batch, training=False):
            engine = self._evaluation.engine(count)
            with self._job.guarded(engine.where), self._own_errors(), paddle.no_grad():
                engine.run({}, self._first_micro_batch)
                return finish(batch)

    @property
    def weights_of_all_replicas(self) -> list[Fraction]:
        """As :attr:`weights_in_backward`, for the micro-batches of all replicas."""
        replicas = self._job.replicas().ranks
        share = Fraction(1, replicas if self._scale == "avg" else 1)
        return [weight * share for weight in self.weights_in_backward] * replicas

    @property
    def weights_in_backward(self) -> list[Fraction]:
        """The weight of each of this replica's micro-batches in the loss that backward starts from.

        These are :attr:`weights`, and 1 where ``delay_scale_loss`` divides the gradients later.
        """
        delayed = self._switches.delay_scale_loss
        return [Fraction(1)] * self.accumulate_steps if delayed else self.weights

    def micro_batches(self, data: Any) -> MicroBatches:
        """Returns the micro-batches that :meth:`train_batch` makes of ``data``; raises as it does.

        An iterator loses the items that are taken of it.
        """
        return split(data, self._cut())

    def shared_micro_batches(self, data: Any) -> tuple[MicroBatches, MicroBatches]:
        """Gives every rank the inputs of the first stage and the labels of the last. Collective.

        Args:
            data: As for :meth:`train_batch`.

        Returns:
            The micro-batches of this replica, which are ``data`` for any of these methods, and
            those of all replicas, one replica after another.
        """
        return self.share(self.micro_batches(data))

    def share(self, batches: MicroBatches) -> tuple[MicroBatches, MicroBatches]:
        """As :meth:`shared_micro_batches`, for a batch that is cut already. Collective."""
        group = self._job.group()
        inputs = group.broadcast(batches.inputs, self.schedule.placement.rank_of(0))
        labels = group.broadcast(batches.labels, self._last_owner)
        replicas = self._job.replicas().all_gather((inputs, labels))
        everyone = MicroBatches(
            [one for theirs, _ in replicas for one in theirs],
            [one for _, theirs in replicas for one in theirs],
        )
        return MicroBatches(inputs, labels), everyone

    def next_keys(self) -> random_keys.Keys | None:
        """Returns the random seeds that the next training batch will have. Collective over mp."""
        return random_keys.peek(self._config.rng, self._job.model_parallel())

    def _cut(self, any_rows: bool = False) -> Cut:
        return Cut(self.accumulate_steps, self.micro_batch_size, any_rows)

    def _bind(self, optimizer: Any) -> None:
        """Makes sure that the optimizer trains this model rightly."""
        if not isinstance(optimizer, PipelineOptimizer):
            raise ConfigError(
                "train_batch needs an optimizer wrapped for the pipeline",
                got=type(optimizer).__name__,
                fix="optimizer = fleet.distributed_optimizer(optimizer)",
            )
        optimizer.bind(self.layers)

    def _require_data(self, batches: MicroBatches, labelled: bool) -> None:
        if batches.inputs is None and self._owns(0):
            raise ConfigError("this rank owns the first stage and was given no inputs")
        if labelled and batches.labels is None and self._owns(self.schedule.placement.stages - 1):
            raise ConfigError(
                "this rank owns the last stage and was given no labels",
                fix="where loss_fn needs none, pass [None] * accumulate_steps",
            )

    @contextmanager
    def _working_on(self, batch: Batch, training: bool) -> Iterator[None]:
        """Within it the stage works on ``batch``; a batch that fails leaves no gradients."""
        hooks = self._hook_calls.begin(training)
        self._stage.begin(batch, self._first_micro_batch, hooks)
        self._losses = batch.losses if self._owns(self.schedule.placement.stages - 1) else None
        try:
            yield
        except BaseException:
            # Some micro-batches are in the gradients: the next batch must not add its own to that.
            if training:
                drop_gradients(self.layers.trained_parameters())
            raise
        finally:
            self._stage.end()

    def _share_losses(self, losses: Losses, by_micro_batch: bool) -> Any:
        """Gives the mean losses of the replicas' last stages to every rank. Collective.

        Returns:
            One loss, or a list where there are several loss functions.
        """
        with self._timing("broadcast_final_loss"):
            found = None
            if self._owns(self.schedule.placement.stages - 1):
                own = losses.by_micro_batch() if by_micro_batch else losses.totals()
                found = [data_parallel.mean_loss(loss, self._job.replicas()) for loss in own]
            shared: list[Any] = self._job.group().broadcast(found, self._last_owner)
        return shared[0] if len(shared) == 1 else shared


def _require_methods(argument: str, value: Any, kind: str, methods: tuple[str, ...]) -> None:
    """Refuses, before the batch trains, what stands in the place of another argument.

    Raises:
        ConfigError: ``value`` is given and lacks one of the methods.
    """
    if value is not None and not all(hasattr(value, method) for method in methods):
        raise ConfigError(
            f"{argument} of train_batch is not {kind}",
            got=type(value).__name__,
            fix="name them: train_batch(data, optimizer, lr_scheduler=.., scaler=..)",
        )


def _require_gradients() -> None:
    if not paddle.is_grad_enabled():
        raise ConfigError(
            "training needs gradients, and they are switched off",
            fix="leave paddle.no_grad(), or use eval_batch",
        )
