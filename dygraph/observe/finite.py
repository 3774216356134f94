"""Refuses to send NaN or Inf if the environment has ``FLAGS_pp_check_naninf``."""

from __future__ import annotations

import os

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.nest import outline, tensors_of
from fleetpipe.engine.observer import Blocked, Instruction, Played, message_of
from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import to_host
from fleetpipe.schedules import Op, Send
from fleetpipe.transport import MessageKey, Value

_FLAG = "FLAGS_pp_check_naninf"
_WHAT = {"F": "the output", "B": "the gradient of the input"}


class FiniteSends:
    """An observer of the engine that checks every number before it is sent."""

    @classmethod
    def asked_for(cls) -> FiniteSends | None:
        """Returns an observer if ``FLAGS_pp_check_naninf`` is set to a word for yes."""
        return cls() if os.environ[_FLAG].lower() in ("1", "true", "t", "yes", "y") else None

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`.

        The instruction that it returns raises :class:`BoundaryError` if the value to send has NaN
        or Inf.
        """
        if not isinstance(op, Send):
            return instruction
        key = message_of(op)

        def check() -> Blocked | None:
            _require_finite(played.values[key], key, played.rank)
            return instruction()

        return check


def _require_finite(value: Value, key: MessageKey, rank: int) -> None:
    for tensor in tensors_of(value):
        if tensor.is_floating_point() and not _finite(tensor):
            source, target = (key.source, key.target)[:: 1 if key.kind == "F" else -1]
            raise BoundaryError(
                f"{_WHAT[key.kind]} of stage {source} holds NaN or Inf",
                where=f"rank {rank}, stage {source}, micro-batch {key.micro_batch}, before it is "
                f"sent to stage {target}",
                got=outline(value),
                cause="a too large learning rate, a product that passed the dtype's range, "
                "or such numbers in the data",
                fix=f"unset {_FLAG} to send it all the same",
            )


def _finite(tensor: Tensor) -> bool:
    tensor = tensor.detach()
    if tensor.dtype in (paddle.float16, paddle.bfloat16):
        # Paddle's CPU kernels do not do everything for these.
        tensor = tensor.astype("float32")
    return bool(to_host(paddle.isfinite(tensor).all()))
