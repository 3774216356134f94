"""Where a capture is cut: places in a run of the forward at which a stage begins.

A place is said by the call of a sublayer, or by a call of :func:`pipe_split`, so that it is found
again in another run, with other shapes or in evaluation. Glue goes with what ran before it, and
glue of a sublayer's own with that sublayer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

from fleetpipe.capture.tracing.value import Capture, Scope
from fleetpipe.errors import CaptureError, ConfigError, nearest


class SplitPoint(Enum):
    """Where, at a sublayer, a stage begins.

    Attributes:
        BEGINNING: The sublayer is the first of the next stage.
        END: It is the last of its stage.
    """

    BEGINNING = "before"
    END = "after"


def nearest_path(path: str, paths: Collection[str]) -> str:
    """Returns a phrase that names the paths closest to ``path``, or all of the first level."""
    phrase = nearest(path, paths)
    if not phrase.startswith("known"):
        return phrase
    return nearest(path, {candidate.partition(".")[0] for candidate in paths})


class AtCall(NamedTuple):
    """Before or after a call of a sublayer.

    Attributes:
        path: The sublayer's path in the model.
        point: Before or after.
        call: Which of its calls, from 0.
    """

    path: str
    point: SplitPoint = SplitPoint.BEGINNING
    call: int = 0

    def __str__(self) -> str:
        return f"{self.point.value} {self.path}" + (f" (call {self.call + 1})" * (self.call > 0))

    def start(self, trace: Capture) -> int:
        """Returns the first node of the stage that begins here.

        Raises:
            ConfigError: The forward does not call the sublayer.
        """
        inside = trace.calls.get(Scope(self.path, self.call))
        if inside is None:
            paths = {scope.path for scope in trace.calls if scope.path}
            within = [
                f"{path} is not opened: {reason}"
                for path, reason in trace.unopened.items()
                if self.path.startswith(f"{path}.")
            ]
            raise ConfigError(
                f"split_spec cuts {self}, where the model's forward does not come",
                got=nearest_path(self.path, paths),
                cause=within[0]
                if within
                else "its forward is called by no other, or as self.block.forward(x), which is no "
                "call of the layer",
                fix="name a sublayer that fleetpipe.explain(model, example) shows",
            )
        first, last = inside
        return first if self.point is SplitPoint.BEGINNING else last + 1


class AtMark(NamedTuple):
    """At a call of :func:`pipe_split`, by its number."""

    number: int

    def __str__(self) -> str:
        return f"at call {self.number + 1} of pipe_split"

    def start(self, trace: Capture) -> int:
        """Returns the first node of the stage that begins here."""
        if self.number >= len(trace.marks):
            raise CaptureError(
                "the forward called pipe_split more often in its first run",
                expected=f"{self.number + 1} calls or more",
                got=f"{len(trace.marks)} calls",
                fix="call pipe_split in training and in evaluation, whatever the inputs are",
            )
        return trace.marks[self.number]


#: A place where a stage begins.
Border = AtCall | AtMark


def starts(trace: Capture, borders: Sequence[Border]) -> list[int]:
    """Returns the first node of each stage but stage 0.

    Args:
        trace: A run of the forward.
        borders: The places, in the order in which the first run came to them.

    Raises:
        ConfigError: The forward does not come to a place, or a stage would be empty.
    """
    numbers = [border.start(trace) for border in borders]
    for border, start, after in zip(borders, numbers, [*numbers[1:], len(trace.nodes)]):
        if not 0 < start < after:
            raise ConfigError(
                f"the cut {border} leaves a stage without a node",
                got=f"stages that begin at the nodes {[0, *numbers]} of {len(trace.nodes)}",
                cause="two places are the same, or nothing runs before the first or after the last",
                fix="cut elsewhere: fleetpipe.explain(model, example) shows the nodes in order",
            )
    return numbers


def in_order(trace: Capture, borders: Sequence[Border]) -> list[Border]:
    """Returns places in the order in which a run comes to them; raises as :func:`starts`."""
    return sorted(borders, key=lambda border: border.start(trace))
