"""How the ranks agree on the step after which all of them stop, without waiting for each other."""

from __future__ import annotations

import contextlib
import itertools

from fleetpipe.errors import PeerFailed
from fleetpipe.mesh.groups import DirectGroup, Group
from fleetpipe.transport import MessageKey

_numbers = itertools.count()
#: What was told last and what is told now differ in their number, and numbers come again: a header
#: that was seen before is known to the transport, and one for every step would fill its memory.
_CYCLE = 2


class Stopping:
    """Asked after every step; on all ranks it says yes at the same step.

    A rank tells the others at the end of a step whether it was asked to stop, and takes what they
    told at the end of the step before, which has come by then: nobody finishes a step without all
    others. So a rank that is asked to stop finishes the step that it is in, and all do the next.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        """Makes the agreement. Collective: all ranks make as many, in the same order.

        Args:
            group: All ranks of the job.
            timeout: Seconds that the wait for what one rank told may last.
        """
        self._group = group
        self._timeout = timeout
        self._name = f"stop {next(_numbers)}"
        self._calls = 0
        self._requested = self._announced = False

    def ask(self) -> None:
        """Asks for the end, on this rank; may be called within a handler of a signal."""
        self._requested = True

    def agreed(self) -> bool:
        """Returns whether to stop after this step. Collective.

        Raises:
            PeerFailed: A rank died.
            PipelineTimeout: A rank did not finish the step before.
        """
        requested, self._announced = self._announced, self._requested
        if not isinstance(self._group, DirectGroup):
            return self._announced
        peers = [rank for rank in range(self._group.ranks) if rank != self._group.rank]
        self._calls += 1
        for rank in peers:
            # One that has done its last step and left need not be told.
            with contextlib.suppress(PeerFailed):
                self._group.transport.send(rank, self._key(self._calls), self._announced)
        if self._calls == 1:
            return False
        before = self._key(self._calls - 1)
        said = [self._group.transport.receive(rank, before, self._timeout) for rank in peers]
        return requested or any(said)

    def _key(self, number: int) -> MessageKey:
        return MessageKey("C", 0, 0, self._name, number % _CYCLE)
