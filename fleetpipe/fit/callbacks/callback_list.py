"""The callbacks of a ``fit``, an ``evaluate`` or a ``predict``: the user's, and fleetpipe's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle.hapi.callbacks import CallbackList, config_callbacks

from fleetpipe.aliases import Nest
from fleetpipe.errors import ConfigError
from fleetpipe.fit import arguments
from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.fit.callbacks.checkpoint import PipelineCheckpoint
from fleetpipe.fit.callbacks.metrics import MetricsLogger
from fleetpipe.fit.callbacks.progress import Progress
from fleetpipe.fit.micro_batches import as_list
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import learning_rate_of

_configured: Callable[..., CallbackList] = config_callbacks


def build_callback_list(
    model: Any,
    callbacks: Nest,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    log_freq: int = 1,
    save_freq: int = 1,
    save_dir: str | None = None,
    verbose: int = 0,
) -> CallbackList:
    """Returns Paddle's ``CallbackList`` of the callbacks that run on this rank.

    Args:
        model: The ``fleetpipe.Model`` whose loop calls them.
        callbacks: The user's: None, one, or several; a string is a format of ``MetricsLogger``.
        epochs: The number of epochs, which the callbacks get in ``params``.
        steps: The number of batches of an epoch, which they get there too.
        log_freq: Batches from one line of the progress to the next.
        save_freq: Epochs from one saved model to the next.
        save_dir: The folder in which models are saved; None saves none.
        verbose: See ``fit``.

    Raises:
        ConfigError: An argument is no callback, or a number is out of range.
    """
    arguments.require_numbers(log_freq=log_freq)
    listed = as_list(callbacks)
    trackers = [callback for callback in listed if isinstance(callback, str)]
    if trackers:
        listed = [callback for callback in listed if not isinstance(callback, str)]
        listed.append(MetricsLogger(save_dir or "run", formats=("jsonl", *trackers)))
    chosen = rank_policy.callbacks_of_rank(listed, model.is_rank)
    # Without a callback of these kinds Paddle would add its own.
    if not any(isinstance(callback, rank_policy.ModelCheckpoint) for callback in chosen):
        whole = any(isinstance(callback, PipelineCheckpoint) for callback in chosen)
        chosen.append(rank_policy.ModelCheckpoint(save_freq, None if whole else save_dir))
    if not any(isinstance(callback, paddle.callbacks.LRScheduler) for callback in chosen):
        chosen.append(rank_policy.LRScheduler())
    _require_steps(model, chosen)
    if verbose and not any(isinstance(c, paddle.callbacks.ProgBarLogger) for c in chosen):
        chosen.insert(0, Progress(log_freq, verbose))
    return _configured(
        chosen,
        model=model,
        epochs=epochs,
        steps=steps,
        verbose=verbose,
        save_dir=save_dir,
        metrics=model.metric_names,
    )


def _require_steps(model: Any, callbacks: list[Any]) -> None:
    """Checks that the callbacks can step the learning rate.

    Raises:
        ConfigError: The rate is a ``ReduceOnPlateau``, whose step takes a loss that Paddle's
            callback does not pass.
    """
    rate = None if model.optimizer is None else learning_rate_of(model.optimizer.wrapped)
    if isinstance(rate, paddle.optimizer.lr.ReduceOnPlateau) and any(
        isinstance(one, paddle.callbacks.LRScheduler) and (one.by_step or one.by_epoch)
        for one in callbacks
    ):
        raise ConfigError(
            "fit steps the learning rate without a loss",
            got="the optimizer's rate is a ReduceOnPlateau, whose step takes one",
            fix="give the optimizer a number, and fit paddle.callbacks.ReduceLROnPlateau(..)",
        )
