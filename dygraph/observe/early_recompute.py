"""Runs what layers have put into ``zero_bubble_utils.RecomputeStore`` while a rank waits."""

from __future__ import annotations

from fleetpipe.engine.observer import Blocked, Instruction, Played
from fleetpipe.paddle_api.meta_parallel import RecomputeStore
from fleetpipe.schedules import Action, Op, Recv


class EarlyRecompute:
    """Sees whose forward runs, and when a rank waits for the gradients of its output.

    Then the spans of that forward run, one by one until the gradients are there. What is left is
    run by the backward itself.
    """

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if isinstance(op, Action) and op.kind == "F":
            return _keyed((op.stage, int(op.micro_batch)), instruction)
        if isinstance(op, Recv) and op.kind == "B":
            return _filled((op.edge.source, int(op.micro_batch)), instruction)
        return instruction


def _keyed(key: tuple[int, int], instruction: Instruction) -> Instruction:
    def forward() -> Blocked | None:
        RecomputeStore.key = key
        try:
            return instruction()
        finally:
            RecomputeStore.key = None

    return forward


def _filled(key: tuple[int, int], instruction: Instruction) -> Instruction:
    def wait() -> Blocked | None:
        while (blocked := instruction()) is not None and RecomputeStore.groups.get(key):
            span = RecomputeStore.groups[key][0]
            span.run_recompute_now()
            RecomputeStore.drop(span)
        return blocked

    return wait
