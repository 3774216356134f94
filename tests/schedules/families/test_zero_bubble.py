from __future__ import annotations

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Action, Costs, Fused, Placement, Schedule, Timeline, build
from fleetpipe.schedules.action import flatten
from tests.schedules.declared import BUBBLES, OF_DUALPIPEV, OF_ZBV, bubble, peaks, takes, value


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


VEE = ("ZBV", "VHalf", "VMin", "DualPipeV")


@pytest.mark.parametrize("name", VEE)
def test_two_chunks_and_no_other_number(name: str) -> None:
    schedule = build(name, ranks=3, micro_batches=4)
    assert (schedule.placement.name, schedule.placement.chunks) == ("vee", 2)
    for chunks in (1, 3):
        with pytest.raises(ConfigError, match="exactly two chunks"):
            build(name, ranks=3, micro_batches=4, chunks=chunks)


@pytest.mark.parametrize("m", range(1, 7))
def test_zbv_with_fewer_micro_batches_is_its_pattern_trimmed(m: int) -> None:
    whole, trimmed = build("ZBV", ranks=4, micro_batches=7), build("ZBV", ranks=4, micro_batches=m)
    assert trimmed.actions == tuple(
        tuple(action for action in flatten(row) if action.micro_batch < m) for row in whole.actions
    )
    assert trimmed.simulate().bubble == 2 * (7 - m)


@pytest.mark.parametrize("p", range(3, 13))
def test_controllable_memory_for_every_number_of_ranks(p: int) -> None:
    half, least = play("VHalf", p, 3 * p), play("VMin", p, 3 * p)
    assert half.bubble == (3 * p - 7 if p % 2 == 0 else 3 * p - 4)
    assert least.bubble == (4 * p - 7 if p % 3 == 0 else 4 * p - 5)
    assert max(half.peak_activations) == 2 * ((p + 2) // 2)
    assert max(least.peak_activations) == 2 * ((p + 4) // 3)


@pytest.mark.parametrize("name", ["VHalf", "VMin"])
def test_more_ranks_than_a_drawing_shows(name: str) -> None:
    for p in (24, 33):
        assert play(name, p, 5).peak_activations <= (10,) * p


@pytest.mark.parametrize("p", [2, 3, 4, 7])
def test_zbv_and_dualpipev_for_every_number_of_micro_batches(p: int) -> None:
    for m in range(1, 2 * p + 3):
        for name in ("ZBV", "DualPipeV"):
            timeline = play(name, p, m)
            assert (timeline.bubble, True) == bubble(name, p, 2, m)
            assert list(timeline.peak_activations) == peaks(name, p, 2, m)
            assert name != "ZBV" or timeline.makespan == value(OF_ZBV["makespan"], p=p, m=m)


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


@pytest.mark.parametrize("m", range(1, 8))
def test_dualpipev_with_fewer_micro_batches_is_trimmed(m: int) -> None:
    schedule = build("DualPipeV", ranks=4, micro_batches=m)
    schedule.lower().verify()
    whole = build("DualPipeV", ranks=4, micro_batches=8)
    for row, filled in zip(schedule.actions, whole.actions):
        assert list(flatten(row)) == [a for a in flatten(filled) if a.micro_batch < m]
        # What is left of a pair is a plain action.
        assert all(len(item.actions) == 2 for item in row if isinstance(item, Fused))
