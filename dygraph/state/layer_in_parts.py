"""A layer whose weights are in parts, some on each rank, in Fleet's folder: its file has the whole.

The rank that has the first part writes it; each rank reads its own parts, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fleetpipe.aliases import Tensor
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.mesh.parts import Held, attached_part, joined_on_first
from fleetpipe.paddle_api import paddle


class LayerInParts:
    """The parts that this process has, as their file has them."""

    def __init__(
        self, parts: Mapping[str, Sequence[Tensor]], group: Callable[[], Group] = SoleGroup
    ) -> None:
        """Takes parameters.

        Args:
            parts: Those of each whole in order, by its name in the file.
            group: Returns the ranks that have all parts between them.
        """
        self._group = group
        self._parts = [
            (name, Held(tensor, part.cut))
            for name, tensors in parts.items()
            for tensor in tensors
            if (part := attached_part(tensor)) is not None
        ]

    def held(self) -> dict[str, Held]:
        """Returns a part of each whole, which knows the shape of the whole."""
        return dict(self._parts)

    def set_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Gives the parts their values, which are read one after another."""
        for name, held in self._parts:
            target: Tensor = held.tensor
            values = state[name] if held.cut is None else held.cut.taken_from(state[name])
            native = values.astype(values.dtype.newbyteorder("="), order="C")
            target.set_value(paddle.to_tensor(native))

    def whole(self) -> dict[str, Tensor] | None:
        """Returns what the file has on the first of the ranks; None elsewhere. Collective."""
        return joined_on_first(self._group(), self._parts) or None
