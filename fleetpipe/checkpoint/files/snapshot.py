"""Host memory that a state is copied into before a thread writes it, the same from save to save."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fleetpipe import systems
from fleetpipe.checkpoint.contents.parts import Held, Name
from fleetpipe.checkpoint.files import host

_ALIGNED = 64


class Snapshot:
    """The bytes of tensors as they were at one moment."""

    def __init__(self) -> None:
        """Has no memory yet."""
        self._places: dict[Name, np.ndarray] = {}

    def take(self, tensors: Mapping[Name, Held]) -> Mapping[Name, memoryview]:
        """Copies tensors, in the place of what was copied before; returns the copies' bytes."""
        # The first of each pair keeps the bytes of the second alive.
        found = {name: host.bytes_of(held) for name, held in tensors.items()}
        sizes = {name: len(memory) for name, (_, memory) in found.items()}
        if {name: len(place) for name, place in self._places.items()} != sizes:
            self._places = _allocated(sizes)
        for name, (_, memory) in found.items():
            self._places[name][:] = np.frombuffer(memory, np.uint8)
        return {name: place.data for name, place in self._places.items()}


def _allocated(sizes: Mapping[Name, int]) -> dict[Name, np.ndarray]:
    """Returns memory for tensors: one piece, which the system can make of few large pages."""
    ends, end = {}, 0
    for name, size in sizes.items():
        ends[name] = end = end + size
        end = -(-end // _ALIGNED) * _ALIGNED
    whole = np.frombuffer(systems.anonymous_memory(max(end, 1)), np.uint8)
    return {name: whole[ends[name] - size : ends[name]] for name, size in sizes.items()}
