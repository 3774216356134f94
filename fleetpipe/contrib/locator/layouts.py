"""Finds which shard of the twin's tensors, and which rows of its samples, a rank has.

The twin is the same script on one device. ``match_samples`` finds the rows of each replica's
micro-batches by their contents. ``possible_layouts`` yields how a tensor may be split: this is not
recorded, and follows from both shapes and from the numbers. ``FullTensors`` joins the ranks'
shards to the tensors of one device.
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
from fleetpipe.contrib.locator.record import RankTensors, Record, TensorKey

#: A row of the twin's data: its micro-batch, and its index there.
Row = tuple[int, int]
#: By replica and micro-batch, the bytes of each row.
Samples = dict[int, dict[int, list[bytes]]]

#: The axes that may split a dimension, alone or together; the first one splits first.
_AXES_OF_A_DIMENSION = (
    *(("mp",), ("sep",), ("cp",), ("ep",), ("sharding",), ("dp",)),
    *(("sep", "mp"), ("cp", "mp"), ("cp", "sep"), ("sep", "cp"), ("cp", "sep", "mp")),
)
#: How many matrices may be fused into one: one; q, k and v; gate and up; four gates. Each of them
#: is split by itself.
_FUSED = (1, 3, 2, 4)
#: The most layouts of a tensor that are tried.
_MOST_LAYOUTS = 24


class SampleRows(NamedTuple):
    """The one-device twin's rows that one micro-batch of a replica has.

    Attributes:
        places: For each row of the micro-batch, the twin's row with the same content.
        micro_batch: The twin's micro-batch that has exactly these rows in this order, or None.
    """

    places: tuple[Row, ...]
    micro_batch: int | None


class SampleMatch(NamedTuple):
    """Where the samples of a step of the job are in the one-device twin's data.

    Attributes:
        rows: The twin's rows by replica and micro-batch; empty if samples cannot be told apart.
        wrong: The cause, with ``{}`` for the replica, and the number of the first replica with
            wrong samples; None if all are right.
    """

    rows: dict[tuple[int, int], SampleRows]
    wrong: tuple[str, int] | None


def match_samples(job: Record, twin: Record, step: int) -> SampleMatch:
    """Finds each replica's samples in the twin's batches of a step; equal bytes, equal sample."""
    (single,) = twin.ranks
    expected = bytes_of_rows(single, step)
    samples: Samples = {}
    for rank in job.ranks:
        replica = job.replica(rank)
        if replica not in samples and (of_rank := bytes_of_rows(rank, step)):
            samples[replica] = of_rank
    twin_rows: dict[bytes, list[Row]] = defaultdict(list)
    for number, contents in expected.items():
        for row, content in enumerate(contents):
            twin_rows[content].append((number, row))
    # By content, the rows of the twin that no row of the job is matched with yet.
    unused = {content: list(rows) for content, rows in twin_rows.items()}
    matched: dict[tuple[int, int], SampleRows] = {}
    missing: list[int] = []  # the replicas with samples that the twin does not have
    for replica in sorted(samples):
        for number, contents in samples[replica].items():
            if not all(content in twin_rows for content in contents):
                missing.append(replica)
                continue
            # Each of several equal rows is used once, as long as there are enough.
            rows = [unused[c].pop(0) if unused[c] else twin_rows[c][0] for c in contents]
            first = rows[0][0]
            same = rows == [(first, row) for row in range(len(expected[first]))]
            matched[replica, number] = SampleRows(tuple(rows), first if same else None)
    # Ranks with parts of sequences have no row of the twin's.
    split = any(job.degrees.get(axis, 1) > 1 for axis in ("sep", "cp", "mp", "ep"))
    if missing:
        return SampleMatch(matched, None if split and not matched else (OTHER_SAMPLES, missing[0]))
    wrong = _find_repeated(samples, expected) or _find_reordered(samples, expected)
    return SampleMatch(matched, wrong)


def _find_repeated(samples: Samples, expected: dict[int, list[bytes]]) -> tuple[str, int] | None:
    """Finds a replica that reads another replica's samples, which one device reads only once.

    Returns the field ``wrong`` of :class:`SampleMatch`: cause and number of the replica, or None.
    """
    twin_counts = Counter(chain.from_iterable(expected.values()))
    earlier: Counter[bytes] = Counter()  # of the replicas before
    for replica, of_replica in sorted(samples.items()):
        counts = Counter(chain.from_iterable(of_replica.values()))
        if any(earlier[row] and earlier[row] + n > twin_counts[row] for row, n in counts.items()):
            return SAME_SAMPLES, replica
        earlier += counts
    return None


def _find_reordered(samples: Samples, expected: dict[int, list[bytes]]) -> tuple[str, int] | None:
    """Finds a replica that reads its samples in another order, if others have the twin's order.

    Returns the cause and the number of the replica, or None, as :func:`_find_repeated` does.
    """

    def in_order(of_replica: dict[int, list[bytes]]) -> bool:
        # Each search goes on behind the row that the one before has found.
        rest = chain.from_iterable(expected.values())
        return all(row in rest for row in chain.from_iterable(of_replica.values()))

    bad = [replica for replica, rows in sorted(samples.items()) if not in_order(rows)]
    return (REORDERED, bad[0]) if 0 < len(bad) < len(samples) else None


def bytes_of_rows(rank: RankTensors, step: int) -> dict[int, list[bytes]]:
    """Returns the bytes of each input row (sample) of a rank in a step, by micro-batch."""
    tensors: dict[int, list[np.ndarray]] = defaultdict(list)
    for key, tensor in rank.in_phase(step, "data").items():
        if key.role.startswith("input") and tensor.ndim:
            tensors[key.micro_batch].append(tensor)
    return {
        number: [
            b"".join(t[row].tobytes() for t in parts if len(t) == len(parts[0]))
            for row in range(len(parts[0]))
        ]
        for number, parts in sorted(tensors.items())
    }


def is_sample(label: np.ndarray, key: TensorKey, twin: RankTensors) -> bool:
    """Returns whether a label is comparable: of integers, or in the data of the twin too.

    Other labels, such as weights or scaled targets, may be computed: only their loss is compared.

    Args:
        label: The label.
        key: The key of the label.
        twin: The tensors of one device.
    """
    full_tensors = (t for p, t in twin.in_phase(key.step, "data").items() if p.role == key.role)
    twin_rows = {row.tobytes() for full in full_tensors if full.ndim for row in full}
    if label.dtype.kind != "f":
        return True
    return label.ndim > 0 and all(row.tobytes() in twin_rows for row in label)


def gather_twin_rows(
    rows: SampleRows, by_micro_batch: dict[int, np.ndarray], counts: int
) -> list[np.ndarray]:
    """Returns the tensors of the one-device twin that may have the rows of a replica's micro-batch.

    Args:
        rows: The twin's rows with the micro-batch's contents.
        by_micro_batch: The twin's tensor of each micro-batch.
        counts: The number of rows in a micro-batch of the twin.

    Returns:
        The twin's tensor if its micro-batch has the same rows; else the rows along the first and
        along the second dimension, and the twin's tensor, for a tensor without rows.
    """
    first = rows.places[0][0] if rows.micro_batch is None else rows.micro_batch
    if first not in by_micro_batch:
        return []
    if rows.micro_batch is not None:
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
    """How one dimension of a tensor is split among ranks.

    Attributes:
        dimension: The dimension of the tensor.
        axes: The axes of the mesh that split it, the first one first.
        parts: How many matrices are fused along the dimension; each is split by itself.
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
        """Returns which of the ``size`` indices along the dimension a rank has."""
        axes, indices = self.axes, np.arange(size)
        if self.zigzag:
            ranks, number = degrees[axes[0]], coordinate.get(axes[0], 0)
            pieces = indices.reshape(2 * ranks, -1)
            indices, axes = pieces[[number, 2 * ranks - 1 - number]].reshape(-1), axes[1:]
        # The rank's number among those along all (other) axes, and how many these are.
        rank, ranks = 0, 1
        for axis in axes:
            rank = rank * degrees[axis] + coordinate.get(axis, 0)
            ranks *= degrees[axis]
        return indices.reshape(self.parts, ranks, -1)[:, rank].reshape(-1)


#: How a tensor is split, dimension by dimension; () if each rank has the full tensor.
Layout = tuple[DimensionCut, ...]


def possible_layouts(
    full: Sequence[int], shard: Sequence[int], degrees: Mapping[str, int]
) -> Iterator[Layout]:
    """Yields the possible splits of a tensor, the likely ones first.

    Args:
        full: The shape of the full tensor.
        shard: The shape of a rank's shard.
        degrees: The degree of each axis with a degree above 1.
    """
    if len(full) != len(shard):
        return
    cuts_by_dimension = [
        list(_ways_to_split(dimension, size, part, degrees))
        for dimension, (size, part) in enumerate(zip(full, shard))
        if size != part
    ]
    # An axis splits one dimension only; fused matrices are the less likely case.
    possible = []
    for layout in itertools.product(*cuts_by_dimension):
        axes = [axis for cut in layout for axis in cut.axes]
        if len(axes) == len({*axes}):
            possible.append(layout)
    possible.sort(key=lambda layout: sum(cut.parts > 1 for cut in layout))
    yield from possible[:_MOST_LAYOUTS]


def _ways_to_split(
    dimension: int, size: int, part: int, degrees: Mapping[str, int]
) -> Iterator[DimensionCut]:
    """Yields the ways to split a dimension of ``size`` so that a rank has ``part`` indices of it.

    Args:
        dimension: The number of the dimension.
        size: The size of the full tensor in it.
        part: The size of the rank's shard in it.
        degrees: The degree of each axis with a degree above 1.
    """
    for axes in _AXES_OF_A_DIMENSION:
        ranks = int(np.prod([degrees.get(axis, 1) for axis in axes]))
        if ranks == 1 or part * ranks != size or not all(degrees.get(a, 1) > 1 for a in axes):
            continue
        if axes[0] == "cp" and size % (2 * degrees["cp"]) == 0:
            yield DimensionCut(dimension, axes, zigzag=True)
        for parts in _FUSED:
            if part % parts == 0:
                yield DimensionCut(dimension, axes, parts)


def index_of_shard(
    shape: Sequence[int], layout: Layout, coordinate: Mapping[str, int], degrees: Mapping[str, int]
) -> tuple[Any, ...]:
    """Returns the NumPy index that takes a rank's shard out of a full tensor.

    Args:
        shape: The shape of the full tensor.
        layout: How it is split.
        coordinate: The rank's coordinate on each axis.
        degrees: The degree of each axis with a degree above 1.
    """
    if not layout:
        return (...,)
    indices: list[np.ndarray] = [np.arange(size) for size in shape]
    for cut in layout:
        indices[cut.dimension] = cut.indices(shape[cut.dimension], coordinate, degrees)
    return np.ix_(*indices)


def possible_shards(
    full: np.ndarray,
    shape: tuple[int, ...],
    coordinate: Mapping[str, int],
    degrees: Mapping[str, int],
) -> Iterator[np.ndarray]:
    """Yields what a rank may have of a full tensor, for each possible layout of the tensor.

    Args:
        full: The full tensor.
        shape: The shape of the rank's shard.
        coordinate: The rank's coordinate on each axis.
        degrees: The degree of each axis with a degree above 1.
    """
    for layout in possible_layouts(full.shape, shape, degrees):
        yield full[index_of_shard(full.shape, layout, coordinate, degrees)]


class FullTensors:
    """Joins ranks' parts of parameters, gradients, dropout masks and input rows to full tensors."""

    def __init__(self, job: Record) -> None:
        """Takes the tensors of the job's ranks."""
        self._job = job
        #: By name, the layout of a parameter once its values have shown it.
        self._layouts: dict[str, Layout] = {}
        #: By step, the results of :meth:`_sources`.
        self._sources_of: dict[int, dict[bytes, tuple[int, int, list[bytes]]]] = {}
        #: By position in the job's ranks and by step, the rank's parameters by name.
        self._values = [self._parameters_by_step(rank) for rank in job.ranks]

    def _parameters_by_step(self, rank: RankTensors) -> list[dict[str, np.ndarray]]:
        """Returns a rank's parameters by name at the beginning of each step."""
        by_step: list[dict[str, np.ndarray]] = []
        now: dict[str, np.ndarray] = {}
        for step in range(self._job.steps):
            now = {**now, **rank.by_name(step, "initial")}
            by_step.append(now)
            # Running statistics, which Paddle makes parameters, are recorded as buffers.
            now = {**now, **rank.by_name(step, "update"), **rank.by_name(step, "buffer")}
        return by_step

    def parameter(self, step: int, name: str, like: np.ndarray) -> np.ndarray | None:
        """Returns a parameter at the beginning of a step; None if the job does not have it.

        Args:
            step: The step.
            name: The parameter.
            like: The one-device twin's own initial value, of the full shape.
        """
        if step >= self._job.steps:
            return None
        return self._assemble(name, [values[step].get(name) for values in self._values], like)

    def gradient(self, step: int, name: str, like: np.ndarray) -> np.ndarray | None:
        """Returns the gradient by which a job's optimizer stepped; None if there is none.

        Args:
            step: The step.
            name: The parameter.
            like: The one-device twin's own gradient, of the full shape.
        """
        rate = TensorKey(step, "optimizer input", "", role="learning rate")
        gradients: list[np.ndarray | None] = []
        for rank in self._job.ranks:
            steps = name in rank.optimizer_parameters(rate)
            gradients.append(rank.by_name(step, "reduction").get(name) if steps else None)
        return self._assemble(name, gradients, like)

    def _assemble(
        self, name: str, parts: Sequence[np.ndarray | None], like: np.ndarray
    ) -> np.ndarray | None:
        """Returns the full tensor of a parameter or gradient; None if no rank's part shows it.

        Args:
            name: The parameter.
            parts: By rank, the full tensor, the rank's shard, or None.
            like: The one-device twin's tensor.
        """
        full_tensors = [part for part in parts if part is not None and part.shape == like.shape]
        if full_tensors:
            if self._job.degrees.get("sharding", 1) == 1:
                return full_tensors[0]
            # Only the rank whose optimizer shard has the parameter has the reduced gradient.
            nearest: np.ndarray = min(full_tensors, key=lambda part: gap(part, like))
            return nearest
        layout = self._layout_of(name, parts, like)
        return None if layout is None else self._join(parts, layout, like)

    def _join(
        self, parts: Sequence[np.ndarray | None], layout: Layout, like: np.ndarray
    ) -> np.ndarray:
        """Returns a copy of ``like`` in which each rank's part replaces the rank's shard."""
        full: np.ndarray = like.copy()
        for rank, part in zip(self._job.ranks, parts):
            if part is not None:
                full[self._shard_index(rank, layout, like)] = part
        return full

    def _shard_index(self, rank: RankTensors, layout: Layout, full: np.ndarray) -> tuple[Any, ...]:
        """Returns the index that takes a rank's shard out of a full tensor."""
        return index_of_shard(full.shape, layout, rank.coordinate, self._job.degrees)

    def _layout_of(
        self, name: str, parts: Sequence[np.ndarray | None], like: np.ndarray
    ) -> Layout | None:
        """Returns the layout under which ranks' parts are nearest to the one-device twin's tensor.

        Args:
            name: The parameter.
            parts: By rank, its shard; None if it has none.
            like: The twin's tensor.

        Returns:
            Of several equally near layouts, the likeliest; None if no layout has such shapes.
        """
        if name not in self._layouts:
            apart = self._gaps_by_layout(parts, like)
            if not apart:
                return None
            nearest = min(apart, key=lambda layout: apart[layout])
            if sum(far <= 2 * apart[nearest] for far in apart.values()) > 1:
                # Constants show no layout; their gradients will.
                return next(iter(apart))
            self._layouts[name] = nearest
        return self._layouts[name]

    def _gaps_by_layout(
        self, parts: Sequence[np.ndarray | None], like: np.ndarray
    ) -> dict[Layout, float]:
        """Returns, by possible layout, how far the ranks' parts are from a full tensor's shards.

        Args:
            parts: By rank, its shard; None if it has none.
            like: The full tensor.

        Returns:
            The sum of the ranks' relative differences, which is 0 for equal bits only; empty if no
            rank has a part, or no layout has such shapes.
        """
        shards = [(rank, part) for rank, part in zip(self._job.ranks, parts) if part is not None]
        if not shards:
            return {}
        _, first = shards[0]
        return {
            layout: sum(gap(part, like[self._shard_index(r, layout, like)]) for r, part in shards)
            for layout in possible_layouts(like.shape, first.shape, self._job.degrees)
        }

    def unclear_layouts(self, drawn: Mapping[str, np.ndarray]) -> dict[str, bool]:
        """Finds the parameters whose layout the one-device twin's values do not show.

        Args:
            drawn: The twin's parameters as the script draws them, before they are set to the job's.

        Returns:
            By parameter, whether the ranks have the twin's numbers in other places; False if they
            have other numbers.
        """
        unclear: dict[str, bool] = {}
        for name, like in drawn.items():
            parts = [rank.by_name(0, "initial").get(name) for rank in self._job.ranks]
            gaps = self._gaps_by_layout(parts, like)
            # Several layouts are possible, and the twin's values agree with none of them.
            if len(gaps) > 1 and min(gaps.values()) > 0:
                numbers = np.unique([part for part in parts if part is not None])
                unclear[name] = bool(np.array_equal(numbers, np.unique(like)))
        return unclear

    def mask(self, key: TensorKey, shape: tuple[int, ...], twin: RankTensors) -> np.ndarray | None:
        """Returns the mask that the job's dropout drew for the samples of a twin's micro-batch.

        A sample is recognized by the bytes of its inputs; else by the number of its micro-batch.

        Args:
            key: The key of the twin's mask.
            shape: The shape of the mask.
            twin: The twin's tensors, with at least the samples.

        Returns:
            The mask; None if the job has none for these samples.
        """
        samples = bytes_of_rows(twin, key.step).get(key.micro_batch, [])
        # For each sample of the twin's micro-batch, where the job has it.
        matched = [self._sources(key.step).get(sample) for sample in samples]
        sources = [source for source in matched if source is not None]
        if len(sources) < len(samples) or not samples:
            # Ranks with parts of sequences: the contents do not show the samples.
            numbers = [k.micro_batch for rank in self._job.ranks for k in rank.tensors]
            # The twin reads the micro-batches of one replica after those of another.
            replica, number = divmod(key.micro_batch, 1 + max(numbers))
            job_key = key._replace(micro_batch=number)
            data = twin.in_phase(key.step, "data").items()
            whole_samples = {k.role: t for k, t in data if k.micro_batch == key.micro_batch}
            return self._join_replica(job_key, replica, shape, whole_samples)
        # Samples stand along the first dimension of a mask, or along the second.
        for axis in range(min(2, len(shape))):
            pieces = []
            for sample, (replica, number, rows) in zip(samples, sources):
                size = shape[axis] // len(samples) * len(rows)
                job_key = key._replace(micro_batch=number)
                full_shape = (*shape[:axis], size, *shape[axis + 1 :])
                joined = self._join_replica(job_key, replica, full_shape)
                if joined is not None:
                    pieces.append(np.split(joined, len(rows), axis)[rows.index(sample)])
            if len(pieces) == len(samples):
                return np.concatenate(pieces, axis)
        return None

    def _sources(self, step: int) -> dict[bytes, tuple[int, int, list[bytes]]]:
        """Returns, by a sample's bytes, its replica, its micro-batch, and all samples of that."""
        if step not in self._sources_of:
            self._sources_of[step] = {
                sample: (self._job.replica(rank), number, rows)
                for rank in reversed(self._job.ranks)
                for number, rows in bytes_of_rows(rank, step).items()
                for sample in rows
            }
        return self._sources_of[step]

    def _join_replica(
        self,
        key: TensorKey,
        replica: int,
        shape: tuple[int, ...],
        samples: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray | None:
        """Joins a tensor from the parts on a replica's ranks; returns None if no rank has a part.

        Args:
            key: The key of the tensor.
            replica: The number of the replica.
            shape: The shape of the full tensor.
            samples: The full samples by role, if ranks have parts of sequences: they show the order
                of the parts.
        """
        parts = self._tensors_of_replica(replica, key)
        first = next((part for part in parts if part is not None), None)
        if first is None:
            return None
        possible = list(possible_layouts(shape, first.shape, self._job.degrees))
        full_samples = (samples or {}).items()
        if any(self._has_successive_pieces(key, replica, *sample) for sample in full_samples):
            possible.sort(key=lambda layout: any(cut.zigzag for cut in layout))
        zeros = np.zeros(shape, first.dtype)
        joined = {layout: self._join(parts, layout, zeros) for layout in possible}
        for layout, full in joined.items():
            # Under a wrong layout ranks with different values share a part.
            if self._gaps_by_layout(parts, full)[layout] == 0:
                return full
        return next(iter(joined.values()), None)

    def _tensors_of_replica(self, replica: int, key: TensorKey) -> list[np.ndarray | None]:
        """Returns, for each rank of the job, its tensor; None for ranks of other replicas."""
        ranks = self._job.ranks
        return [r.tensors.get(key) if self._job.replica(r) == replica else None for r in ranks]

    def _has_successive_pieces(
        self, key: TensorKey, replica: int, role: str, full: np.ndarray
    ) -> bool:
        """Returns whether the bits of a sample show that its ranks have successive pieces of it.

        In a zigzag a rank has a piece from the front and one from the back instead. The result is
        False also if both layouts give the same bits, or if no layout gives the full tensor's.

        Args:
            key: A key of the micro-batch.
            replica: The number of the replica.
            role: Which tensor of the sample, such as ``"input 0"``.
            full: The full tensor.
        """
        of_sample = TensorKey(key.step, "data", "", key.micro_batch, role)
        gaps = self._gaps_by_layout(self._tensors_of_replica(replica, of_sample), full)
        # The layouts that split the tensor, and under which all ranks' parts have its bits.
        fitting = [layout for layout, far in gaps.items() if layout and far == 0]
        return bool(fitting) and not any(cut.zigzag for layout in fitting for cut in layout)

    def batches(self, step: int, kind: str) -> list[dict[str, np.ndarray]]:
        """Returns the inputs or labels of all replicas' micro-batches, one after another.

        Args:
            step: The step.
            kind: "input" or "label".

        Returns:
            For each micro-batch, the tensors by their paths in the containers of the batch.
        """
        batches: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        for rank in self._job.ranks:
            for key, tensor in rank.in_phase(step, "data").items():
                if key.role.startswith(kind):
                    position = self._job.replica(rank), key.micro_batch
                    batches.setdefault(position, {}).setdefault(key.role[len(kind) :], tensor)
        return [batches[position] for position in sorted(batches)]
