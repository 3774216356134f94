"""The wrapper that trains and evaluates a ``PipelineLayer``: Fleet's ``train_batch`` and kin."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetpipe.aliases import Nest
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.backward.crossings import Crossing
from fleetpipe.dygraph.backward.deferral_report import DeferralReport
from fleetpipe.dygraph.batch.micro_batches import (
    MicroBatches,
    counted_in,
    split_value,
    unwrapped,
)
from fleetpipe.dygraph.batch.outputs import joined, on_host
from fleetpipe.dygraph.gradients import gradient_of
from fleetpipe.dygraph.optimizer.optimizer import PipelineOptimizer
from fleetpipe.dygraph.optimizer.scaler import prepared
from fleetpipe.dygraph.train.fleet_face import PipelineFace
from fleetpipe.dygraph.train.scheduling import require_steps, step_rate
from fleetpipe.dygraph.train.training_batch import TrainingBatch, forwarded, take_step
from fleetpipe.engine.observer import BatchObserver, Observer
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_types import Batch, GradScaler, LRScheduler, Optimizer, Tensor

if TYPE_CHECKING:
    from fleetpipe.engine.trace import Trace
    from fleetpipe.profiling import Profile


class PipelineParallel(PipelineFace):
    """Runs the batches of a ``PipelineLayer`` through the stages of all ranks.

    Every method below that takes a batch is collective: each rank of the pipeline calls it the same
    number of times, in the same order. A batch that raises an error leaves no gradients and nothing
    else behind; where one process plays all ranks, the next may follow.
    """

    #: What the parts of a step hand on to the last of them.
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
            lr_scheduler: Stepped once, after the optimizer; a ``ReduceOnPlateau`` by the loss.
            scaler: A ``paddle.amp.GradScaler``. All ranks agree on whether a gradient overflowed:
                all step, or none. On CPU Paddle switches it off.
            loss_fn_idx: Which of the model's loss functions backward starts from; all are computed.
            return_micro_batch_loss: Whether to return the micro-batches' losses one by one.
            weights: The weight of each micro-batch in the loss, the same on all ranks of the
                pipeline, where they do not all count alike: those of a short last batch, say.

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
        scaler = None if scaler is None else prepared(scaler)
        batch = TrainingBatch(
            self._runtime, data, loss_fn_idx, scaler, return_micro_batch_loss, weights
        )
        # Last, for it may wait: what this rank can refuse by itself is refused by now.
        self._bind(optimizer)
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
        batch = TrainingBatch(self._runtime, data, 0, scaler, return_micro_batch_loss, weights)
        batch.train()
        self._scaler, self._loss = scaler, batch.loss
        return batch.loss

    def _prepare_training(
        self, data: Nest, optimizer: Optimizer, lr_scheduler: LRScheduler | None = None
    ) -> Nest:
        """Checks what ``forward_backward_pipeline`` and then ``optimizer.step`` will train with.

        For trainers that take a step in these three parts, as PaddleNLP's does. Collective over the
        job the first time it is called with this optimizer.

        Args:
            data: As for :meth:`train_batch`.
            optimizer: What ``fleet.distributed_optimizer`` returned.
            lr_scheduler: Stepped by :meth:`_optimizer_step`; who steps the optimizer without that
                steps it.

        Returns:
            ``data``, for :meth:`forward_backward_pipeline`.

        Raises:
            ConfigError: The optimizer does not train this model, on this rank or on another.
            StateError: ``fleet.shutdown`` ended the job of this model.
        """
        self._runtime.require_running()
        require_steps(lr_scheduler)
        self._bind(optimizer)
        self._prepared = optimizer, lr_scheduler
        return data

    def _optimizer_step(self) -> None:
        """Takes the step of what :meth:`_prepare_training` was given; clears the gradients.

        The third part of a step, after :meth:`forward_backward_pipeline`.
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
        functions = self._runtime.loss_functions(loss_fn_idx) if compute_loss else None
        data = unwrapped(data)
        batches = self._runtime.micro_batches(data, any_rows=True)
        if functions is None and self.layers.placement.has_head:
            # Its parts would give their share of the loss for the logits that nobody has.
            batches = batches._replace(labels=None)
        # Only a whole batch knows of rows; an iterator's micro-batches all count alike.
        labels = data[1] if compute_loss and isinstance(data, (list, tuple)) else None
        with forwarded(self._runtime, batches, functions, labels) as batch:
            if batch.losses is not None:
                mean = self._runtime.config.loss_reduction == "mean"
                counted = counted_in(labels) or len(batches.labels or ()) if mean else None
                runtime = self._runtime
                return runtime.reductions.share_losses(
                    runtime.losses, runtime.last_owner, counted=counted
                )
            outputs = batch.ordered_outputs()
            return [on_host(output) for output in outputs] if return_host_tensor else outputs

    def predict_batch(self, inputs: Nest, broadcast: bool = True) -> Nest:
        """Returns the model's output for a whole batch; leaves the layers in ``eval()`` mode.

        Args:
            inputs: What stands first in ``[inputs, labels]``, of any number of rows, as for
                :meth:`eval_batch`. Only the owner of the first stage needs it.
            broadcast: Whether every rank of the pipeline gets the output.

        Returns:
            The outputs of all micro-batches joined along axis 0, in the containers that the model
            returns. Without ``broadcast`` on the owner of the last stage; None elsewhere.
        """
        cut = self._runtime.cut(any_rows=True)
        batches = MicroBatches(split_value(inputs, cut, "inputs"), None)
        with forwarded(self._runtime, batches) as batch:
            outputs = batch.ordered_outputs()
            output = joined(outputs) if outputs else None
            if not broadcast:
                return output
            return self._runtime.job.group().broadcast(output, self._runtime.last_owner)

    def profile(self, data: Batch, path: str | Path | None = None) -> Profile:
        """Measures what each layer, and each action of each stage, costs. Collective.

        The model, its gradients and the random states stay as they are.

        Args:
            data: As for :meth:`train_batch`.
            path: Where rank 0 writes it as JSON, for ``fleetpipe plan``, and for ``fleetpipe
                schedule auto --costs`` and ``fleetpipe_configs["costs"]``.

        Returns:
            On every rank the same: seconds of F, B, I and W of each layer or node, and bytes, of
            which :func:`fleetpipe.plan` makes a plan. ``profile["forward"]`` gives a figure of each
            stage, by the names of ``fleetpipe.schedules.Costs``. Of a model that is trained with
            slices of sequences those of each slice as well, as it is cut now.
        """
        self._runtime.require_running()
        batches, job = self.micro_batches(data), self._runtime.job
        with (
            job.guarded(lambda: "profiling"),
            random_keys.keyed(self.next_keys(), job.model_parallel()),
        ):
            measure = pkgutil.resolve_name("fleetpipe.dygraph.observe.profile:measure")
            measured: Profile = measure(self.layers, job, batches, self.weights, self.units)
        if path is not None and job.leads():
            measured.write(path)
        return measured

    @property
    def trace(self) -> Trace | None:
        """What really ran, where ``fleetpipe_configs["trace"]`` asked for it."""
        trace: Trace | None = self._runtime.observer("trace")
        return trace

    def observe(self, observer: Observer) -> None:
        """Makes ``observer`` watch later batches, or only their operations.

        Args:
            observer: A :class:`BatchObserver`, for training batches; anything else that has a
                ``wrap`` watches the operations of all batches.
        """
        self._runtime.observe(observer)

    def accompany(self, companion: BatchObserver | None) -> None:
        """Makes ``companion`` watch each of the next batches; None ends that. There is one at most.

        Within its ``step`` the optimizer steps before guards verify what it has done.
        """
        self._runtime.accompany(companion)

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """Returns the gradient that the last batch has left, or None. Collective over sharding."""
        shards = self._runtime.reductions.last_shards
        left: Tensor = gradient_of(parameter) if shards is None else shards.gradient(parameter)
        return left

    def deferral_report(self) -> DeferralReport:
        """Returns which parameters' gradients wait for W, and the bytes kept between I and W.

        For the stages of this process, of a schedule that splits backward, after a first batch.
        """
        return self._runtime.split.report()

    def crossings(self) -> AbstractContextManager[dict[int, Crossing]]:
        """While it is open, training notes how the graphs of this process's stages hang together.

        Returns:
            A context that gives, by stage, its crossing in the last micro-batch.
        """
        return self._runtime.stage.noting_crossings()

    def reordered_leaves(self) -> list[str]:
        """Returns the layers here whose split backward may add up in another order than a full one.

        Known after a first batch, as :meth:`deferral_report` is.
        """
        return self._runtime.split.reordered()

    @property
    def weights_of_all_replicas(self) -> list[Fraction]:
        """As :attr:`weights_in_backward`, for the micro-batches of all replicas."""
        replicas = self.replicas.ranks
        share = Fraction(1, replicas if self._runtime.reductions.scale == "avg" else 1)
        return [weight * share for weight in self.weights_in_backward] * replicas

    @property
    def weights_in_backward(self) -> list[Fraction]:
        """The weight of each of this replica's micro-batches in the loss that backward starts from.

        These are :attr:`weights`, and 1 where ``delay_scale_loss`` divides the gradients later.
        """
        delayed = self._runtime.switches.delay_scale_loss
        return [Fraction(1)] * self.accumulate_steps if delayed else self.weights

    def micro_batches(self, data: Nest) -> MicroBatches:
        """Returns the micro-batches that :meth:`train_batch` makes of ``data``; raises as it does.

        An iterator loses the items that are taken of it.
        """
        return self._runtime.micro_batches(data)

    def shared_micro_batches(self, data: Nest) -> tuple[MicroBatches, MicroBatches]:
        """Gives every rank the inputs of the first stage and the labels of the last. Collective.

        Args:
            data: As for :meth:`train_batch`.

        Returns:
            The micro-batches of this replica, which are ``data`` for any of these methods, and
            those of all replicas, one replica after another.
        """
        return self.share(self.micro_batches(data))

    def share(self, batches: MicroBatches) -> tuple[MicroBatches, MicroBatches]:
        """As :meth:`shared_micro_batches`, for a batch that is cut already. Collective.

        Sequences that are split along sep and cp are whole in what it returns.
        """
        runtime = self._runtime
        runtime.compare_rows(batches)
        group = runtime.job.group()
        inputs = group.broadcast(batches.inputs, runtime.first_owner)
        labels = group.broadcast(batches.labels, runtime.last_owner)
        if runtime.sequence.ranks > 1:
            ranks = pkgutil.resolve_name("fleetpipe.dygraph.sequences:sequence_ranks")()
            inputs, labels = ranks.whole_batch((inputs, labels))
        replicas = self.replicas.all_gather((inputs, labels))
        everyone = MicroBatches(
            [one for parts, _ in replicas for one in parts],
            [one for _, parts in replicas for one in parts],
        )
        return MicroBatches(inputs, labels), everyone

    def token_weights(self, labels: Sequence[Nest], group: Group) -> list[Fraction] | None:
        """Returns how much micro-batches count by their places; None where all count alike.

        Collective over ``group`` with ``loss_reduction="tokens"``; nothing happens without it.

        Args:
            labels: Those of whole sequences, by micro-batch.
            group: The ranks whose losses are averaged, each of which has other micro-batches.
        """
        if self._runtime.config.loss_reduction != "tokens":
            return None
        token_weights = pkgutil.resolve_name("fleetpipe.dygraph.batch.token_weights:TokenWeights")
        weights = token_weights(self.layers.loss_functions(), labels, None, group)
        return [weights.of(0, number) for number in range(len(labels))]

    def from_last_stage(self, value: Nest) -> list[Nest]:
        """Returns on every rank what the owners of the last stage pass. Collective over the job.

        Args:
            value: Tensors and plain values in tuples, lists and dicts; other ranks may pass None.

        Returns:
            The values, replica by replica.

        Raises:
            BoundaryError: A value is made of something else.
            PipelineTimeout: Some rank did not come within the limit.
        """
        runtime = self._runtime
        with runtime.job.guarded(lambda: "sharing what the last stage has"):
            owns = runtime.plays(runtime.last_owner)
            values = self.replicas.all_gather(value) if owns else None
            shared: list[Nest] = runtime.job.group().broadcast(values, runtime.last_owner)
            return shared

    def next_keys(self) -> random_keys.Keys | None:
        """Returns the random seeds that the next training batch will have. Collective over mp."""
        runtime = self._runtime
        group, python = runtime.job.model_parallel(), runtime.keys_python()
        return random_keys.peek(runtime.config.rng, group, python, runtime.sequence.rank)

    def key_python_draws(self) -> None:
        """Makes layers draw from Python's and NumPy's generators under keys from now on.

        For whoever runs the batches of one process once more beside it. On ranks they always do.
        """
        self._runtime.compared = True

    def _bind(self, optimizer: Optimizer) -> None:
        """Makes sure that the optimizer trains this model rightly."""
        if not isinstance(optimizer, PipelineOptimizer):
            raise ConfigError(
                "train_batch needs an optimizer wrapped for the pipeline",
                got=type(optimizer).__name__,
                fix="optimizer = fleet.distributed_optimizer(optimizer)",
            )
        optimizer.bind(self._runtime.layers)
        self._runtime.reductions.shards = optimizer.shards


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
