from __future__ import annotations

import pytest

from fleetpipe.schedules import Action, Costs, Placement, Schedule, Timeline, build


def play(name: str, p: int, m: int, costs: Costs | None = None, chunks: int = 1) -> Timeline:
    schedule = build(name, ranks=p, micro_batches=m, chunks=chunks)
    schedule.verify()
    return schedule.simulate(costs)


@pytest.mark.parametrize(
    ("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (4, 4, 1), (3, 5, 3), (4, 5, 2)]
)
def test_closed_forms(f: int, i: int, w: int) -> None:
    costs = Costs(f, i, w)
    assert play("1F1B", 4, 12, costs).bubble == 3 * (f + i + w)
    assert play("ZBH1", 4, 12, costs).bubble == 3 * (f + i - w)
    assert play("ZBH1", 4, 12, costs, chunks=2).bubble == 3 * (f + i - w)
    assert play("ZBH2", 4, 12, costs).bubble == 3 * (f + i - 2 * w)


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 2), (2, 3, 4), (2, 5, 3), (3, 1, 2)])
def test_long_weight_gradients(f: int, i: int, w: int) -> None:
    assert play("ZBH1", 4, 12, Costs(f, i, w)).bubble == 3 * (i + max(0, f - w))


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("v", range(1, 5))
def test_interleaved_zero_bubble_loses_a_chunk_for_each_rank(p: int, v: int) -> None:
    for m in range(p, 4 * p + 2):
        timeline = play("InterleavedZeroBubble", p, m, chunks=v)
        first = -(-m // max(1, m // p))
        assert timeline.bubble == p - 1
        assert timeline.peak_activations == (min(m * v, (v - 1) * first + p),) * p


def paddle_zb_h1(p: int, m: int) -> Schedule:
    """Returns the order of Paddle 3.3's static ZBH1: whole backwards in the steady phase."""
    rows = []
    for r in range(p):
        row = [Action("F", r, k) for k in range(p - r)]
        for k in range(r):
            row += (Action("I", r, k), Action("F", r, p - r + k))
        for k in range(r, m - p + r):
            row += (Action("B", r, k), Action("F", r, p - r + k))
        row += [Action("B", r, k) for k in range(m - p + r, m - (r > 0))]
        if r > 0:
            row += (Action("I", r, m - 1), Action("W", r, m - 1))
        row += [Action("W", r, k) for k in range(r)]
        rows.append(tuple(row))
    return Schedule("PaddleZBH1", Placement("loop", p), m, tuple(rows))


@pytest.mark.parametrize(("p", "m", "theirs", "ours"), [(4, 8, 5, 3), (8, 32, 13, 7)])
def test_the_bubble_of_paddles_static_zbh1(p: int, m: int, theirs: int, ours: int) -> None:
    paddle = paddle_zb_h1(p, m).simulate()
    assert paddle.bubble == theirs
    assert paddle.peak_activations == play("ZBH1", p, m).peak_activations == (p,) * p
    assert play("ZBH1", p, m).bubble == ours


def test_paddles_static_zbh1_on_uneven_costs() -> None:
    costs = Costs(3, 5, 4)
    assert paddle_zb_h1(4, 12).simulate(costs).bubble == 21
    assert play("ZBH1", 4, 12, costs).bubble == 15
