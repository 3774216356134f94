"""Which kept states stay when further steps are kept: a page that a supervisor writes, ranks read.

It is there where the states go to a neighbour. One state is in the memory of two hosts each, whole
on all; another one is on its way. Neither may go before a newer one has arrived.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from fleetpipe.launch.keeping.slots import Stamp

_FILE = "pins"
_NUMBER = struct.Struct("<Q")
_SIZE = 5 * _NUMBER.size
#: Where the page has the mark of this life, and the two states: steps + 1 (0: none) and life.
_LIFE, _SAFE, _UNDER_WAY = 0, 8, 24

#: Slots for the last two steps, and with a neighbour for the two states that are pinned.
SLOTS, SLOTS_WITH_NEIGHBOUR = 2, 4


class Pins:
    """The page."""

    def __init__(self, folder: Path) -> None:
        """Opens the page in the folder of kept states; makes it where it is missing."""
        with (folder / _FILE).open("a+b") as opened:
            opened.truncate(_SIZE)
            self._memory = mmap.mmap(opened.fileno(), _SIZE)

    @classmethod
    def of(cls, folder: Path) -> Pins | None:
        """Returns the page in a folder; None where states do not go to a neighbour."""
        return cls(folder) if (folder / _FILE).exists() else None

    @staticmethod
    def remove(folder: Path) -> None:
        """Removes the page: from now on states do not go to a neighbour."""
        (folder / _FILE).unlink(missing_ok=True)

    @property
    def life(self) -> int:
        """The mark of this life."""
        return self._get(_LIFE)

    @life.setter
    def life(self, mark: int) -> None:
        self._put(_LIFE, mark)

    @property
    def states(self) -> list[Stamp]:
        """The states that stay."""
        return [stamp for stamp in map(self._state, (_SAFE, _UNDER_WAY)) if stamp is not None]

    def set(self, safe: Stamp | None, under_way: Stamp) -> None:
        """Says which states stay.

        Args:
            safe: That which all hosts have twice; None leaves the one that was said last.
            under_way: That which goes to the neighbours now, or will once it is kept.
        """
        if safe is not None:
            self._put_state(_SAFE, safe)
        self._put_state(_UNDER_WAY, under_way)

    def _state(self, at: int) -> Stamp | None:
        count = self._get(at)
        return Stamp(self._get(at + 8), count - 1) if count else None

    def _put_state(self, at: int, stamp: Stamp) -> None:
        if self._state(at) != stamp:
            self._put(at, 0)
            self._put(at + 8, stamp.life)
            self._put(at, stamp.step + 1)

    def _get(self, at: int) -> int:
        number: int = _NUMBER.unpack_from(self._memory, at)[0]
        return number

    def _put(self, at: int, number: int) -> None:
        _NUMBER.pack_into(self._memory, at, number)
