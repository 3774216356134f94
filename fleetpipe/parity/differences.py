"""How far two tensors are apart, in the units in which floating-point errors are told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.paddle_api import paddle

#: What is compared, in the order in which a step computes it.
QUANTITIES = (
    "micro-batch",
    "output",
    "loss",
    "gradient",
    "gradient norm",
    "learning rate",
    "parameter",
    "buffer",
    "last_epoch",
)

#: Unsigned integers with the bits of a float, by size in bytes.
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Difference:
    """Two values that should have the same bits and do not.

    Attributes:
        quantity: One of ``QUANTITIES``.
        name: The parameter, buffer or layer by its lasting name, an edge as "edge 0 -> 1", a call
            as "eval_batch"; "" for a quantity of the whole model.
        step: The training step, from 0; of an evaluation, the number of steps before it.
        absolute: Largest absolute difference.
        relative: The absolute difference over the largest absolute value of the reference.
        ulps: Units in the last place where the difference is largest; None where shapes differ.
    """

    quantity: str
    name: str
    step: int
    absolute: float
    relative: float
    ulps: int | None

    def __str__(self) -> str:
        what = f"{self.quantity} of {self.name}" if self.name else self.quantity
        size = f"{self.absolute:.3g} absolute, {self.relative:.3g} relative"
        unlike = "one is missing, or shape or dtype differ"
        units = unlike if self.ulps is None else f"{self.ulps} ulp"
        return f"step {self.step}: {what} differs by {size}, {units}"


def compare(
    quantity: str, name: str, step: int, pipeline: Tensor | None, reference: Tensor | None
) -> Difference | None:
    """Compares two tensors bit by bit.

    Args:
        quantity: What is compared.
        name: Whose it is.
        step: The training step.
        pipeline: The pipeline's tensor; None where it has none.
        reference: The single-device model's tensor; None where it has none.

    Returns:
        None where both have the same shape, dtype and bits (or both are None).
    """
    if pipeline is None and reference is None:
        return None
    ours, theirs = _array(pipeline), _array(reference)
    if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return Difference(quantity, name, step, float("inf"), float("inf"), None)
    if ours.tobytes() == theirs.tobytes():
        return None
    gaps = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    worst = np.unravel_index(int(np.argmax(gaps)), gaps.shape)
    absolute = float(gaps[worst])
    scale = float(np.max(np.abs(theirs)))
    relative = absolute / scale if scale else float("inf")
    ulps = _units_between(ours[worst], theirs[worst]) >> _unused_bits(reference)
    return Difference(quantity, name, step, absolute, relative, ulps)


def compare_values(
    quantity: str,
    name: str,
    step: int,
    pipeline: Nest,
    reference: Nest,
    same: Callable[[Tensor, Tensor], Tensor] = lambda whole, ours: whole,
) -> list[Difference]:
    """Compares all tensors in nested tuples, lists and dicts; what is no tensor by its value.

    Args:
        quantity: What is compared.
        name: Whose it is; the place in the containers is added.
        step: The training step.
        pipeline: The pipeline's value.
        reference: The single-device model's.
        same: ``same(whole, ours)`` returns the part of the reference's tensor that a rank has.
    """
    ours, theirs = leaves(pipeline), leaves(reference)
    found = []
    for path in {**theirs, **ours}:
        one, other = ours.get(path), theirs.get(path)
        if isinstance(one, paddle.Tensor) or isinstance(other, paddle.Tensor):
            both = all(isinstance(value, paddle.Tensor) for value in (one, other))
            part = same(other, one) if both else None
            difference = compare(quantity, name + path, step, one, part)
            found += [difference] if difference else []
        elif type(one) is not type(other) or one != other:
            found.append(Difference(quantity, name + path, step, math.inf, math.inf, None))
    return found


def leaves(value: Nest, path: str = "") -> dict[str, Any]:
    """Returns what stands in nested containers, by its place: ``{"[0]['mask']": tensor}``.

    A container's own place has its type.
    """
    if isinstance(value, (tuple, list)):
        parts = [leaves(item, f"{path}[{index}]") for index, item in enumerate(value)]
    elif isinstance(value, dict):
        parts = [leaves(item, f"{path}[{key!r}]") for key, item in value.items()]
    else:
        return {path: value}
    return {path: type(value), **{place: leaf for part in parts for place, leaf in part.items()}}


def compare_numbers(
    quantity: str, name: str, step: int, pipeline: float, reference: float
) -> list[Difference]:
    """Compares two numbers bit by bit; returns the difference, if there is one."""
    if pipeline == reference or (math.isnan(pipeline) and math.isnan(reference)):
        return []
    gap = abs(pipeline - reference)
    relative = gap / abs(reference) if reference else math.inf
    numbers = np.array([pipeline, reference])
    return [Difference(quantity, name, step, gap, relative, _units_between(*numbers))]


def _array(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    # NumPy has no bfloat16: its bits are the upper half of a float32's.
    return (tensor.astype("float32") if _unused_bits(tensor) else tensor).numpy()


def _unused_bits(tensor: Tensor) -> int:
    return 16 if str(tensor.dtype).endswith("bfloat16") else 0


def _units_between(one: Any, other: Any) -> int:
    return abs(_ordered(one) - _ordered(other))


def _ordered(value: Any) -> int:
    """Maps a float to an integer that grows with it, one unit in the last place a step."""
    if value.dtype.kind != "f":
        return int(value)
    bits = int(value.view(_BITS[value.dtype.itemsize]))
    sign = 1 << (8 * value.dtype.itemsize - 1)
    return sign - bits if bits >= sign else bits
