"""Keeps all uses of state that a forward writes into in one stage.

A stage runs its micro-batches one after another, so that each sees the writes of the one before.
Another stage would run too early or too late, or have its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fleetpipe.capture.tracing.value import Capture, Node
from fleetpipe.errors import CaptureError


class Span(NamedTuple):
    """The first and the last node of a run that use a parameter or buffer."""

    first: int
    last: int


#: By the name of what any of several runs writes into, its span in each; None where none uses it.
Spans = dict[str, list[Span | None]]


def spans(traces: Sequence[Capture]) -> Spans:
    """Returns the span in each run of the state that any of them writes into."""
    names = dict.fromkeys(name for trace in traces for name in trace.changed)
    return {name: [_span(name, trace.nodes) for trace in traces] for name in names}


def _span(name: str, nodes: Sequence[Node]) -> Span | None:
    users = [number for number, node in enumerate(nodes) if name in node.state]
    return Span(users[0], users[-1]) if users else None


def split_state(written: Spans, starts: Sequence[int]) -> str | None:
    """Names a state that is used on both sides of a border; None if there is none.

    Args:
        written: The spans of written state in the runs.
        starts: The first node after the border, in each run.
    """
    for name, nodes in written.items():
        pairs = [(span, start) for span, start in zip(nodes, starts) if span is not None]
        if any(span.first < start for span, start in pairs) and any(
            span.last >= start for span, start in pairs
        ):
            return name
    return None


def require_one_stage(runs: Sequence[tuple[Capture, Sequence[int]]]) -> None:
    """Refuses a cut between the uses of state that a forward writes into.

    Args:
        runs: The runs in training and in evaluation, each with the first node of each stage after
            stage 0.
    """
    traces, cuts = zip(*runs)
    for starts in zip(*cuts):
        written = spans(traces)
        name = split_state(written, starts)
        if name is not None:
            before, after = _sides(name, runs)
            raise CaptureError(
                f"two stages share {name!r}, into which the forward writes",
                where=f"{before}; {after}",
                cause="micro-batches come to the stages at different times: one stage would see "
                "what others wrote for another micro-batch",
                fix="cut so that all of its uses are in one stage: fleetpipe.explain(model, "
                "example) shows where",
            )


def _sides(name: str, runs: Sequence[tuple[Capture, Sequence[int]]]) -> tuple[str, str]:
    """Names a node in each of two stages that use a parameter or buffer."""
    users: dict[int, str] = {}
    for trace, starts in runs:
        for number, node in enumerate(trace.nodes):
            if name in node.state:
                stage = sum(start <= number for start in starts)
                users.setdefault(stage, f"{node.name} in stage {stage}, {node.place}")
    first, second, *_ = (users[stage] for stage in sorted(users))
    return first, second
