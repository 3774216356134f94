"""Collective operations of some ranks, over their own connections or by a group of Paddle's.

The bytes that these operations send are counted while a profile asks for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from fleetpipe.errors import FleetPipeError, PeerFailed
from fleetpipe.mesh import turns
from fleetpipe.mesh.sums import add, copy_parts, sum_parts
from fleetpipe.representation import shows
from fleetpipe.transport.base import Transport, Value
from fleetpipe.transport.wire.structure import MessageKey

#: The open counters of :func:`counting_traffic`.
_counting: list[Traffic] = []


@dataclass
class Traffic:
    """Counts what this process exchanges, and the tokens and attention that it computes.

    Attributes:
        exchanges: Number of all_to_all and reduce_scatter operations.
        nbytes: Bytes sent to other members.
        routed: Bytes of the tokens that go to experts, those of this process included.
        loads: For each mixture of experts that ran, the tokens that go to each of its experts.
        expert_seconds: Seconds that the experts of this process computed.
        queries: Bytes of the queries, for attention over whole sequences.
        keys: Bytes of the keys and values of that attention.
        heads: For each attention that ran, the heads of its queries.
        clock: Returns seconds, for ``expert_seconds``.
    """

    exchanges: int = 0
    nbytes: int = 0
    routed: int = 0
    loads: list[list[int]] = field(default_factory=list)
    expert_seconds: float = 0.0
    queries: int = 0
    keys: int = 0
    heads: list[int] = field(default_factory=list)
    clock: Callable[[], float] = time.thread_time

    def add(self, parts: Iterable[Any]) -> None:
        """Counts one exchange that sends ``parts``, a tensor for each other member."""
        # Late: a mesh is looked at where no Paddle is, too.
        from fleetpipe.paddle_api.tensor import tensor_bytes

        self.exchanges += 1
        self.nbytes += sum(map(tensor_bytes, parts))

    def attend(self, query: Any, key: Any) -> None:
        """Counts one attention of the queries over the keys and as many values."""
        from fleetpipe.paddle_api.tensor import tensor_bytes

        self.queries += tensor_bytes(query)
        self.keys += 2 * tensor_bytes(key)
        self.heads.append(query.shape[2])


@contextmanager
def counting_traffic(clock: Callable[[], float] = time.thread_time) -> Iterator[Traffic]:
    """Counts exchanges and attention of this process while the context is open.

    Args:
        clock: Returns the seconds by which experts are timed.
    """
    traffic = Traffic(clock=clock)
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def note_exchange(parts: Iterable[Any]) -> None:
    """Counts an exchange of ``parts``, one for each other member, in all open counters."""
    for traffic in _counting:
        traffic.add(parts)


def note_attention(query: Any, key: Any) -> None:
    """Counts an attention over a query and a key in all open counters."""
    for traffic in _counting:
        traffic.attend(query, key)


def note_tokens(rows: int, row_bytes: int, counts: Any) -> None:
    """Begins the time of this process's experts in each open :func:`counting_traffic`.

    Args:
        rows: Tokens that they compute.
        row_bytes: Bytes of each token.
        counts: A tensor of the tokens that go to each expert.
    """
    for traffic in _counting:
        traffic.routed += rows * row_bytes
        traffic.loads.append(counts.flatten().tolist())
        traffic.expert_seconds -= traffic.clock()


def note_outputs() -> None:
    """Ends the time of this process's experts in each open :func:`counting_traffic`."""
    for traffic in _counting:
        traffic.expert_seconds += traffic.clock()


class Gathering(Protocol):
    """An ``all_gather`` or ``all_to_all`` under way: this member has sent its values."""

    def arrived(self) -> bool:
        """Returns whether the values of all members have arrived; never blocks."""

    def values(self) -> list[Value]:
        """Waits for the values of all members; returns them by member."""


class Group(Protocol):
    """Some ranks that exchange values; each method must be called by all members.

    Operations that several ``begin`` methods have begun end in the order in which they began.

    Attributes:
        rank: This member's number.
        ranks: Number of members.

    Raises:
        PipelineTimeout: A member's value did not come within the limit.
    """

    rank: int
    ranks: int

    def broadcast(self, value: Value, source: int) -> Value:
        """Returns the value of member ``source`` on every member. Collective."""

    def all_gather(self, value: Value) -> list[Value]:
        """Returns the values of all members, by member, on every member. Collective."""
        return self.begin_all_gather(value).values()

    def begin_all_gather(self, value: Value) -> Gathering:
        """Sends ``value`` to all members; returns the gathering under way. Collective."""

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Replaces each tensor by the sum over all members. Collective."""

    def broadcast_each(self, tensors: Sequence[tuple[Any, int]]) -> None:
        """Replaces each tensor by that of one member. Collective.

        Args:
            tensors: Each tensor with the number of the member that has its values.
        """

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
        """Sends each member its part; returns the exchange under way. Collective."""

    def reduce_scatter(self, parts: Sequence[Any]) -> Any:
        """Returns the sum of the parts that all members have for this one. Collective.

        The parts are added in the members' order, so that the bits depend on no timing.

        Args:
            parts: A tensor for each member, of the same shape and dtype on all members.

        Raises:
            UsageError: There is not one part for each member; one is of bools; or the members'
                parts for this one differ in shape or dtype.
        """
        return sum_parts(self.all_to_all(parts), self.rank)


class _Gathered:
    """The gathering of a member that does not wait for others: its own value for each member."""

    def __init__(self, value: Value, ranks: int = 1) -> None:
        """Stores this member's value, and the number of members."""
        self._value, self._ranks = value, ranks

    def arrived(self) -> bool:
        """Returns True."""
        return True

    def values(self) -> list[Value]:
        """Returns this member's value once for each member."""
        return [self._value] * self._ranks


@shows("rank", "ranks")
class SoleGroup(Group):
    """A group whose only member is this process."""

    rank = 0
    ranks = 1

    def broadcast(self, value: Value, source: int) -> Value:
        """Returns ``value``: the only member has sent it."""
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
        (part,) = copy_parts(parts, self.rank, self.ranks)
        return _Gathered(part)


@shows("rank", "ranks")
class DirectGroup(Group):
    """Sends each value straight from rank to rank; meant for small values such as losses.

    Unlike Gloo's, its waits last as long as the user's limit.

    Attributes:
        alone: Whether this member does not wait for the others, and takes its own values for
            theirs: its process replaces one that has met them, and gets their state later.
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
        #: The gatherings that have begun and not ended, the oldest first; each adds itself.
        self.begun: list[_DirectGathering] = []

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
        """Sends ``value`` to all members; returns the gathering under way. Collective."""
        if self.alone:
            return _Gathered(value, self.ranks)
        for peer in self._peers():
            self.transport.send(peer, self._gather, value)
        return _DirectGathering(self, self._gather, value)

    def begin_all_to_all(self, parts: Sequence[Any]) -> Gathering:
        """Sends each member its part; returns the exchange under way. Collective."""
        outgoing = copy_parts(parts, self.rank, self.ranks)
        if self.alone:
            return _Gathered(outgoing[self.rank], self.ranks)
        note_exchange([outgoing[peer] for peer in self._peers()])
        for peer in self._peers():
            self.transport.send(peer, self._exchange, outgoing[peer])
        return _Exchange(self, self._exchange, outgoing[self.rank])

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Replaces each tensor by the sum over all members, in their order. Collective."""
        for tensor in () if self.alone else tensors:
            tensor.set_value(functools.reduce(add, self.all_gather(tensor.clone())))

    def broadcast_each(self, tensors: Sequence[tuple[Any, int]]) -> None:
        """Replaces each tensor by that of the member whose number is beside it. Collective."""
        for tensor, source in () if self.alone else tensors:
            # Sent as a copy: the tensor may change before it has left this process.
            copy = tensor.detach().clone() if source == self.rank else None
            value = self.broadcast(copy, source)
            if source != self.rank:
                tensor.set_value(value)

    def begin_anew(self) -> None:
        """Drops unfinished gatherings, and waits for the other members from now on."""
        self.alone = False
        self.begun.clear()

    def receive_for(self, wanted: _DirectGathering, wait: bool) -> None:
        """Receives values for the gatherings up to one of them, in the order in which they began.

        Args:
            wanted: The gathering whose values are wanted.
            wait: Whether to wait until it is complete; if not, takes only what has arrived.
        """
        while self.begun and not wanted.complete:
            oldest = self.begun[0]
            for peer in self._peers():
                if peer in oldest.by_member:
                    continue
                arrived, value = self.transport.try_receive(peer, oldest.key)
                if arrived or wait:
                    oldest.by_member[peer] = value if arrived else self._receive(peer, oldest.key)
            if not oldest.complete:
                return
            self.begun.pop(0)

    def _receive(self, peer: int, key: MessageKey) -> Value:
        """Waits for a member's message within this group's limit."""
        return self.transport.receive(peer, key, self._timeout)

    def _peers(self) -> list[int]:
        """Returns the numbers of the other members."""
        return [rank for rank in range(self.ranks) if rank != self.rank]


class _DirectGathering:
    """An ``all_gather`` or ``all_to_all`` of a :class:`DirectGroup` under way.

    Attributes:
        key: The key of its messages.
        by_member: The values that have been taken, by member.
    """

    def __init__(self, group: DirectGroup, key: MessageKey, value: Value) -> None:
        """Begins with this member's own ``value``; the group receives the others in turn."""
        self._group = group
        self.key = key
        self.by_member: dict[int, Value] = {group.rank: value}
        group.begun.append(self)

    @property
    def complete(self) -> bool:
        """Whether the values of all members have been taken."""
        return len(self.by_member) == self._group.ranks

    def arrived(self) -> bool:
        """Returns whether the values of all members have arrived; never blocks."""
        self._group.receive_for(self, wait=False)
        return self.complete

    def values(self) -> list[Value]:
        """Waits for the values of all members; returns them by member."""
        self._group.receive_for(self, wait=True)
        return [self.by_member[member] for member in range(self._group.ranks)]


class _Exchange(_DirectGathering):
    """An ``all_to_all`` under way; while it waits, the other of two computations may run."""

    def values(self) -> list[Value]:
        """Lets the other computation run, then waits for the parts of all members."""
        turns.hand_over()
        since = time.perf_counter()
        values = super().values()
        turns.here.waited += time.perf_counter() - since
        return values


class GlooGroup(DirectGroup):
    """Sums large tensors in one of Paddle's own groups: Gloo's on CPU, NCCL's on GPU.

    The members meet over their connections first, under the user's limit: Gloo itself gives up
    after 30 s, and the group is broken afterwards.
    """

    def __init__(
        self,
        transport: Transport,
        timeout: float,
        paddle_group: Any,
        limit: Callable[[], AbstractContextManager[None]] = nullcontext,
        name: str = "group",
    ) -> None:
        """Uses a group of Paddle's with the same members in the same order.

        Args:
            transport: This rank's connections to the other members.
            timeout: Seconds that the wait for a member may last.
            paddle_group: A group from ``paddle.distributed.new_group``.
            limit: Returns a context in which an operation of that group runs, such as a limit.
            name: Prefix of its messages.
        """
        super().__init__(transport, timeout, name)
        self.paddle_group = paddle_group
        self._limit = limit

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Replaces each tensor by the sum over all members. Collective."""
        from paddle.distributed import all_reduce

        if self.alone:
            return
        self.all_gather(None)
        with self.collective():
            for tensor in tensors:
                # Gloo's sums of float16 are not numbers.
                is_half = str(tensor.dtype).endswith("float16") and tensor.place.is_cpu_place()
                total = tensor.astype("float32") if is_half else tensor
                all_reduce(total, group=self.paddle_group)
                if is_half:
                    tensor.set_value(total.astype(tensor.dtype))

    def broadcast_each(self, tensors: Sequence[tuple[Any, int]]) -> None:
        """Replaces each tensor by that of the member whose number is beside it. Collective."""
        from paddle.distributed import broadcast

        if self.alone:
            return
        members = self.all_gather(self.paddle_group.ranks[self.paddle_group.rank])
        with self.collective():
            for tensor, source in tensors:
                broadcast(tensor, members[source], group=self.paddle_group)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A context for Paddle's own collectives; the members must have met before.

        Raises:
            PeerFailed: The collective broke, because a member died or stopped meanwhile.
        """
        try:
            with self._limit():
                yield
        except (RuntimeError, OSError) as error:  # of Gloo, of NCCL
            if isinstance(error, FleetPipeError):
                raise
            raise PeerFailed(
                "a collective operation of Paddle's broke",
                got=str(error).strip().splitlines()[0],
                cause="another member died within it, did not go on for 30 s, or uses the same GPU",
                fix="read the logs of the other members",
            ) from error
