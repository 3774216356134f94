"""Decides whether a difference is rounding: as large as another order of a sum makes it.

A difference is measured by the largest number of its tensor; that of a gradient by the gradients of
the whole layer, never by one alone: that of a key's bias under a softmax is 0 but for rounding, so
all of it may change with an order of sums. All holds for one machine and the settings that
:func:`fleetpipe.numerics.settings` returns: others change what a product itself is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fleetpipe.aliases import Tensor
from fleetpipe.compare.differences import largest_gap, largest_of
from fleetpipe.paddle_api import paddle

#: Of the largest number; in float32, within one step.
ROUNDING = 1e-5

#: Of what a number moves by when everything that it is computed from moves by a unit in its last
#: place: two runs are a small sample of what rounding does.
MARGIN = 16.0


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
        self._gradients, self._moved = gradients, moved
        self._moved_gradients: Mapping[str, Tensor] | None = None

    def carries(self, name: str, off: float) -> bool:
        """Whether rounding explains a difference of ``off`` in a parameter's gradient."""
        if off <= ROUNDING * self.scale(name):
            return True
        if not np.isfinite(off):
            return False
        if self._moved_gradients is None:
            self._moved_gradients = self._moved()
        return off <= MARGIN * largest_gap(
            self._moved_gradients.get(name), self._gradients.get(name)
        )

    def scale(self, name: str) -> float:
        """Returns the largest gradient among the parameters of the layer that has ``name``."""
        layer = name.rpartition(".")[0]
        beside = (g for other, g in self._gradients.items() if other.rpartition(".")[0] == layer)
        return max(map(largest_of, beside), default=0.0)


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
