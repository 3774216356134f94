"""Measures the difference of two tensors, and whether rounding explains it.

Two tensors are equal if their shapes, dtypes and bits are equal: -0.0 differs from 0.0, and all
NaNs are equal. A difference is rounding if another order of a sum gives one that is as large.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetpipe.aliases import DType, Nest, Tensor
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.paddle_api.tensor import to_host
from fleetpipe.transport.wire import bridge

#: The quantities that are compared, in the order in which a step computes them.
QUANTITIES = (
    *("initial parameter", "initial buffer", "micro-batch", "output", "loss", "gradient"),
    *("gradient norm", "learning rate", "parameter", "buffer", "last_epoch"),
)

#: The largest difference that is rounding in one float32 step, relative to the largest number.
ROUNDING = 1e-5

#: The largest difference that is rounding, as a multiple of the difference between two runs whose
#: parameters are one unit in the last place apart: two runs are a small sample of rounding.
MARGIN = 16.0


@dataclass(frozen=True)
class Difference:
    """Two values that should have the same bits and do not.

    Attributes:
        quantity: One of ``QUANTITIES``.
        name: The fully qualified name of a parameter, buffer or layer; an edge between two stages
            such as "edge 0 -> 1"; a call such as "eval_batch"; "" for a quantity of the whole
            model.
        step: The training step, from 0; of an evaluation, the number of steps before it.
        absolute: Largest absolute difference.
        relative: The absolute difference over the largest absolute value of the reference.
        ulps: The largest difference in units in the last place; None if one value is missing, or
            shapes or dtypes differ.
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
        missing = "one is missing, or shape or dtype differ"
        units = missing if self.ulps is None else f"{self.ulps} ulp"
        return f"step {self.step}: {what} differs by {size}, {units}"


def compare(
    quantity: str, name: str, step: int, pipeline: Tensor | None, reference: Tensor | None
) -> Difference | None:
    """Compares two tensors bit by bit.

    Args:
        quantity: One of ``QUANTITIES``.
        name: See :class:`Difference`.
        step: The training step.
        pipeline: The pipeline's tensor; None if it has none.
        reference: The single-device model's tensor; None if it has none.

    Returns:
        None if both have the same shape, dtype and bits, or both are None.
    """
    if pipeline is None and reference is None:
        return None
    if pipeline is None or reference is None or not _is_same_kind(pipeline, reference):
        return Difference(quantity, name, step, math.inf, math.inf, None)
    if same_bits(pipeline, reference):
        return None
    ours, reference_array = numbers_of(pipeline), numbers_of(reference)
    gaps = gaps_of(ours, reference_array)
    worst = np.unravel_index(int(np.argmax(gaps)), gaps.shape)
    absolute, scale = float(gaps[worst]), largest_of(reference)
    relative = absolute / scale if scale else math.inf
    ulps = _units_between(ours[worst], reference_array[worst]) >> _unused_bits(reference)
    return Difference(quantity, name, step, absolute, relative, ulps)


def compare_all(
    quantity: str,
    step: int,
    pipeline: Mapping[str, Tensor | None],
    reference: Mapping[str, Tensor | None],
) -> list[Difference]:
    """Compares tensors by name; a tensor that only one side has is a difference."""
    pairs = ((name, pipeline.get(name), reference.get(name)) for name in {**reference, **pipeline})
    compared = (compare(quantity, name, step, *pair) for name, *pair in pairs)
    return [difference for difference in compared if difference]


def compare_values(
    quantity: str,
    name: str,
    step: int,
    pipeline: Nest,
    reference: Nest,
    same: Callable[[Tensor, Tensor], Tensor] = lambda whole, ours: whole,
) -> list[Difference]:
    """Compares all tensors in nested tuples, lists and dicts bit by bit, other items by ``==``.

    Args:
        quantity: One of ``QUANTITIES``.
        name: See :class:`Difference`; the path in the containers is appended.
        step: The training step.
        pipeline: The pipeline's value.
        reference: The single-device model's value.
        same: ``same(whole, ours)`` returns the part of the reference's tensor ``whole`` that
            corresponds to this rank's tensor ``ours``.
    """
    ours, reference_leaves = leaves(pipeline), leaves(reference)
    differences = []
    for path in {**reference_leaves, **ours}:
        leaf, expected = ours.get(path), reference_leaves.get(path)
        if isinstance(leaf, paddle.Tensor) or isinstance(expected, paddle.Tensor):
            both = isinstance(leaf, paddle.Tensor) and isinstance(expected, paddle.Tensor)
            part = same(expected, leaf) if both else None
            difference = compare(quantity, name + path, step, leaf, part)
            differences += [difference] if difference else []
        elif type(leaf) is not type(expected) or leaf != expected:
            differences.append(Difference(quantity, name + path, step, math.inf, math.inf, None))
    return differences


def leaves(value: Nest, path: str = "") -> dict[str, Any]:
    """Returns the items of nested containers by their paths, such as ``{"[0]['mask']": tensor}``.

    The result also has each container's type, under the container's path.
    """
    if isinstance(value, (tuple, list)):
        parts = [leaves(item, f"{path}[{index}]") for index, item in enumerate(value)]
    elif isinstance(value, dict):
        parts = [leaves(item, f"{path}[{key!r}]") for key, item in value.items()]
    else:
        return {path: value}
    return {path: type(value), **{inner: leaf for part in parts for inner, leaf in part.items()}}


def compare_numbers(
    quantity: str, name: str, step: int, pipeline: float, reference: float
) -> list[Difference]:
    """Compares two numbers; returns their difference in a list, which is empty if they are equal.

    NaN equals NaN.
    """
    if pipeline == reference or (math.isnan(pipeline) and math.isnan(reference)):
        return []
    absolute = abs(pipeline - reference)
    relative = absolute / abs(reference) if reference else math.inf
    numbers = np.array([pipeline, reference])
    return [Difference(quantity, name, step, absolute, relative, _units_between(*numbers))]


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Returns whether two tensors have the same shape, dtype and bits, or are both None."""
    if one is None or other is None:
        return one is other
    if bridge.same_bits(one, other):
        return True
    return _is_same_kind(one, other) and same_numbers(numbers_of(one), numbers_of(other))


def same_numbers(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays have the same shape, dtype and bits; all NaNs are equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.tobytes() == other.tobytes() or _bits(one) == _bits(other)


def zeros_for_missing(
    one: Tensor | None, other: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns two gradients; if only one is None, zeros in the shape of the other replace it.

    If both are None, both stay None.
    """
    if one is None and other is not None:
        return paddle.zeros_like(other), other
    return one, paddle.zeros_like(one) if other is None and one is not None else other


def largest_gap(one: Tensor | None, other: Tensor | None) -> float:
    """Returns the largest absolute difference of two tensors.

    The result is infinite if shapes or dtypes differ, or if a number is finite in only one tensor.
    """
    difference = compare("", "", 0, one, other)
    return 0.0 if difference is None else difference.absolute


def gap(ours: np.ndarray, expected: np.ndarray, scale: float | None = None) -> float:
    """Returns the relative difference of two arrays: 0 for equal bits, infinite for other shapes.

    Args:
        ours: An array.
        expected: The expected array.
        scale: The number by which the largest difference is divided; None takes the largest
            absolute number of ``expected``.
    """
    if ours.shape != expected.shape:
        return math.inf
    if ours.tobytes() == expected.tobytes():
        return 0.0
    worst = float(gaps_of(ours, expected).max(initial=0.0))
    size = largest_of(expected) if scale is None else scale
    return worst / size if size else (math.inf if worst else 0.0)


def numbers_of(tensor: Tensor) -> Any:
    """Returns the numbers of a tensor as a NumPy array; bfloat16 becomes float32."""
    with dynamic_mode(), paddle.no_grad():
        # The bits of bfloat16 are the upper half of a float32's.
        tensor = tensor.astype("float32") if _unused_bits(tensor) else tensor
        return (tensor if tensor.place.is_cpu_place() else to_host(tensor)).numpy()


def largest_of(tensor: Tensor | np.ndarray) -> float:
    """Returns the largest finite absolute number; 0 if there is none."""
    numbers = np.abs(numbers_of(tensor) if isinstance(tensor, paddle.Tensor) else tensor)
    return float(numbers.max(initial=0, where=np.isfinite(numbers)))


def unit_of(dtype: DType | np.dtype[np.generic]) -> float:
    """Returns the distance from 1 to the next larger number of a floating dtype."""
    name = str(dtype).rpartition(".")[2]
    return 2.0**-7 if name == "bfloat16" else float(np.finfo(name).eps)


def kind_of(tensor: Tensor | np.ndarray) -> str:
    """Returns the dtype and the shape of a tensor, such as ``float32 [2, 3]``."""
    return f"{str(tensor.dtype).rpartition('.')[2]} {list(tensor.shape)}"


def digest_of(content: Any) -> str:
    """Returns a digest of bytes, of the bytes of a flat array, or of a tensor.

    The digest of a tensor is that of its dtype, shape and bits.
    """
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(content, paddle.Tensor):
        digest.update(kind_of(content).encode())
        content = np.ascontiguousarray(numbers_of(content)).reshape(-1)
    digest.update(content)
    return digest.hexdigest()


def gaps_of(ours: Any, expected: Any) -> Any:
    """Returns the absolute difference of each number; infinite if only one is NaN or infinite."""
    if np.iscomplexobj(ours):
        return np.hypot(gaps_of(ours.real, expected.real), gaps_of(ours.imag, expected.imag))
    with np.errstate(invalid="ignore"):
        gaps = np.abs(ours.astype(np.float64) - expected.astype(np.float64))
    equal = (ours == expected) | (np.isnan(ours) & np.isnan(expected))
    return np.where(equal, 0.0, np.where(np.isnan(gaps), np.inf, gaps))


def _is_same_kind(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same shape and dtype."""
    return list(one.shape) == list(other.shape) and one.dtype == other.dtype


def _bits(numbers: np.ndarray) -> bytes:
    """Returns the bytes of an array, in which all NaNs have the same bits."""
    if numbers.dtype.kind == "c":  # its two parts are NaN each for itself
        numbers = np.ascontiguousarray(numbers).view(f"f{numbers.dtype.itemsize // 2}")
    if numbers.dtype.kind == "f":
        numbers = np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers)
    return numbers.tobytes()


def _unused_bits(tensor: Tensor) -> int:
    """Returns how many low bits of a tensor's float32 numbers are always 0: 16 for bfloat16."""
    return 16 if str(tensor.dtype).endswith("bfloat16") else 0


def _units_between(one: Any, other: Any) -> int:
    """Returns the distance of two NumPy numbers in units in the last place."""
    if one.dtype.kind == "c":
        return max(_units_between(one.real, other.real), _units_between(one.imag, other.imag))
    return abs(_ordinal(one) - _ordinal(other))


def _ordinal(value: Any) -> int:
    """Maps a float to an integer, so that neighbouring floats have neighbouring integers."""
    if value.dtype.kind != "f":
        return int(value)
    bits = int(value.view(f"u{value.dtype.itemsize}"))
    sign = 1 << (8 * value.dtype.itemsize - 1)
    return sign - bits if bits >= sign else bits


class Rounding:
    """Decides whether a gradient differs only by rounding, such as another order of sums gives."""

    def __init__(
        self, gradients: Mapping[str, Tensor], moved: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Stores the plain model's gradients.

        Args:
            gradients: The gradients by the names of the parameters.
            moved: Computes the gradients again, from parameters of which each is changed by a unit
                in the last place; called only for a difference above ``ROUNDING``.
        """
        self._gradients, self._moved = gradients, moved
        self._moved_gradients: Mapping[str, Tensor] | None = None

    def explains(self, name: str, off: float) -> bool:
        """Returns whether rounding explains a difference in a gradient.

        Args:
            name: The parameter.
            off: The largest absolute difference.
        """
        if off <= ROUNDING * self.scale(name):
            return True
        if not np.isfinite(off):
            return False
        if self._moved_gradients is None:
            self._moved_gradients = self._moved()
        moved = self._moved_gradients.get(name)
        return off <= MARGIN * largest_gap(moved, self._gradients.get(name))

    def scale(self, name: str) -> float:
        """Returns the largest gradient in the layer of the parameter ``name``."""
        layer = name.rpartition(".")[0]
        of_layer = (g for other, g in self._gradients.items() if other.rpartition(".")[0] == layer)
        return max(map(largest_of, of_layer), default=0.0)


@paddle.no_grad()
def move_by_a_unit(parameters: Iterable[Tensor]) -> None:
    """Moves each number of parameters by a unit in the last place, up or down at random."""
    signs = np.random.default_rng(0)
    for parameter in parameters:
        if parameter.dtype not in (paddle.float32, paddle.float64):
            continue
        numbers = parameter.numpy()
        directions = np.where(signs.random(numbers.shape) < 0.5, -np.inf, np.inf)
        parameter.set_value(np.nextafter(numbers, directions.astype(numbers.dtype)))
