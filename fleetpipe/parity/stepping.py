"""The optimizers of both sides: compares gradients before they step, and the state after.

The reference has copies of the learning rate schedulers, which it steps itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from fleetpipe.aliases import Nest, Optimizer, Scheduler, Tensor
from fleetpipe.compare.differences import Difference, compare, compare_all, compare_numbers
from fleetpipe.dygraph import PipelineLayer, PipelineOptimizer, tensor_parallel
from fleetpipe.dygraph.train.scheduling import step_rate
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import learning_rate_of
from fleetpipe.parity.reference import Reference


class Rates:
    """The learning rates of the two sides during one step.

    Between two steps the script may change the rate. So the reference starts each step with a copy
    of the pipeline's scheduler or rate, and steps the copy itself.
    """

    def __init__(
        self,
        optimizer: PipelineOptimizer,
        reference: Optimizer,
        lr_scheduler: Scheduler | None,
        follow: bool,
    ) -> None:
        """Copies the pipeline's rate at the begin of a step.

        Args:
            optimizer: The pipeline's optimizer.
            reference: The reference's optimizer.
            lr_scheduler: The scheduler that the pipeline steps after the optimizer, or None.
            follow: Whether the reference takes the pipeline's rate. A user's own optimizer with a
                scheduler of its own does not: the user steps that.
        """
        self._optimizer, self._of_reference = optimizer.wrapped, reference
        self._scheduler, self._copied_scheduler = lr_scheduler, lr_scheduler
        rate = learning_rate_of(self._optimizer)
        self._follow = follow or learning_rate_of(reference) is rate
        if not self._follow:
            return
        # A scheduler may refer to its optimizer, and one scheduler to another.
        memo = {id(optimizer): reference, id(self._optimizer): reference}
        if isinstance(rate, paddle.optimizer.lr.LRScheduler):
            reference.set_lr_scheduler(copy.deepcopy(rate, memo))
        else:
            reference.set_lr(rate)
        self._copied_scheduler = copy.deepcopy(lr_scheduler, memo)

    def compare(self, step: int) -> list[Difference]:
        """Compares the current learning rates of the optimizers."""
        ours, expected = self._optimizer.get_lr(), self._of_reference.get_lr()
        return compare_numbers("learning rate", "", step, ours, expected)

    def step(self, step: int, loss: Nest) -> list[Difference]:
        """Steps the reference's scheduler after the pipeline stepped its own, and compares both."""
        if not self._follow:
            return []
        step_rate(self._copied_scheduler, loss)
        differences = self.compare(step)
        epoch, copied_epoch = (
            getattr(one, "last_epoch", 0) for one in (self._scheduler, self._copied_scheduler)
        )
        name = type(self._scheduler).__name__
        return differences + compare_numbers("last_epoch", name, step, epoch, copied_epoch)


#: By parameter, the squared norms of its gradient in the pipeline and in the reference.
Squares = dict[str, tuple[float, float]]


class ComparingOptimizer(PipelineOptimizer):
    """An optimizer that compares complete gradients of both sides, then steps both."""

    def __init__(
        self,
        optimizer: PipelineOptimizer,
        reference: Reference,
        layers: PipelineLayer,
        step: int,
        is_rounding: Callable[[Difference], bool],
        before: Callable[[list[Difference]], list[Difference]],
    ) -> None:
        """Wraps the pipeline's optimizer for one step.

        Args:
            optimizer: The pipeline's optimizer.
            reference: The single-device side, with the gradients of the batch.
            layers: The ``PipelineLayer``.
            step: The training step.
            is_rounding: Whether a gradient's difference is rounding; then both step with the
                pipeline's.
            before: Gets the gradients' differences, and returns other differences before the step.
        """
        super().__init__(optimizer.wrapped)
        self._pipelines = optimizer
        self.differences: list[Difference] = []
        self.squares: Squares = {}
        self._reference = reference
        self._parameters = layers.state.own_parameters()
        self._number = step
        self._is_rounding = is_rounding
        self._before = before

    def bind(self, layers: PipelineLayer) -> None:
        """See :meth:`PipelineOptimizer.bind`."""
        self._pipelines.bind(layers)

    def step(self) -> None:
        """Compares the gradients, and steps both optimizers. Collective as both are."""
        reference = self._reference.tensors()
        for name, parameter in self._parameters.items():
            grad = parameter.grad if self.shards is None else self.shards.gradient(parameter)
            grad, expected = _whole(grad, parameter), reference[name].grad
            difference = compare("gradient", name, self._number, grad, expected)
            if difference:
                self.differences.append(difference)
                if grad is not None and self._is_rounding(difference):
                    # Where it is next to nothing, Adam makes as much of the last bits as of a sign:
                    # the reference takes the step that these gradients ask for.
                    reference[name].grad = grad.detach().clone()
            self.squares[name] = (_square(grad), _square(expected))
        self.differences += self._before(self.differences)
        self._pipelines.step()
        self._reference.step()


def compare_state(
    layers: PipelineLayer, reference: Reference, step: int, buffers_too: bool
) -> list[Difference]:
    """Compares parameters, and all buffers if one replica saw all the data."""
    tensors = reference.tensors()
    # Running statistics are parameters in Paddle, which nobody trains.
    of_stages = layers.state.own_parameters().items()
    parameters = {n: _whole(p, p) for n, p in of_stages if buffers_too or not p.stop_gradient}
    differences = compare_all("parameter", step, parameters, {n: tensors[n] for n in parameters})
    if not buffers_too:
        return differences
    places = reference.hidden_places()
    tensors.update((name, holder[key]) for name, (holder, key) in places.items() if key in holder)
    buffers = {**layers.state.local_tensors(), **layers.state.hidden_buffers()}
    buffers = {n: _whole(t, t) for n, t in buffers.items() if n not in parameters and n in tensors}
    return differences + compare_all("buffer", step, buffers, {n: tensors[n] for n in buffers})


def _whole(value: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Returns a parameter or its gradient whole. Collective if the parameter is a shard."""
    if value is None or tensor_parallel.shard_in(parameter) is None:
        return value
    return tensor_parallel.whole_value(value, parameter)


def _square(grad: Tensor | None) -> float:
    return 0.0 if grad is None else float((grad.astype("float64") ** 2).sum())
