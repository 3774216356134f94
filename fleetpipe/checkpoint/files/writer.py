"""Writes one rank's parts of a checkpoint from host memory; the last rank publishes it.

Start with ``Writing``. Each rank writes its parts and then a report of their checksums. The last
rank is the one that finds all reports: it writes the manifest and publishes the step.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe import atomic_file, log, systems
from fleetpipe.aliases import Tensor
from fleetpipe.checkpoint.contents.parts import MODEL, TensorName
from fleetpipe.checkpoint.files import run_folder, tensors
from fleetpipe.checkpoint.files.manifest import (
    MANIFEST,
    Entry,
    Manifest,
    Whole,
    WrittenPart,
    tensor_digest,
)
from fleetpipe.checkpoint.files.run_folder import Retention
from fleetpipe.checkpoint.files.tensors import FilePlan
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.mesh.parts import Described, LocalTensor, Region
from fleetpipe.paddle_api import paddle
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.structure import TensorLeaf

_ALIGNED = 64

_log = log.logger(__name__)

_CLAIM = "claimed"
#: The priority of the writer's thread: about a tenth of a processor that another thread uses too.
_NICE = 10
_MOST_THREADS = 8
#: Returns the bytes of this rank's part of a tensor.
BytesOf = Callable[[TensorName], memoryview]


def bytes_of_tensor(local: LocalTensor) -> memoryview:
    """Returns the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    tensor = local.tensor
    if isinstance(tensor, np.ndarray):
        return _flat(np.ascontiguousarray(tensor))
    kept, memories = bridge.readable([tensor], [_part_of(local)])
    if not memories:
        return memoryview(b"")
    (memory,) = memories
    owner: Any = memory.obj
    owner.kept = kept  # keeps a copy alive as long as its bytes are used
    return memory


def empty_like(local: LocalTensor) -> tuple[Tensor | np.ndarray, memoryview]:
    """Returns an empty tensor with the shape and dtype of ``local``, and its memory to fill."""
    if isinstance(local.tensor, np.ndarray):
        array = np.empty_like(local.tensor, order="C")
        return array, _flat(array)
    return empty(_part_of(local))


def empty(described: Described) -> tuple[Tensor, memoryview]:
    """Returns an empty tensor, and its memory to fill."""
    leaf = TensorLeaf(described.dtype, described.shape, True)
    (tensor,), memories = bridge.allocate([leaf])
    return tensor, memories[0] if memories else memoryview(bytearray())


def assign(local: LocalTensor, value: Tensor | np.ndarray) -> None:
    """Copies a tensor that :func:`empty_like` made, and that was filled, into ``local``."""
    if isinstance(local.tensor, np.ndarray):
        local.tensor[...] = value
    else:
        with paddle.no_grad():
            local.tensor.set_value(value)


class Snapshot:
    """Copies of tensors' bytes at one moment."""

    def __init__(self) -> None:
        self._places: dict[TensorName, np.ndarray] = {}

    def take(self, tensors: Mapping[TensorName, LocalTensor]) -> Mapping[TensorName, memoryview]:
        """Copies tensors into the memory of the previous copies, and returns the bytes."""
        memories = {name: bytes_of_tensor(local) for name, local in tensors.items()}
        sizes = {name: len(memory) for name, memory in memories.items()}
        if {name: len(place) for name, place in self._places.items()} != sizes:
            self._places = _allocate(sizes)
        for name, memory in memories.items():
            self._places[name][:] = np.frombuffer(memory, np.uint8)
        return {name: place.data for name, place in self._places.items()}


def _part_of(local: LocalTensor) -> Described:
    """Returns dtype and shape of the part in this process."""
    return Described(local.described.dtype, tuple(int(size) for size in local.tensor.shape))


def _flat(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _allocate(sizes: Mapping[TensorName, int]) -> dict[TensorName, np.ndarray]:
    """Allocates one piece of memory for all tensors, so that the system can use large pages."""
    ends, end = {}, 0
    for name, size in sizes.items():
        ends[name] = end = end + size
        end = -(-end // _ALIGNED) * _ALIGNED
    whole = np.frombuffer(systems.anonymous_memory(max(end, 1)), np.uint8)
    return {name: whole[ends[name] - size : ends[name]] for name, size in sizes.items()}


@dataclass(frozen=True)
class Assignment:
    """The task of one rank for a checkpoint.

    Attributes:
        retention: The folder of the run, and which steps are kept there.
        draft: The folder in which this step is written.
        plan: The files, and the writer of each part.
        rank: The number of this rank in the job.
        ranks: Number of ranks of the job.
        manifest: The manifest, still without tensors.
        texts: Further files by name; rank 0 writes them.
    """

    retention: Retention
    draft: Path
    plan: FilePlan
    rank: int
    ranks: int
    manifest: Manifest
    texts: Mapping[str, str]


class Writing:
    """The writing of one rank's task, in a thread or at once."""

    def __init__(self, task: Assignment, bytes_of: BytesOf) -> None:
        """Stores the task, and writes nothing yet.

        Args:
            task: The parts to write.
            bytes_of: Returns the bytes of this rank's part of a tensor, by its name.
        """
        self.task = task
        self._bytes_of = bytes_of
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is still running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Writes in a thread, which the process waits for before it exits."""

        def run_at_low_priority() -> None:
            systems.lower_priority(_NICE)
            self.run()
            # Frees the copies, although :meth:`end` may come much later.
            self._bytes_of = dict[TensorName, memoryview]().__getitem__

        name = "fleetpipe checkpoint writer"
        self._thread = threading.Thread(target=run_at_low_priority, name=name)
        self._thread.start()

    def run(self) -> None:
        """Writes, and stores an error for :meth:`end`."""
        try:
            write(self.task, self._bytes_of)
        except Exception as error:  # Saver.settle raises it on all ranks
            self._error = error

    def run_with(self, ranks: Ranks, elsewhere: Sequence[int]) -> None:
        """Writes; rank 0 also writes the parts of ranks that do not see its folder. Collective.

        Args:
            ranks: All ranks of the job.
            elsewhere: The ranks that do not see the folder, on hosts without shared storage. They
                send rank 0 their parts; rank 0 has those of one rank in memory at a time.

        Raises:
            PeerFailed: A rank died.
            PipelineTimeout: A rank did not arrive within the limit.
        """
        if ranks.rank in elsewhere:
            ranks.give(self._bytes_of(name) for name, _, _ in self.task.plan.parts_of(ranks.rank))
            return
        self.run()
        for rank in elsewhere if ranks.rank == 0 else ():
            parts = {
                name: LocalTensor(ranks.take(rank)) for name, _, _ in self.task.plan.parts_of(rank)
            }
            of_rank = Writing(replace(self.task, rank=rank), bytes_in(parts))
            of_rank.run()
            self._error = self._error or of_rank._error

    def end(self) -> None:
        """Waits for the thread without a limit, and raises its error, if it had one."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


def bytes_in(local: Mapping[TensorName, LocalTensor]) -> BytesOf:
    """Returns a function that returns a tensor's bytes by its name."""
    return lambda name: bytes_of_tensor(local[name])


def write(task: Assignment, bytes_of: BytesOf) -> None:
    """Writes this rank's parts; the last rank to finish publishes the step.

    Args:
        task: The parts to write.
        bytes_of: Returns the bytes of this rank's part of a tensor, by its name.

    Raises:
        OSError: The disk is full or fails; the draft stays, which readers ignore.
    """
    checksums: dict[str, dict[str, list[Any]]] = {}
    with ExitStack() as files:
        opened: dict[str, FileIO] = {}

        def file_of(name: str) -> FileIO:
            if name not in opened:
                path = task.draft / name
                path.touch()  # another rank may have begun to write it
                opened[name] = files.enter_context(path.open("r+b", buffering=0))
            return opened[name]

        for file, layout in task.plan.files.items():
            if task.plan.header_writer(file) == task.rank:
                tensors.write_at(file_of(file), 0, layout.header)
        for name, file, cut in task.plan.parts_of(task.rank):
            values, stored = bytes_of(name), task.plan.files[file].tensors[name.name]
            tensors.write(file_of(file), stored, cut, values)
            hashed = name.group == MODEL and len(task.plan.shares[file][name.name]) == 1
            digest = tensor_digest(stored.tensor, [values]) if hashed else ""
            pieces = checksums.setdefault(file, {}).setdefault(name.name, [])
            pieces.append([cut, tensors.checksum([values]), digest])
        for opened_file in opened.values():
            os.fsync(opened_file.fileno())
    if task.rank == 0:
        for file, text in task.texts.items():
            run_folder.write_file(task.draft / file, text)
    atomic_file.replace_text(_report(task.draft, task.rank), json.dumps(checksums))
    _end(task)


def _report(draft: Path, rank: int) -> Path:
    return draft / f"report-{rank:05d}.json"


def _end(task: Assignment) -> None:
    """Publishes the step if all ranks' reports are there."""
    reports = [_report(task.draft, rank) for rank in range(task.ranks)]
    try:
        if not all(report.exists() for report in reports):
            return
        claim = os.open(task.draft / _CLAIM, os.O_CREAT | os.O_EXCL)
    except (FileExistsError, FileNotFoundError):
        return  # two ranks see all reports: the other one publishes, or has published
    os.close(claim)
    records = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    manifest = replace(task.manifest, tensors=_entries(task, records))
    for path in reports:
        path.unlink()
    run_folder.write_file(task.draft / MANIFEST, manifest.to_text())
    step, run_directory = task.manifest.step, task.retention.run_directory
    # Before this step is visible, so that "latest" is never a step that the run has left.
    aside = run_folder.set_aside(run_directory, step)
    run_folder.publish(task.draft, run_directory, step)
    # Not before, since a rank that has just seen all reports would publish the draft again.
    (run_folder.folder_of(run_directory, step) / _CLAIM).unlink()
    _log.debug("step %d is saved in %s", step, run_directory)
    if aside:
        names = ", ".join(path.name for path in aside.values())
        _log.warning(
            f"step {step} is saved; the run had gone on to step {max(aside)} before: "
            f"what is later is set aside in {run_directory} as {names}"
        )
    try:
        task.retention.apply()
    except OSError as error:
        _log.warning(
            f"step {step} is saved in {run_directory}; one that is due to go stays: {error}"
        )


def _entries(
    task: Assignment, reports: list[dict[str, dict[str, list[Any]]]]
) -> dict[TensorName, Entry]:
    """Returns the manifest's entry of each tensor, from the reports of all ranks."""
    entries, whole = {}, _digests_of_parts(task)
    for group, files in task.plan.groups.items():
        for file in files:
            for name, stored in task.plan.files[file].tensors.items():
                rows = [row for report in reports for row in report.get(file, {}).get(name, ())]
                pieces = [
                    WrittenPart(None if cut is None else Region(*cut), crc) for cut, crc, _ in rows
                ]
                pieces.sort(key=lambda piece: 0 if piece.cut is None else piece.cut.start)
                full = TensorName(group, name)
                digest = whole.get(full, rows[0][-1])
                entries[full] = Entry(file, stored.tensor, tuple(pieces), digest)
    return entries


def _digests_of_parts(task: Assignment) -> dict[TensorName, str]:
    """Returns the digests of the model's tensors that several ranks have written, from the disk.

    It uses a thread for each rank, up to a limit, since the ranks have finished writing.
    """
    plan = task.plan
    places = [
        (file, name)
        for file in plan.groups.get(MODEL, ())
        for name, shares in plan.shares[file].items()
        if len(shares) > 1
    ]

    def digest(place: tuple[str, str]) -> str:
        file, name = place
        stored = plan.files[file].tensors[name]
        with (task.draft / file).open("rb", buffering=0) as opened:
            return tensor_digest(stored.tensor, tensors.blocks(opened, stored))

    with ThreadPoolExecutor(min(task.ranks, _MOST_THREADS)) as threads:
        digests = threads.map(digest, places)
        return {TensorName(MODEL, name): one for (_, name), one in zip(places, digests)}


def described_files(plan: FilePlan, texts: Mapping[str, str]) -> dict[str, Whole]:
    """Returns size and checksum of each file for the manifest."""
    files = {
        name: Whole(layout.size, tensors.checksum([layout.header]))
        for name, layout in plan.files.items()
    }
    for name, text in texts.items():
        data = text.encode()
        files[name] = Whole(len(data), tensors.checksum([data]))
    return files
