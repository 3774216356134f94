"""Refuses options and layers that do not work with gradients summed by trees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.broadcast import is_spread
from fleetpipe.dygraph.gradients import gradient_of
from fleetpipe.dygraph.random_keys import FLEET
from fleetpipe.dygraph.tensor_parallel import is_sequence_parallel_parameter
from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Placement


def refuse_beside_trees(
    parameters: Sequence[Tensor], delayed: bool, sliced: bool, placement: Placement, rng: str
) -> None:
    """Refuses options and layers that add gradients in an order of their own.

    Args:
        parameters: The parameters of this process.
        delayed: Whether ``delay_scale_loss`` is on.
        sliced: Whether the schedule cuts micro-batches.
        placement: The owner of each stage.
        rng: The option ``rng``.
    """
    reasons: Mapping[str, bool] = {
        "delay_scale_loss, which divides gradients after they are added up": delayed,
        "slices of sequences, which add up parts of a micro-batch": sliced,
        "a VocabularyHead, whose parts add up over all ranks": placement.has_head,
        "rng='fleet', under which draws depend on the order of the layers": rng == FLEET,
        "experts that ranks share out": any(map(is_spread, parameters)),
        "sequence parallelism, whose norms add up parts of a sequence": any(
            map(is_sequence_parallel_parameter, parameters)
        ),
    }
    for reason, is_there in reasons.items():
        if is_there:
            raise ConfigError(
                f"sums by a tree do not go with {reason}",
                where="strategy.fleetpipe_configs['sums'] = 'tree'",
                fix="leave one of the two out",
            )


def refuse_shared_with_losses(
    entries: Mapping[int, Sequence[Tensor]], of_losses: Sequence[Tensor]
) -> None:
    """Refuses a parameter that a layer of the list and a loss use: these would add in one sum.

    Args:
        entries: The parameters of the last stage's entries, by number.
        of_losses: The parameters of the loss functions.
    """
    for number, parameters in entries.items():
        for parameter in parameters:
            if any(parameter is one for one in of_losses):
                raise ConfigError(
                    "sums by a tree do not go with a loss that uses a weight of the list",
                    where=f"layer {number} of the list, parameter {parameter.name}",
                    cause="the loss is a layer that has a layer of the list as a sublayer",
                    fix="have that layer of the list return what the loss needs beside its output, "
                    "or set fleetpipe_configs['sums'] = 'running'",
                )


def require_taken(parameters: Iterable[Tensor]) -> None:
    """Refuses a gradient that comes from none of the known uses of a parameter."""
    for parameter in parameters:
        if gradient_of(parameter) is not None:
            raise ConfigError(
                "a parameter has a gradient of a stage whose entries do not show that they use it",
                where=f"parameter {parameter.name}",
                cause="a function of the list uses a parameter of a layer that is not its own",
                fix="make the layer an argument of the function, as SharedLayerDesc's forward_func "
                "has it, or set fleetpipe_configs['sums'] = 'running'",
            )
