"""Makes all ranks share the verdict of a ``GradScaler``: all step, or none.

A rank sees only the gradients of its own stages. If one of them overflows, all ranks must skip the
step and lower the scale, or the stages drift apart.
"""

from __future__ import annotations

from fleetpipe import log
from fleetpipe.aliases import Optimizer, Scaler
from fleetpipe.dygraph.gradients import gradient_of
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import (
    note_unscaled,
    rehearsal_dtype,
    replace_unscale,
    scale_of,
    scaler_counts,
    unscale,
)
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.optimizer import optimized_parameters

_log = log.logger(__name__)


def agreeing(scaler: Scaler) -> Scaler:
    """Makes a ``GradScaler`` ask all ranks of the job whether to step. Changes it in place.

    Args:
        scaler: Paddle's ``GradScaler``, or its ``MixPrecisionScaler`` around one.

    Returns:
        ``scaler``.
    """
    replace_unscale(scaler, _unscale)
    return scaler


def prepare_scaler(scaler: Scaler) -> Scaler:
    """Returns the scaler for ``train_batch`` to use; None if it scales nothing.

    Paddle's scaler switches itself off in ``scale`` if the loss is not float16. Only the owner of
    the last stage scales a loss, so each rank scales a number here, and all ranks switch alike.
    """
    if scaler.is_enable():
        scaler.scale(paddle.zeros([1]))
    if scaler.is_enable():
        return agreeing(scaler)
    if device_kind() == "cpu" and rehearsal_dtype() is None:
        log.once(
            _log.warning,
            "a GradScaler does nothing on CPU: gradients are computed in float32 there",
        )
    return None


@paddle.no_grad()
def _unscale(scaler: Scaler, optimizer: Optimizer) -> None:
    """Divides the gradients by the scale, and agrees with all ranks whether to step. Collective."""
    if not scaler.is_enable():
        return
    gradients = map(gradient_of, optimized_parameters(optimizer))
    overflow = unscale((one for one in gradients if one is not None), scale_of(scaler))
    note_unscaled(scaler, optimizer, _any_rank(overflow, scaler))


def _any_rank(found_inf: bool, scaler: Scaler) -> bool:
    """Returns whether any rank has a gradient that is not finite. Collective over the job."""
    job = current_job()
    if job is None:
        return found_inf
    everyone = job.everyone()
    verdicts = everyone.all_gather((found_inf, str(scaler_counts(scaler))))
    different = [rank for rank, (_, counts) in enumerate(verdicts) if counts != verdicts[0][1]]
    if different:
        raise ConfigError(
            f"the GradScalers of ranks 0 and {different[0]} are not in the same state",
            expected=f"as on rank 0: {verdicts[0][1]}",
            got=f"on rank {different[0]}: {verdicts[different[0]][1]}",
            fix="give all ranks the same GradScaler arguments, and load the same state on each",
        )
    return any(verdict for verdict, _ in verdicts)
