"""What Paddle calls a process group, where its wheel has no Gloo: those for macOS (3.3.1).

``paddle.distributed``'s functions find the methods that they call, and go over connections of the
group's ranks. Results are those of Gloo but for the order of a sum: member by member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetpipe.aliases import PaddleStore
from fleetpipe.job.groups.exchanges import Exchanges, methods, reduced
from fleetpipe.mesh.groups import DirectGroup, Group
from fleetpipe.transport.sockets.transport import connect


class Done:
    """A collective operation that has ended."""

    def wait(self) -> bool:
        """Returns at once."""
        return True


class OwnGroup(Exchanges):
    """The ranks of one of Paddle's groups; each method is called by all of them."""

    def __init__(
        self, store: PaddleStore, rank: int, ranks: int, number: int, *, timeout: float
    ) -> None:
        """Connects the ranks. Collective over the group.

        Args:
            store: Where they find each other.
            rank: This rank's number in the group.
            ranks: Members of the group.
            number: The group's number among Paddle's.
            timeout: Seconds that any wait for another member may last.
        """
        name = f"fleetpipe/group/{number}"
        transport = connect(rank=rank, ranks=ranks, store=store, namespace=name, timeout=timeout)
        self._members = DirectGroup(transport, timeout)

    def members(self) -> Group:
        """Returns the members."""
        return self._members

    def name(self) -> str:
        """Returns the name of the backend in whose place this is."""
        return "GLOO"

    def rank(self) -> int:
        """Returns this rank's number in the group."""
        return self._members.rank

    def size(self) -> int:
        """Returns how many members there are."""
        return self._members.ranks

    def all_reduce(self, tensor: Any, operation: Any, sync_op: bool = True) -> Done:
        """Replaces the tensor by the sum, or another reduction, of all members'. Collective."""
        self._reduce(tensor, operation)
        return Done()

    def reduce(self, tensor: Any, target: int, operation: Any, sync_op: bool = True) -> Done:
        """Replaces the tensor of member ``target`` likewise. Collective."""
        self._reduce(tensor if self.rank() == target else tensor.clone(), operation)
        return Done()

    def broadcast(self, tensor: Any, source: int, sync_op: bool = True) -> Done:
        """Gives the tensor the value that it has on member ``source``. Collective."""
        self._members.broadcast_each([(tensor, source)])
        return Done()

    def all_gather(self, places: Sequence[Any], tensor: Any, sync_op: bool = True) -> Done:
        """Gives ``places``, by member, the values of all members' tensors. Collective."""
        for place, value in zip(places, self._members.all_gather(tensor.detach().clone())):
            place.set_value(value)
        return Done()

    def barrier(self, device: int = 0) -> Done:
        """Waits until all members have come. Collective."""
        self._members.all_gather(None)
        return Done()

    def _reduce(self, tensor: Any, operation: Any) -> None:
        parts = self._members.all_gather(tensor.detach().clone())
        tensor.set_value(reduced(parts, operation))


for _name, _method in methods().items():
    if _name.endswith("_on_calc_stream"):
        setattr(OwnGroup, _name, _method)
