"""Plans a checkpoint: the file of each tensor, and the rank that writes each part.

The files follow from the whole tensors alone: any layout of ranks writes the same bytes. Each part
is written once, by the holder that has the least to write so far.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetpipe.checkpoint.contents.parts import GROUPS, MASTER_WEIGHTS, OPTIMIZER, TensorName
from fleetpipe.checkpoint.files.tensors import CODES, Layout, is_whole, layout_of
from fleetpipe.errors import CheckpointError
from fleetpipe.mesh.parts import Described, LocalTensor, Region

#: Bytes of tensors after which the next file begins.
FILE_BYTES = 4 << 30

_NUMBER = re.compile(r"(\d+)")


class Share(NamedTuple):
    """A part of a tensor and the rank of the job that writes it."""

    cut: Region | None
    writer: int


class FilePlan(NamedTuple):
    """All files of tensors of a checkpoint.

    Attributes:
        files: The layout of each file, by its name.
        groups: The names of the files of each group.
        shares: The parts of each tensor, by file and name, in their order along the axis.
    """

    files: Mapping[str, Layout]
    groups: Mapping[str, tuple[str, ...]]
    shares: Mapping[str, Mapping[str, tuple[Share, ...]]]

    def header_writer(self, file: str) -> int:
        """Returns the rank that writes the header of a file."""
        first = next(iter(self.shares[file].values()))
        return first[0].writer

    def parts_of(self, rank: int) -> list[tuple[TensorName, str, Region | None]]:
        """Returns name, file and part of each piece that a rank writes, in the files' order."""
        return [
            (TensorName(group, name), file, share.cut)
            for group, files in self.groups.items()
            for file in files
            for name, ones in self.shares[file].items()
            for share in ones
            if share.writer == rank
        ]


class Holding(NamedTuple):
    """The part that one rank holds of a tensor, without values; see :class:`LocalTensor`."""

    tensor: Described
    cut: Region | None
    differs: bool


class Inventory(NamedTuple):
    """The parts that one rank holds of all tensors."""

    tensors: Mapping[TensorName, Holding]

    @classmethod
    def of(cls, local: Mapping[TensorName, LocalTensor]) -> Inventory:
        """Describes the tensors that a rank holds.

        Raises:
            CheckpointError: safetensors lacks the dtype of a tensor.
        """
        holdings = {
            name: Holding(one.described, one.cut, one.differs) for name, one in local.items()
        }
        for name, holding in holdings.items():
            if holding.tensor.dtype not in CODES:
                raise CheckpointError(
                    f"{name} cannot be saved: safetensors has no {holding.tensor.dtype}",
                    expected=", ".join(CODES),
                    fix="store it as two tensors, or in another dtype",
                )
        return cls(holdings)

    def to_json(self) -> str:
        """Returns a text for :meth:`from_json`."""
        return json.dumps([[*name, *holding] for name, holding in self.tensors.items()])

    @classmethod
    def from_json(cls, text: str) -> Inventory:
        """Returns the inventory in a text of :meth:`to_json`."""
        return cls(
            {
                TensorName(group, name): Holding(
                    Described(dtype, tuple(shape)), None if cut is None else Region(*cut), differs
                )
                for group, name, (dtype, shape), cut, differs in json.loads(text)
            }
        )


def plan_files(inventories: Sequence[Inventory]) -> FilePlan:
    """Plans the files for the inventories of all ranks, in the ranks' order.

    Raises:
        CheckpointError: Ranks have different tensors under one name, or no rank holds some part.
    """
    whole: dict[TensorName, Described] = {}
    holders: dict[TensorName, dict[Region | None, list[int]]] = {}
    for rank, inventory in enumerate(inventories):
        for name, (tensor, cut, differs) in inventory.tensors.items():
            if whole.setdefault(name, tensor) != tensor:
                raise CheckpointError(
                    f"the ranks do not have the same {name}",
                    expected=str(whole[name]),
                    got=f"{tensor} on rank {rank} of the job",
                    fix="build the same model and the same optimizer on every rank",
                )
            ranks = holders.setdefault(name, {}).setdefault(cut, [])
            if not (differs and ranks):
                ranks.append(rank)
    shares = _shares(whole, holders, len(inventories))
    files: dict[str, Layout] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for group in GROUPS:
        names = sorted((name for name in whole if name.group == group), key=_in_order)
        layouts = _files(group, {name.name: whole[name] for name in names})
        if layouts:
            groups[group] = tuple(layouts)
        files.update(layouts)
    return FilePlan(
        files,
        groups,
        {
            file: {name: shares[TensorName(group, name)] for name in files[file].tensors}
            for group, names in groups.items()
            for file in names
        },
    )


def _in_order(name: TensorName) -> list[str | int]:
    """Returns a sort key that puts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in _NUMBER.split(name.name)]


def _files(group: str, tensors: Mapping[str, Described]) -> dict[str, Layout]:
    contents: list[dict[str, Described]] = []
    filled = FILE_BYTES
    for name, tensor in tensors.items():
        if filled + tensor.nbytes > FILE_BYTES and filled:
            contents.append({})
            filled = 0
        contents[-1][name] = tensor
        filled += tensor.nbytes
    count = len(contents)
    return {
        f"{group}-{number:05d}-of-{count:05d}.safetensors": layout_of(content)
        for number, content in enumerate(contents, 1)
    }


def _shares(
    whole: Mapping[TensorName, Described],
    holders: Mapping[TensorName, Mapping[Region | None, Sequence[int]]],
    ranks: int,
) -> dict[TensorName, tuple[Share, ...]]:
    """Chooses the writer of each part of each tensor, the largest parts first."""
    load = [0] * ranks
    shares: dict[TensorName, list[Share]] = {name: [] for name in whole}
    parts = [
        (math.prod(tensor.shape if cut is None else cut.part(tensor.shape)), name, cut)
        for name, tensor in whole.items()
        for cut in _tiling(name, tensor, [*holders[name]])
    ]
    parts.sort(key=lambda part: (-part[0], _in_order(part[1])))
    for size, name, cut in parts:
        writer = min(holders[name][cut], key=lambda rank: (load[rank], rank))
        load[writer] += size * whole[name].itemsize
        shares[name].append(Share(cut, writer))
    return {
        name: tuple(sorted(ones, key=lambda share: 0 if share.cut is None else share.cut.start))
        for name, ones in shares.items()
    }


def _tiling(name: TensorName, tensor: Described, cuts: list[Region | None]) -> list[Region | None]:
    """Returns parts that ranks hold and that make up the whole tensor."""
    everything = [cut for cut in cuts if cut is None or cut.stop - cut.start == cut.size]
    if everything:
        return everything[:1]
    ordered = sorted(cut for cut in cuts if cut is not None)
    if not is_whole(ordered, tensor.shape):
        raise CheckpointError(
            f"the ranks do not hold the whole of {name}",
            expected=str(tensor),
            got=", ".join(f"{cut.start} to {cut.stop} of axis {cut.axis}" for cut in ordered),
            fix="build the same model on every rank, with the same mp_degree",
        )
    return [*ordered]


def indexes(plan: FilePlan) -> dict[str, str]:
    """Returns the text of the index file of each group, which maps tensors to files.

    The format is Hugging Face's; PaddleNLP's unified checkpoint has such a file for each group.
    """
    indexes_by_file = {}
    for group, files in plan.groups.items():
        places = {name: file for file in files for name in plan.files[file].tensors}
        total = sum(t.tensor.nbytes for file in files for t in plan.files[file].tensors.values())
        index: dict[str, object] = {"metadata": {"total_size": total}, "weight_map": places}
        if group == OPTIMIZER:
            index["master_weights"] = MASTER_WEIGHTS in plan.groups
        indexes_by_file[f"{group}.safetensors.index.json"] = json.dumps(
            index, sort_keys=True, indent=1
        )
    return indexes_by_file
