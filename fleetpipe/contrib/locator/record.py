"""Stores the tensors of one run by their keys, in a folder with a file for each rank and step.

The run is a job, or the job's twin: the same script on one device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fleetpipe.errors import UsageError
from fleetpipe.extras import needed_for
from fleetpipe.json_value import JsonValue, Source, parse

#: The files of a record.
FILES = "rank-*.step-*.safetensors"
#: The ``role`` of a gradient of the step before that still exists when backward begins.
LEFT = "left over"
#: The ``role`` of the first numbers of a dropout's input.
DROPPED = "dropped"
#: The ``role`` of the number of times that a twin read further samples before it stepped.
READ_ON = "read on"

_SOURCE = Source(
    "this file is no record of a run, or is damaged",
    UsageError,
    "record the run again with fleetpipe locate --record",
)


class TensorKey(NamedTuple):
    """The key of a recorded tensor, which says what the tensor is.

    Attributes:
        step: The training step, from 0.
        phase: The phase of the step: initial, data, forward, loss, gradient, reduction, clip,
            optimizer input, update or buffer, in this order.
        name: The path of a layer, parameter or buffer in the whole model; "" for the whole step.
        micro_batch: The micro-batch within the step and replica, from 0; -1 for a value of the
            step.
        role: Which tensor of that name: ``"output 0"``, ``"input 0"``, ``"parameter"``.
        call: The number of the layer's call in its micro-batch.
    """

    step: int
    phase: str
    name: str
    micro_batch: int = -1
    role: str = ""
    call: int = 0


class RankTensors:
    """The tensors of one rank.

    Attributes:
        rank: The rank in the job.
        coordinate: The rank's coordinate on each axis with a degree above 1.
        tensors: The tensors by key, in the order in which they were computed.
        sources: By the key of a layer's output, the keys of the layer's inputs.
    """

    def __init__(self, rank: int, coordinate: Mapping[str, int]) -> None:
        self.rank = rank
        self.coordinate = dict(coordinate)
        self.tensors: dict[TensorKey, np.ndarray] = {}
        self.sources: dict[TensorKey, list[TensorKey]] = {}

    def in_phase(self, step: int, phase: str) -> dict[TensorKey, np.ndarray]:
        """Returns the tensors of one phase of a step."""
        return {p: t for p, t in self.tensors.items() if p.step == step and p.phase == phase}

    def by_name(self, step: int, phase: str) -> dict[str, np.ndarray]:
        """Returns, by name, a phase's tensors of no micro-batch, such as the parameters."""
        return {p.name: t for p, t in self.in_phase(step, phase).items() if p.micro_batch == -1}

    def optimizer_parameters(self, key: TensorKey) -> list[str]:
        """Returns the names of the parameters of the optimizer whose learning rate has ``key``."""
        text = self.tensors.get(key._replace(role="parameters"))
        return [] if text is None else json.loads(text.tobytes().decode())


class Record(NamedTuple):
    """The tensors of a run of some ranks.

    Attributes:
        ranks: The tensors of each rank.
        degrees: The degree of each axis with a degree above 1.
    """

    ranks: Sequence[RankTensors]
    degrees: Mapping[str, int]

    @property
    def steps(self) -> int:
        """The number of steps that all ranks have finished."""
        return min(1 + max((p.step for p in r.tensors), default=-1) for r in self.ranks)

    @property
    def replicas(self) -> int:
        """The number of replicas, which have different samples."""
        return self.degrees.get("dp", 1) * self.degrees.get("sharding", 1)

    def replica(self, rank: RankTensors) -> int:
        """Returns the number of a rank's replica."""
        of_sharding = rank.coordinate.get("sharding", 0)
        return rank.coordinate.get("dp", 0) * self.degrees.get("sharding", 1) + of_sharding


def write(folder: Path, record: RankTensors, degrees: Mapping[str, int], step: int) -> None:
    """Writes the tensors of one step of a rank, and removes them from memory.

    Args:
        folder: The folder.
        record: The tensors of the rank.
        degrees: The degree of each axis with a degree above 1.
        step: The step.
    """
    with needed_for("a record of a run"):
        from safetensors.numpy import save_file
    keys = [key for key in record.tensors if key.step == step]
    sources = {str(i): record.sources[key] for i, key in enumerate(keys) if key in record.sources}
    index = {
        "rank": record.rank,
        "coordinate": record.coordinate,
        "degrees": dict(degrees),
        "places": keys,
        "sources": sources,
    }
    arrays = {str(i): np.ascontiguousarray(record.tensors[key]) for i, key in enumerate(keys)}
    file = folder / f"rank-{record.rank:05d}.step-{step:06d}.safetensors"
    save_file(arrays, file, metadata={"record": json.dumps(index)})
    record.tensors = {p: t for p, t in record.tensors.items() if p.step != step}
    record.sources = {p: s for p, s in record.sources.items() if p.step != step}


def read(folder: Path) -> Record:
    """Reads the record of a run.

    Raises:
        UsageError: The folder has no record.
    """
    ranks: dict[int, RankTensors] = {}
    degrees: Mapping[str, int] = {}
    for file in sorted(folder.glob(FILES)):
        try:
            index, arrays = _read_file(file)
            degrees = _read_counts(index["degrees"])
            number = index["rank"].count()
            rank = ranks.setdefault(number, RankTensors(number, _read_counts(index["coordinate"])))
            keys = {str(i): key for i, key in enumerate(_read_keys(index["places"]))}
            if keys.keys() != arrays.keys():
                raise index["places"].refused(f"the meanings of {len(arrays)} tensors")
            rank.tensors.update((key, arrays[i]) for i, key in keys.items())
            for i, sources in index["sources"].fields().items():
                if i not in keys:
                    raise sources.refused("sources of one of the tensors")
                rank.sources[keys[i]] = _read_keys(sources)
        except UsageError as error:
            error.add_place(str(file))
            raise
    if not ranks:
        raise UsageError(
            "nothing was collected: the script trained no step",
            where=str(folder),
            cause="it has no layer that is called and no optimizer that steps, or it is a static "
            "program",
            fix="give a training script in dynamic graph that trains at least one step",
        )
    return Record([ranks[rank] for rank in sorted(ranks)], degrees)


def _read_counts(value: JsonValue) -> dict[str, int]:
    """Reads an object of counts, such as degrees by axis."""
    return {name: one.count() for name, one in value.fields().items()}


def _read_keys(value: JsonValue) -> list[TensorKey]:
    """Reads a list of keys; the micro-batch of a key may be -1."""

    def micro_batch_of(field: JsonValue) -> int:
        return -1 if field.content == -1 else field.count()

    return [one.row(TensorKey, micro_batch=micro_batch_of) for one in value.items()]


def _read_file(file: Path) -> tuple[JsonValue, dict[str, np.ndarray]]:
    """Reads a file; returns its index, and the arrays by their numbers in the index."""
    with needed_for("a record of a run"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(file, "numpy") as opened:
            text = opened.metadata()["record"]
            arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _SOURCE.refused(expected="one that locate wrote", got=str(error)) from error
    return parse(text, _SOURCE), arrays
