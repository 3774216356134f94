"""Appends the backward to a stage's forward, and names the optimizer's variables, for both IRs.

The backward leads from the values that leave the stage, or from the loss, to the parameters and the
incoming values. Start with :func:`append_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from fleetpipe.aliases import DType, Optimizer, Variable
from fleetpipe.errors import BoundaryError, ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import master_weight_of, state_of
from fleetpipe.paddle_api.static import dtype_name, static
from fleetpipe.static.cut import OptimizerVariables, Split


def optimizer_variables_of(
    optimizer: Optimizer, parameter: str, name_of: Callable[[Variable], str]
) -> OptimizerVariables:
    """Returns the variables of the optimizer's state for a parameter.

    Args:
        optimizer: The optimizer, applied to a program.
        parameter: The name of the parameter.
        name_of: Returns the name of a variable of the program.
    """
    master = master_weight_of(optimizer, parameter)
    state = state_of(optimizer, parameter, name_of)
    return OptimizerVariables(
        {kind: name_of(variable) for kind, variable in state.items()},
        None if master is None else name_of(master),
    )


class Gradients(NamedTuple):
    """The variables in which a stage puts its gradients.

    Attributes:
        accumulators: The variable of each parameter's gradient.
        inputs: The variable of the gradient of each incoming value that gets one; two values may
            share theirs.
    """

    accumulators: dict[str, str]
    inputs: dict[int, str]


class Forward(Protocol):
    """A stage that has only its forward; new operations are appended to it."""

    def parameters(self) -> Mapping[str, Variable]:
        """Returns the trainable parameters that the stage uses, by name."""

    def variable(self, value: int) -> Variable:
        """Returns the variable of a value of the stage, computed or incoming."""

    def target(self, value: int) -> Variable:
        """Returns the variable to differentiate for a value that leaves the stage."""

    def scope_variable(self, name: str, like: Variable) -> Variable:
        """Returns the scope's variable ``name``, of the shape and dtype of ``like``."""

    def add(self, parts: Sequence[Variable]) -> Variable:
        """Returns the sum of ``parts``, added in their order."""

    def add_to(self, total: Variable, grad: Variable) -> None:
        """Adds the gradient ``grad`` to the accumulator ``total`` in place."""

    def is_sparse(self, grad: Variable) -> bool:
        """Returns whether a gradient has only some of the rows."""

    def export_gradient(self, grad: Variable, name: str) -> str:
        """Puts a gradient into a variable of the scope.

        Args:
            grad: The gradient.
            name: The name for the variable, if the gradient has none yet.

        Returns:
            The name of the variable that has the gradient.
        """


def append_backward(
    forward: Forward, split: Split, stage: int, loss: tuple[int, float]
) -> Gradients:
    """Appends the backward to a stage; call it in the stage's program.

    Args:
        forward: The stage.
        split: The cut.
        stage: The number of the stage.
        loss: The number of the loss among the program's values, and the gradient of the loss.

    Returns:
        The variables that have the gradients after the backward.

    Raises:
        ConfigError: A gradient is sparse.
    """
    gradients = Gradients({}, {})
    trained = split.trained
    parameters = {
        name: parameter
        for name, parameter in forward.parameters().items()
        if trained is None or name in trained
    }
    entering = [value for value in incoming(split, stage) if value in split.graph.differentiable]
    inputs = [*parameters.values(), *map(forward.variable, entering)]
    targets, grads = _targets_and_gradients(forward, split, stage, loss) if inputs else ([], [])
    if not targets:
        return gradients
    results = static.gradients(targets, inputs, grads)
    for name, grad in zip(parameters, results):
        if grad is not None:
            if forward.is_sparse(grad):
                raise ConfigError(
                    f"the gradient of {name!r} is sparse, which a static pipeline does not add up",
                    fix="build the embedding with sparse=False",
                )
            accumulator = gradients.accumulators[name] = split.names.accumulator(name)
            forward.add_to(forward.scope_variable(accumulator, grad), grad)
    for value, grad in zip(entering, results[len(parameters) :]):
        if grad is not None:
            name = split.names.incoming_gradient(stage, value)
            gradients.inputs[value] = forward.export_gradient(grad, name)
    return gradients


def incoming(split: Split, stage: int) -> list[int]:
    """Returns the values that enter a stage, in the order of the edges."""
    edges = sorted(edge for edge in split.crossing if edge.target == stage)
    return [value for edge in edges for value in split.crossing[edge]]


def control_flow_error(where: str) -> BoundaryError:
    """Returns the error of a backward that needs a value from inside of a cond or while_loop.

    ``where`` names the operation and its stage or line.
    """
    return BoundaryError(
        "a gradient passes through control flow, which a pipeline cannot cut",
        where=where,
        fix="write it without cond and while_loop (paddle.where chooses by value), or "
        "keep gradients out of it with stop_gradient",
    )


def _targets_and_gradients(
    forward: Forward, split: Split, stage: int, loss: tuple[int, float]
) -> tuple[list[Variable], list[Variable]]:
    """Returns the variables that the backward starts from, and the gradient of each."""
    number, weight = loss
    readers = split.readers(stage)
    leaving = sorted(split.graph.differentiable.intersection(readers))
    targets = [forward.target(value) for value in leaving]
    grads = []
    for value in leaving:
        like = forward.variable(value)
        # The latest reader first: in this order the unsplit program adds gradients up.
        parts = [
            forward.scope_variable(split.names.gradient(stage, value, reader), like)
            for reader in sorted(readers[value], reverse=True)
        ]
        grads.append(parts[0] if len(parts) == 1 else forward.add(parts))
    if split.stage_of_value.get(number) == stage:
        value = forward.variable(number)
        targets.append(value)
        dtype: DType = dtype_name(value)
        grads.append(paddle.full(value.shape, weight, dtype))
    return targets, grads
