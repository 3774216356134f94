"""Ranks that share sequences, as threads of one process over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleetpipe.contrib.sequences import SequenceRanks
from fleetpipe.mesh.groups import DirectGroup, SoleGroup
from fleetpipe.transport import View
from tests.dygraph.members import threads
from tests.transport.helpers import LIMIT


@contextmanager
def sequence_ranks(
    sep: int, cp: int, made: Callable[[DirectGroup], Any] = lambda group: group
) -> Iterator[list[SequenceRanks]]:
    """Connects sep x cp ranks; ``made`` may put something around the group along cp."""

    def along(whole: DirectGroup, members: list[int], name: str) -> Any:
        if len(members) == 1:
            return SoleGroup()
        return made(DirectGroup(View(whole.transport, members), LIMIT, name))

    def seen_by(whole: DirectGroup) -> SequenceRanks:
        place, part = divmod(whole.rank, sep)
        return SequenceRanks(
            along(whole, [place * sep + other for other in range(sep)], "sep"),
            along(whole, [other * sep + part for other in range(cp)], "cp"),
        )

    if sep * cp == 1:
        yield [SequenceRanks(SoleGroup(), SoleGroup())]
        return
    with threads(sep * cp) as groups:
        yield [seen_by(group) for group in groups]
