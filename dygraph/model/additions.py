"""What users add to a model around its list of layers, and what of that cannot be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Callable

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.layers.tied import SharedLayer
from fleetpipe.errors import ConfigError, listed


def refuse_untied(
    parameters: Mapping[str, Tensor],
    built: Mapping[str, Tensor],
    tied: Sequence[SharedLayer],
    rank_of_layer: Callable[[int], int],
) -> None:
    """Refuses what was put into a shared layer of which several ranks have copies.

    Args:
        parameters: This process's parameters by lasting name.
        built: Those that it had when the model was built.
        tied: The shared layers of the list.
        rank_of_layer: The rank that owns a layer, by its number.

    Raises:
        ConfigError: The layer has a trained parameter of its own now, or lacks a shared weight.
    """
    spread = [one for one in tied if len({rank_of_layer(i) for i in one.indices}) > 1]
    names = {name for one in spread for name in one.names.values()}
    paths = tuple(f"{one.path}." for one in spread)
    present, before = ({id(p) for p in held.values()} for held in (parameters, built))
    changed = [name for name, p in built.items() if name in names and id(p) not in present]
    changed += [
        name
        for name, p in parameters.items()
        if name.startswith(paths) and not p.stop_gradient and id(p) not in before
    ]
    if changed:
        raise ConfigError(
            "a layer that several ranks share was given other parameters",
            got=listed(changed),
            cause="each rank would train a copy of its own: what ranks share is said by the "
            "SharedLayerDesc when the model is built",
            fix="leave shared layers as they are, or freeze what is put into them; or build them "
            "with it, by a class of your own in the SharedLayerDesc",
        )
