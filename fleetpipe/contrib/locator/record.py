"""The tensors of one run, named by their meaning: a folder with a file for each rank and step."""

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
#: The ``part`` of a gradient of the step before that still exists when backward begins.
LEFT = "left over"
#: The ``part`` of the first numbers of a dropout's input.
DROPPED = "dropped"
#: The ``part`` of the number of times that a twin read further samples before it stepped.
READ_ON = "read on"

_SOURCE = Source(
    "this file is no record of a run, or is damaged",
    UsageError,
    "record the run again with fleetpipe locate --record",
)


class Meaning(NamedTuple):
    """The meaning of a tensor.

    Attributes:
        step: The training step, from 0.
        phase: The phase of the step: initial, data, forward, loss, gradient, reduction, clip,
            optimizer input, update or buffer, in this order.
        name: The path of a layer, parameter or buffer in the whole model; "" for the whole step.
        micro_batch: The micro-batch within the step and replica, from 0; -1 for a value of the
            step.
        part: Which tensor of that name: ``"output 0"``, ``"input 0"``, ``"parameter"``.
        call: The number of the layer's call in its micro-batch.
    """

    step: int
    phase: str
    name: str
    micro_batch: int = -1
    part: str = ""
    call: int = 0


class RankTensors:
    """The tensors of one rank.

    Attributes:
        rank: The rank in the job.
        coordinate: Its coordinate on each axis with a degree above 1.
        tensors: The tensors by their meaning, in the order in which they were computed.
        sources: For each output of a layer, the meanings of the layer's inputs.
    """

    def __init__(self, rank: int, coordinate: Mapping[str, int]) -> None:
        self.rank = rank
        self.coordinate = dict(coordinate)
        self.tensors: dict[Meaning, np.ndarray] = {}
        self.sources: dict[Meaning, list[Meaning]] = {}

    def of(self, step: int, phase: str) -> dict[Meaning, np.ndarray]:
        """Returns the tensors of one phase of a step."""
        return {p: t for p, t in self.tensors.items() if p.step == step and p.phase == phase}

    def names(self, step: int, phase: str) -> dict[str, np.ndarray]:
        """Returns by name the tensors of a phase that belong to no micro-batch, as parameters."""
        return {p.name: t for p, t in self.of(step, phase).items() if p.micro_batch == -1}

    def listed(self, place: Meaning) -> list[str]:
        """Returns the names of the parameters of the optimizer whose learning rate is ``place``."""
        text = self.tensors.get(place._replace(part="parameters"))
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
    """Writes one step of a rank and removes it from memory."""
    with needed_for("a record of a run"):
        from safetensors.numpy import save_file
    places = [place for place in record.tensors if place.step == step]
    sources = {str(i): record.sources[p] for i, p in enumerate(places) if p in record.sources}
    index = {
        "rank": record.rank,
        "coordinate": record.coordinate,
        "degrees": dict(degrees),
        "places": places,
        "sources": sources,
    }
    arrays = {str(i): np.ascontiguousarray(record.tensors[p]) for i, p in enumerate(places)}
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
            index, arrays = _open(file)
            degrees = _counts(index["degrees"])
            number = index["rank"].count()
            rank = ranks.setdefault(number, RankTensors(number, _counts(index["coordinate"])))
            places = {str(i): place for i, place in enumerate(_meanings(index["places"]))}
            if places.keys() != arrays.keys():
                raise index["places"].refused(f"the meanings of {len(arrays)} tensors")
            rank.tensors.update((place, arrays[i]) for i, place in places.items())
            for i, sources in index["sources"].fields().items():
                if i not in places:
                    raise sources.refused("sources of one of the tensors")
                rank.sources[places[i]] = _meanings(sources)
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


def _counts(value: JsonValue) -> dict[str, int]:
    return {name: one.count() for name, one in value.fields().items()}


def _meanings(value: JsonValue) -> list[Meaning]:
    def number(one: JsonValue) -> int:
        return -1 if one.content == -1 else one.count()

    return [one.row(Meaning, micro_batch=number) for one in value.items()]


def _open(file: Path) -> tuple[JsonValue, dict[str, np.ndarray]]:
    with needed_for("a record of a run"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(file, "numpy") as opened:
            text = opened.metadata()["record"]
            arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _SOURCE.refused(expected="one that locate wrote", got=str(error)) from error
    return parse(text, _SOURCE), arrays
