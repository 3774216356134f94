"""Files in Fleet's folder of layers whose weights are cut into parts on several ranks.

A file has the whole weights. The rank with the first part writes it; each rank reads only its own
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fleetpipe.aliases import Tensor
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.mesh.parts import LocalTensor, attached_part, joined_on_first
from fleetpipe.paddle_api import paddle


class LayerInParts:
    """The parts of a layer's weights that this process holds."""

    def __init__(
        self, parts: Mapping[str, Sequence[Tensor]], group: Callable[[], Group] = SoleGroup
    ) -> None:
        """Stores the parts.

        Args:
            parts: The parts of each whole weight in order, by the name of the whole in the file.
            group: Returns the ranks that together hold all parts.
        """
        self._group = group
        self._parts = [
            (name, LocalTensor(tensor, part.cut))
            for name, tensors in parts.items()
            for tensor in tensors
            if (part := attached_part(tensor)) is not None
        ]

    def parts(self) -> dict[str, LocalTensor]:
        """Returns one part of each whole weight; it includes the shape of the whole."""
        return dict(self._parts)

    def set_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets the parts from whole weights, which are read one after another."""
        for name, local in self._parts:
            target: Tensor = local.tensor
            values = state[name] if local.cut is None else local.cut.taken_from(state[name])
            native = values.astype(values.dtype.newbyteorder("="), order="C")
            target.set_value(paddle.to_tensor(native))

    def whole(self) -> dict[str, Tensor] | None:
        """Returns the whole weights on the first of the ranks; None on others. Collective."""
        return joined_on_first(self._group(), self._parts) or None
