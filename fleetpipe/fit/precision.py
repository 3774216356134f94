"""Mixed precision from the ``amp_configs`` of ``Model.prepare``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

from fleetpipe import fleet, log
from fleetpipe.aliases import Layer, Optimizer, Scaler
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import checked_amp, rehearsal_dtype
from fleetpipe.paddle_api.device import device_kind

_log = log.logger(__name__)

#: Its stubs take literals alone.
_amp: Any = paddle.amp


class Precision(NamedTuple):
    """The precision in which a model computes.

    Attributes:
        level: ``"O0"`` for full precision, ``"O1"`` or ``"O2"``.
        lists: The options of ``auto_cast``.
        scaler: The ``GradScaler`` of the losses; None in full precision.
    """

    level: str = "O0"
    lists: Mapping[str, Any] = MappingProxyType({})
    scaler: Scaler = None

    def computing(self) -> AbstractContextManager[None]:
        """While it is open, operations compute in this precision."""
        if self.level == "O0":
            return nullcontext()
        cast: AbstractContextManager[None] = _amp.auto_cast(level=self.level, **self.lists)
        return cast


def precision_of(
    configs: str | dict[str, Any] | None, network: Layer, optimizer: Optimizer
) -> Precision:
    """Returns the precision that ``amp_configs`` asks for; ``"O2"`` casts the parameters to it.

    Args:
        configs: A level, or a dict with ``level`` and the options of ``auto_cast`` and
            ``GradScaler``; None for full precision.
        network: The model.
        optimizer: The user's optimizer.
    """
    try:
        level, lists, scaling = checked_amp(configs, optimizer)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"amp_configs: {error}",
            got=repr(configs),
            fix="prepare(.., amp_configs='O1'), or a dict with 'level' and options of "
            "paddle.amp.auto_cast and paddle.amp.GradScaler",
        ) from error
    if level == "O0":
        return Precision()
    if device_kind() == "cpu" and rehearsal_dtype() is None:
        log.once(
            _log.warning,
            "amp_configs: on a CPU auto_cast changes nothing; all is computed as it is",
        )
        return Precision()
    if level == "O2":
        _amp.decorate(models=network, optimizers=optimizer, level=level)
    return Precision(level, lists, fleet.distributed_scaler(_amp.GradScaler(**scaling)))
