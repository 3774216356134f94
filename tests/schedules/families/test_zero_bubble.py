"""Schedules with split backwards, and the figures that papers print of all families."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from fleetpipe.schedules import Costs, Fused, Timeline, build
from fleetpipe.schedules.action import parts
from tests.schedules.sample_schedules import (
    BUBBLES,
    OF_DUALPIPEV,
    takes,
    value,
)

pytestmark = pytest.mark.no_paddle


def play(
    name: str, p: int, m: int, costs: Costs | None = None, chunks: int | None = None
) -> Timeline:
    schedule = build(name, ranks=p, micro_batches=m, chunks=chunks)
    schedule.verify()
    return schedule.simulate(costs)


@pytest.mark.parametrize("name", [name for name in BUBBLES if name != "DualPipeV"])
@pytest.mark.parametrize(
    ("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (4, 4, 1), (3, 5, 3), (4, 5, 2)]
)
def test_closed_forms(name: str, f: int, i: int, w: int) -> None:
    for chunks in (1, 2) if takes(name, 2) else (1,):
        bubble = value(BUBBLES[name], p=4, F=f, I=i, W=w, B=i + w)
        assert play(name, 4, 12, Costs(f, i, w), chunks).bubble == bubble


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 2), (2, 3, 4), (2, 5, 3), (3, 1, 2)])
def test_long_weight_gradients(f: int, i: int, w: int) -> None:
    assert play("ZBH1", 4, 12, Costs(f, i, w)).bubble == 3 * (i + max(0, f - w))


@pytest.mark.parametrize(
    ("f", "w", "pair"),
    [(1, 1, 3), (1, 2, 4), (2, 1, 5), (2, 2, 6), (2, 5, 12), (3, 2, 8), (3, 7, 15)],
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 11), (5, 10)])
def test_the_bubble_of_dualpipev(f: int, w: int, pair: int, p: int, m: int) -> None:
    names = {"p": p, "F": f, "I": f, "W": w, "B": f + w}
    timeline = play("DualPipeV", p, m, Costs(f, f, w, overlapped=pair))
    assert timeline.bubble == value(OF_DUALPIPEV["costs"], FB=pair, **names)
    assert w > f or timeline.bubble == value(BUBBLES["DualPipeV"], FB=pair, **names)
    assert w > f or timeline.makespan == m * 2 * (2 * f + w) + timeline.bubble
    for shorter in (f + w, 1.5 * f + w):
        most = value(OF_DUALPIPEV["costs"], FB=shorter, **names)
        assert play("DualPipeV", p, m, Costs(f, f, w, overlapped=shorter)).bubble <= most + 1e-9


def test_overlap_of_pairs_in_dualpipev() -> None:
    timeline = play("DualPipeV", 4, 10, Costs(overlapped=2.4))
    computed = [sum(e - s for _, s, e in row) for row in timeline.events]
    assert timeline.makespan == pytest.approx(57.6)
    assert timeline.makespan - computed[0] == pytest.approx(3.0)
    assert timeline.makespan - computed[3] == pytest.approx(3 * (2.4 + 2 - 3))


def test_pairs_of_dualpipev_are_a_forward_and_a_whole_backward() -> None:
    schedule = build("DualPipeV", ranks=4, micro_batches=10)
    pairs = [[item for item in row if isinstance(item, Fused)] for row in schedule.actions]
    assert all([a.kind for a in pair.actions] == ["F", "B"] for row in pairs for pair in row)
    # Two in each step of the middle, one in each of the part after it; the last rank has one less.
    assert [len(row) for row in pairs] == [2 * (3 + r) + 3 - r - (r == 3) for r in range(4)]


@pytest.mark.parametrize("m", range(1, 7))
@pytest.mark.parametrize(("name", "filled"), [("ZBV", 7), ("DualPipeV", 8)])
def test_fewer_micro_batches_have_the_pattern_of_more_trimmed(
    name: str, filled: int, m: int
) -> None:
    trimmed, whole = (build(name, ranks=4, micro_batches=count) for count in (m, filled))
    for row, pattern in zip(trimmed.actions, whole.actions):
        kept = (tuple(a for a in parts(item) if a.micro_batch < m) for item in pattern)
        assert list(map(parts, row)) == list(filter(None, kept))


class Figures(NamedTuple):
    """A schedule, its options and costs, and figures of its timeline; None where it has no say.

    ``peaks`` is one number for all ranks, or one for each.
    """

    name: str
    ranks: int
    micro_batches: int
    span: float | None = None
    bubble: float | None = None
    makespan: float | None = None
    peaks: int | tuple[int, ...] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012
    costs: Costs | None = None


OVERLAPPED = Costs(overlapped=3)
FIGURES = [
    Figures("FThenB", 4, 8, 57, peaks=16, options={"chunks": 2}),
    Figures("Interleaved1F1B", 4, 8, 57, 9, peaks=(11, 9, 7, 5), options={"chunks": 2}),
    Figures("Interleaved1F1B", 4, 16, 201, 9, peaks=(19, 17, 15, 13), options={"chunks": 4}),
    Figures("Interleaved1F1B", 4, 3, bubble=12),
    Figures("Interleaved1F1B", 4, 2, bubble=15),
    Figures("Interleaved1F1B", 4, 12, 44, costs=Costs(0.5, 0.5, 0.5, comm=0.25)),
    Figures("Interleaved1F1B", 4, 12, 60.5, costs=Costs(0.5, 0.5, 0.5, comm=1)),
    Figures("ZBH1", 4, 8, 27, 3, 27, 4),
    Figures("ZBH2", 4, 8, 24, 0, 27, 7),
    # Few micro-batches are no case for ZBH2.
    Figures("ZBH1", 4, 4, makespan=15),
    Figures("ZBH2", 4, 4, bubble=3, makespan=16),
    Figures("ZBV", 4, 7, 42, 0, 45, 8),
    Figures("ZBV", 4, 8, 48, 0, 51, 8),
    Figures("ZBV", 4, 16, 96, 0, 99, 8),
    Figures("VHalf", 4, 16, 101, peaks=6),
    Figures("VHalf", 8, 32, 209, peaks=10),
    Figures("VMin", 4, 16, 107, peaks=4),
    Figures("VMin", 6, 24, 161, peaks=6),
    Figures("Hanayo", 4, 16, 110, peaks=(11, 12, 13, 14)),
    Figures("DualPipeV", 4, 10, bubble=6, makespan=66, peaks=9, costs=OVERLAPPED),
    Figures("DualPipeV", 2, 4, bubble=2, makespan=26, peaks=5, costs=OVERLAPPED),
    *(
        Figures("kFkB", 4, 24, span, options={"groups": [k]}, costs=Costs(comm=comm))
        for comm, spans in ((1, (121, 87, 87)), (3, (201, 123, 99)), (4, (241, 145, 115)))
        for k, span in enumerate(spans, 1)
    ),
]


@pytest.mark.parametrize("row", FIGURES)
def test_a_schedule_has_its_figures(row: Figures) -> None:
    schedule = build(row.name, ranks=row.ranks, micro_batches=row.micro_batches, **row.options)
    schedule.verify()
    timeline = schedule.simulate(row.costs)
    for name in ("span", "bubble", "makespan"):
        expected = getattr(row, name)
        assert expected is None or getattr(timeline, name) == expected, name
    peaks = (row.peaks,) * row.ranks if isinstance(row.peaks, int) else row.peaks
    assert peaks is None or timeline.peak_activations == peaks
