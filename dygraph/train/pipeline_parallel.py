"""The wrapper that trains and evaluates a ``PipelineLayer``, with Fleet's methods."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.batch.micro_batches import (
    MicroBatches,
    counted_in,
    join_outputs,
    on_host,
    split_value,
    unwrap,
)
from fleetpipe.dygraph.batch.stage_interfaces import Batch as ForwardBatch
from fleetpipe.dygraph.batch.units import Units
from fleetpipe.dygraph.optimizer.optimizer import PipelineOptimizer, prepare_scaler
from fleetpipe.dygraph.train.fleet_face import PipelineFace
from fleetpipe.dygraph.train.training_batch import (
    TrainingBatch,
    require_steps,
    required_loss_functions,
    run_forwards,
    step_rate,
    take_step,
)
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.paddle_types import Batch, GradScaler, LRScheduler, Optimizer, Tensor

if TYPE_CHECKING:
    from fleetpipe.profiling import Profile


class PipelineParallel(PipelineFace):
    """Runs the batches of a ``PipelineLayer`` through the stages of all ranks.

    Every method below that takes a batch is collective: each rank of the pipeline calls it the same
    number of times, in the same order. A batch that raises an error leaves no gradients.
    If one process plays all ranks, buffers and running statistics are restored too, and the next
    batch may follow; other attributes that layers have changed stay changed.
    """

    #: What ``_prepare_training`` and ``forward_backward_pipeline`` store for ``_optimizer_step``.
    _prepared: tuple[Optimizer, LRScheduler | None] | None = None
    _scaler: GradScaler | None = None
    _loss: Nest = None

    def train_batch(
        self,
        data: Batch,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        loss_fn_idx: int = 0,
        return_micro_batch_loss: bool = False,
        weights: Sequence[Fraction] | None = None,
    ) -> Tensor:
        """Trains on one batch: all micro-batches forward and backward, then one optimizer step.

        Args:
            data: ``[inputs, labels]`` of accumulate_steps x micro_batch_size rows, or an iterator
                of which accumulate_steps items ``(inputs, labels)`` are taken. Every rank may pass
                the same; only the owners of the first and the last stage need theirs.
            optimizer: What ``fleet.distributed_optimizer`` returned.
            lr_scheduler: Stepped once, after the optimizer; a ``ReduceOnPlateau`` with the loss.
            scaler: A ``paddle.amp.GradScaler``. All ranks agree on whether a gradient overflowed:
                all step, or none. On CPU Paddle switches it off.
            loss_fn_idx: The number of the loss function that starts backward; all are computed.
            return_micro_batch_loss: Whether to return the micro-batches' losses one by one.
            weights: The weight of each micro-batch in the loss, the same on all ranks of the
                pipeline; None for equal weights. A short last batch needs others, for example.

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
        require_steps(lr_scheduler, return_micro_batch_loss)
        _require_methods("scaler", scaler, "a GradScaler", ("scale", "step", "update"))
        scaler = None if scaler is None else prepare_scaler(scaler)
        options = loss_fn_idx, scaler, return_micro_batch_loss, weights

        def begin(data: Batch) -> TrainingBatch:
            """Returns the training batch of some data, after all checks."""
            batch = TrainingBatch(self._runtime, data, *options)
            # Last, because it may wait for other ranks: this rank's own checks come before.
            self._bind(optimizer)
            return batch

        before_batch = self._runtime.job.before_batches.get(id(self._runtime.layers))
        if before_batch is not None:
            before_batch(optimizer)
        healing = self._runtime.job.healing
        if healing is not None:
            healing.follow(self, scaler, guards=self._runtime.config.guards, drawn=callable(data))
            batch = healing.train(begin, data, optimizer)
        else:
            batch = begin(data)
            batch.train(optimizer)
        loss: Tensor = batch.loss
        step_rate(lr_scheduler, loss, loss_fn_idx)
        return loss

    def forward_backward_pipeline(
        self,
        data: Batch,
        scaler: GradScaler | None = None,
        static_scheduler: bool = False,
        return_micro_batch_loss: bool = False,
        weights: Sequence[Fraction] | None = None,
    ) -> Nest:
        """Trains without the optimizer step: leaves the gradients on the parameters.

        Under ``delay_scale_loss`` they are not divided yet.

        Args:
            data: As for :meth:`train_batch`.
            scaler: As for :meth:`train_batch`.
            static_scheduler: Runs nothing, and returns :meth:`get_static_scheduler`.
            return_micro_batch_loss: As for :meth:`train_batch`.
            weights: As for :meth:`train_batch`.

        Returns:
            The loss, as :meth:`train_batch` does.
        """
        if static_scheduler:
            return self.get_static_scheduler()
        if self._runtime.job.healing is not None:
            self._runtime.job.healing.refuse("a batch leaves its gradients to the script")
        batch = TrainingBatch(self._runtime, data, 0, scaler, return_micro_batch_loss, weights)
        batch.train()
        self._scaler, self._loss = scaler, batch.loss
        return batch.loss

    def _prepare_training(
        self, data: Nest, optimizer: Optimizer, lr_scheduler: LRScheduler | None = None
    ) -> Nest:
        """Checks the optimizer: the first part of a training step in three parts.

        :meth:`forward_backward_pipeline` and :meth:`_optimizer_step` follow. Trainers such as
        PaddleNLP's call these three. Collective over the job the first time it is called with this
        optimizer.

        Args:
            data: As for :meth:`train_batch`.
            optimizer: What ``fleet.distributed_optimizer`` returned.
            lr_scheduler: Stepped by :meth:`_optimizer_step`; a trainer that calls
                ``optimizer.step()`` instead steps it itself.

        Returns:
            ``data``, for :meth:`forward_backward_pipeline`.
        """
        self._runtime.require_running()
        require_steps(lr_scheduler)
        self._bind(optimizer)
        self._prepared = optimizer, lr_scheduler
        return data

    def _optimizer_step(self) -> None:
        """Steps the optimizer and the scheduler, and clears gradients: the third part of a step.

        The first part is :meth:`_prepare_training`, the second :meth:`forward_backward_pipeline`.
        """
        if self._prepared is None:
            raise StateError(
                "_optimizer_step takes the step of an optimizer that _prepare_training was given",
                got="no _prepare_training before",
                fix="call _prepare_training(data, optimizer, lr_scheduler), "
                "forward_backward_pipeline(data) and _optimizer_step(), or train_batch",
            )
        optimizer, lr_scheduler = self._prepared
        take_step(self._runtime, optimizer, self._scaler)
        step_rate(lr_scheduler, self._loss)

    def eval_batch(
        self,
        data: Batch,
        compute_loss: bool = False,
        loss_fn_idx: int = 0,
        return_host_tensor: bool = False,
    ) -> Nest:
        """Runs one batch forward without gradients; leaves the layers in ``eval()`` mode.

        The next :meth:`train_batch` puts them into ``train()`` mode again.

        Args:
            data: As for :meth:`train_batch`, but with any number of rows: they become micro-batches
                of micro_batch_size rows; the last may be smaller, and is weighted in the loss by
                its rows. Lists may have any number of values.
            compute_loss: Whether to compute the loss instead of returning outputs; only then are
                labels and a loss function needed.
            loss_fn_idx: The number of a loss function; all are computed.
            return_host_tensor: Whether to move outputs to the host's memory.

        Returns:
            With ``compute_loss`` the loss, the same on every rank (a list if there are several loss
            functions). Otherwise a list with the output of each micro-batch on the rank that owns
            the last stage, and an empty list on other ranks.
        """
        runtime = self._runtime
        functions = required_loss_functions(runtime, loss_fn_idx) if compute_loss else None
        data = unwrap(data)
        batches = runtime.data.micro_batches(data, any_rows=True)
        if functions is None and self.layers.placement.has_head:
            # With labels, the parts of the head would return shares of the loss, not logits.
            batches = batches._replace(labels=None)
        # Only a whole batch has rows; an iterator's micro-batches all have one weight.
        labels = data[1] if compute_loss and isinstance(data, (list, tuple)) else None

        def evaluate() -> Nest:
            """Runs the batch forward; returns its outputs, or the loss on every rank."""
            activity = "evaluates a batch"
            with run_forwards(runtime, batches, functions, labels, activity=activity) as batch:
                if functions is None:
                    outputs = batch.ordered_outputs()
                    return (
                        [on_host(output) for output in outputs] if return_host_tensor else outputs
                    )
                mean = runtime.config.loss_reduction == "mean"
                counted = counted_in(labels) or len(batches.labels or ()) if mean else None
                return runtime.reductions.share_losses(runtime.data.last_owner, counted=counted)

        if functions is None:
            return evaluate()
        return runtime.job.share("an evaluation", evaluate, runtime.pass_over_forwards)

    def predict_batch(self, inputs: Nest, broadcast: bool = True) -> Nest:
        """Returns the model's output for a whole batch; leaves the layers in ``eval()`` mode.

        Args:
            inputs: The inputs of a batch ``[inputs, labels]``, of any number of rows, as for
                :meth:`eval_batch`. Only the owner of the first stage needs them.
            broadcast: Whether every rank of the pipeline gets the output.

        Returns:
            The outputs of all micro-batches joined along axis 0, in the containers that the model
            returns. Without ``broadcast`` on the owner of the last stage; None elsewhere.
        """
        cut = self._runtime.data.cut(any_rows=True)
        batches = MicroBatches(split_value(inputs, cut, "inputs"), None)
        with run_forwards(self._runtime, batches, activity="predicts") as batch:
            outputs = batch.ordered_outputs()
            output = join_outputs(outputs) if outputs else None
            if not broadcast:
                return output
            return self._runtime.job.group().broadcast(output, self._runtime.data.last_owner)

    def run_forwards(
        self, inputs: list[Nest], result_of: Callable[[Nest], Nest], units: Units
    ) -> AbstractContextManager[ForwardBatch]:
        """Runs micro-batches forward when the returned context opens, which yields their outputs.

        Collective over the ranks of one pipeline: replicas need not all call it. An error within
        the context reaches all ranks. The layers stay in ``eval()`` mode.

        Args:
            inputs: The input of each micro-batch, of any sizes; the same on every rank.
            result_of: Called with each output on the rank that owns the last stage; returns the
                value to store.
            units: Sets the states that layers keep from one run to the next, such as a cache.
        """
        batches = MicroBatches(inputs, None)
        return run_forwards(
            self._runtime,
            batches,
            result_of=result_of,
            units=units,
            compares_counts=False,
            activity="generates",
        )

    def profile(self, data: Batch, path: str | Path | None = None) -> Profile:
        """Measures what each layer, and each action of each stage, costs. Collective.

        The model, its gradients and the random states stay as they are.

        Args:
            data: As for :meth:`train_batch`.
            path: The file to which rank 0 writes the profile as JSON, for ``fleetpipe plan``,
                ``fleetpipe schedule --costs`` and ``fleetpipe_configs["costs"]``.

        Returns:
            The profile, the same on every rank: seconds of F, B, I and W, and bytes, of each layer
            or node. :func:`fleetpipe.plan` makes a plan of it. ``profile["forward"]`` has a number
            for each stage, under the names of ``fleetpipe.schedules.Costs``. If the schedule cuts
            sequences into chunks, the profile has the costs of each chunk, too.
        """
        self._runtime.require_running()
        batches, job, keys = self.micro_batches(data), self._runtime.job, self._runtime.keys
        with job.calling("profiles a batch"), keys.keyed(keys.peek()):
            measure = pkgutil.resolve_name("fleetpipe.dygraph.observe.profile:measure")
            measured: Profile = measure(self.layers, job, batches, self.weights, self.units)
        if path is not None and job.leads():
            measured.write(path)
        return measured

    def _bind(self, optimizer: Optimizer) -> None:
        """Binds a wrapped optimizer to this model; refuses any other optimizer."""
        if not isinstance(optimizer, PipelineOptimizer):
            raise ConfigError(
                "train_batch needs an optimizer wrapped for the pipeline",
                got=type(optimizer).__name__,
                fix="optimizer = fleet.distributed_optimizer(optimizer)",
            )
        optimizer.bind(self._runtime.layers)
        self._runtime.reductions.shards = optimizer.shards


def _require_methods(argument: str, value: Any, kind: str, methods: tuple[str, ...]) -> None:
    """Refuses an argument of ``train_batch`` without the methods of its kind.

    Args:
        argument: The name of the argument.
        value: The argument; None is allowed.
        kind: What it must be, for the error.
        methods: The names of the methods that it must have.
    """
    if value is not None and not all(hasattr(value, method) for method in methods):
        raise ConfigError(
            f"{argument} of train_batch is not {kind}",
            got=type(value).__name__,
            fix="name them: train_batch(data, optimizer, lr_scheduler=.., scaler=..)",
        )
