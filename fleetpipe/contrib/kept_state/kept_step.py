"""What the ranks of one layout have kept, as a step that ranks of any layout restore."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.checkpoint.contents import training_state
from fleetpipe.checkpoint.contents.parts import TensorName
from fleetpipe.checkpoint.files.manifest import Entry, Manifest
from fleetpipe.checkpoint.ranks import Place
from fleetpipe.contrib.kept_state.layouts import KeptLayout
from fleetpipe.mesh.parts import Described, Region


class Block(NamedTuple):
    """A block of a segment, as its index describes it: a tensor, or the part that a rank holds.

    Attributes:
        group: The group of the tensor's fully qualified name.
        name: The name in that group.
        dtype: Paddle's name of it.
        shape: The shape of the whole tensor.
        bytes: The size of the part.
        cut: Which part it is, as numbers of a :class:`Region`; None for the whole.
        differs: Whether other replicas may hold other values.
    """

    group: str
    name: str
    dtype: str
    shape: list[int]
    bytes: int
    cut: list[int] | None
    differs: bool

    @property
    def tensor(self) -> TensorName:
        """The fully qualified name."""
        return TensorName(self.group, self.name)

    @property
    def whole(self) -> Described:
        """The whole tensor."""
        return Described(self.dtype, tuple(self.shape))


class KeptStep:
    """The parts that all ranks have kept of one step, for ``restore_from``.

    They are this host's memory, in which a slot counts once it is complete: nothing is compared
    with a checksum.
    """

    def __init__(self, kept: KeptLayout) -> None:
        self._parts: dict[TensorName, dict[Region | None, memoryview]] = {}
        entries: dict[TensorName, Entry] = {}
        states, places = [], []
        for segment in kept.segments:
            blocks, text = segment.read(kept.step)
            states.append({"extra": {}, **json.loads(text)})
            places.append(Place.from_json(segment.index["place"]))
            replica = places[-1].replica.number
            for row, memory in zip(segment.index["blocks"], blocks):
                block = Block(*row)
                of_replica = block.differs and replica
                name = block.tensor.of_replica(replica) if of_replica else block.tensor
                cut = None if block.cut is None else Region(*block.cut)
                self._parts.setdefault(name, {}).setdefault(cut, memory)
                entries[name] = Entry("", block.whole, ())
        about = kept.segments[0].index
        self._state = training_state.merge_states(states, places)
        self.manifest = Manifest(
            *(kept.step, {}, entries, tuple(about["order"]), about["optimizer"], {}),
            *(kept.degrees, {}, tuple(about["plain_order"])),
        )

    def text(self, _name: str) -> Any:
        """Returns all of the state that is no tensor."""
        return self._state

    def check_texts(self) -> None:
        """Does nothing."""

    def check(self, _groups: Collection[str], _share: int, _shares: int) -> None:
        """Does nothing."""

    @contextmanager
    def opened(self) -> Iterator[Callable[[TensorName, Region | None, memoryview], None]]:
        """Yields a function that reads a part of a tensor into memory."""

        def read(name: TensorName, cut: Region | None, memory: memoryview) -> None:
            values = self._whole_bytes(name)
            part = values if cut is None else cut.taken_from(values)
            memory[:] = np.ascontiguousarray(part).reshape(-1).data

        yield read

    def _whole_bytes(self, name: TensorName) -> np.ndarray:
        """Returns the bytes of a tensor: an array of its shape, with an axis for an element's."""
        whole, parts = self.manifest.tensors[name].tensor, self._parts[name]
        shape = (*whole.shape, whole.itemsize)
        if None in parts:
            return np.frombuffer(parts[None], np.uint8).reshape(shape)
        values = np.empty(shape, np.uint8)
        for cut, memory in parts.items():
            if cut is not None:
                part = np.frombuffer(memory, np.uint8)
                values[cut.slices] = part.reshape(*cut.part(whole.shape), whole.itemsize)
        return values
