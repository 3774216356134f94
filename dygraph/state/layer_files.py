"""The layers of one process in Fleet's checkpoint folder: which of them, under which names."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fleetpipe.aliases import Layer, Nest
from fleetpipe.dygraph.layers.tied import SharedLayer
from fleetpipe.dygraph.state import files
from fleetpipe.dygraph.state.manifest import Writer
from fleetpipe.dygraph.state.tied_weights import SharedWeights
from fleetpipe.job.job import Job
from fleetpipe.paddle_api import paddle
from fleetpipe.partition import Partition
from fleetpipe.schedules import Placement


class LayerFiles:
    """Writes and reads the files of the layers that this process has built."""

    def __init__(
        self,
        written: Mapping[files.ParameterPlace, Layer],
        read: Mapping[files.ParameterPlace, Layer],
        sources: Mapping[str, int],
        job: Job | None,
    ) -> None:
        """Describes the layers.

        Args:
            written: Those of this process that have a file.
            read: Those whose file counts.
            sources: The rank of the pipeline that reads a weight which several hold, by name.
            job: The job of the model; None where it was built outside of one.
        """
        self._written = written
        self._read = read
        self._sources = sources
        self._job = job
        #: How often each folder was written: as often on every rank.
        self._saves: Counter[str] = Counter()

    def save(self, folder: str | Path) -> None:
        """Writes a file for each layer; nothing in replicas other than the first."""
        self._saves[str(folder)] += 1
        if self._writes():
            writer = self._writer(self._saves[str(folder)])
            files.save(folder, self._written, self._tensor_shard()[0], writer)

    def load(self, folder: str | Path, copies: SharedWeights) -> None:
        """Reads the files, and makes the copies of shared weights equal again.

        Collective over the pipeline where weights are shared between ranks.

        Args:
            folder: Where the files are.
            copies: This rank's copies of what it shares with other ranks.

        Raises:
            CheckpointError: The folder or a file is missing, or does not fit its layer; the layers
                of this rank are as they were.
            PipelineTimeout: Another rank did not come within the limit.
        """
        # Before anything that others hear of: a script may go on without a checkpoint.
        files.require_folder(folder)
        guard = nullcontext() if self._job is None else self._job.guarded(lambda: "loading layers")
        with guard:
            files.load(folder, self._read, *self._tensor_shard())
            copies.equalize(self._sources)

    def _writes(self) -> bool:
        """Whether this process is the one that writes its layers and tensor-parallel shards."""
        if self._job is None:
            return int(paddle.distributed.get_rank()) == 0
        return self._job.leads("pp", "mp")

    def _writer(self, number: int) -> Writer:
        """Returns this process's part in a save, of which no rank need tell another."""
        if self._job is None:
            return Writer(uuid.uuid4().hex, 0, 1)
        tensor_shard, shards = self._tensor_shard()
        ranks = 1 if self._job.local else self._job.degrees.pp
        rank = self._job.coordinate.pp
        save = f"{self._job.run}/{number}"
        return Writer(save, rank * shards + tensor_shard, ranks * shards)

    def _tensor_shard(self) -> tuple[int, int]:
        """Returns this process's place among the tensor-parallel ranks, and their number."""
        if self._job is None:
            return 0, 1
        return self._job.shard


def files_of_list(
    entries: Sequence[Any],
    functions: Mapping[int, Callable[[Nest], Nest]],
    shared: Mapping[int, SharedLayer],
    partition: Partition,
    placement: Placement,
    job: Job | None,
) -> LayerFiles:
    """Returns the files of a list of layers, numbered as the list is.

    Args:
        entries: The whole list of layers.
        functions: The layers and functions of this process, by their numbers in the list.
        shared: The shared layers, by each of their numbers.
        partition: The cut into stages.
        placement: Which rank has which stage.
        job: The job of the model; None where it was built outside of one.
    """

    def place(index: int) -> files.ParameterPlace:
        stage = partition.stage_of(index)
        stages = placement.stages_of(placement.rank_of(stage))
        return files.ParameterPlace(index, None if len(stages) == 1 else stages.index(stage))

    at = {index: files.written_at(layer, entries) for index, layer in shared.items()}
    layers = files.layers_to_write(functions, shared, entries)
    written = {place(index): layer for index, layer in layers.items()}
    read = {place(index): layer for index, layer in layers.items() if at.get(index, index) == index}
    sources: dict[str, int] = {}
    for index, layer in sorted(shared.items()):
        rank = placement.rank_of(partition.stage_of(at[index]))
        for name in layer.names.values():
            sources.setdefault(name, rank)
    return LayerFiles(written, read, sources, job)
