"""Decides whether a gradient's difference is rounding: as large as an order of sums can make it.

A difference is compared with the gradients of the whole layer, never with one alone: that of a
key's bias under a softmax is 0 but for rounding, so all of it may change with an order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fleetpipe.aliases import Tensor
from fleetpipe.paddle_api import paddle
from fleetpipe.parity.differences import largest_gap, numbers_of

#: Of the largest gradient of the parameters of one layer.
SHARE = 1e-5

#: Of what a gradient moves by when every parameter moves by a unit in its last place.
_UNITS = 16.0


class Rounding:
    """The largest difference of each gradient of a step that the order of sums explains."""

    def __init__(
        self, gradients: Mapping[str, Tensor], moved: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Stores the plain model's gradients.

        Args:
            gradients: The gradients by the names of the parameters.
            moved: Computes them once more with parameters that are moved by a unit in the last
                place; called if the scale of a layer does not explain a difference.
        """
        self._gradients = gradients
        self._moved: Callable[[], Mapping[str, Tensor]] = moved
        self._moved_state: Mapping[str, Tensor] | None = None

    def carries(self, name: str, off: float) -> bool:
        """Whether rounding explains a difference of ``off`` in a parameter's gradient."""
        if off <= SHARE * self.scale(name):
            return True
        if not np.isfinite(off):
            return False
        if self._moved_state is None:
            self._moved_state = self._moved()
        return off <= _UNITS * largest_gap(self._moved_state.get(name), self._gradients.get(name))

    def scale(self, name: str) -> float:
        """Returns the largest gradient among the parameters of the layer that has ``name``."""
        return max(map(largest_of, self._beside(name)), default=0.0)

    def _beside(self, name: str) -> Iterable[Tensor]:
        owner = name.rpartition(".")[0]
        return (g for other, g in self._gradients.items() if other.rpartition(".")[0] == owner)


def largest_of(tensor: Tensor) -> float:
    """Returns the largest absolute number; 0 if one is infinite or NaN, or there is none."""
    numbers = np.abs(numbers_of(tensor))
    return float(numbers.max()) if numbers.size and np.isfinite(numbers).all() else 0.0


@paddle.no_grad()
def move_by_a_unit(parameters: Iterable[Tensor]) -> None:
    """Moves each number of parameters by a unit in the last place, up or down at random."""
    signs = np.random.default_rng(0)
    for parameter in parameters:
        if parameter.dtype not in (paddle.float32, paddle.float64):
            continue
        numbers = parameter.numpy()
        ways = np.where(signs.random(numbers.shape) < 0.5, -np.inf, np.inf)
        parameter.set_value(np.nextafter(numbers, ways.astype(numbers.dtype)))


def ulp(tensor: Tensor) -> float:
    """Returns the unit in the last place of the largest number of a tensor."""
    return float(np.spacing(np.abs(numbers_of(tensor)).max())) if tensor.size else 0.0
