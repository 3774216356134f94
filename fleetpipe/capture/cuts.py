"""Where a capture is cut: from what the user says to the first node of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Union

from fleetpipe.capture.value import Trace
from fleetpipe.errors import ConfigError, nearest


class SplitPoint(Enum):
    """Where, at a sublayer, a stage begins.

    Attributes:
        BEGINNING: The sublayer is the first of the next stage.
        END: It is the last of its stage.
    """

    BEGINNING = "beginning"
    END = "end"


class Border(NamedTuple):
    """A place where a new stage begins: before or after the first call of a sublayer."""

    path: str
    point: SplitPoint

    def __str__(self) -> str:
        return f"{self.path} {self.point.name}"


#: What a user says of the cut.
SplitSpec = Union[str, Sequence[str], Mapping[str, SplitPoint], None]


def borders_of(spec: SplitSpec) -> list[Border]:
    """Returns the places that a user named."""
    if isinstance(spec, Mapping):
        return [Border(path, point) for path, point in spec.items()]
    return [Border(path, SplitPoint.BEGINNING) for path in spec or ()]


def starts(trace: Trace, borders: Sequence[Border]) -> list[int]:
    """Returns the first node of each stage but stage 0, in the order in which nodes run.

    Glue goes with what ran before it, and glue within a sublayer with the sublayer.

    Raises:
        ConfigError: The model has no such sublayer, or its forward does not call it.
    """
    return sorted(_start(trace, border) for border in borders)


def _start(trace: Trace, border: Border) -> int:
    inside = [
        number
        for number, node in enumerate(trace.nodes)
        if any(scope.path == border.path and not scope.call for scope in node.scopes)
    ]
    if not inside:
        paths = {scope.path for node in trace.nodes for scope in node.scopes if scope.path}
        raise ConfigError(
            f"split_spec names {border.path!r}, which no call of the model's forward goes to",
            got=nearest(border.path, paths),
            fix="name a sublayer as model.named_sublayers() has it",
        )
    return inside[0] if border.point is SplitPoint.BEGINNING else inside[-1] + 1
