"""Writes and reads Fleet's checkpoint folders: one file for each layer.

A rank that has the layer writes the file, one for each mp shard. If ranks hold parts of a weight,
as of a vocabulary head, the rank with the first part writes the whole weight, and each rank reads
only its parts. Start with :class:`LayerFiles`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.layers.tied import SharedLayer, called_through
from fleetpipe.dygraph.state.tied_weights import SharedWeights
from fleetpipe.errors import CheckpointError
from fleetpipe.extras import extra
from fleetpipe.fleet_files import manifest
from fleetpipe.fleet_files.manifest import LayerFile, Writer
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.mesh.parts import LocalTensor, attached_part, joined_on_first
from fleetpipe.paddle_api import paddle
from fleetpipe.partition import Partition
from fleetpipe.schedules import Placement


class LayerInParts:
    """A layer of whose weights this process holds only parts, such as a vocabulary head."""

    def __init__(
        self, parts: Mapping[str, Sequence[Tensor]], group: Callable[[], Group] = SoleGroup
    ) -> None:
        """Stores this process's parts of the layer's weights.

        Args:
            parts: The parts of each whole weight, in order, by the weight's name in the file.
            group: Returns the ranks that hold the parts.
        """
        self._group = group
        self._parts = [
            (name, LocalTensor(tensor, part.cut))
            for name, tensors in parts.items()
            for tensor in tensors
            if (part := attached_part(tensor)) is not None
        ]

    def parts(self) -> dict[str, LocalTensor]:
        """Returns for each weight, by its name in the file, the last part that this process holds.

        That is enough to check a file: each part describes the whole weight's dtype and shape.
        """
        return dict(self._parts)

    def set_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets the parts from whole weights.

        Args:
            state: The whole weights by name, mapped from a file: of each only the parts are read.
        """
        for name, local in self._parts:
            parameter: Tensor = local.tensor
            values = state[name] if local.cut is None else local.cut.taken_from(state[name])
            native = values.astype(values.dtype.newbyteorder("="), order="C")
            parameter.set_value(paddle.to_tensor(native))

    def whole(self) -> dict[str, Tensor] | None:
        """Joins the parts of all ranks of the group. Collective over the group.

        Returns:
            On the first rank of the group the whole weights by name; on the others None.
        """
        return joined_on_first(self._group(), self._parts) or None


def number_of_file(shared: SharedLayer, entries: Sequence[Any]) -> int:
    """Returns the number in the name of the file with the weights of a shared layer.

    It is the number of the first entry of the list that calls the layer without a ``forward_func``,
    as in Fleet; if there is none, that of the first entry.
    """
    without_function = [index for index in shared.indices if entries[index].forward_func is None]
    return without_function[0] if without_function else shared.indices[0]


def layers_to_write(
    functions: Mapping[int, Callable[[Nest], Nest]],
    shared: Mapping[int, SharedLayer],
    entries: Sequence[Any],
) -> dict[int, Layer]:
    """Returns the layers for which this process writes a file, by the number of the file.

    ``functions`` are those of this process by number, ``shared`` the shared layers by each of their
    numbers, and ``entries`` the whole list.
    """
    layers = {}
    for index, function in functions.items():
        if isinstance(function, paddle.nn.Layer):
            layers[index] = function
        elif index in shared and number_of_file(shared[index], entries) == index:
            (layers[index],) = called_through(function)
    return layers


def save(
    folder: str | Path,
    layers: Mapping[LayerFile, Mapping[str, Tensor]],
    mp_rank: int,
    writer: Writer,
) -> None:
    """Writes each layer's weights to a file, and then this rank's manifest, a list of the files.

    Until all ranks have finished, the previous save in the folder can still be read.

    Args:
        folder: The folder to write to; created if it does not exist.
        layers: The state of each layer to write.
        mp_rank: This rank's number among the tensor-parallel ranks.
        writer: This rank's number among those that write the save.
    """
    states = {file._replace(shard=mp_rank).name: state for file, state in layers.items()}
    manifest.link_replaced_files(Path(folder), writer, states)
    fleet_files.save_all(folder, states)
    manifest.write(Path(folder), writer, states)


def load(
    folder: str | Path,
    layers: Mapping[LayerFile, Layer | LayerInParts],
    mp_rank: int,
    mp_size: int,
) -> None:
    """Reads the file of each layer; a weight that several layers share gets the first one's value.

    Args:
        folder: The folder of the files, written by fleetpipe or by Fleet.
        layers: The layers to fill.
        mp_rank: This rank's number among the tensor-parallel ranks.
        mp_size: The number of tensor-parallel ranks.

    Raises:
        CheckpointError: A file is missing, is not in Paddle's format, does not fit its layer, or
            belongs to another save than the other files. No layer has changed then.
    """
    folder = Path(folder)
    saved = manifest.newest_save_in(folder)
    names = sorted(saved.paths)
    states = {}
    for layer_file, layer in layers.items():
        files = _files_of(layer_file, names, folder)
        file = files[mp_rank * len(files) // mp_size]
        read = fleet_files.mapped if isinstance(layer, LayerInParts) else fleet_files.load
        states[layer_file] = read(saved.path(file))
        _require_fit(layer_file, layer, states[layer_file], file)
        saved.require(file)
    for layer_file, layer in reversed(list(layers.items())):
        layer.set_state_dict(states[layer_file])


def _files_of(layer_file: LayerFile, names: list[str], folder: Path) -> list[str]:
    """Returns the names of the files of a layer, one for each mp shard, in order.

    Args:
        layer_file: The name under which this process would write the layer. A saved file has the
            same number, but may be of another chunk.
        names: The names of all files of the save.
        folder: The folder, for messages.

    Raises:
        CheckpointError: There is no file of the layer, or the layer is in several chunks.
    """
    by_stem: dict[str, list[str]] = {}
    for name in names:
        file = LayerFile.parse(name)
        if file is not None and file.number == layer_file.number:
            by_stem.setdefault(file.stem, []).append(name)
    if layer_file.stem in by_stem:
        return by_stem[layer_file.stem]
    if len(by_stem) == 1:
        return next(iter(by_stem.values()))
    raise CheckpointError(
        f"layer {layer_file.number} was not saved here"
        if not by_stem
        else f"layer {layer_file.number} was saved here as part of several chunks",
        where=str(folder),
        expected=f"{layer_file.stem}-tensor_*-model_states.pdparams",
        got=", ".join(sorted(by_stem)) or f"{len(names)} files, none of this layer",
        cause=None
        if by_stem
        else "the model was saved with another list of layers, or by a rank "
        "whose disk is not this one",
        fix="save each model in a folder of its own",
    )


def _require_fit(
    layer_file: LayerFile, layer: Layer | LayerInParts, state: Mapping[str, Any], file: str
) -> None:
    """Refuses a saved state whose shapes or dtypes differ from the layer's.

    Args:
        layer_file: The name under which this process would write the layer.
        layer: The layer.
        state: The saved state.
        file: The name of the file with the state.
    """
    if isinstance(layer, LayerInParts):
        tensors = layer.parts()
    else:
        tensors = {
            name: LocalTensor(tensor) for name, tensor in paddle.nn.Layer.state_dict(layer).items()
        }
    for name, local in tensors.items():
        value, expected = state.get(name), local.described
        got = (
            LocalTensor(value).described if isinstance(value, (paddle.Tensor, np.ndarray)) else None
        )
        if got != expected:
            raise CheckpointError(
                f"the saved layer {layer_file.number} does not fit the model's",
                where=f"{name!r} in {file}",
                expected=str(expected),
                got=str(got or f"a {type(value).__name__}")
                if name in state
                else "nothing of that name",
                cause="it was saved with other layers, in another dtype, or another mp_degree",
                fix="build the model, and set mp_degree, as they were when it was saved",
            )


class LayerFiles:
    """Writes and reads the files of the layers that this process has built."""

    def __init__(
        self,
        written: Mapping[LayerFile, Layer | LayerInParts],
        read: Mapping[LayerFile, Layer | LayerInParts],
        sources: Mapping[str, int],
        job: Job | None,
    ) -> None:
        """Stores which layers to write and to read.

        Args:
            written: The layers for which this process writes a file.
            read: The layers for which this process reads a file.
            sources: For each weight of which several ranks hold copies, by fully qualified name,
                the rank of the pipeline that reads it.
            job: The job of the model; None if it was built outside of one.
        """
        self._layers_to_write = written
        self._layers_to_read = read
        self._sources = sources
        self._job = job

    def save(self, folder: str | Path, number: int) -> None:
        """Writes a file for each layer; only the first replica writes.

        Args:
            folder: The folder to write to.
            number: The number of this save into the folder, from 1; the same on every rank.
        """
        if self._is_writer():
            with self._guard_call("saving layers"):
                states = {
                    file: layer.whole()
                    if isinstance(layer, LayerInParts)
                    else paddle.nn.Layer.state_dict(layer)
                    for file, layer in self._layers_to_write.items()
                }
            writer = self._writer(number)
            states_here = {file: state for file, state in states.items() if state is not None}
            mp_rank, _ = self._mp_rank_and_size()
            save(folder, states_here, mp_rank, writer)

    def load(self, folder: str | Path, copies: SharedWeights) -> None:
        """Reads the files, and then makes the copies of shared weights equal.

        Collective over the pipeline if ranks share weights.

        Args:
            folder: The folder of the files.
            copies: This rank's copies of the weights that it shares with other ranks.

        Raises:
            CheckpointError: The folder or a file is missing, or does not fit its layer. The layers
                of this rank have not changed then.
            PipelineTimeout: Another rank did not come within the limit.
        """
        # Before the collective calls: a script may catch the error, and go on without a checkpoint.
        if not Path(folder).is_dir():
            raise CheckpointError(
                "there is no such folder of saved layers",
                got=str(folder),
                fix="pass the path that save_state_dict was given",
            )
        with self._guard_call("loading layers"):
            load(folder, self._layers_to_read, *self._mp_rank_and_size())
            copies.equalize(self._sources)

    def _guard_call(self, operation: str) -> AbstractContextManager[None]:
        """Returns a context whose error all ranks raise; ``operation`` describes it there."""
        return nullcontext() if self._job is None else self._job.guarded(lambda: operation)

    def _is_writer(self) -> bool:
        """Whether this process is in the first replica, which writes."""
        if self._job is None:
            return int(paddle.distributed.get_rank()) == 0
        return self._job.leads("pp", "mp")

    def _writer(self, number: int) -> Writer:
        """Returns this process's number among the writers of save ``number``; sends no messages."""
        if self._job is None:
            return Writer(uuid.uuid4().hex, 0, 1)
        mp_rank, mp_size = self._mp_rank_and_size()
        ranks = 1 if self._job.local else self._job.degrees.pp
        rank = self._job.coordinate.pp
        save = f"{self._job.run}/{number}"
        return Writer(save, rank * mp_size + mp_rank, ranks * mp_size)

    def _mp_rank_and_size(self) -> tuple[int, int]:
        """Returns this process's number among the tensor-parallel ranks, and their count."""
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
    group: Callable[[], Group],
) -> LayerFiles:
    """Returns the writer and reader of this process's layers; files have the layers' numbers.

    Args:
        entries: The whole list of layers.
        functions: The layers and functions of this process, by their numbers in the list.
        shared: The shared layers, by each of their numbers.
        partition: The cut into stages.
        placement: The rank of each stage.
        job: The job of the model; None if it was built outside of one.
        group: Returns the ranks that hold the stages.
    """

    def file_of(index: int) -> LayerFile:
        """Returns the name of a layer's file, with the chunk's number on its rank if v > 1."""
        stage = partition.stage_of(index)
        stages = placement.stages_of(placement.rank_of(stage))
        return LayerFile(index, None if placement.chunks == 1 else stages.index(stage))

    file_numbers = {index: number_of_file(layer, entries) for index, layer in shared.items()}
    to_write = layers_to_write(functions, shared, entries)
    layers: Mapping[int, Layer | LayerInParts] = to_write
    if any(attached_part(p) for layer in to_write.values() for p in layer.parameters()):
        with_whole_head = extra("vocabulary").with_whole_head
        layers = with_whole_head(to_write, shared, group)
    written = {file_of(index): layer for index, layer in layers.items()}
    # A shared layer is read once, from the file that has its number.
    read = {
        file_of(index): layer
        for index, layer in layers.items()
        if file_numbers.get(index, index) == index
    }
    # The rank that reads each shared weight, and then gives it to the others.
    sources: dict[str, int] = {}
    for index, layer in sorted(shared.items()):
        rank = placement.rank_of(partition.stage_of(file_numbers[index]))
        for name in layer.names.values():
            sources.setdefault(name, rank)
    return LayerFiles(written, read, sources, job)
