"""Cuts the sequences of micro-batches into slices, and their weights in the loss with them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.nest import mapped, tensors_of
from fleetpipe.errors import ConfigError


def sliced(
    batches: MicroBatches, weights: Sequence[Fraction], slices: int
) -> tuple[MicroBatches, list[Fraction]]:
    """Cuts each micro-batch along axis 1 into slices of lengths as equal as can be.

    The first slices are one longer where the length is not divisible.

    Args:
        batches: Micro-batches of tensors [rows, length, ..].
        weights: The weight of each micro-batch in the loss.
        slices: The number of slices.

    Returns:
        The slices of all micro-batches in order, and the weight of each: a slice counts by its
        share of the length, as far as this rank has labels, or else inputs, to know it by.

    Raises:
        ConfigError: A tensor has no axis 1, or a shorter one than there are slices; or the tensors
            of a micro-batch differ in it.
    """
    parts = [_of_all(part, slices, name) for part, name in zip(batches, batches._fields)]
    shares = [Fraction(1, slices)] * (len(weights) * slices)
    known = next((part for part in (batches.labels, batches.inputs) if part), None)
    if known is not None:
        lengths = [_length(value, slices, "a micro-batch") for value in known]
        shares = [
            Fraction(end - begin, length)
            for length in lengths
            for begin, end in _bounds(length, slices)
        ]
    whole = [weight for weight in weights for _ in range(slices)]
    return MicroBatches(*parts), [weight * share for weight, share in zip(whole, shares)]


def _of_all(values: Sequence[Nest] | None, slices: int, name: str) -> list[Nest] | None:
    if values is None:
        return None
    return [
        mapped(partial(_places, begin, end), value)
        for value in values
        for begin, end in _bounds(_length(value, slices, name), slices)
    ]


def _places(begin: int, end: int, tensor: Tensor) -> Tensor:
    return tensor[:, begin:end]


def _bounds(length: int, slices: int) -> list[tuple[int, int]]:
    size, longer = divmod(length, slices)
    ends = [(index + 1) * size + min(index + 1, longer) for index in range(slices)]
    return list(zip([0, *ends], ends))


def _length(value: Nest, slices: int, name: str) -> int:
    """Returns the length of the sequences of a micro-batch."""
    tensors: list[Tensor] = list(tensors_of(value))
    lengths = {tensor.shape[1] if tensor.ndim > 1 else 0 for tensor in tensors}
    if len(lengths) != 1 or min(lengths) < slices:
        raise ConfigError(
            "sequences are cut into slices along axis 1",
            where=name,
            expected=f"tensors [rows, length, ..] of one length, of at least {slices} (slices)",
            got=" and ".join(str(list(tensor.shape)) for tensor in tensors) or "no tensors",
            fix="give the place in the sequence axis 1, fewer slices, or another schedule_mode",
        )
    return int(lengths.pop())
