"""The loss functions of a model, as its user gave them: one, several in a list, or none."""

from __future__ import annotations

from typing import Any, Callable

from fleetpipe.aliases import Tensor
from fleetpipe.errors import ConfigError

#: ``loss_fn(output, label)`` gives a Tensor with one element.
LossFunction = Callable[[Any, Any], Tensor]


def as_list(loss_fn: Any) -> list[Any]:
    """Returns the loss functions of ``loss_fn``; None stands for none."""
    return list(loss_fn) if isinstance(loss_fn, (list, tuple)) else [loss_fn]


def require_callable(loss_fn: Any) -> None:
    """Refuses a loss that would fail in the first batch, on the last rank alone.

    Raises:
        ConfigError: One of the functions is a class, or cannot be called.
    """
    for function in as_list(loss_fn):
        is_class = isinstance(function, type)
        if function is not None and (is_class or not callable(function)):
            raise ConfigError(
                "loss_fn is called with the model's output and the label",
                expected="a function or a built layer, or a list of these",
                got=f"the class {function.__name__}" if is_class else repr(function),
                fix=f"pass {function.__name__}()" if is_class else "pass nn.CrossEntropyLoss()",
            )


def required(loss_fn: Any) -> list[LossFunction]:
    """Returns the loss functions.

    Raises:
        ConfigError: There is none.
    """
    functions = as_list(loss_fn)
    if not functions or None in functions:
        raise ConfigError(
            "this PipelineLayer has no loss function", fix="pass loss_fn= when you build it"
        )
    return functions
