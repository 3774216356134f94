"""How a stage gets its backward, in either representation: what is differentiated, in which order.

From what leaves the stage, or the loss, to its parameters and to what it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from fleetpipe.aliases import DType, Variable
from fleetpipe.errors import BoundaryError, ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.static import dtype_name, static
from fleetpipe.static.cut.split import Split


class Gradients(NamedTuple):
    """Where a stage leaves its gradients.

    Attributes:
        accumulators: The variable of each parameter's gradient.
        inputs: The variable of the gradient of each value that the stage is given, where one comes
            back to it; two values may share theirs.
    """

    accumulators: dict[str, str]
    inputs: dict[int, str]


class Forward(Protocol):
    """A stage that has its forward alone; each operation made for it goes to the end of it."""

    def parameters(self) -> Mapping[str, Variable]:
        """Returns the parameters to train that the stage uses, by name."""

    def variable(self, value: int) -> Variable:
        """Returns the variable of a value that the stage makes or is given."""

    def target(self, value: int) -> Variable:
        """Returns what is differentiated in the place of a value that leaves the stage."""

    def fed(self, name: str, like: Variable) -> Variable:
        """Returns a variable of the scope, shaped as another."""

    def add(self, parts: Sequence[Variable]) -> Variable:
        """Returns a sum, added up in the order of its parts."""

    def add_to(self, total: Variable, grad: Variable) -> None:
        """Adds a gradient to an accumulator."""

    def is_sparse(self, grad: Variable) -> bool:
        """Whether a gradient has some rows alone."""

    def leave(self, grad: Variable, name: str) -> str:
        """Leaves a gradient in a variable of the scope; returns its name, ``name`` or its own."""


def append(forward: Forward, split: Split, stage: int, loss: tuple[int, float]) -> Gradients:
    """Gives a stage its backward; in the stage's program.

    Args:
        forward: The stage.
        split: The cut.
        stage: Its number.
        loss: The number of the loss, and what its gradient is.

    Raises:
        ConfigError: A gradient is sparse.
    """
    gradients = Gradients({}, {})
    trained = split.trained
    parameters = {
        name: one
        for name, one in forward.parameters().items()
        if trained is None or name in trained
    }
    entering = [value for value in incoming(split, stage) if value in split.graph.differentiable]
    inputs = [*parameters.values(), *map(forward.variable, entering)]
    targets, grads = _targets(forward, split, stage, loss) if inputs else ([], [])
    if not targets:
        return gradients
    results = static.gradients(targets, inputs, grads)
    for name, grad in zip(parameters, results):
        if grad is not None:
            gradients.accumulators[name] = split.names.accumulator(name)
            _accumulate(forward, name, grad, gradients.accumulators[name])
    for value, grad in zip(entering, results[len(parameters) :]):
        if grad is not None:
            name = split.names.incoming_gradient(stage, value)
            gradients.inputs[value] = forward.leave(grad, name)
    return gradients


def incoming(split: Split, stage: int) -> list[int]:
    """Returns the values that a stage is given, by edge."""
    edges = sorted(edge for edge in split.crossing if edge.target == stage)
    return [value for edge in edges for value in split.crossing[edge]]


def through_control_flow(where: str) -> BoundaryError:
    """Returns the refusal of a backward that takes what an inner block made."""
    return BoundaryError(
        "a gradient passes through control flow, which a pipeline cannot cut",
        where=where,
        fix="write it without cond and while_loop (paddle.where chooses by value), or "
        "keep gradients out of it with stop_gradient",
    )


def _targets(
    forward: Forward, split: Split, stage: int, loss: tuple[int, float]
) -> tuple[list[Variable], list[Variable]]:
    """Returns what to differentiate and the gradients of it."""
    number, weight = loss
    readers = split.readers(stage)
    leaving = sorted(split.graph.differentiable.intersection(readers))
    targets = [forward.target(value) for value in leaving]
    grads = []
    for value in leaving:
        like = forward.variable(value)
        # The latest reader first, as the unsplit program adds gradients up.
        parts = [
            forward.fed(split.names.gradient(stage, value, reader), like)
            for reader in sorted(readers[value], reverse=True)
        ]
        grads.append(parts[0] if len(parts) == 1 else forward.add(parts))
    if split.stage_of_value.get(number) == stage:
        value = forward.variable(number)
        targets.append(value)
        dtype: DType = dtype_name(value)
        grads.append(paddle.full(value.shape, weight, dtype))
    return targets, grads


def _accumulate(forward: Forward, name: str, grad: Variable, accumulator: str) -> None:
    if forward.is_sparse(grad):
        raise ConfigError(
            f"the gradient of {name!r} is sparse, which a static pipeline does not add up",
            fix="build the embedding with sparse=False",
        )
    forward.add_to(forward.fed(accumulator, grad), grad)
