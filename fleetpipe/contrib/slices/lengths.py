"""Cuts the sequences of micro-batches into slices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.nest import map_tensors, tensors_of
from fleetpipe.errors import ConfigError

#: How sequences are cut: into so many slices of lengths as equal as can be, or into slices whose
#: lengths have these proportions.
Slicing = int | tuple[int, ...]

#: The first position of a slice, and the one after its last.
Bounds = list[tuple[int, int]]


def slices_in(slicing: Slicing) -> int:
    """Returns the number of slices."""
    return slicing if isinstance(slicing, int) else len(slicing)


def cut_sequences(batches: MicroBatches, slicing: Slicing) -> MicroBatches:
    """Cuts each micro-batch along axis 1 into slices.

    Args:
        batches: Micro-batches of tensors [rows, length, ..].
        slicing: How sequences are cut. In an equal cut the first slices are one position longer if
            the length is not divisible.

    Returns:
        The slices of all micro-batches, in order.

    Raises:
        ConfigError: A tensor has no axis 1, or fewer positions than there are slices; or the
            tensors of a micro-batch have different lengths.
    """
    return MicroBatches(
        *(_of_all(part, slicing, name) for part, name in zip(batches, batches._fields))
    )


def bounds_of(value: Nest, slicing: Slicing, name: str) -> Bounds:
    """Returns the bounds of the slices of a micro-batch; ``name`` is for messages.

    Raises:
        ConfigError: The same errors as :func:`cut_sequences`.
    """
    slices = slices_in(slicing)
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
    return bounds(int(lengths.pop()), slicing)


def bounds(length: int, slicing: Slicing) -> Bounds:
    """Returns the bounds of the slices of a sequence; each slice has at least one position.

    Args:
        length: Places of the sequence, at least as many as there are slices.
        slicing: How it is cut.
    """
    slices = slices_in(slicing)
    if isinstance(slicing, int):
        size, longer = divmod(length, slices)
        ends = [(index + 1) * size + min(index + 1, longer) for index in range(slices)]
        return list(zip([0, *ends], ends))
    total, before, ends = sum(slicing), 0, []
    for index, share in enumerate(accumulate(slicing)):
        # To the nearest position, half up; and a position is left for each slice that follows.
        nearest = (2 * length * share + total) // (2 * total)
        before = max(before + 1, min(nearest, length - (slices - 1 - index)))
        ends.append(before)
    return list(zip([0, *ends], ends))


def part_of(value: Nest, begin: int, end: int) -> Nest:
    """Returns the positions ``begin`` to ``end - 1`` of the tensors of a micro-batch."""
    return map_tensors(lambda tensor: tensor[:, begin:end], value)


def _of_all(values: Sequence[Nest] | None, slicing: Slicing, name: str) -> list[Nest] | None:
    if values is None:
        return None
    return [
        part_of(value, begin, end)
        for value in values
        for begin, end in bounds_of(value, slicing, name)
    ]
