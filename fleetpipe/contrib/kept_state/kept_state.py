"""Stores the state after every step in memory that outlives this process, and restores it.

``KeptState`` is the store of a rank. ``KeptStep`` is a step that all ranks of a layout have stored,
which ranks of any layout can restore.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from fleetpipe import log
from fleetpipe.checkpoint.contents import training_state
from fleetpipe.checkpoint.contents.model_and_optimizer import NamedTensors, OptimizerState
from fleetpipe.checkpoint.contents.objects import Objects, ScriptState
from fleetpipe.checkpoint.contents.parts import (
    STATE,
    Saved,
    SavedPart,
    SavedProgram,
    TensorName,
    plain_order,
)
from fleetpipe.checkpoint.contents.training_state import TrainingState
from fleetpipe.checkpoint.files import writer
from fleetpipe.checkpoint.files.manifest import Entry, Manifest
from fleetpipe.checkpoint.manager import CheckpointManager
from fleetpipe.checkpoint.ranks import RankCoordinates, Ranks
from fleetpipe.checkpoint.restoring import restore_from
from fleetpipe.contrib.kept_state import KeptLayout, Segment, complete_layouts
from fleetpipe.mesh.parts import Described, LocalTensor, Region
from fleetpipe.paddle_api.device import dynamic_mode

_log = log.logger(__name__)

#: The environment variable with the folder in memory, which the supervisor sets.
FOLDER = "FLEETPIPE_KEPT_STATE"

#: The description of a segment, as JSON: the layout of the job, and the blocks.
Index = dict[str, Any]

#: How many times as long as the first text a later one may be: generators' states vary in length.
_TEXT_TIMES = 2


class Block(NamedTuple):
    """A block of a segment, as its index describes it: a tensor, or the part that a rank holds.

    Attributes:
        group: The group of the tensor's fully qualified name.
        name: The name in that group.
        dtype: Paddle's name of the dtype.
        shape: The shape of the full tensor.
        bytes: The bytes of the block.
        cut: The fields of the :class:`Region` of the tensor in the block; None for the full tensor.
        differs: Whether replicas may have different values, so that each replica's are stored.
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
        """Dtype and shape of the full tensor."""
        return Described(self.dtype, tuple(self.shape))


class KeptStep:
    """A step in memory, with the methods by which ``restore_from`` reads a checkpoint's step.

    The step has no checksums: in this host's memory a slot counts only when it is complete.
    """

    def __init__(self, kept: KeptLayout) -> None:
        """Reads the states of all ranks of a layout, without copying tensors."""
        self._parts: dict[TensorName, dict[Region | None, memoryview]] = {}
        entries: dict[TensorName, Entry] = {}
        states, places = [], []
        for segment in kept.segments:
            blocks, text = segment.read(kept.step)
            states.append({"extra": {}, **json.loads(text)})
            places.append(RankCoordinates.from_json(segment.index["place"]))
            replica = places[-1].replica.number
            for row, memory in zip(segment.index["blocks"], blocks):
                block = Block(*row)
                name = block.tensor
                if block.differs and replica:
                    name = name.of_replica(replica)
                cut = None if block.cut is None else Region(*block.cut)
                self._parts.setdefault(name, {}).setdefault(cut, memory)
                entries[name] = Entry("", block.whole, ())
        index = kept.segments[0].index
        self._state = training_state.merge_states(states, places)
        self.manifest = Manifest(
            *(kept.step, {}, entries, tuple(index["order"]), index["optimizer"], {}),
            *(kept.degrees, {}, tuple(index["plain_order"])),
        )

    def text(self, _name: str) -> Any:
        """Returns the state except tensors, in the form of ``state.json``."""
        return self._state

    def check_texts(self) -> None:
        """Does nothing: stored states have no checksums."""

    def check(self, _groups: Collection[str], _share: int, _shares: int) -> None:
        """Does nothing: stored states have no checksums."""

    @contextmanager
    def opened(self) -> Iterator[Callable[[TensorName, Region | None, memoryview], None]]:
        """Yields a function that reads a tensor, or a region of it, into given memory."""

        def read(name: TensorName, cut: Region | None, memory: memoryview) -> None:
            values = self._full_tensor_bytes(name)
            part = values if cut is None else cut.taken_from(values)
            memory[:] = np.ascontiguousarray(part).reshape(-1).data

        yield read

    def _full_tensor_bytes(self, name: TensorName) -> np.ndarray:
        """Returns the bytes of a full tensor: uint8 [*shape, bytes of an element]."""
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


class KeptState:
    """The stored states of this rank after its last steps.

    Attributes:
        folder: The folder of the states of all ranks on this host.
        generators: The states of Paddle's generators in the state that this process has stored or
            restored last.
    """

    def __init__(self, folder: Path, objects: Objects, ranks: Ranks) -> None:
        """Opens the states that an earlier attempt left in the folder.

        Args:
            folder: The folder in memory, of all ranks on this host.
            objects: The objects whose state is stored.
            ranks: The ranks of the job.
        """
        self.folder = folder
        self._objects = objects
        self._ranks = ranks
        self._segments = dict(self._segments_of_earlier_attempt())
        #: Whether :meth:`newest` found the newest step in states of another layout.
        self._newest_is_of_another_layout = False
        self._index: Index = {}
        self._described_tensors: list[tuple[TensorName, int, Described]] | None = None
        self.generators: Any = None

    @classmethod
    def asked_for(cls, objects: Objects, ranks: Ranks) -> KeptState | None:
        """Returns the stored states if the environment names a folder for them; else None."""
        folder = os.environ.get(FOLDER)
        return None if folder is None else cls(Path(folder), objects, ranks)

    @dynamic_mode()
    def keep(self, step: int) -> None:
        """Stores the state after ``step`` steps. Not collective.

        Raises:
            CheckpointError: The host has too little memory.
        """
        script = self._objects.script_part(self._ranks.coordinates)
        local = self._list_tensors(script)
        state = self._objects.training_state(self._objects.model_part()).collect()
        if self._objects.state is not None:
            state[STATE] = script.trees()
        text, self.generators = training_state.to_text(state).encode(), state["random"]["paddle"]
        segment = self._segment_for(text)
        segment.write(step, [writer.bytes_of_tensor(tensor) for tensor in local], text)
        if segment.steps() == [step - 1, step]:
            self._remove_other_segments(segment)

    @dynamic_mode()
    def newest(self) -> int | None:
        """Returns the newest step that all ranks of some layout have stored, or None. Collective.

        Raises:
            PeerFailed: A rank died.
        """

        def find_newest_in_folder() -> tuple[int | None, bool]:
            steps = [kept.step for kept in complete_layouts(self.folder)]
            newest = max(steps, default=None)
            return newest, newest != self.newest_of_all()

        # All ranks are on one host and see the same files.
        newest, self._newest_is_of_another_layout = self._ranks.together(
            "looking for kept states", find_newest_in_folder
        )[0]
        return newest

    def newest_of_all(self) -> int | None:
        """Returns the newest step that all ranks of this layout have stored, or None."""
        present = (
            kept.step
            for kept in complete_layouts(self.folder)
            if (len(kept.segments), kept.degrees) == (self._ranks.count, self._ranks.layout)
        )
        return next(present, None)

    def steps(self) -> list[int]:
        """Returns the steps that this rank has stored completely."""
        return [step for segment in self._segments.values() for step in segment.steps()]

    def forget_after(self, step: int) -> None:
        """Drops the states after the step from which the run continues."""
        for segment in self._segments.values():
            segment.forget_after(step)

    @dynamic_mode()
    def restore(self, step: int) -> None:
        """Restores the objects to the state after a step from :meth:`newest`.

        Collective.

        Raises:
            CheckpointError: The state on some rank belongs to other objects.
        """
        what = f"going back to step {step}"
        if self._newest_is_of_another_layout:
            restore_from(
                self._ranks, what, lambda: (self._step_of_another_layout(step), self._objects)
            )
        else:
            self._ranks.together(what, lambda: self._restore_own_state(step))

    def _step_of_another_layout(self, step: int) -> KeptStep:
        """Returns a step that ranks of another layout stored; warns if the batch has changed."""
        kept = next(one for one in complete_layouts(self.folder) if one.step == step)
        before, now = kept.segments[0].index["samples"], self._samples
        if None not in (before, now) and before != now and not self._ranks.rank:
            _log.warning(
                "a step has %s samples now, not %s: accumulate_steps is to be worked out from the "
                "number of ranks where it shall keep them",
                *(now, before),
            )
        return KeptStep(kept)

    def _restore_own_state(self, step: int) -> None:
        """Restores the objects to the state that this rank itself stored after a step."""
        text = self.put_tensors_back(step, self._objects.state)
        training = self._objects.training_state(self._objects.model_part())
        state = json.loads(text)
        training.put_back(state)
        training.put_back_random(state["random"])
        self.generators = state["random"]["paddle"]

    def obstacle(self) -> str:
        """Returns why the stored states are incomplete; empty if they are complete."""
        if self._objects.optimizer is None:
            return "fleetpipe.resume was given no optimizer, whose state is not kept"
        return ""

    @dynamic_mode()
    def collect(self) -> dict[str, Any]:
        """Returns the present state without tensors and without the position in the data."""
        return self._state_without_data().collect()

    @dynamic_mode()
    def put_back(self, state: Mapping[str, Any]) -> None:
        """Restores the state that :meth:`collect` returned."""
        beside = self._state_without_data()
        beside.put_back(state)
        beside.put_back_random(state["random"])

    def changed_since(self, before: Mapping[str, Any]) -> str:
        """Returns the first attribute of a layer that differs from what :meth:`collect` returned.

        Args:
            before: The result of :meth:`collect`.

        Returns:
            The name of the attribute; empty if none has changed.
        """
        attributes, noted = self._objects.attributes, before.get("attributes", {})
        now = {} if attributes is None or not noted else attributes.now()
        return next((name for name, value in now.items() if noted["now"].get(name) != value), "")

    @dynamic_mode()
    def copy(self) -> Callable[[], None]:
        """Copies the values of all tensors; returns a function that restores them."""
        *_, local = self._collect_tensors(self._objects.script_part(self._ranks.coordinates))
        copies = writer.Snapshot().take(local)

        def put_back() -> None:
            for name, tensor in local.items():
                value, memory = writer.empty_like(tensor)
                memory[:] = copies[name]
                writer.assign(tensor, value)

        return put_back

    def save(self, step: int, manager: CheckpointManager) -> None:
        """Saves the state after a step that all ranks have stored. Collective.

        Afterwards tensors have their values of that step; other state is unchanged.

        Raises:
            CheckpointError: The step cannot be saved.
        """
        now, objects = self.collect(), self._objects
        # The script's own state is saved as it was then, and stays as it is.
        script = None if objects.state is None else dict.fromkeys(objects.state)
        state = json.loads(self.put_tensors_back(step, script))
        position = SimpleNamespace(state_dict=lambda: state["data"], set_state_dict=dict)
        position.random_of_pass = SimpleNamespace(begun=state["random"].get("pass"))
        data = None if objects.data is None else position
        rest = {"lr_scheduler": objects.lr_scheduler, "scaler": objects.scaler, "data": data}
        rest["state"] = script
        try:
            self.put_back(state)
            manager.save(step, model=objects.model, optimizer=objects.optimizer, force=True, **rest)
        finally:
            self.put_back(now)

    def _state_without_data(self) -> TrainingState:
        """Returns the training state of all objects except the position in the data."""
        objects = replace(self._objects, data=None)
        return objects.training_state(objects.model_part())

    @dynamic_mode()
    def put_tensors_back(self, step: int, script: dict[str, Any] | None = None) -> bytes:
        """Restores the tensors of this rank to their values after a step.

        Args:
            step: A step that this rank has stored.
            script: The script's own state, if its tensors are restored too.

        Returns:
            The rest of the state after that step, as JSON text.
        """
        segment = next(each for each in self._segments.values() if step in each.steps())
        index = segment.index
        blocks, text = segment.read(step)
        rows = [Block(*row) for row in index["blocks"]]
        described = {block.tensor: block.whole for block in rows}
        saved = Saved(described, tuple(index["order"]), index["optimizer"])
        model = self._objects.model_part()
        optimizer = self._objects.optimizer_part(model)
        parts: list[SavedPart] = [part for part in (model, optimizer) if part is not None]
        if script is not None:
            trees = json.loads(text).get(STATE)
            parts.append(ScriptState(script, self._ranks.coordinates, trees))
        wanted = {name: local for part in parts for name, local in part.wanted(saved).items()}
        tensors = dict(zip(described, blocks))
        for name, local in wanted.items():
            value, memory = writer.empty_like(local)
            memory[:] = tensors[name]
            writer.assign(local, value)
        for part in parts:
            part.settle()
        return text

    def _list_tensors(self, script: ScriptState) -> list[LocalTensor]:
        """Returns the tensors of the present state, and updates the index if they have changed."""
        model, optimizer, local = self._collect_tensors(script)
        # Tensors count as the same by name, id and shape: a new one may have another's address.
        tensors = [(name, id(each.tensor), each.described) for name, each in local.items()]
        if tensors != self._described_tensors:
            self._described_tensors = tensors
            static = isinstance(self._objects.model, SavedProgram)
            self._index = {
                **self._layout,
                # The stages of a static program are fixed.
                "narrows": ["dp"] if static else [*self._ranks.shrinkable_axes],
                "samples": self._samples,
                "place": self._ranks.coordinates.to_json(),
                "order": [*model.order()],
                "plain_order": [*plain_order(model.order(), model.plain_names)],
                "optimizer": None if optimizer is None else optimizer.kind,
                "blocks": [[*_block_of(name, tensor)] for name, tensor in local.items()],
            }
        return [*local.values()]

    def _collect_tensors(
        self, script: ScriptState
    ) -> tuple[NamedTensors, OptimizerState | None, dict[TensorName, LocalTensor]]:
        """Returns the model, the optimizer, and this rank's tensors of both and of the script."""
        model = self._objects.required_model()
        optimizer = self._objects.optimizer_part(model)
        of_optimizer = {} if optimizer is None else optimizer.local_tensors()
        return model, optimizer, {**model.local_tensors(), **of_optimizer, **script.local_tensors()}

    @property
    def _samples(self) -> int | None:
        """The number of samples of a step on all replicas; None if the model does not tell."""
        names = "accumulate_steps", "micro_batch_size"
        sizes = [getattr(self._objects.model, name, None) for name in names]
        counts = [size for size in sizes if isinstance(size, int)]
        replicas = self._ranks.coordinates.replica.total
        return math.prod(counts) * replicas if counts == sizes else None

    @property
    def _layout(self) -> Index:
        """This rank, the number of ranks and the degrees, in the form of a segment's index."""
        ranks = self._ranks
        return {"rank": ranks.rank, "ranks": ranks.count, "degrees": ranks.layout}

    def _segment_for(self, text: bytes) -> Segment:
        """Returns this rank's segment for the present tensors, with room for a text.

        If there is none, creates a new one.
        """
        for segment in self._segments.values():
            if segment.index == self._index and segment.takes(text):
                return segment
        # Segments of another index stay until this one has two steps.
        files = self.folder.glob(f"rank-{self._ranks.rank}.*")
        number = 1 + max((int(file.suffix[1:]) for file in files), default=0)
        file = self.folder / f"rank-{self._ranks.rank}.{number}"
        sizes = [Block(*row).bytes for row in self._index["blocks"]]
        segment = Segment.create(file, self._index, sizes, _TEXT_TIMES * len(text))
        self._segments[file] = segment
        return segment

    def _remove_other_segments(self, kept: Segment) -> None:
        """Removes this rank's other segments, and rank 0 those of ranks that no longer exist.

        Args:
            kept: The segment that stays; like those of other ranks it has the two newest steps.
        """
        self._segments = {file: each for file, each in self._segments.items() if each is kept}
        for file in self.folder.glob("rank-*"):
            rank = int(file.stem.removeprefix("rank-"))
            no_longer_exists = rank >= self._ranks.count
            is_mine = rank == self._ranks.rank or (no_longer_exists and self._ranks.rank == 0)
            if is_mine and file not in self._segments:
                file.unlink(missing_ok=True)

    def _segments_of_earlier_attempt(self) -> Iterator[tuple[Path, Segment]]:
        """Yields the states that an earlier attempt of this rank left, under the same layout."""
        for file in self.folder.glob(f"rank-{self._ranks.rank}.*"):
            segment = Segment(file)
            if self._layout.items() <= segment.index.items():
                yield file, segment


def _block_of(name: TensorName, local: LocalTensor) -> Block:
    """Returns the description of the block that stores a tensor, or this rank's shard of it."""
    full, cut = local.described, None if local.cut is None else [*local.cut]
    size = math.prod(int(length) for length in local.tensor.shape) * full.itemsize
    return Block(*name, full.dtype, [*full.shape], size, cut, local.differs)
