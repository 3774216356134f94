"""Borders of stages in a capture: places in a run of the forward.

A border is named by the call of a sublayer or of :func:`pipe_split`, so that it is found again in
another run, with other shapes or in evaluation. An operation belongs to the stage of the node
before it, and an operation inside a sublayer to that sublayer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from fleetpipe.capture.tracing.value import Capture, Scope
from fleetpipe.errors import CaptureError, ConfigError, nearest


class SplitPoint(Enum):
    """Says at which side of a sublayer a stage begins.

    Attributes:
        BEGINNING: The sublayer is the first of the next stage.
        END: The sublayer is the last of its stage.
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
    """A border before or after a call of a sublayer.

    Attributes:
        path: The sublayer's path in the model.
        point: Before or after.
        call: The number of the call, from 0.
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
    """A border at a call of :func:`pipe_split`, by its number."""

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


def starts(trace: Capture, borders: Sequence[Border], example: Capture | None = None) -> list[int]:
    """Returns the first node of each stage after stage 0.

    Args:
        trace: A run of the forward.
        borders: The borders, in the order of the first run.
        example: The first run, in this mode. A run for another batch may leave out sublayers, as
            those for images: then the others are in the stages of the first run, and a stage may
            have no node.

    Raises:
        ConfigError: The forward does not reach a border, or a stage would be empty.
    """
    if example is not None:
        reached = [_start(trace, border, example) for border in borders]
        return list(accumulate(reached, max))
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


def _start(trace: Capture, border: Border, example: Capture) -> int:
    """Returns the first node that is behind a border, where the forward may not come."""
    if not isinstance(border, AtCall) or Scope(border.path, border.call) in trace.calls:
        return border.start(trace)
    first = border.start(example)
    for number, node in enumerate(trace.nodes):
        if any(example.calls.get(scope, (0,))[0] >= first for scope in node.scopes):
            return number
    return len(trace.nodes)


def in_order(trace: Capture, borders: Sequence[Border]) -> list[Border]:
    """Sorts borders as a run reaches them; raises the same errors as :func:`starts`."""
    return sorted(borders, key=lambda border: border.start(trace))
