"""Makes Paddle's own files of a checkpoint, and a checkpoint of Fleet's layer files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fleetpipe.aliases import Tensor
from fleetpipe.checkpoint import fleet_files
from fleetpipe.checkpoint.contents.layer_and_optimizer import NamedTensors, held_of
from fleetpipe.checkpoint.contents.parts import MODEL, TensorName
from fleetpipe.checkpoint.files import host_memory, run_folder
from fleetpipe.checkpoint.files.reader import StepReader
from fleetpipe.checkpoint.manager import CheckpointManager
from fleetpipe.errors import CheckpointError

_FILE = re.compile(
    r"layer_(?P<layer>\d{2,})(-virtual_pp_stage_\d{2,})?"
    r"-tensor_(?P<shard>\d{2,})-model_states\.pdparams"
)
_NAME = re.compile(r"(?P<layer>\d+)\.(?P<name>.+)")


class _Loaded(NamedTuple):
    """Tensors under lasting names, as a model that can be saved."""

    tensors: dict[str, Tensor]

    def checkpoint_part(self) -> NamedTensors:
        """Returns all of them."""
        held = {name: held_of(tensor, (0, 1)) for name, tensor in self.tensors.items()}
        return NamedTensors(held, {name: one.described.shape for name, one in held.items()})


def write_parameters(reader: StepReader, target: Path) -> None:
    """Writes the model's parameters and buffers in one file of ``paddle.save``.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """
    fleet_files.save(target, dict(_tensors(reader)))


def to_layer_files(reader: StepReader, folder: Path) -> int:
    """Writes the model as Fleet's folder of layer files, for a model without shared layers.

    Returns:
        How many files. A layer before the last without parameters has one, too.

    Raises:
        CheckpointError: The model has shared layers, or other names than a list of layers.
    """
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _tensors(reader):
        match = _NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{name!r} belongs to no single layer of a list",
                cause="the layer is shared by several entries, or the model is not a PipelineLayer",
                fix="restore the checkpoint in a job, then layers.save_state_dict(folder)",
            )
        layers.setdefault(int(match["layer"]), {})[match["name"]] = tensor
    count = max(layers, default=-1) + 1
    names = [f"layer_{layer:02d}-tensor_00-model_states.pdparams" for layer in range(count)]
    fleet_files.save_all(folder, {name: layers.get(layer, {}) for layer, name in enumerate(names)})
    return count


def from_layer_files(folder: Path, home: Path, step: int) -> int:
    """Saves the model of Fleet's layer files as a step. They have no optimizer's state.

    Args:
        folder: Of ``save_state_dict``, fleetpipe's or Fleet's.
        home: The folder of the run.
        step: Its number.

    Returns:
        How many tensors.

    Raises:
        CheckpointError: A file cannot be read, or holds a shard of its layer; or the run has later
            steps.
    """
    later = [number for number in run_folder.complete_steps(home) if number > step]
    if later:
        raise CheckpointError(
            f"the run has steps after step {step}, which a save would set aside",
            where=str(home),
            got=f"steps {later}",
            fix=f"--step {max(later) + 1}, or another folder",
        )
    tensors: dict[str, Tensor] = {}
    layer_files = sorted((int(m["layer"]), p, m) for p in folder.iterdir() if (m := _match(p)))
    for layer, path, match in layer_files:
        if int(match["shard"]):
            raise CheckpointError(
                "files of shards do not say how their layers were cut",
                where=str(path),
                fix="load them in a job of the same mp_degree by layers.set_state_dir(folder), "
                "then save with a CheckpointManager",
            )
        for name, tensor in fleet_files.load(path).items():
            tensors[f"{layer}.{name}"] = tensor
    CheckpointManager(home).save(step, model=_Loaded(tensors))
    return len(tensors)


def _match(path: Path) -> re.Match[str] | None:
    return _FILE.fullmatch(path.name)


def _tensors(reader: StepReader) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of the model by name, in its order."""
    with reader.opened() as read:
        for name in reader.manifest.order:
            described = reader.manifest.tensors[TensorName(MODEL, name)].tensor
            tensor, memory = host_memory.empty(described)
            read(TensorName(MODEL, name), None, memory)
            yield name, tensor
