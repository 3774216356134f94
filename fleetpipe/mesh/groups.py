"""Collective operations of some ranks, over their own connections."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, Protocol

from fleetpipe.mesh import traffic, turns
from fleetpipe.mesh.sums import add, added_up, copies
from fleetpipe.representation import shows
from fleetpipe.transport.base import Transport, Value
from fleetpipe.transport.wire.message import MessageKey


class Gathering(Protocol):
    """An ``all_gather`` or ``all_to_all`` under way: this member has sent its values."""

    def arrived(self) -> bool:
        """Whether the values of all members have arrived; never blocks."""

    def values(self) -> list[Value]:
        """Waits for the values of all members; returns them by member."""


class Group(Protocol):
    """The members of a collective operation; each of its methods is called by all of them.

    What several ``begin`` methods have begun ends in the order in which it began.

    Attributes:
        rank: This member's number.
        ranks: Number of members.

    Raises:
        PipelineTimeout: Some value did not come within the limit.
    """

    rank: int
    ranks: int

    def broadcast(self, value: Value, source: int) -> Value:
        """Returns the value of member ``source`` on every member. Collective."""

    def all_gather(self, value: Value) -> list[Value]:
        """Returns the values of all members, by member, on every member. Collective."""
        return self.begin_all_gather(value).values()

    def begin_all_gather(self, value: Value) -> Gathering:
        """Sends ``value`` to all members without waiting for theirs. Collective."""

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Replaces each tensor by the sum over all members. Collective."""

    def broadcast_each(self, tensors: Sequence[tuple[Any, int]]) -> None:
        """Replaces each tensor by the one of the member named beside it. Collective."""

    def all_to_all(self, parts: Sequence[Any]) -> list[Any]:
        """Sends a part to each member; returns the parts for this one, by member. Collective.

        Each part is copied and goes straight to its member: the caller may change it afterwards.

        Args:
            parts: A tensor for each member, of any shapes and dtypes; some may be empty.

        Raises:
            UsageError: There is not one part for each member.
        """
        return self.begin_all_to_all(parts).values()

    def begin_all_to_all(self, parts: Sequence[Any]) -> Gathering:
        """Sends each member its part without waiting for the others'. Collective."""

    def reduce_scatter(self, parts: Sequence[Any]) -> Any:
        """Returns the sum of the parts that all members have for this one. Collective.

        They are added in the members' order, so that the bits depend on no timing.

        Args:
            parts: A tensor for each member, of the same shape and dtype on all members.

        Raises:
            UsageError: There is not one part for each member; one is of bools; or the members'
                parts for this one differ in shape or dtype.
        """
        return self.begin_reduce_scatter(parts).value()

    def begin_reduce_scatter(self, parts: Sequence[Any]) -> Reduction:
        """Sends each member its part without waiting for the others'. Collective."""
        return Reduction(self.begin_all_to_all(parts), self.rank)


class Reduction:
    """A ``reduce_scatter`` under way: this member has sent its parts."""

    def __init__(self, gathering: Gathering, rank: int) -> None:
        """Sums the parts of ``gathering`` for the member ``rank``."""
        self._gathering, self._rank = gathering, rank

    def arrived(self) -> bool:
        """Whether the parts of all members have arrived; never blocks."""
        return self._gathering.arrived()

    def value(self) -> Any:
        """Waits for the parts of all members; returns their sum.

        Raises:
            UsageError: They differ in shape or dtype, or are bools.
        """
        return added_up(self._gathering.values(), self._rank)


class _Gathered:
    """The gathering of a member that meets no other: its own value, for each member."""

    def __init__(self, value: Value, ranks: int = 1) -> None:
        self._value, self._ranks = value, ranks

    def arrived(self) -> bool:
        """Always true."""
        return True

    def values(self) -> list[Value]:
        """Returns the value as often as there are members."""
        return [self._value] * self._ranks


@shows("rank", "ranks")
class SoleGroup(Group):
    """A group whose only member is this process."""

    rank = 0
    ranks = 1

    def broadcast(self, value: Value, source: int) -> Value:
        """Returns ``value``."""
        return value

    def begin_all_gather(self, value: Value) -> Gathering:
        """Returns a gathering of ``value`` alone."""
        return _Gathered(value)

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Leaves the tensors unchanged."""

    def broadcast_each(self, tensors: Sequence[tuple[Any, int]]) -> None:
        """Leaves the tensors unchanged."""

    def begin_all_to_all(self, parts: Sequence[Any]) -> Gathering:
        """Returns a gathering of a copy of the one part."""
        (part,) = copies(parts, self.rank, self.ranks)
        return _Gathered(part)


@shows("rank", "ranks")
class DirectGroup(Group):
    """Sends each value straight from rank to rank; meant for small values such as losses.

    Unlike Gloo's, its waits last as long as the user's limit.

    Attributes:
        alone: Whether this member does not wait for the others, and takes its own values for
            theirs: it replaces one that has met them before, and will be given what they have.
    """

    alone = False

    def __init__(self, transport: Transport, timeout: float, name: str = "group") -> None:
        """Uses the connections of one rank.

        Args:
            transport: This rank's connections to the other members.
            timeout: Seconds that the wait for one value may last.
            name: Prefix of its messages. Groups that share connections need different names, so
                that none takes a message of another.
        """
        self.rank = transport.rank
        self.ranks = transport.ranks
        self.transport = transport
        self._timeout = timeout
        self._broadcast = MessageKey("C", 0, 0, f"{name} broadcast", 0)
        self._gather = MessageKey("C", 0, 0, f"{name} gather", 0)
        self._exchange = MessageKey("C", 0, 0, f"{name} exchange", 0)
        self._begun: list[_DirectGathering] = []

    def broadcast(self, value: Value, source: int) -> Value:
        """Returns the value of member ``source`` on every member. Collective."""
        if self.alone:
            return value
        if self.rank != source:
            return self.transport.receive(source, self._broadcast, self._timeout)
        for peer in self._peers():
            self.transport.send(peer, self._broadcast, value)
        return value

    def begin_all_gather(self, value: Value) -> Gathering:
        """Sends ``value`` to all members without waiting for theirs. Collective."""
        if self.alone:
            return _Gathered(value, self.ranks)
        for peer in self._peers():
            self.transport.send(peer, self._gather, value)
        return self._begin(self._gather, value)

    def begin_all_to_all(self, parts: Sequence[Any]) -> Gathering:
        """Sends each member its part without waiting for the others'. Collective."""
        outgoing = copies(parts, self.rank, self.ranks)
        if self.alone:
            return _Gathered(outgoing[self.rank], self.ranks)
        traffic.note([outgoing[peer] for peer in self._peers()])
        for peer in self._peers():
            self.transport.send(peer, self._exchange, outgoing[peer])
        return _Exchange(self._begin(self._exchange, outgoing[self.rank]))

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Replaces each tensor by the sum over all members, in their order. Collective."""
        for tensor in () if self.alone else tensors:
            tensor.set_value(functools.reduce(add, self.all_gather(tensor.clone())))

    def broadcast_each(self, tensors: Sequence[tuple[Any, int]]) -> None:
        """Replaces each tensor by the one of the member named beside it. Collective."""
        for tensor, source in () if self.alone else tensors:
            # Sent as a copy: the tensor may change before it has left this process.
            copy = tensor.detach().clone() if source == self.rank else None
            value = self.broadcast(copy, source)
            if source != self.rank:
                tensor.set_value(value)

    def begin_anew(self) -> None:
        """Forgets what has begun, and meets the other members from now on."""
        self.alone = False
        self._begun.clear()

    def _begin(self, key: MessageKey, value: Value) -> _DirectGathering:
        gathering = _DirectGathering(self, key, value)
        self._begun.append(gathering)
        return gathering

    def advance(self, wanted: _DirectGathering, wait: bool) -> None:
        """Takes arrived values for the gatherings up to ``wanted``, in the order of begin."""
        while self._begun and not wanted.complete:
            first = self._begun[0]
            for peer in self._peers():
                if peer in first.by_member:
                    continue
                arrived, value = self.transport.try_receive(peer, first.key)
                if arrived or wait:
                    first.by_member[peer] = value if arrived else self._receive(peer, first.key)
            if not first.complete:
                return
            self._begun.pop(0)

    def _receive(self, peer: int, key: MessageKey) -> Value:
        return self.transport.receive(peer, key, self._timeout)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]


class _DirectGathering:
    """An ``all_gather`` or ``all_to_all`` of a :class:`DirectGroup` under way.

    Attributes:
        key: The key of its messages.
        by_member: The values that have been taken, by member.
    """

    def __init__(self, group: DirectGroup, key: MessageKey, value: Value) -> None:
        self._group = group
        self.key = key
        self.by_member: dict[int, Value] = {group.rank: value}

    @property
    def complete(self) -> bool:
        """Whether the values of all members have been taken."""
        return len(self.by_member) == self._group.ranks

    def arrived(self) -> bool:
        """Whether the values of all members have arrived; never blocks."""
        self._group.advance(self, wait=False)
        return self.complete

    def values(self) -> list[Value]:
        """Waits for the values of all members; returns them by member."""
        self._group.advance(self, wait=True)
        return [self.by_member[member] for member in range(self._group.ranks)]


class _Exchange:
    """An ``all_to_all`` under way, during which the other of two computations may run."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self.arrived = gathering.arrived

    def values(self) -> list[Value]:
        """Lets the other computation run first; then see :class:`Gathering`."""
        turns.hand_over()
        since = time.perf_counter()
        values = self._gathering.values()
        turns.here.waited += time.perf_counter() - since
        return values
