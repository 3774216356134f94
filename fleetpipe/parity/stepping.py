"""Compares gradients before the optimizers step, parameters and buffers after."""

from __future__ import annotations

from typing import Callable

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph import PipelineLayer, PipelineOptimizer, tensor_parallel
from fleetpipe.parity.differences import Difference, compare
from fleetpipe.parity.reference import Reference

#: By parameter, the squared norms of its gradient in the pipeline and in the reference.
Squares = dict[str, tuple[float, float]]


class ComparingOptimizer(PipelineOptimizer):
    """Compares the gradients of both models when they are complete, then steps both."""

    def __init__(
        self,
        optimizer: PipelineOptimizer,
        reference: Reference,
        layers: PipelineLayer,
        step: int,
        rounding: float,
        before: Callable[[list[Difference]], list[Difference]],
    ) -> None:
        """Wraps the pipeline's optimizer for one step.

        Args:
            optimizer: The pipeline's.
            reference: The single-device side, with the gradients of the batch.
            layers: The ``PipelineLayer``.
            step: The training step.
            rounding: Relative difference up to which a gradient of the pipeline's is a right one,
                with which the reference steps too.
            before: Takes the gradients that differ, and returns what else does before the step.
        """
        super().__init__(optimizer.wrapped)
        self._pipelines = optimizer
        self.found: list[Difference] = []
        self.squares: Squares = {}
        self._reference = reference
        self._parameters = layers.state.own_parameters()
        self._number = step
        self._rounding = rounding
        self._before = before

    def bind(self, layers: PipelineLayer, post_validation: bool = False) -> None:
        """See :meth:`PipelineOptimizer.bind`."""
        self._pipelines.bind(layers, post_validation)

    def step(self) -> None:
        """Compares the gradients and steps both optimizers. Collective as both are."""
        theirs = self._reference.tensors()
        for name, parameter in self._parameters.items():
            grad, expected = _whole(parameter.grad, parameter), theirs[name].grad
            difference = compare("gradient", name, self._number, grad, expected)
            if difference:
                self.found.append(difference)
                if grad is not None and difference.relative <= self._rounding:
                    # Where it is next to nothing, Adam makes as much of the last bits as of a sign:
                    # the reference takes the step that these gradients ask for.
                    theirs[name].grad = grad.detach().clone()
            self.squares[name] = (_square(grad), _square(expected))
        self.found += self._before(self.found)
        self._pipelines.step()
        self._reference.step()


def compare_state(
    layers: PipelineLayer, reference: Reference, step: int, buffers_too: bool
) -> list[Difference]:
    """Compares parameters, and all buffers where one replica saw all the data that made them."""
    theirs = reference.tensors()
    parameters = layers.state.own_parameters()
    if not buffers_too:
        # Running statistics are parameters in Paddle, which nobody trains.
        parameters = {name: p for name, p in parameters.items() if not p.stop_gradient}
    pairs = [("parameter", name, p, theirs[name]) for name, p in parameters.items()]
    if buffers_too:
        buffers = {n: t for n, t in layers.state.own().items() if n not in parameters}
        pairs += [("buffer", name, tensor, theirs[name]) for name, tensor in buffers.items()]
        places = reference.hidden_places()
        pairs += [
            ("buffer", name, tensor, holder[key])
            for name, tensor in layers.state.hidden_buffers().items()
            for holder, key in [places[name]]
            if name in places
        ]
    compared = (
        compare(quantity, name, step, _whole(tensor, tensor), expected)
        for quantity, name, tensor, expected in pairs
    )
    return [difference for difference in compared if difference]


def _whole(value: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Returns a parameter or its gradient whole. Collective where the parameter is a slice."""
    axis = tensor_parallel.split_axis(parameter)
    return value if axis is None or value is None else tensor_parallel.whole_value(value, axis)


def _square(grad: Tensor | None) -> float:
    return 0.0 if grad is None else float((grad.astype("float64") ** 2).sum())
