"""Gives all ranks of a group the values that the first of them has."""

from __future__ import annotations

from collections.abc import Mapping

from fleetpipe.aliases import Tensor
from fleetpipe.mesh.groups import Group


def is_spread(parameter: Tensor) -> bool:
    """Whether a parameter is an expert's that other ranks of its stage do not hold.

    ``no_sync`` is Paddle's mark for it, which the libraries' layers set too.
    """
    return bool(getattr(parameter, "no_sync", False))


def broadcast_copies(state: Mapping[str, Tensor], group: Group, of_experts: Group) -> None:
    """Gives all copies of a model's part the values of the first. Collective over both groups.

    Args:
        state: Tensors by name, the same names and shapes on every copy.
        group: The ranks with copies of what is no expert's.
        of_experts: The ranks with copies of the same experts.
    """
    spread = {name: tensor for name, tensor in state.items() if is_spread(tensor)}
    broadcast_state({n: t for n, t in state.items() if n not in spread}, group)
    broadcast_state(spread, of_experts)


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
