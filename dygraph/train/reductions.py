"""Sums gradients and averages losses over the ranks of a job, at the end of a batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph import layer_kinds, tensor_parallel
from fleetpipe.dygraph.batch.losses import Losses, weighted
from fleetpipe.dygraph.batch.row_digests import require_one_rate
from fleetpipe.dygraph.gradients import drop_gradients, gradient_of, set_gradient
from fleetpipe.dygraph.layer_kinds import broadcast_copies, is_spread
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.observe.hooks import Timers
from fleetpipe.dygraph.optimizer import replicas
from fleetpipe.dygraph.optimizer.replicas import Shards
from fleetpipe.dygraph.sums import GradientTrees, refuse_remaining_gradients
from fleetpipe.errors import StateError
from fleetpipe.job import attempt_files
from fleetpipe.job.job import Job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import squared_norm

#: The relative difference that losses of the same outputs may have, in any precision.
_ROUNDING = 1e-2


class Reductions:
    """Sums gradients and averages losses over ranks, for the batches of one model.

    Attributes:
        scale: Whether the gradients of the replicas are averaged ("avg") or added up ("sum").
        sole: Whether each stage is on one rank only, so that there is nothing to sum over ranks.
        kinds: The kinds of this process's layers that have special rules.
        timers: The timers of ``pp_configs.enable_timer``; None if it is off.
        losses: The losses of the last batch, if this process owns the last stage.
        shards: The owners of parameters in a sharded optimizer, for the next batch; None if each
            rank steps all.
        last_shards: The same for the last batch, until its gradients are cleared.
    """

    def __init__(self, layers: PipelineLayer, job: Job, scale: str, timed: bool) -> None:
        """Stores the model, the job, the attribute ``scale``, and whether to time reductions."""
        self._layers, self._job = layers, job
        self.timers: Timers | None = Timers() if timed else None
        self.losses: Losses | None = None
        self.scale = scale
        self.sole = job.degrees.size == job.degrees.pp
        self._by_tree = job.sums_by_tree
        self._trees: GradientTrees | None = None
        self.kinds = layer_kinds.kinds_in(layers.state.own_parameters())
        self.shards: Shards | None = None
        self.last_shards: Shards | None = None
        #: Parameters with gradients of earlier batches, which are added again after the reduction.
        self._earlier: list[tuple[Tensor, Tensor]] = []
        # A process that replaces a failed one begins after the comparison of the others.
        self._alike_along_mp = attempt_files.own_generation() > 0

    def require_cleared(self) -> None:
        """Refuses uncleared gradients of ZeRO stage 2, of which each rank has only a part."""
        scattered = self.last_shards is not None and self.last_shards.scatters
        gradients = map(gradient_of, self._layers.trained_parameters()) if scattered else ()
        if any(gradient is not None and bool((gradient != 0).any()) for gradient in gradients):
            raise StateError(
                "stage 2 has added up the gradients of the batch before, each on one rank",
                expected="a step, and no gradients, before the next batch",
                cause="forward_backward_pipeline was called twice without clear_grad between",
                fix="optimizer.clear_grad() after each step; raise accumulate_steps for larger "
                "batches, or use sharding_configs['stage'] = 1",
            )

    def own_errors(self) -> AbstractContextManager[None]:
        """Returns a context in which a failed collective of a backward raises its own error."""
        return nullcontext() if self.sole else tensor_parallel.own_errors()

    def drop_gradients(self) -> None:
        """Frees the gradients of a failed batch, to which the next one must not add."""
        drop_gradients(self._layers.trained_parameters())

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """Returns a parameter's gradient from the last batch, or None. Collective over sharding."""
        shards = self.last_shards
        return gradient_of(parameter) if shards is None else shards.gradient(parameter)

    def share_losses(
        self,
        owner: int,
        by_micro_batch: bool = False,
        counted: int | None = None,
        rate: float | None = None,
    ) -> Nest:
        """Returns, on every rank, the mean losses over the copies of the last stage. Collective.

        Args:
            owner: The rank of the pipeline that owns the last stage.
            by_micro_batch: Whether to return the losses of the micro-batches, not their sum.
            counted: The number of rows over which the loss of this replica is averaged; None if all
                replicas have the same weight.
            rate: The learning rate of the step that follows; None without one.

        Returns:
            One loss, or a list if there are several loss functions.

        Raises:
            ConfigError: Ranks along mp have different losses, or replicas different rates.
        """
        with self._timing("broadcast_final_loss"):
            total, losses = None, self.losses
            if losses is not None:
                total = losses.by_micro_batch() if by_micro_batch else losses.totals()
                if counted is not None and not self.sole:
                    share = replicas.share_in_mean(counted, self._job.copies())
                    total = [weighted(loss, share) for loss in total]
                if not self.sole:
                    self._require_alike_along_mp(total)
                    everyone = self._job.copies().all_gather((total, rate))
                    if rate is not None:
                        require_one_rate(self._job, [rate_of_one for _, rate_of_one in everyone])
                    # Gradients that are added up do not change what is reported.
                    weighed = self._by_tree and self.scale == "avg"
                    by_replica = [losses_of_one for losses_of_one, _ in everyone]
                    total = replicas.average_losses(by_replica, self._by_tree, weighed)
            shared: list[Tensor] = self._job.group().broadcast(total, owner)
        return shared[0] if len(shared) == 1 else shared

    def _require_alike_along_mp(self, losses: list[Tensor]) -> None:
        """Refuses, in the first batch, different losses on ranks with shards of the last stage."""
        group, compared = self._job.model_parallel(), self._alike_along_mp
        self._alike_along_mp = True
        if compared or group.ranks == 1:
            return
        values = [loss.astype("float32").numpy().tolist() for loss in losses]
        are_close = functools.partial(np.allclose, rtol=_ROUNDING, equal_nan=True)
        for other_values in group.all_gather(values):
            if not all(map(are_close, values, other_values)):
                self._job.allow.refuse(
                    "loss",
                    "losses_of_shards",
                    "the ranks that hold shards of the last stage have different losses",
                    got=f"{values} and {other_values}",
                    cause="the head leaves each rank its columns of the output, and the loss is "
                    "one of whole outputs",
                    fix="build the head with gather_output=True, or use ParallelCrossEntropy",
                )

    @paddle.no_grad()
    def share_loss_state(self, owner: int) -> None:
        """Broadcasts the state of the loss layers from the rank that runs them.

        Collective over the pipeline if there is such state.

        Args:
            owner: The rank of the pipeline that owns the last stage.
        """
        states = (layer.state_dict().values() for layer in self._layers.loss_layers())
        tensors = [tensor for state in states for tensor in state]
        group = self._job.group()
        if tensors and group.ranks > 1:
            group.broadcast_each([(tensor, owner) for tensor in tensors])

    @paddle.no_grad()
    def set_aside_gradients(self) -> None:
        """Stores and removes gradients of earlier batches that a reduction would count once more.

        Gradients that are averaged over replicas stay: they are equal there, so the average does
        not change them. With sums by trees all are set aside, since any gradient would count as one
        of the batch.
        """
        averages = self.sole or self.scale == "avg"
        pairs = [(p, gradient_of(p)) for p in self._layers.trained_parameters()]
        counted_again = [
            (parameter, gradient)
            for parameter, gradient in pairs
            if gradient is not None and (self._by_tree or not averages or _is_summed(parameter))
        ]
        # Read together: on a GPU the host waits for each read.
        flags = [squared_norm(gradient).reshape([]) != 0 for _, gradient in counted_again]
        nonzero: Iterable[bool] = paddle.stack(flags).numpy() if flags else ()
        self._earlier = [
            (parameter, gradient.clone())
            for (parameter, gradient), is_nonzero in zip(counted_again, nonzero)
            if is_nonzero
        ]
        drop_gradients([parameter for parameter, _ in self._earlier])

    def begin_trees(self, micro_batches: int) -> GradientTrees | None:
        """Returns an object that sums a batch's gradients by trees; None if autograd adds them."""
        if self._by_tree:
            self._trees = GradientTrees(self._layers.begin_uses(), micro_batches)
        return self._trees

    def finish_trees(self) -> None:
        """Sets the parameters' gradients to the sums over the micro-batches of this process.

        Raises:
            ConfigError: A parameter has a gradient from a layer that does not show that it uses it.
        """
        if self._trees is not None:
            refuse_remaining_gradients(self._layers.trained_parameters())
            self._trees.finish()

    def end_trees(self) -> None:
        """Makes layers compute with the parameters themselves again, without stand-ins."""
        if self._trees is not None:
            self._trees.uses.end()
            self._trees = None

    @paddle.no_grad()
    def reduce_gradients(self) -> None:
        """Adds up gradients over all copies of the stages, then of shared weights. Collective."""
        uses = None if self._trees is None else self._trees.uses
        self.last_shards, self.shards = self.shards, None
        with self._timing("allreduce_gradients"):
            parameters = self._layers.trained_parameters()
            several = {} if uses is None else uses.several
            totals = [use.total for of_parameter in several.values() for use in of_parameter]
            parameters = [p for p in parameters if id(p) not in several] + totals
            for kind in self.kinds:
                kind.fill_gradients(self._layers.state.own_parameters())
            if not self.sole:
                of_split_sequences = tensor_parallel.marked(parameters)
                replicas.reduce_gradients(of_split_sequences, self._job.model_parallel())
                # Losses are weighted for an average over the ranks that split their sequences.
                averaged = (
                    self._job.copies().ranks if self.scale == "avg" else self._job.sequence().ranks
                )
                share = 1.0 if self._by_tree else 1.0 / averaged
                replicas.reduce_all(parameters, self._job, share, self.last_shards)
        # After the replicas, whose sums differ in the last bit from stage to stage.
        with self._timing("allreduce_shared_weight_gradients"):
            if uses is None:
                self._layers.allreduce_shared_weight_gradients()
            else:
                self._layers.add_up_uses(uses)
        for parameter, earlier in self._earlier:
            gradient = gradient_of(parameter)
            set_gradient(parameter, earlier if gradient is None else earlier + gradient)
        self._earlier = []
        if self.last_shards is not None:
            self.last_shards.drop_gradients_of_others(self._layers.trained_parameters())

    def _timing(self, name: str) -> AbstractContextManager[None]:
        """Returns a context that adds its time to the timer ``name``, if there are timers."""
        return nullcontext() if self.timers is None else self.timers.timing(name)


def share_state(layers: PipelineLayer, job: Job) -> None:
    """Makes the copies of each stage, and of loss layers, equal to those of the first replica.

    Collective over the job.
    """
    if job.alone:
        return  # the state is restored later
    losses = [layer.state_dict() for layer in layers.loss_layers()]
    for state in (layers.state.local_tensors(), *losses):
        tensor_parallel.share_with_shards(state, job)
        broadcast_copies(state, job.copies(), job.expert_copies())


def _is_summed(parameter: Tensor) -> bool:
    """Whether ranks add up the gradient of a parameter, and do not average it."""
    tied = hasattr(parameter, "is_firstly_shared")
    return tied or is_spread(parameter) or tensor_parallel.is_sequence_parallel_parameter(parameter)
