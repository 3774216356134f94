"""Which state all hosts copy to their neighbours next: the leading supervisor decides, by rounds.

A round is about one step, which lies ahead: each host sees to it that the state after this step
stays when it is kept, sends it to its neighbour and says so. When all have, that state is *safe*:
whichever host is lost, all of it is there. A host on which the step was over before it heard of it
has missed it; the next round is about a later one.
"""

from __future__ import annotations

from fleetpipe.launch.keeping.slots import Stamp

#: What a host says of its part in a round.
WHOLE, MISSED, FAILED = OUTCOMES = ("whole", "missed", "failed")


class Rounds:
    """The rounds of one life."""

    def __init__(self, life: int, nodes: int, every: int) -> None:
        """Begins with none.

        Args:
            life: The mark of the life.
            nodes: Hosts that take part in it.
            every: Only multiples of it are copied.
        """
        self._life = life
        self._nodes = nodes
        self._every = every
        self._step: int | None = None
        self._last = 0
        self._whole: set[int] = set()
        self._ahead = 1
        #: The last state that was safe; None: none was in this life.
        self.safe: Stamp | None = None

    def due(self, done: int) -> Stamp | None:
        """Returns the state of the next round, which begins with that; None where one is on.

        Args:
            done: Steps that are done, as far as it is known here.
        """
        if self._step is not None:
            return None
        self._whole = set()
        # A state may be kept, and copied, before its step is known as done.
        after = max(done, self._last)
        self._step = self._last = -(-(after + self._ahead) // self._every) * self._every
        return Stamp(self._life, self._step)

    def told(self, node: int, step: int, outcome: str) -> None:
        """Takes note of what a host says of its part.

        Args:
            node: The host.
            step: That of the round; another one is of a round that is over.
            outcome: One of :data:`OUTCOMES`.
        """
        if step != self._step:
            return
        if outcome == WHOLE:
            self._whole.add(node)
            if len(self._whole) == self._nodes:
                self.safe, self._step, self._ahead = Stamp(self._life, step), None, 1
            return
        if outcome == MISSED:
            # However long the news are on their way compared with a step: some day it is enough.
            self._ahead *= 2
        self._step = None
