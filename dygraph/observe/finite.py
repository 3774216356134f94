"""Refuses to send NaN or Inf where the environment asks for that: ``FLAGS_pp_check_naninf``."""

from __future__ import annotations

import os
from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.dygraph.nest import outline, tensors_of
from fleetpipe.errors import BoundaryError
from fleetpipe.transport import MessageKey, Transport, Value

_FLAG = "FLAGS_pp_check_naninf"
_WHAT = {"F": "the output", "B": "the gradient of the input"}


def asked_for() -> bool:
    """Whether ``FLAGS_pp_check_naninf`` is set to something that means yes."""
    return os.environ.get(_FLAG, "").lower() in ("1", "true", "t", "yes", "y")


class CheckedTransport:
    """A transport that looks at every number before it sends; all else is the wrapped one's."""

    def __init__(self, transport: Transport) -> None:
        """Wraps ``transport``."""
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the wrapped transport."""
        return getattr(self._transport, name)

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """See :class:`fleetpipe.transport.Transport`.

        Raises:
            BoundaryError: The value holds NaN or Inf.
        """
        for tensor in tensors_of(value):
            if tensor.is_floating_point() and not _finite(tensor):
                stage = key.source if key.kind == "F" else key.target
                raise BoundaryError(
                    f"{_WHAT[key.kind]} of stage {stage} holds NaN or Inf",
                    where=f"rank {self._transport.rank}, stage {stage}, "
                    f"micro-batch {key.micro_batch}, before it is sent to rank {peer}",
                    got=outline(value),
                    cause="a too large learning rate, a product that passed the dtype's range, "
                    "or such numbers in the data",
                    fix=f"unset {_FLAG} to send it all the same",
                )
        self._transport.send(peer, key, value)


def _finite(tensor: Any) -> bool:
    tensor = tensor.detach()
    if tensor.dtype in (paddle.float16, paddle.bfloat16):
        # Paddle's CPU kernels do not do everything for these.
        tensor = tensor.astype("float32")
    return bool(paddle.isfinite(tensor).all())
