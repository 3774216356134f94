"""``TENSOR_SHAPE``: what goes from stage to stage is checked against it."""

from __future__ import annotations

from collections.abc import Sequence

from fleetpipe.aliases import Layer
from fleetpipe.dygraph.nest import outline, tensors_of
from fleetpipe.engine.observer import Blocked, Instruction, Played, message_of
from fleetpipe.errors import BoundaryError
from fleetpipe.schedules import Op, Send


class ShapedSends:
    """An observer of the engine that looks at the shape of what a forward sends.

    Every message tells its shape, so that a promise of it saves nothing; a broken one is an error.
    Only an evaluation may have fewer rows, in its last batch.
    """

    def __init__(self, shape: Sequence[int], model: Layer) -> None:
        """Takes the promised shape, and the model that is in training or not."""
        self._shape = tuple(shape)
        self._model = model

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`.

        What it returns raises :class:`BoundaryError` where a value has another shape.
        """
        if not isinstance(op, Send) or op.kind != "F":
            return instruction
        key = message_of(op)

        def checked() -> Blocked | None:
            value = played.values[key]
            if not all(self._fits(tuple(tensor.shape)) for tensor in tensors_of(value)):
                raise BoundaryError(
                    "a value between stages does not have the shape of TENSOR_SHAPE",
                    where=f"rank {played.rank}, stage {key.source}, micro-batch {key.micro_batch}",
                    expected=str(list(self._shape)),
                    got=outline(value),
                    fix="leave TENSOR_SHAPE out: messages tell their shapes",
                )
            return instruction()

        return checked

    def _fits(self, shape: tuple[int, ...]) -> bool:
        short = not self._model.training and shape[:1] < self._shape[:1]
        return shape == self._shape or (short and shape[1:] == self._shape[1:])
