"""Checks the arguments of a ``Model``'s methods, before any rank waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fleetpipe.aliases import Nest, Optimizer
from fleetpipe.dygraph.batch.losses import require_functions
from fleetpipe.errors import ConfigError, require_whole
from fleetpipe.fit.micro_batches import Metric
from fleetpipe.paddle_api import paddle

#: The methods of a metric.
_METRIC_METHODS = ("compute", "update", "accumulate", "name", "reset")
#: The smallest value of each argument that is a number.
_LEAST = {
    "epochs": 0,
    "eval_freq": 1,
    "log_freq": 1,
    "save_freq": 1,
    "accumulate_grad_batches": 1,
    "num_iters": 0,
    "num_workers": 0,
}


def require_prepared(
    optimizer: Optimizer, loss: Callable[..., Nest] | None, metrics: Sequence[Metric]
) -> None:
    """Checks the arguments of ``Model.prepare``.

    Raises:
        ConfigError: The optimizer, the loss or a metric has the wrong type.
    """
    require_functions(loss)
    if optimizer is not None and not hasattr(optimizer, "clear_grad"):
        raise ConfigError(
            "the optimizer is one of Paddle's",
            got=repr(optimizer),
            fix="paddle.optimizer.Adam(0.001, parameters=model.parameters())",
        )
    for metric in metrics:
        missing = [name for name in _METRIC_METHODS if not hasattr(metric, name)]
        if isinstance(metric, type) or missing:
            raise ConfigError(
                "metrics are objects of paddle.metric, or have their methods",
                expected=", ".join(_METRIC_METHODS),
                got=f"the class {metric.__name__}"
                if isinstance(metric, type)
                else f"{metric!r} without {', '.join(missing)}",
                fix=f"pass {metric.__name__}()"
                if isinstance(metric, type)
                else "pass paddle.metric.Accuracy(), or derive one from paddle.metric.Metric",
            )


def require_numbers(**numbers: int | None) -> None:
    """Checks that numbers, by argument name, are large enough; only ``num_iters`` may be None.

    Raises:
        ConfigError: An argument is no whole number, or too small.
    """
    for name, value in numbers.items():
        if value is not None or name != "num_iters":
            require_whole(name, value, _LEAST[name])


def batch_sizes_of(batch_size: int | Sequence[int]) -> tuple[int, int]:
    """Returns the numbers of rows of a training batch and of an evaluation batch.

    Raises:
        ConfigError: ``batch_size`` is neither a number nor a pair of numbers.
    """
    pair = batch_size if isinstance(batch_size, (list, tuple)) else (batch_size, batch_size)
    if len(pair) != 2:
        raise ConfigError(
            "batch_size is a number of rows, or a pair for training and evaluation",
            got=repr(batch_size),
            fix="batch_size=64",
        )
    train, evaluation = (require_whole("batch_size", size) for size in pair)
    return train, evaluation


def require_data(data: object) -> None:
    """Raises ConfigError unless the data are a ``Dataset`` or iterable."""
    if not isinstance(data, (paddle.io.Dataset, Iterable)):
        raise ConfigError(
            "the data is a Dataset, or yields batches",
            got="no data" if data is None else type(data).__name__,
            fix="pass a paddle.io.Dataset, a DataLoader or a list of batches (inputs, labels)",
        )


def require_callback(callback: Any) -> None:
    """Raises ConfigError unless a callback is an object with the methods of Paddle's callbacks."""
    if isinstance(callback, type) or not hasattr(callback, "on_train_batch_end"):
        raise ConfigError(
            "a callback is an object of paddle.callbacks.Callback",
            got=f"the class {callback.__name__}" if isinstance(callback, type) else repr(callback),
            fix=f"pass {callback.__name__}(..)"
            if isinstance(callback, type)
            else "derive a class from paddle.callbacks.Callback",
        )
