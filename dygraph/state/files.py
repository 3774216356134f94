"""Fleet's checkpoint folder: one file for each layer, written by a rank that holds the layer.

A file has whole weights. If ranks hold parts of a weight, the rank with the first part writes the
whole, and each rank reads only its parts. Start with :class:`LayerFiles`.
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
    """The parts of a layer's weights that this process holds."""

    def __init__(
        self, parts: Mapping[str, Sequence[Tensor]], group: Callable[[], Group] = SoleGroup
    ) -> None:
        """Stores the parts.

        Args:
            parts: The parts of each whole weight, in order, by the weight's name in the file.
            group: Returns the ranks that together hold all parts.
        """
        self._group = group
        self._parts = [
            (name, LocalTensor(tensor, part.cut))
            for name, tensors in parts.items()
            for tensor in tensors
            if (part := attached_part(tensor)) is not None
        ]

    def parts(self) -> dict[str, LocalTensor]:
        """Returns one part of each whole weight; the part says which shape the whole has."""
        return dict(self._parts)

    def set_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets the parts from whole weights, which are read one after another."""
        for name, local in self._parts:
            target: Tensor = local.tensor
            values = state[name] if local.cut is None else local.cut.taken_from(state[name])
            native = values.astype(values.dtype.newbyteorder("="), order="C")
            target.set_value(paddle.to_tensor(native))

    def whole(self) -> dict[str, Tensor] | None:
        """Returns the whole weights on the first of the ranks; None on others. Collective."""
        return joined_on_first(self._group(), self._parts) or None


def written_at(shared: SharedLayer, entries: Sequence[Any]) -> int:
    """Returns the number of the entry whose file has the weights of a shared layer.

    Fleet writes a file for each entry that calls the layer itself, but none for an entry with a
    ``forward_func``.
    """
    plain = [index for index in shared.indices if entries[index].forward_func is None]
    return plain[0] if plain else shared.indices[0]


def layers_to_write(
    functions: Mapping[int, Callable[[Nest], Nest]],
    shared: Mapping[int, SharedLayer],
    entries: Sequence[Any],
) -> dict[int, Layer]:
    """Returns the layers of this process that get a file, by number.

    If every entry of a shared layer has a ``forward_func``, the first entry gets the file. The
    arguments are as for :func:`files_of_list`.
    """
    layers = {}
    for index, function in functions.items():
        if isinstance(function, paddle.nn.Layer):
            layers[index] = function
        elif index in shared and written_at(shared[index], entries) == index:
            (layers[index],) = called_through(function)
    return layers


def save(
    folder: str | Path,
    layers: Mapping[LayerFile, Mapping[str, Tensor]],
    tensor_shard: int,
    writer: Writer,
) -> None:
    """Writes a file for each layer, and then the manifest that names them.

    Until all ranks have finished, the previous save in the folder can still be read.

    Args:
        folder: The folder to write to; created if it does not exist.
        layers: The state of each layer to write.
        tensor_shard: This rank's number among the tensor-parallel ranks.
        writer: This rank's number in the save.
    """
    states = {file._replace(shard=tensor_shard).name: state for file, state in layers.items()}
    manifest.keep(Path(folder), writer, states)
    fleet_files.save_all(folder, states)
    manifest.write(Path(folder), writer, states)


def require_folder(folder: str | Path) -> None:
    """Refuses a folder that does not exist."""
    if not Path(folder).is_dir():
        raise CheckpointError(
            "there is no such folder of saved layers",
            got=str(folder),
            fix="pass the path that save_state_dict was given",
        )


def load(
    folder: str | Path,
    layers: Mapping[LayerFile, Layer | LayerInParts],
    tensor_shard: int,
    tensor_shards: int,
) -> None:
    """Reads the file of each layer; a weight in several layers gets the first layer's value.

    Args:
        folder: The folder of the files, written by fleetpipe or by Fleet.
        layers: The layers to fill.
        tensor_shard: This rank's number among the tensor-parallel ranks.
        tensor_shards: The number of tensor-parallel ranks.

    Raises:
        CheckpointError: A file is missing, is not in Paddle's format, does not fit its layer, or
            belongs to another save than the other files. No layer has changed then.
    """
    folder = Path(folder)
    saved = manifest.save_in(folder)
    names = sorted(saved.paths)
    states = {}
    for place, layer in layers.items():
        files = _files_of(place, names, folder)
        file = files[tensor_shard * len(files) // tensor_shards]
        read = fleet_files.mapped if isinstance(layer, LayerInParts) else fleet_files.load
        states[place] = read(saved.path(file))
        _require_fit(place, layer, states[place], file)
        saved.require(file)
    for place, layer in reversed(list(layers.items())):
        layer.set_state_dict(states[place])


def _files_of(place: LayerFile, names: list[str], folder: Path) -> list[str]:
    """Returns the names of a layer's files, by shard; the layer may be in another chunk now."""
    by_stem: dict[str, list[str]] = {}
    for name in names:
        file = LayerFile.parse(name)
        if file is not None and file.number == place.number:
            by_stem.setdefault(file.stem, []).append(name)
    if place.stem in by_stem:
        return by_stem[place.stem]
    if len(by_stem) == 1:
        return next(iter(by_stem.values()))
    raise CheckpointError(
        f"layer {place.number} was not saved here"
        if not by_stem
        else f"layer {place.number} was saved here as part of several chunks",
        where=str(folder),
        expected=f"{place.stem}-tensor_*-model_states.pdparams",
        got=", ".join(sorted(by_stem)) or f"{len(names)} files, none of this layer",
        cause=None
        if by_stem
        else "the model was saved with another list of layers, or by a rank "
        "whose disk is not this one",
        fix="save each model in a folder of its own",
    )


def _require_fit(
    place: LayerFile, layer: Layer | LayerInParts, state: Mapping[str, Any], file: str
) -> None:
    """Refuses a saved state whose shapes or dtypes differ from the layer's."""
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
                f"the saved layer {place.number} does not fit the model's",
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
            sources: For each weight that several ranks hold, by name, the rank of the pipeline that
                reads it.
            job: The job of the model; None if it was built outside of one.
        """
        self._written = written
        self._read = read
        self._sources = sources
        self._job = job

    def save(self, folder: str | Path, number: int) -> None:
        """Writes a file for each layer; only the first replica writes.

        Args:
            folder: The folder to write to.
            number: The number of this save into the folder, from 1; the same on every rank.
        """
        if self._writes():
            with self._guard("saving layers"):
                states = {
                    place: layer.whole()
                    if isinstance(layer, LayerInParts)
                    else paddle.nn.Layer.state_dict(layer)
                    for place, layer in self._written.items()
                }
            writer = self._writer(number)
            here = {place: state for place, state in states.items() if state is not None}
            save(folder, here, self._tensor_shard()[0], writer)

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
        require_folder(folder)
        with self._guard("loading layers"):
            load(folder, self._read, *self._tensor_shard())
            copies.equalize(self._sources)

    def _guard(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._job is None else self._job.guarded(lambda: what)

    def _writes(self) -> bool:
        """Whether this process writes its layers and tensor-parallel shards."""
        if self._job is None:
            return int(paddle.distributed.get_rank()) == 0
        return self._job.leads("pp", "mp")

    def _writer(self, number: int) -> Writer:
        """Returns this process's number in a save; every rank computes its number by itself."""
        if self._job is None:
            return Writer(uuid.uuid4().hex, 0, 1)
        tensor_shard, shards = self._tensor_shard()
        ranks = 1 if self._job.local else self._job.degrees.pp
        rank = self._job.coordinate.pp
        save = f"{self._job.run}/{number}"
        return Writer(save, rank * shards + tensor_shard, ranks * shards)

    def _tensor_shard(self) -> tuple[int, int]:
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
    """Returns the files of this process's layers, numbered like the list of layers.

    Args:
        entries: The whole list of layers.
        functions: The layers and functions of this process, by their numbers in the list.
        shared: The shared layers, by each of their numbers.
        partition: The cut into stages.
        placement: The owner of each stage.
        job: The job of the model; None if it was built outside of one.
        group: Returns the ranks that hold the stages.
    """

    def place(index: int) -> LayerFile:
        stage = partition.stage_of(index)
        stages = placement.stages_of(placement.rank_of(stage))
        return LayerFile(index, None if placement.chunks == 1 else stages.index(stage))

    at = {index: written_at(layer, entries) for index, layer in shared.items()}
    to_write = layers_to_write(functions, shared, entries)
    layers: Mapping[int, Layer | LayerInParts] = to_write
    if any(attached_part(p) for layer in to_write.values() for p in layer.parameters()):
        with_whole_head = extra("vocabulary").with_whole_head
        layers = with_whole_head(to_write, shared, group)
    written = {place(index): layer for index, layer in layers.items()}
    read = {place(index): layer for index, layer in layers.items() if at.get(index, index) == index}
    sources: dict[str, int] = {}
    for index, layer in sorted(shared.items()):
        rank = placement.rank_of(partition.stage_of(at[index]))
        for name in layer.names.values():
            sources.setdefault(name, rank)
    return LayerFiles(written, read, sources, job)
