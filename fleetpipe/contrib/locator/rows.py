"""Finds the rows of a replica's micro-batches among the twin's, by their contents."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain
from typing import NamedTuple

import numpy as np

from fleetpipe.contrib.locator.causes import OTHER_SAMPLES, REORDERED, SAME_SAMPLES
from fleetpipe.contrib.locator.record import Meaning, RankTensors, Record

#: Of the twin: a micro-batch and a row of it.
Row = tuple[int, int]
#: By replica and micro-batch, the bytes of each row.
Samples = dict[int, dict[int, list[bytes]]]


class SampleRows(NamedTuple):
    """The twin's rows that one micro-batch of a replica has.

    Attributes:
        places: Each row's place in the twin.
        whole: The twin's micro-batch that has just these rows in this order, or None.
    """

    places: tuple[Row, ...]
    whole: int | None


class Matched(NamedTuple):
    """The places of the step's samples in the twin's data.

    Attributes:
        rows: The rows by replica and micro-batch; empty if samples cannot be distinguished.
        wrong: The cause, with room for a replica, and the replica; None if all is right.
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
                rows[replica, number] = SampleRows(tuple(places), _whole(places, expected))
    # Parts of sequences, or numbers drawn on each rank: nothing to be known by content.
    split = any(job.degrees.get(axis, 1) > 1 for axis in ("sep", "cp", "mp", "ep"))
    if missing:
        return Matched(rows, None if split and not rows else (OTHER_SAMPLES, missing[0]))
    return Matched(rows, _find_repeated(samples, expected) or _find_reordered(samples, expected))


def _whole(places: list[Row], expected: dict[int, list[bytes]]) -> int | None:
    first = places[0][0]
    same = places == [(first, row) for row in range(len(expected[first]))]
    return first if same else None


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

    Other numbers may be computed, as weights or scaled targets are. They are not compared, but the
    loss computed from them is.
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
        counts: SampleRows that a micro-batch of the twin has.

    Returns:
        The tensor itself if the micro-batches have the same rows; else its rows along the first or
        second dimension, and the tensor itself, which may have no rows.
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
