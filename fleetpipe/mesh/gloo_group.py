"""Collective operations of some ranks by one of Paddle's own groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from fleetpipe.errors import FleetPipeError, PeerFailed
from fleetpipe.mesh.groups import DirectGroup
from fleetpipe.transport.base import Transport


class GlooGroup(DirectGroup):
    """Sums large tensors in one of Paddle's own groups: Gloo's on CPU, NCCL's on GPU.

    The members meet over their connections first, under the user's limit: Gloo itself gives up
    after 30 s, and the group is broken afterwards.
    """

    def __init__(
        self,
        transport: Transport,
        timeout: float,
        paddle_group: Any,
        limit: Callable[[], AbstractContextManager[None]] = nullcontext,
        name: str = "group",
    ) -> None:
        """Uses a group of Paddle's with the same members in the same order.

        Args:
            transport: This rank's connections to the other members.
            timeout: Seconds that the wait for a member may last.
            paddle_group: A group from ``paddle.distributed.new_group``.
            limit: Returns a context; each operation of that group runs in one.
            name: Prefix of its messages.
        """
        super().__init__(transport, timeout, name)
        self.paddle_group = paddle_group
        self._limit = limit

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Replaces each tensor by the sum over all members. Collective."""
        from paddle.distributed import all_reduce

        if self.alone:
            return
        self.all_gather(None)
        with self.collective():
            for tensor in tensors:
                # Gloo's sums of float16 are not numbers.
                narrow = str(tensor.dtype).endswith("float16") and tensor.place.is_cpu_place()
                total = tensor.astype("float32") if narrow else tensor
                all_reduce(total, group=self.paddle_group)
                if narrow:
                    tensor.set_value(total.astype(tensor.dtype))

    def broadcast_each(self, tensors: Sequence[tuple[Any, int]]) -> None:
        """Replaces each tensor by the one of the member named beside it. Collective."""
        from paddle.distributed import broadcast

        if self.alone:
            return
        members = self.all_gather(self.paddle_group.ranks[self.paddle_group.rank])
        with self.collective():
            for tensor, source in tensors:
                broadcast(tensor, members[source], group=self.paddle_group)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Is open while Paddle's own collectives run; the members must have met before.

        Raises:
            PeerFailed: The collective broke, because a member died or stopped meanwhile.
        """
        try:
            with self._limit():
                yield
        except (RuntimeError, OSError) as error:  # of Gloo, of NCCL
            if isinstance(error, FleetPipeError):
                raise
            raise PeerFailed(
                "a collective operation of Paddle's broke",
                got=str(error).strip().splitlines()[0],
                cause="another member died within it, did not go on for 30 s, or uses the same GPU",
                fix="read the logs of the other members",
            ) from error
