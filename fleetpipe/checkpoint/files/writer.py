"""Writes one rank's parts of tensors of a checkpoint; the last rank to finish publishes the step.

Start with ``Writing``. Each rank writes its parts and then a report of their checksums. The last
rank is the one that finds the reports of all: it writes the manifest and publishes the step.
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
    FileSummary,
    Manifest,
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

_ALIGNMENT = 64

_log = log.logger(__name__)

_CLAIM_FILE = "claimed"
#: The priority of the writer's thread: about a tenth of a processor that another thread uses too.
_NICE = 10
#: The most threads that compute digests.
_MOST_THREADS = 8
#: A function that returns the bytes of this rank's part of a tensor, by the tensor's name.
BytesOf = Callable[[TensorName], memoryview]


def bytes_of_tensor(local: LocalTensor) -> memoryview:
    """Returns the bytes of this rank's part of a tensor.

    They are not copied if the tensor is contiguous and on the CPU.
    """
    tensor = local.tensor
    if isinstance(tensor, np.ndarray):
        return _as_bytes(np.ascontiguousarray(tensor))
    copy, memories = bridge.readable([tensor], [_describe_local(local)])
    if not memories:
        return memoryview(b"")
    (memory,) = memories
    owner: Any = memory.obj
    owner.kept = copy  # keeps a copy alive as long as its bytes are used
    return memory


def empty_like(local: LocalTensor) -> tuple[Tensor | np.ndarray, memoryview]:
    """Returns an uninitialized tensor like this rank's part, and the tensor's memory to fill."""
    if isinstance(local.tensor, np.ndarray):
        array = np.empty_like(local.tensor, order="C")
        return array, _as_bytes(array)
    return empty(_describe_local(local))


def empty(described: Described) -> tuple[Tensor, memoryview]:
    """Returns an uninitialized tensor of a dtype and shape, and the tensor's memory to fill."""
    leaf = TensorLeaf(described.dtype, described.shape, True)
    (tensor,), memories = bridge.allocate([leaf])
    return tensor, memories[0] if memories else memoryview(bytearray())


def assign(local: LocalTensor, value: Tensor | np.ndarray) -> None:
    """Copies the values of a tensor of the same dtype and shape into this rank's part."""
    if isinstance(local.tensor, np.ndarray):
        local.tensor[...] = value
    else:
        with paddle.no_grad():
            local.tensor.set_value(value)


class Snapshot:
    """Copies the bytes of tensors, into the same buffers each time if the sizes are the same."""

    def __init__(self) -> None:
        self._buffers: dict[TensorName, np.ndarray] = {}

    def take(self, tensors: Mapping[TensorName, LocalTensor]) -> Mapping[TensorName, memoryview]:
        """Copies the bytes of tensors over the previous copies, and returns them by name."""
        memories = {name: bytes_of_tensor(local) for name, local in tensors.items()}
        sizes = {name: len(memory) for name, memory in memories.items()}
        if {name: len(buffer) for name, buffer in self._buffers.items()} != sizes:
            self._buffers = _allocate(sizes)
        for name, memory in memories.items():
            self._buffers[name][:] = np.frombuffer(memory, np.uint8)
        return {name: buffer.data for name, buffer in self._buffers.items()}


def _describe_local(local: LocalTensor) -> Described:
    """Returns the dtype and shape of the part of a tensor that this process has."""
    return Described(local.described.dtype, tuple(int(size) for size in local.tensor.shape))


def _as_bytes(array: np.ndarray) -> memoryview:
    """Returns the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8).data


def _allocate(sizes: Mapping[TensorName, int]) -> dict[TensorName, np.ndarray]:
    """Returns a buffer of each size by name.

    All are in one block of memory, so that the system can use large pages.
    """
    ends, end = {}, 0
    for name, size in sizes.items():
        ends[name] = end = end + size
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
    block = np.frombuffer(systems.anonymous_memory(max(end, 1)), np.uint8)
    return {name: block[ends[name] - size : ends[name]] for name, size in sizes.items()}


@dataclass(frozen=True)
class Assignment:
    """What one rank has to write of a checkpoint.

    Attributes:
        retention: The folder of the run, and which steps are kept there.
        draft: The folder in which this step is written.
        plan: The files of tensors, and the writer of each part.
        rank: The number of this rank in the job.
        ranks: Number of ranks of the job.
        manifest: The manifest, still without tensors.
        texts: The contents of further files, by name; rank 0 writes them.
    """

    retention: Retention
    draft: Path
    plan: FilePlan
    rank: int
    ranks: int
    manifest: Manifest
    texts: Mapping[str, str]


class Writing:
    """Writes one rank's part of a checkpoint, in a thread or at once.

    Attributes:
        task: What the rank has to write.
    """

    def __init__(self, task: Assignment, bytes_of: BytesOf) -> None:
        """Stores the task, and writes nothing yet.

        Args:
            task: What the rank has to write.
            bytes_of: Returns the bytes of this rank's part of a tensor, by the tensor's name.
        """
        self.task = task
        self._bytes_of = bytes_of
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether a thread is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Starts a thread that writes; the process waits for it before it exits."""

        def run_at_low_priority() -> None:
            """Writes with a low priority, so that the training has the processors."""
            systems.lower_priority(_NICE)
            self.run()
            # The function holds the copies of the tensors; :meth:`end` may come much later.
            del self._bytes_of

        name = "fleetpipe checkpoint writer"
        self._thread = threading.Thread(target=run_at_low_priority, name=name)
        self._thread.start()

    def run(self) -> None:
        """Writes this rank's part, and stores an error so that :meth:`end` raises it."""
        try:
            write(self.task, self._bytes_of)
        except Exception as error:  # Saver.settle raises it on all ranks
            self._error = error

    def run_with(self, ranks: Ranks, elsewhere: Sequence[int]) -> None:
        """Writes this rank's part; rank 0 also those of ranks without its folder. Collective.

        Args:
            ranks: All ranks of the job.
            elsewhere: The ranks that do not see the folder, on hosts without shared storage. They
                send rank 0 their parts; rank 0 has those of one rank in memory at a time.

        Raises:
            PeerFailed: A rank died.
            PipelineTimeout: A rank did not arrive within the limit.
        """
        if ranks.rank in elsewhere:
            ranks.send_parts(
                self._bytes_of(name) for name, _, _ in self.task.plan.parts_of(ranks.rank)
            )
            return
        self.run()
        for rank in elsewhere if ranks.rank == 0 else ():
            parts = {
                name: LocalTensor(ranks.receive_part(rank))
                for name, _, _ in self.task.plan.parts_of(rank)
            }
            of_rank = Writing(replace(self.task, rank=rank), bytes_in(parts))
            of_rank.run()
            self._error = self._error or of_rank._error

    def end(self) -> None:
        """Waits for the thread without a time limit, and raises the error of the writing."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


def bytes_in(local: Mapping[TensorName, LocalTensor]) -> BytesOf:
    """Returns a function from the name of a tensor in ``local`` to the tensor's bytes."""
    return lambda name: bytes_of_tensor(local[name])


def write(task: Assignment, bytes_of: BytesOf) -> None:
    """Writes this rank's parts and its report; the last rank makes the draft a complete step.

    Args:
        task: What the rank has to write.
        bytes_of: Returns the bytes of this rank's part of a tensor, by the tensor's name.

    Raises:
        OSError: The disk is full or fails; the draft stays, which readers ignore.
    """
    checksums: dict[str, dict[str, list[Any]]] = {}
    with ExitStack() as files:
        opened: dict[str, FileIO] = {}

        def file_of(name: str) -> FileIO:
            """Returns the open file of the draft with a name; opens it at the first use."""
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
    atomic_file.replace_text(_report_path(task.draft, task.rank), json.dumps(checksums))
    _publish_if_complete(task)


def _report_path(draft: Path, rank: int) -> Path:
    """Returns the path of a rank's report, which it writes after its parts."""
    return draft / f"report-{rank:05d}.json"


def _publish_if_complete(task: Assignment) -> None:
    """Makes the draft a complete step if all ranks have reported; then removes old steps."""
    reports = [_report_path(task.draft, rank) for rank in range(task.ranks)]
    try:
        if not all(report.exists() for report in reports):
            return
        claim = os.open(task.draft / _CLAIM_FILE, os.O_CREAT | os.O_EXCL)
    except (FileExistsError, FileNotFoundError):
        return  # two ranks see all reports: the other one publishes, or has published
    os.close(claim)
    records = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    manifest = replace(task.manifest, tensors=_manifest_entries(task, records))
    for path in reports:
        path.unlink()
    run_folder.write_file(task.draft / MANIFEST, manifest.to_text())
    step, run_directory = task.manifest.step, task.retention.run_directory
    # Before this step is visible, so that "latest" is never a step that the run has left.
    aside = run_folder.set_aside(run_directory, step)
    run_folder.publish(task.draft, run_directory, step)
    # Only now, since a rank that has just seen all reports would publish the draft again.
    (run_folder.folder_of(run_directory, step) / _CLAIM_FILE).unlink()
    _log.debug("step %d is saved in %s", step, run_directory)
    if aside:
        names = ", ".join(path.name for path in aside.values())
        _log.warning(
            f"step {step} is saved; the run had gone on to step {max(aside)} before: "
            f"what is later is set aside in {run_directory} as {names}"
        )
    try:
        task.retention.remove_old_steps()
    except OSError as error:
        _log.warning(
            f"step {step} is saved in {run_directory}; one that is due to go stays: {error}"
        )


def _manifest_entries(
    task: Assignment, reports: list[dict[str, dict[str, list[Any]]]]
) -> dict[TensorName, Entry]:
    """Returns the manifest's entry of each tensor.

    Args:
        task: The task of a rank, with the plan of the files.
        reports: The report of each rank: by file and tensor, a row for each part that the rank
            wrote, with the region, the checksum and the digest.
    """
    entries, shared_digests = {}, _digests_of_shared_tensors(task)
    for group, files in task.plan.groups.items():
        for file in files:
            for name, stored in task.plan.files[file].tensors.items():
                rows = [row for report in reports for row in report.get(file, {}).get(name, ())]
                pieces = [
                    WrittenPart(None if cut is None else Region(*cut), crc) for cut, crc, _ in rows
                ]
                pieces.sort(key=lambda piece: 0 if piece.cut is None else piece.cut.start)
                full_name = TensorName(group, name)
                _, _, digest_of_first = rows[0]
                digest = shared_digests.get(full_name, digest_of_first)
                entries[full_name] = Entry(file, stored.tensor, tuple(pieces), digest)
    return entries


def _digests_of_shared_tensors(task: Assignment) -> dict[TensorName, str]:
    """Returns the digests of the model's tensors that several ranks have written.

    It reads the tensors from the disk. There is a thread for each rank, up to a limit, since the
    ranks have finished writing.
    """
    plan = task.plan
    shared = [
        (file, name)
        for file in plan.groups.get(MODEL, ())
        for name, shares in plan.shares[file].items()
        if len(shares) > 1
    ]

    def digest(file_and_name: tuple[str, str]) -> str:
        """Returns the digest of a tensor in a file of the draft."""
        file, name = file_and_name
        stored = plan.files[file].tensors[name]
        with (task.draft / file).open("rb", buffering=0) as opened:
            return tensor_digest(stored.tensor, tensors.blocks(opened, stored))

    with ThreadPoolExecutor(min(task.ranks, _MOST_THREADS)) as threads:
        digests = threads.map(digest, shared)
        return {TensorName(MODEL, name): result for (_, name), result in zip(shared, digests)}


def described_files(plan: FilePlan, texts: Mapping[str, str]) -> dict[str, FileSummary]:
    """Returns what the manifest says of each file, by name.

    Args:
        plan: The files of tensors.
        texts: The contents of the other files, by name.
    """
    files = {
        name: FileSummary(layout.size, tensors.checksum([layout.header]))
        for name, layout in plan.files.items()
    }
    for name, text in texts.items():
        data = text.encode()
        files[name] = FileSummary(len(data), tensors.checksum([data]))
    return files
