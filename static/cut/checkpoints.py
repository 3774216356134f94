"""Recompute: which values a stage keeps from forward to backward, as the user's script marks them.

Backward computes all else again from those, segment by segment (Chen et al., 2016, "Training Deep
Nets with Sublinear Memory Cost", arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleetpipe.aliases import Optimizer, Strategy, Variable
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api.static import recomputing
from fleetpipe.static.cut.contract import GraphReader
from fleetpipe.static.cut.split import Split


def marked(
    optimizer: Optimizer, strategy: Strategy
) -> tuple[Optimizer, Sequence[Variable | str] | None]:
    """Returns the optimizer itself, and what a strategy or a ``RecomputeOptimizer`` marks.

    Args:
        optimizer: A Paddle optimizer, perhaps in ``paddle.incubate.optimizer.RecomputeOptimizer``.
        strategy: Fleet's strategy.

    Returns:
        The optimizer that updates parameters. Checkpoints, values or their names; None where
        backward is to take from forward whatever it needs.

    Raises:
        ConfigError: Recompute is switched on without checkpoints, or is to use another device.
    """
    optimizer, checkpoints, offload = recomputing(optimizer)
    if strategy.recompute:
        configs = strategy.recompute_configs
        checkpoints = [*(checkpoints or ()), *configs["checkpoints"]]
        offload = offload or configs["enable_offload"]
    if offload:
        raise ConfigError(
            "a static pipeline keeps checkpoints where they are: it offloads nothing",
            fix="strategy.recompute_configs = {'checkpoints': [..], 'enable_offload': False}",
        )
    if checkpoints is not None and not checkpoints:
        raise ConfigError(
            "recompute is switched on, and no checkpoint is named",
            fix="strategy.recompute_configs = {'checkpoints': [name, ..]}, where name is "
            "fleetpipe.static.name_of(value)",
        )
    return optimizer, checkpoints


def mark(split: Split, reader: GraphReader, checkpoints: Sequence[Variable | str] | None) -> Split:
    """Returns the cut with its checkpoints.

    Raises:
        ConfigError: A checkpoint is no value of the program.
    """
    if checkpoints is None:
        return split
    numbers = set()
    for checkpoint in checkpoints:
        number = reader.number(checkpoint)
        if number is None:
            raise ConfigError(
                f"the program has no value {str(checkpoint)!r} to be a checkpoint of recompute",
                cause="under PIR a value has no name until it is asked for one",
                fix="name it by fleetpipe.static.name_of(value), before minimize",
            )
        numbers.add(number)
    return replace(split, checkpoints=frozenset(numbers))
