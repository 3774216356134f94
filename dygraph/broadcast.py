"""Broadcasts the values of the first rank of a group to the others."""

from __future__ import annotations

from collections.abc import Mapping

from fleetpipe.aliases import Tensor
from fleetpipe.mesh.groups import Group


def is_spread(parameter: Tensor) -> bool:
    """Whether a parameter is an expert's, and other ranks of its stage hold other experts.

    Paddle marks it by ``no_sync``, and so do the libraries' layers.
    """
    return bool(getattr(parameter, "no_sync", False))


def broadcast_copies(state: Mapping[str, Tensor], group: Group, of_experts: Group) -> None:
    """Sets all copies of a model's part to the values of the first. Collective over both groups.

    Args:
        state: Tensors by name, with the same names and shapes on every copy.
        group: The ranks with copies of everything but experts.
        of_experts: The ranks with copies of the same experts.
    """
    spread = {name: tensor for name, tensor in state.items() if is_spread(tensor)}
    broadcast_state({n: t for n, t in state.items() if n not in spread}, group)
    broadcast_state(spread, of_experts)


def broadcast_state(state: Mapping[str, Tensor], group: Group) -> None:
    """Sets the tensors of all members of a group to the values of the first. Collective.

    Args:
        state: Tensors by name, with the same names and shapes on every member.
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
