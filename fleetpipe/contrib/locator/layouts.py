"""Finds which shard of the twin's tensors, and which of its rows, a rank has.

``match`` finds the rows of each replica's micro-batches by their contents. ``layouts`` yields how a
tensor may be split: this is not recorded, and follows from both shapes and from the numbers.
``WholeTensors`` joins the ranks' shards to the tensors of one device.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.compare.differences import gap
from fleetpipe.contrib.locator import OTHER_SAMPLES, REORDERED, SAME_SAMPLES
from fleetpipe.contrib.locator.record import Meaning, RankTensors, Record

#: A row of the twin's data: its micro-batch, and its index there.
Row = tuple[int, int]
#: By replica and micro-batch, the bytes of each row.
Samples = dict[int, dict[int, list[bytes]]]

#: The axes that may split a dimension, alone or together; the first one splits first.
_SPLITTING = (
    *(("mp",), ("sep",), ("cp",), ("ep",), ("sharding",), ("dp",)),
    *(("sep", "mp"), ("cp", "mp"), ("cp", "sep"), ("sep", "cp"), ("cp", "sep", "mp")),
)
#: The numbers of parts of fused matrices: q, k and v; gate and up; four gates. Each part is split.
FUSED = (1, 3, 2, 4)


class SampleRows(NamedTuple):
    """The twin's rows that one micro-batch of a replica has.

    Attributes:
        places: The twin's row for each row.
        whole: The twin's micro-batch that has exactly these rows in this order, or None.
    """

    places: tuple[Row, ...]
    whole: int | None


class Matched(NamedTuple):
    """The samples of a step, found in the twin's data.

    Attributes:
        rows: The rows by replica and micro-batch; empty if samples cannot be told apart.
        wrong: A cause with ``{}`` for the replica, and the replica; None if the samples are right.
    """

    rows: dict[tuple[int, int], SampleRows]
    wrong: tuple[str, int] | None


def match(job: Record, twin: Record, step: int) -> Matched:
    """Finds the samples of each replica in the twin's batches."""
    (single,) = twin.ranks
    expected = signatures(single, step)
    samples: Samples = {}
    for rank in job.ranks:
        replica = job.replica(rank)
        if replica not in samples and (of_rank := signatures(rank, step)):
            samples[replica] = of_rank
    waiting: dict[bytes, list[Row]] = defaultdict(list)
    for number, of_micro_batch in expected.items():
        for row, signature in enumerate(of_micro_batch):
            waiting[signature].append((number, row))
    taken = {signature: list(rows) for signature, rows in waiting.items()}
    rows: dict[tuple[int, int], SampleRows] = {}
    missing: list[int] = []
    for replica in sorted(samples):
        for number, of_micro_batch in samples[replica].items():
            places = []
            for signature in of_micro_batch:
                free = taken.get(signature) or waiting.get(signature)
                if not free:
                    missing.append(replica)
                    break
                places.append(free.pop(0) if free is taken.get(signature) else free[0])
            else:
                first = places[0][0]
                same = places == [(first, row) for row in range(len(expected[first]))]
                rows[replica, number] = SampleRows(tuple(places), first if same else None)
    # Ranks with parts of sequences have no row of the twin's.
    split = any(job.degrees.get(axis, 1) > 1 for axis in ("sep", "cp", "mp", "ep"))
    if missing:
        return Matched(rows, None if split and not rows else (OTHER_SAMPLES, missing[0]))
    return Matched(rows, _find_repeated(samples, expected) or _find_reordered(samples, expected))


def _find_repeated(samples: Samples, expected: dict[int, list[bytes]]) -> tuple[str, int] | None:
    """Finds a replica that reads another's samples although the twin reads them only once."""
    wanted = Counter(chain.from_iterable(expected.values()))
    here: Counter[bytes] = Counter()
    for replica, of_replica in sorted(samples.items()):
        counts = Counter(chain.from_iterable(of_replica.values()))
        if any(here[row] and here[row] + n > wanted[row] for row, n in counts.items()):
            return SAME_SAMPLES, replica
        here += counts
    return None


def _find_reordered(samples: Samples, expected: dict[int, list[bytes]]) -> tuple[str, int] | None:
    """Finds a replica that reads its samples in another order, if others have the twin's order."""

    def in_order(of_replica: dict[int, list[bytes]]) -> bool:
        rest = chain.from_iterable(expected.values())
        return all(row in rest for row in chain.from_iterable(of_replica.values()))

    bad = [replica for replica, rows in sorted(samples.items()) if not in_order(rows)]
    return (REORDERED, bad[0]) if 0 < len(bad) < len(samples) else None


def signatures(rank: RankTensors, step: int) -> dict[int, list[bytes]]:
    """Returns the bytes of each row of the inputs, by micro-batch."""
    tensors: dict[int, list[np.ndarray]] = defaultdict(list)
    for place, tensor in rank.of(step, "data").items():
        if place.part.startswith("input") and tensor.ndim:
            tensors[place.micro_batch].append(tensor)
    return {
        number: [
            b"".join(t[row].tobytes() for t in parts if len(t) == len(parts[0]))
            for row in range(len(parts[0]))
        ]
        for number, parts in sorted(tensors.items())
    }


def is_sample(label: np.ndarray, place: Meaning, twin: RankTensors) -> bool:
    """Whether a label belongs to a sample of the twin's, or consists of whole numbers.

    Other labels, such as weights or scaled targets, may be computed: they are not compared, only
    their loss is.
    """
    wholes = (t for p, t in twin.of(place.step, "data").items() if p.part == place.part)
    rows = {row.tobytes() for whole in wholes if whole.ndim for row in whole}
    return label.dtype.kind != "f" or (label.ndim > 0 and all(r.tobytes() in rows for r in label))


def gather(
    rows: SampleRows, by_micro_batch: dict[int, np.ndarray], counts: int
) -> list[np.ndarray]:
    """Returns the possible tensors of the twin for the rows of a replica's micro-batch.

    Args:
        rows: The places of the rows.
        by_micro_batch: The twin's tensor of each micro-batch.
        counts: The number of rows in a micro-batch of the twin.

    Returns:
        The twin's tensor if its micro-batch has the same rows; else the rows along the first and
        along the second dimension, and the twin's tensor, for a tensor without rows.
    """
    first = rows.places[0][0] if rows.whole is None else rows.whole
    if first not in by_micro_batch:
        return []
    if rows.whole is not None:
        return [by_micro_batch[first]]
    candidates = []
    for axis in (0, 1):
        pieces = []
        for number, row in rows.places:
            tensor = by_micro_batch.get(number)
            if tensor is None or tensor.ndim <= axis or tensor.shape[axis] % counts:
                break
            size = tensor.shape[axis] // counts
            pieces.append(tensor.take(range(row * size, (row + 1) * size), axis=axis))
        else:
            candidates.append(np.concatenate(pieces, axis=axis))
    return [*candidates, by_micro_batch[first]]


class DimensionCut(NamedTuple):
    """The split of one dimension of a tensor.

    Attributes:
        dimension: The dimension of the tensor.
        axes: The axes of the mesh.
        parts: The number of parts of the dimension, each of which is split.
        zigzag: Whether a rank of the first axis has one piece from the front and one from the
            back, which the other axes split.
    """

    dimension: int
    axes: tuple[str, ...]
    parts: int = 1
    zigzag: bool = False

    def indices(
        self, size: int, coordinate: Mapping[str, int], degrees: Mapping[str, int]
    ) -> np.ndarray:
        """Returns which of the ``size`` indices of the dimension a rank has."""
        axes, here = self.axes, np.arange(size)
        if self.zigzag:
            ranks, number = degrees[axes[0]], coordinate.get(axes[0], 0)
            pieces = here.reshape(2 * ranks, -1)
            here, axes = pieces[[number, 2 * ranks - 1 - number]].reshape(-1), axes[1:]
        place, ranks = 0, 1
        for axis in axes:
            place = place * degrees[axis] + coordinate.get(axis, 0)
            ranks *= degrees[axis]
        return here.reshape(self.parts, ranks, -1)[:, place].reshape(-1)


#: How a tensor is split, dimension by dimension; () if each rank has the full tensor.
Layout = tuple[DimensionCut, ...]


def layouts(
    whole: Sequence[int], here: Sequence[int], degrees: Mapping[str, int]
) -> Iterator[Layout]:
    """Yields the possible splits of a tensor, the likely ones first.

    Args:
        whole: The shape of the full tensor.
        here: The shape of the rank's shard.
        degrees: The degree of each axis with a degree above 1.
    """
    if len(whole) != len(here):
        return
    ways = [
        list(_cuts(dimension, size, part, degrees))
        for dimension, (size, part) in enumerate(zip(whole, here))
        if size != part
    ]
    # An axis splits one dimension only; fused matrices are the less likely case.
    axes = {way: [axis for cut in way for axis in cut.axes] for way in itertools.product(*ways)}
    apart = [way for way, used in axes.items() if len(used) == len({*used})]
    yield from sorted(apart, key=lambda way: sum(cut.parts > 1 for cut in way))[:24]


def _cuts(
    dimension: int, size: int, part: int, degrees: Mapping[str, int]
) -> Iterator[DimensionCut]:
    """Yields the ways to split ``size`` indices of a dimension so that a rank has ``part``."""
    for axes in _SPLITTING:
        ranks = int(np.prod([degrees.get(axis, 1) for axis in axes]))
        if ranks == 1 or part * ranks != size or not all(degrees.get(a, 1) > 1 for a in axes):
            continue
        if axes[0] == "cp" and size % (2 * degrees["cp"]) == 0:
            yield DimensionCut(dimension, axes, zigzag=True)
        for parts in FUSED:
            if part % parts == 0:
                yield DimensionCut(dimension, axes, parts)


def places_of(
    shape: Sequence[int], layout: Layout, coordinate: Mapping[str, int], degrees: Mapping[str, int]
) -> tuple[Any, ...]:
    """Returns the index that takes a rank's shard out of a full tensor of a shape."""
    if not layout:
        return (...,)
    places: list[np.ndarray] = [np.arange(size) for size in shape]
    for cut in layout:
        places[cut.dimension] = cut.indices(shape[cut.dimension], coordinate, degrees)
    return np.ix_(*places)


def parts_of(
    whole: np.ndarray,
    shape: tuple[int, ...],
    coordinate: Mapping[str, int],
    degrees: Mapping[str, int],
) -> Iterator[np.ndarray]:
    """Yields the possible shards of a full tensor that a rank has, from the shape of its shard."""
    for layout in layouts(whole.shape, shape, degrees):
        yield whole[places_of(whole.shape, layout, coordinate, degrees)]


class WholeTensors:
    """The parameters, gradients and samples of a job, joined to those of one device."""

    def __init__(self, job: Record) -> None:
        self._job = job
        self._layouts: dict[str, Layout] = {}
        self._sources_of: dict[int, dict[bytes, tuple[int, int, list[bytes]]]] = {}
        self._values = [self._by_step(rank) for rank in job.ranks]

    def _by_step(self, rank: RankTensors) -> list[dict[str, np.ndarray]]:
        """Returns a rank's parameters at the beginning of each step."""
        values: list[dict[str, np.ndarray]] = []
        now: dict[str, np.ndarray] = {}
        for step in range(self._job.steps):
            now = {**now, **rank.names(step, "initial")}
            values.append(now)
            # Running statistics, which Paddle makes parameters, are recorded as buffers.
            now = {**now, **rank.names(step, "update"), **rank.names(step, "buffer")}
        return values

    def parameter(self, step: int, name: str, like: np.ndarray) -> np.ndarray | None:
        """Returns a parameter at the beginning of a step; None if the job does not have it.

        Args:
            step: The step.
            name: The parameter.
            like: The twin's own initial value, of the whole shape.
        """
        if step >= self._job.steps:
            return None
        return self._assemble(name, [values[step].get(name) for values in self._values], like)

    def gradient(self, step: int, name: str, like: np.ndarray) -> np.ndarray | None:
        """Returns the gradient with which a parameter was stepped; None if the job has none."""
        rate = Meaning(step, "optimizer input", "", part="learning rate")
        parts = [
            rank.names(step, "reduction").get(name) if name in rank.listed(rate) else None
            for rank in self._job.ranks
        ]
        return self._assemble(name, parts, like)

    def _assemble(
        self, name: str, parts: Sequence[np.ndarray | None], like: np.ndarray
    ) -> np.ndarray | None:
        """Returns the full tensor of the ranks' parts; None if they do not make one."""
        wholes = [part for part in parts if part is not None and part.shape == like.shape]
        if wholes:
            if self._job.degrees.get("sharding", 1) == 1:
                return wholes[0]
            # Only the rank whose optimizer shard has the parameter has the reduced gradient.
            nearest: np.ndarray = min(wholes, key=lambda part: gap(part, like))
            return nearest
        layout = self._layout(name, parts, like)
        return None if layout is None else self._join(parts, layout, like)

    def _join(
        self, parts: Sequence[np.ndarray | None], layout: Layout, like: np.ndarray
    ) -> np.ndarray:
        """Returns a copy of ``like`` with the ranks' parts put into it."""
        whole: np.ndarray = like.copy()
        for rank, part in zip(self._job.ranks, parts):
            if part is not None:
                whole[self._places(rank, layout, like)] = part
        return whole

    def _places(self, rank: RankTensors, layout: Layout, whole: np.ndarray) -> tuple[Any, ...]:
        return places_of(whole.shape, layout, rank.coordinate, self._job.degrees)

    def _layout(
        self, name: str, parts: Sequence[np.ndarray | None], like: np.ndarray
    ) -> Layout | None:
        """Returns the layout that is nearest to the twin's values; the likeliest if these tie."""
        if name not in self._layouts:
            apart = self._apart(parts, like)
            if not apart:
                return None
            nearest = min(apart, key=lambda layout: apart[layout])
            if sum(far <= 2 * apart[nearest] for far in apart.values()) > 1:
                # Constants show no layout; their gradients will.
                return next(iter(apart))
            self._layouts[name] = nearest
        return self._layouts[name]

    def _apart(self, parts: Sequence[np.ndarray | None], like: np.ndarray) -> dict[Layout, float]:
        """Returns for each layout the difference between the ranks' parts and a full tensor."""
        held = [(r, p) for r, p in zip(self._job.ranks, parts) if p is not None]
        ways = layouts(like.shape, held[0][1].shape, self._job.degrees) if held else ()
        return {way: sum(gap(p, like[self._places(r, way, like)]) for r, p in held) for way in ways}

    def unclear(self, drawn: Mapping[str, np.ndarray]) -> dict[str, bool]:
        """Finds the parameters whose layout the twin's values do not show.

        Args:
            drawn: The twin's parameters before it was given the job's.

        Returns:
            By name whether the ranks have the twin's numbers at other places, or other numbers.
        """
        unclear: dict[str, bool] = {}
        for name, like in drawn.items():
            held = [rank.names(0, "initial").get(name) for rank in self._job.ranks]
            apart = self._apart(held, like)
            if len(apart) > 1 and min(apart.values()) > 0:
                numbers = np.unique([part for part in held if part is not None])
                unclear[name] = bool(np.array_equal(numbers, np.unique(like)))
        return unclear

    def mask(self, place: Meaning, shape: tuple[int, ...], twin: RankTensors) -> np.ndarray | None:
        """Returns the dropout mask that the job used for some samples; None if it has none.

        Args:
            place: The place of the twin's dropout.
            shape: The shape of its output.
            twin: The twin's tensors, with at least the samples.
        """
        samples = signatures(twin, place.step).get(place.micro_batch, [])
        matched = [self._sources(place.step).get(sample) for sample in samples]
        sources = [source for source in matched if source is not None]
        if len(sources) < len(samples) or not samples:
            # Ranks with parts of sequences: the contents do not show the samples.
            counts = [p.micro_batch for rank in self._job.ranks for p in rank.tensors]
            replica, number = divmod(place.micro_batch, 1 + max(counts))
            there = place._replace(micro_batch=number)
            data = twin.of(place.step, "data").items()
            whole = {p.part: t for p, t in data if p.micro_batch == place.micro_batch}
            return self._of_members(there, replica, shape, whole)
        for axis in range(min(2, len(shape))):
            pieces = []
            for sample, (replica, number, rows) in zip(samples, sources):
                size = shape[axis] // len(samples) * len(rows)
                there = place._replace(micro_batch=number)
                of_all = self._of_members(there, replica, (*shape[:axis], size, *shape[axis + 1 :]))
                if of_all is not None:
                    pieces.append(np.split(of_all, len(rows), axis)[rows.index(sample)])
            if len(pieces) == len(samples):
                return np.concatenate(pieces, axis)
        return None

    def _sources(self, step: int) -> dict[bytes, tuple[int, int, list[bytes]]]:
        """Returns for each sample its replica, its micro-batch and all samples of that."""
        if step not in self._sources_of:
            self._sources_of[step] = {
                sample: (self._job.replica(rank), number, rows)
                for rank in reversed(self._job.ranks)
                for number, rows in signatures(rank, step).items()
                for sample in rows
            }
        return self._sources_of[step]

    def _of_members(
        self,
        place: Meaning,
        replica: int,
        shape: tuple[int, ...],
        samples: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray | None:
        """Joins the parts of a replica's ranks to a tensor of a shape; None if no rank has any."""
        parts = self._of_replica(replica, place)
        first = next((part for part in parts if part is not None), None)
        if first is None:
            return None
        ways = list(layouts(shape, first.shape, self._job.degrees))
        if any(self._in_order(place, replica, *sample) for sample in (samples or {}).items()):
            ways.sort(key=lambda way: any(cut.zigzag for cut in way))
        joined = {way: self._join(parts, way, np.zeros(shape, first.dtype)) for way in ways}
        # Under a wrong layout ranks with different values share a part.
        fitting = (whole for way, whole in joined.items() if self._apart(parts, whole)[way] == 0)
        return next(fitting, next(iter(joined.values()), None))

    def _of_replica(self, replica: int, place: Meaning) -> list[np.ndarray | None]:
        ranks = self._job.ranks
        return [r.tensors.get(place) if self._job.replica(r) == replica else None for r in ranks]

    def _in_order(self, place: Meaning, replica: int, part: str, whole: np.ndarray) -> bool:
        """Whether the ranks have successive pieces of a sample, and certainly no zigzag ones."""
        here = Meaning(place.step, "data", "", place.micro_batch, part)
        apart = self._apart(self._of_replica(replica, here), whole)
        fitting = [way for way, far in apart.items() if way and far == 0]
        return bool(fitting) and not any(cut.zigzag for way in fitting for cut in way)

    def batches(self, step: int, kind: str) -> list[dict[str, np.ndarray]]:
        """Returns the inputs or labels of all replicas' micro-batches, one after another."""
        batches: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        for rank in self._job.ranks:
            for place, tensor in rank.of(step, "data").items():
                if place.part.startswith(kind):
                    key = self._job.replica(rank), place.micro_batch
                    batches.setdefault(key, {}).setdefault(place.part[len(kind) :], tensor)
        return [batches[key] for key in sorted(batches)]
