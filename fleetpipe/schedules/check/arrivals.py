"""Tries all arrivals of messages: every order in which ranks may run a schedule that is a hint."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

from fleetpipe.errors import ScheduleError
from fleetpipe.schedules.action import parts
from fleetpipe.schedules.check.envelope import Envelope
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Dependencies, Edge, checked_edges
from fleetpipe.schedules.explain import where
from fleetpipe.schedules.rows import ScheduleRows

#: For each rank, a bit for each entry of its row that has run.
_State = tuple[int, ...]


def explore(
    schedule: ScheduleRows,
    edges: Iterable[Edge] | None = None,
    memory_cap: float | None = None,
    costs: Costs | None = None,
) -> int:
    """Returns the number of states that ranks can reach; from each they come to the end.

    A message may arrive at any time after its send, so a rank that has several entries whose inputs
    are sent may run any of them: each choice is followed. The number grows fast with the schedule.

    Args:
        schedule: A verified schedule.
        edges: As for :class:`Envelope`.
        memory_cap: As there.
        costs: As there.

    Raises:
        ScheduleError: Some arrival blocks the ranks, or makes one hold more than its cap.
    """
    checked = checked_edges(edges, schedule.placement)
    ranks = [
        _Rank(schedule, Envelope(schedule, rank, checked, memory_cap, costs), checked)
        for rank in range(schedule.placement.ranks)
    ]
    begin: _State = (0,) * len(ranks)
    seen, waiting = {begin}, [begin]
    while waiting:
        state = waiting.pop()
        moves = [move for rank in ranks for move in rank.moves(state)]
        if not moves and not all(one.at(state).finished for one in ranks):
            raise ScheduleError(
                "some arrival of messages blocks the ranks",
                where="\n    ".join(
                    where(schedule, rank, one.at(state).head) for rank, one in enumerate(ranks)
                ),
                expected="a rank that can go on",
                cause="the schedule was not verified, or its envelope is wrong",
            )
        new = [move for move in moves if move not in seen]
        seen.update(new)
        waiting += new
    return len(seen)


class _Rank:
    """What one rank can do, by the entries of its row that have run."""

    def __init__(self, schedule: ScheduleRows, envelope: Envelope, edges: tuple[Edge, ...]) -> None:
        self._rank = envelope.rank
        self._envelopes = {0: envelope}
        #: By the same, what each entry that may run needs of other ranks, and the bits after it.
        self._steps: dict[int, list[tuple[list[tuple[int, int]], int]]] = {}
        bits = {
            ("B" if kind == "I" else kind, stage, number): (rank, 1 << place)
            for rank, row in enumerate(schedule.actions)
            for place, item in enumerate(row)
            for kind, stage, number in parts(item)
        }
        dependencies = Dependencies(edges, schedule.placement.stages)
        #: By entry, what has to have run on other ranks: their numbers, and their bits.
        self._needs = [
            [
                need
                for kind, stage, number in parts(item)
                for other, at in dependencies.of(kind, stage)
                if (need := bits[other, at, number])[0] != self._rank
            ]
            for item in schedule.actions[self._rank]
        ]

    def at(self, state: _State) -> Envelope:
        """Returns the envelope in a state."""
        return self._envelopes[state[self._rank]]

    def moves(self, state: _State) -> Iterator[_State]:
        """Yields the states that the rank can make of one."""
        done = state[self._rank]
        if done not in self._steps:
            self._steps[done] = [*self._steps_from(done)]
        for needs, after in self._steps[done]:
            if all(state[rank] & bit for rank, bit in needs):
                yield (*state[: self._rank], after, *state[self._rank + 1 :])

    def _steps_from(self, done: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
        for place in self._envelopes[done].candidates():
            after = done | 1 << place
            if after not in self._envelopes:
                envelope = copy.deepcopy(self._envelopes[done])
                envelope.take(place)
                _require_within_cap(envelope, place)
                self._envelopes[after] = envelope
            yield self._needs[place], after


def _require_within_cap(envelope: Envelope, place: int) -> None:
    if envelope.held > envelope.cap:
        raise ScheduleError(
            f"rank {envelope.rank} holds more than its cap",
            expected=f"at most {envelope.cap:g}",
            got=f"{envelope.held:g} after #{place}",
            cause="the envelope is wrong",
        )
