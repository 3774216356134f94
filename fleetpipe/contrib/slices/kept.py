"""Keeps values of layers from slice to slice of a sequence, and brings back their gradients.

If a schedule cuts sequences into slices, a layer whose positions see earlier positions (causal
attention, a recurrent net) asks for the values that it kept in earlier slices, and keeps its part
for later ones::

    class Attention(nn.Layer):
        takes_slices = True

        def forward(self, hidden):
            query, key, value = ...
            kept = slices.earlier(self)
            slices.keep(self, (key, value))
            if kept:
                key = paddle.concat([*(k for k, _ in kept), key], axis=-2)
                ...

A later slice gets leaves in the place of the kept tensors, so that its backward ends there.
Backwards run from the last slice to the first: when one begins, the leaves hold the sum of the
gradients of all later slices, and the backward begins from these as well as from its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.batch.units import UnitStates
from fleetpipe.dygraph.nest import differentiable, leaf_like, map_tensors
from fleetpipe.errors import UsageError


class _Slice:
    """One slice of a micro-batch in one stage, with the values that its layers keep."""

    def __init__(self, earlier: list[_Slice]) -> None:
        self.before = list(earlier)
        #: By the id of a layer, what it kept, within the graph of this slice.
        self.kept: dict[int, Nest] = {}
        #: Likewise, the leaves that later slices get in its place.
        self.handed: dict[int, Nest] = {}


class _Backward(NamedTuple):
    """Stands for a slice while its backward runs, in which layers can keep nothing."""


_running: list[_Slice | _Backward] = []


def earlier(layer: Layer) -> list[Nest]:
    """Returns what ``layer`` kept in the earlier slices of this micro-batch, in order.

    The list is empty in the first slice, and whenever sequences are whole: in evaluation, under any
    other schedule, and in a direct call.

    Args:
        layer: The layer that calls this, ``self``.

    Raises:
        UsageError: The layer is called again in a backward, by recompute.
    """
    now = _now()
    return [] if now is None else [one.handed[id(layer)] for one in now.before]


def keep(layer: Layer, value: Nest) -> None:
    """Keeps ``value`` for the later slices of this micro-batch; does nothing without slices.

    Args:
        layer: The layer that keeps the value, ``self``. It must keep one value in each slice.
        value: Tensors and plain values in tuples, lists and dicts. Gradients of the tensors come
            back from the later slices.

    Raises:
        UsageError: The layer kept something in this slice already; or it is called again in a
            backward, by recompute.
    """
    now = _now()
    if now is None:
        return
    if id(layer) in now.kept:
        raise UsageError(
            f"{type(layer).__name__} keeps two values in one slice",
            cause="it is called twice in a stage",
            fix="keep one value, a tuple say; build a layer for each call",
        )
    now.kept[id(layer)] = value
    now.handed[id(layer)] = map_tensors(leaf_like, value)


def _now() -> _Slice | None:
    now = _running[-1] if _running else None
    if isinstance(now, _Backward):
        raise UsageError(
            "a layer that keeps values between slices is called again in a backward",
            cause="recompute, which cannot tell slices apart",
            fix="leave recompute out for this layer: slices save memory too",
        )
    return now


@contextmanager
def again() -> Iterator[Mapping[int, Nest]]:
    """While it is open, layers may run the current slice several times, to be measured.

    Yields:
        The values that they keep, by the layer's id; empty if sequences are whole.
    """
    now = _now()
    if now is None:
        yield {}
        return
    trial = _Slice(now.before)
    _running.append(trial)
    try:
        yield trial.kept
    finally:
        _running.pop()


class SliceStates(UnitStates):
    """The slices of a batch with their values, by stage and micro-batch, until their backwards."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._kept: dict[tuple[int, int], list[_Slice]] = {}

    @contextmanager
    def forward(self, stage: int, number: int) -> Iterator[None]:
        """While it is open, the layers of a stage run slice ``number``, counted over the batch."""
        done = self._kept.setdefault((stage, number // self._slices), [])
        now = _Slice(done)
        _running.append(now)
        try:
            yield
        finally:
            _running.pop()
        now.before.clear()
        done.append(now)

    @contextmanager
    def backward(self, stage: int, number: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """While it is open, the backward of slice ``number`` runs, after those of later slices.

        Yields:
            The tensors that it begins from besides the output, and their gradients.
        """
        last = self._kept[stage, number // self._slices][-1]
        tensors, grads = [], []
        for layer, value in last.kept.items():
            leaves = differentiable(last.handed[layer])
            for tensor, leaf in zip(differentiable(value), leaves):
                if leaf.grad is not None:
                    tensors.append(tensor)
                    grads.append(leaf.grad)
        _running.append(_Backward())
        try:
            yield tensors, grads
        finally:
            _running.pop()

    def release(self, stage: int, number: int) -> None:
        """Drops the values of the last slice that is left of a stage and micro-batch."""
        key = stage, number // self._slices
        self._kept[key].pop()
        if not self._kept[key]:
            del self._kept[key]
