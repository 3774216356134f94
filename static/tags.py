"""What the device of a ``device_guard`` says of a stage: ``gpu:k`` is stage k on any device."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.static.graph import EVERYWHERE


def stage_of_device(device: str | None) -> int | None:
    """Returns the stage of ``gpu:k``, :data:`EVERYWHERE` for ``gpu:all``, None for all else."""
    kind, _, index = (device or "").partition(":")
    if not kind or kind == "cpu" or not index:
        return None
    if index == "all":
        return EVERYWHERE
    if not index.isdigit():
        raise ConfigError(
            f"device_guard({device!r}) names no stage",
            expected="'gpu:0', 'gpu:1', .., or 'gpu:all'",
            fix="write the number of the stage behind the colon",
        )
    return int(index)


def stage_guard(stage: int) -> AbstractContextManager[object]:
    """Builds what stands in it into a stage: ``device_guard("gpu:k")`` under a plainer name."""
    if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
        raise ConfigError(
            "a stage is a whole number of at least 0",
            got=repr(stage),
            fix="number the stages 0, 1, 2, .. in the order of the network",
        )
    guard: AbstractContextManager[object] = paddle.static.device_guard(f"gpu:{stage}")
    return guard
