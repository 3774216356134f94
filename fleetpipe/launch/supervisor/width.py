"""The places of a job's ranks, of which some may be given up for a while.

A place is one of the devices of this host, or of its cores: rank r of a job that has all ranks runs
on place r. With fewer ranks those that are left keep their order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from fleetpipe.job import attempt_files

#: Which cards a process sees; Paddle's launcher gives each rank one of them.
_CARDS = "CUDA_VISIBLE_DEVICES"
#: Is there where a driver of cards is.
_CARDS_DRIVER = "/dev/nvidiactl"


class Width(NamedTuple):
    """The places that have a rank in an attempt.

    Attributes:
        places: Their numbers, ascending; empty if all have one.
        lost: Those that were given up, also while they are tried again.
        whole: How many there are; 0 until one is given up.
        left: How many had a rank when one was given up last.
        since: The step in which one was given up, or after which all have a rank again.
        seconds: After how long those that were given up are tried again.
    """

    places: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    whole: int = 0
    left: int = 0
    since: int | None = None
    seconds: float = 0.0

    @property
    def ranks(self) -> int:
        """How many ranks there are; 0 if that is not known."""
        return len(self.places) or self.whole

    def fails_trial(self, rank: int, step: int | None) -> bool:
        """Whether a rank on a place that is tried again has failed in its first step there."""
        return not self.places and rank in self.lost and step in (None, self.since)

    def without(self, rank: int, ranks: int, left: int, step: int | None, seconds: float) -> Width:
        """Returns the width without the place of a rank.

        Args:
            rank: The rank.
            ranks: How many there are now.
            left: How many there are to be.
            step: The step in which it failed.
            seconds: After how long a place is tried again.
        """
        places = self.places or tuple(range(ranks))
        working = tuple(place for place in places if place != places[rank])
        lost = (*self.lost, places[rank])
        return Width(working[:left], lost, max(self.whole, ranks), left, step, seconds)

    def with_fewer(self, left: int) -> Width:
        """Returns the width in which only so many of the places have a rank."""
        return self._replace(places=self.places[:left], left=left)

    def with_all(self, step: int) -> Width:
        """Returns the width in which all places have a rank again after some steps."""
        return self._replace(places=(), since=step)

    def environment(self, here: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns what the ranks of this width have in their environment."""
        if not self.places:
            return {}
        names = here.get(_CARDS, "").split(",") if _CARDS in here else _all_cards(self.whole)
        seen = [names[place] for place in self.places if place < len(names) and names[place]]
        cards = {_CARDS: ",".join(seen)} if seen else {}
        return {attempt_files.WHOLE_SIZE: str(self.whole), **cards}


def _all_cards(places: int) -> list[str]:
    """Returns the numbers of the cards of a host on which no variable names some."""
    return [str(place) for place in range(places)] if os.path.exists(_CARDS_DRIVER) else []
