"""Gives all ranks of a group the values that the first of them has."""

from __future__ import annotations

from collections.abc import Mapping

from fleetpipe.aliases import Tensor
from fleetpipe.mesh.groups import Group


def broadcast_state(state: Mapping[str, Tensor], group: Group) -> None:
    """Gives every member of a group the values that the first has. Collective over the group.

    Args:
        state: Tensors by name, the same names and shapes on every member.
        group: The replicas, or the members that hold the shards of one model.
    """
    if group.ranks == 1:
        return
    # Sent as copies: what these are may change before they have left this process.
    copies = None if group.rank else {name: t.detach().clone() for name, t in state.items()}
    first = group.broadcast(copies, 0)
    if group.rank:
        for name, tensor in state.items():
            tensor.set_value(first[name])
