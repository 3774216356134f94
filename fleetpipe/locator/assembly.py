"""Whole tensors of a job, put together from what its ranks have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fleetpipe.locator.layouts import Layout, layouts, part_of, put_part
from fleetpipe.locator.record import Meaning, RankTensors, Record
from fleetpipe.locator.rows import signatures
from fleetpipe.locator.tolerance import gap


class WholeTensors:
    """Parameters, gradients and samples of a job as one device would have them."""

    def __init__(self, job: Record) -> None:
        self._job = job
        self._layouts: dict[str, Layout] = {}
        self._values = [self._by_step(rank) for rank in job.ranks]

    def _by_step(self, rank: RankTensors) -> list[dict[str, np.ndarray]]:
        """Returns a rank's parameters at the beginning of each step."""
        values: list[dict[str, np.ndarray]] = []
        now: dict[str, np.ndarray] = {}
        for step in range(self._job.steps):
            now = {**now, **rank.names(step, "initial")}
            values.append(now)
            # Running statistics, which Paddle makes parameters, are left as buffers.
            now = {**now, **rank.names(step, "update"), **rank.names(step, "buffer")}
        return values

    def parameter(self, step: int, name: str, like: np.ndarray) -> np.ndarray | None:
        """Returns a parameter at the beginning of a step; None where the job has none.

        Args:
            step: The step.
            name: The parameter.
            like: What the twin itself has drawn, of the whole shape.
        """
        if step >= self._job.steps:
            return None
        return self._assembled(name, [values[step].get(name) for values in self._values], like)

    def gradient(self, step: int, name: str, like: np.ndarray) -> np.ndarray | None:
        """Returns the gradient that a parameter was stepped by; None where the job has none."""
        parts = [rank.names(step, "reduction").get(name) for rank in self._job.ranks]
        return self._assembled(name, parts, like)

    def _assembled(
        self, name: str, parts: Sequence[np.ndarray | None], like: np.ndarray
    ) -> np.ndarray | None:
        wholes = [part for part in parts if part is not None and part.shape == like.shape]
        if wholes:
            if self._job.degrees.get("sharding", 1) == 1:
                return wholes[0]
            # Of an optimizer's shards one rank has the reduced gradient.
            nearest: np.ndarray = min(wholes, key=lambda part: gap(part, like))
            return nearest
        layout = self.layout(name, parts, like)
        if layout is None:
            return None
        whole: np.ndarray = like.copy()
        for rank, part in zip(self._job.ranks, parts):
            if part is not None:
                put_part(whole, part, layout, rank.coordinate, self._job.degrees)
        return whole

    def layout(
        self, name: str, parts: Sequence[np.ndarray | None], like: np.ndarray
    ) -> Layout | None:
        """Returns how a parameter is split: as what the twin has drawn shows, else plainly."""
        if name not in self._layouts:
            held = [(r, p) for r, p in zip(self._job.ranks, parts) if p is not None]
            degrees = self._job.degrees
            candidates = list(layouts(like.shape, held[0][1].shape, degrees)) if held else []
            if not candidates:
                return None
            self._layouts[name] = min(
                candidates,
                key=lambda layout: all(
                    gap(part, part_of(like, layout, rank.coordinate, degrees)) > 0
                    for rank, part in held
                ),
            )
        return self._layouts[name]

    def rows(self, step: int) -> int:
        """Returns how many samples all replicas have in a step."""
        replicas = {
            self._job.replica(r): r for r in reversed(self._job.ranks) if r.of(step, "data")
        }
        counted = (signatures(rank, step) for rank in replicas.values())
        return sum(len(rows) for by_micro_batch in counted for rows in by_micro_batch.values())

    def mask(
        self, place: Meaning, shape: tuple[int, ...], samples: Sequence[bytes]
    ) -> np.ndarray | None:
        """Returns what the job's dropout has kept of some samples; None where it has no such.

        Args:
            place: Of the twin's dropout.
            shape: Of what it returns.
            samples: The bytes of each, in order.
        """
        pieces = []
        for sample in samples:
            piece = next(self._masks(place, shape, sample), None)
            if piece is None:
                return None
            pieces.append(piece)
        mask = np.concatenate(pieces) if pieces else None
        return mask if mask is not None and mask.shape == shape else None

    def _masks(self, place: Meaning, shape: tuple[int, ...], sample: bytes) -> Iterator[np.ndarray]:
        for rank in self._job.ranks:
            for number, rows in signatures(rank, place.step).items():
                if sample not in rows:
                    continue
                there = place._replace(micro_batch=number)
                same = [
                    r for r in self._job.ranks if self._job.replica(r) == self._job.replica(rank)
                ]
                parts = [r.tensors[there] for r in same if there in r.tensors]
                if not parts:
                    continue
                different = [d for d, n in enumerate(parts[0].shape) if d and n != shape[d]]
                mask = np.concatenate(parts, different[0]) if different else parts[0]
                if len(mask) % len(rows) == 0:
                    size = len(mask) // len(rows)
                    yield mask[rows.index(sample) * size :][:size]

    def batches(self, step: int, kind: str) -> list[dict[str, np.ndarray]]:
        """Returns the inputs, or labels, of all replicas' micro-batches, one after another.

        Args:
            step: The step.
            kind: ``"input"`` or ``"label"``.
        """
        batches: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        for rank in self._job.ranks:
            for place, tensor in rank.of(step, "data").items():
                if place.part.startswith(kind):
                    key = self._job.replica(rank), place.micro_batch
                    batches.setdefault(key, {}).setdefault(place.part[len(kind) :], tensor)
        return [batches[key] for key in sorted(batches)]
