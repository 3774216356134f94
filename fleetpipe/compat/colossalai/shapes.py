"""``TENSOR_SHAPE``: what goes from stage to stage is checked against it."""

from __future__ import annotations

from collections.abc import Sequence

from fleetpipe.dygraph.nest import outline, tensors_of
from fleetpipe.engine.observer import Blocked, Instruction, Played, message_of
from fleetpipe.errors import BoundaryError
from fleetpipe.schedules import Op, Send


class ShapedSends:
    """An observer of the engine that looks at the shape of what a forward sends.

    Every message tells its shape, so that a promise of it saves nothing; a broken one is an error.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        """Takes the promised shape."""
        self._shape = tuple(shape)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`.

        What it returns raises :class:`BoundaryError` where a value has another shape.
        """
        if not isinstance(op, Send) or op.kind != "F":
            return instruction
        key = message_of(op)

        def checked() -> Blocked | None:
            value = played.values[key]
            if any(tuple(tensor.shape) != self._shape for tensor in tensors_of(value)):
                raise BoundaryError(
                    "a value between stages does not have the shape of TENSOR_SHAPE",
                    where=f"rank {played.rank}, stage {key.source}, micro-batch {key.micro_batch}",
                    expected=str(list(self._shape)),
                    got=outline(value),
                    fix="leave TENSOR_SHAPE out: messages tell their shapes",
                )
            return instruction()

        return checked
