"""Figures of all families in one table, and those that papers print."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from fleetpipe.schedules import Costs, build


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


# Zero Bubble paper (arXiv:2401.10241): p, m, profiled F, I, W and latency in ms, v; bubble rates of
# 1F1B, ZB-H1, ZB-H2 and Interleaved1F1B, and the rate that the paper prints for the last one.
PAPER = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 3, (0.2431, 0.1585, 0.1083, 0.1090), 0.1055),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 3, (0.1240, 0.0674, 0.0444, 0.0461), 0.0443),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 4, (0.2347, 0.1323, 0.0698, 0.0827), 0.0808),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 4, (0.1091, 0.0554, 0.0294, 0.0328), 0.0320),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 3, (0.2552, 0.1397, 0.0672, 0.1136), 0.1104),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 3, (0.1251, 0.0576, 0.0266, 0.0459), 0.0445),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 2, (0.2646, 0.1421, 0.0641, 0.1528), 0.1493),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 2, (0.1352, 0.0594, 0.0257, 0.0641), 0.0624),
]


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "comm", "v", "rates", "printed"), PAPER)
def test_the_rates_of_the_zero_bubble_paper(
    p: int, m: int, f: float, i: float, w: float, comm: float, v: int, rates: Any, printed: float
) -> None:
    costs = Costs(forward=f, input_grad=i, weight_grad=w, comm=comm)
    whole = [build(name, ranks=p, micro_batches=m) for name in ("1F1B", "ZBH1", "ZBH2")]
    timeline = build("VPP", ranks=p, micro_batches=m, chunks=v).simulate(
        Costs(f / v, i / v, w / v, comm=comm)
    )
    for schedule in whole:
        schedule.verify()
    found = [*(one.simulate(costs).bubble_rate for one in whole), timeline.bubble_rate]
    assert [round(rate, 4) for rate in found] == [*rates]
    work = m * (f + i + w)
    lost = (p - 1) * (f + i + w) / v + (2 * v * p - 2) * comm
    assert timeline.span == pytest.approx(work + lost, rel=1e-12)
    # The paper counts p latencies less: the hops from the last rank back to the first.
    assert round((lost - p * comm) / (work + lost - p * comm), 4) == printed
