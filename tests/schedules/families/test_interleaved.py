from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules import Costs, Placement, Schedule, Timeline, build
from fleetpipe.schedules.action import Action
from fleetpipe.schedules.families.one_f_one_b import balanced_groups, interleaved_one_f_one_b
from tests.schedules.sample_schedules import OF_HANAYO, value

pytestmark = pytest.mark.no_paddle


def play(m: int, costs: Costs | None = None, *, chunks: int = 2, **options: object) -> Timeline:
    """Returns the timeline of four ranks."""
    schedule = build("VPP", ranks=4, micro_batches=m, chunks=chunks, **options)
    schedule.verify()
    return schedule.simulate(costs)


@pytest.mark.parametrize(
    ("groups", "bubble", "peak"),
    [(None, 9, 12), ([5, 5], 9, 12), ((6, 4), 9, 13), ([4, 4, 2], 19, 11)],
)
def test_groups_trade_bubble_for_memory(groups: list[int] | None, bubble: int, peak: int) -> None:
    timeline = play(10, groups=groups)
    assert (timeline.bubble, timeline.peak_activations[0]) == (bubble, peak)


@pytest.mark.parametrize(
    ("groups", "m", "chunks", "message"),
    [
        ([4, 6], 10, 2, r"`groups` \[4, 6\] deadlock(.|\n)*F7\.4(.|\n)*groups=\[5, 5\]"),
        ([4, 1], 5, 3, r"`groups` \[4, 1\] deadlock(.|\n)*fewer than 4(.|\n)*groups=\[5\]"),
        ([4, 4], 10, 2, r"sum 10(.|\n)*\[4, 4\], which is 8"),
        ([10, 0], 10, 2, "groups=0"),
        ([], 10, 2, r"\[\], which is 0"),
        (10, 10, 2, "no list of sizes"),
        ("55", 10, 2, "no list of sizes"),
    ],
)
def test_bad_groups_are_refused_with_the_reason(
    groups: object, m: int, chunks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        play(m, chunks=chunks, groups=groups)


def test_growing_groups_are_found_by_verification_too() -> None:
    placement = Placement("loop", 4, 2)
    rows = tuple(map(tuple, interleaved_one_f_one_b(placement, 10, [4, 6])))
    with pytest.raises(ScheduleError, match=r"B7\.4 stands before F7\.4, which it waits for"):
        Schedule("Grown", placement, 10, rows).verify()


def test_balanced_groups_do_not_grow_and_hold_a_micro_batch_for_each_rank() -> None:
    assert balanced_groups(4, 11) == [6, 5]
    assert balanced_groups(4, 3) == [3]
    for ranks in range(1, 6):
        for m in range(ranks, 30):
            groups = balanced_groups(ranks, m)
            assert sum(groups) == m
            assert groups == sorted(groups, reverse=True)
            assert groups[0] - groups[-1] <= 1
            assert groups[-1] >= ranks


def test_less_slack_holds_less_and_hides_no_latency() -> None:
    for slack, peaks in ((2, (11, 9, 7, 5)), (1, (8, 7, 6, 5))):
        timeline = play(8, warmup_slack=slack)
        assert (timeline.bubble, timeline.peak_activations) == (9, peaks)
    costs = Costs(18.522 / 3, 18.086 / 3, 9.337 / 3, comm=0.601)
    rates = [
        build("VPP", ranks=8, micro_batches=24, chunks=3, warmup_slack=slack)
        .simulate(costs)
        .bubble_rate
        for slack in (1, 2)
    ]
    assert [round(rate, 4) for rate in rates] == [0.1487, 0.1090]
    with pytest.raises(ConfigError, match="1 or 2"):
        play(8, warmup_slack=3)


def test_1f1b_with_chunks_is_interleaved() -> None:
    schedule = build("1F1B", ranks=4, micro_batches=10, chunks=2, groups=[6, 4])
    assert schedule == build("VPP", ranks=4, micro_batches=10, groups=[6, 4])
    assert schedule.name == "Interleaved1F1B"
    assert build("1F1B", ranks=4, micro_batches=10, chunks=1).name == "1F1B"
    with pytest.raises(ConfigError, match="1F1B has no option 'groups'"):
        build("1F1B", ranks=4, micro_batches=10, groups=[6, 4])


@given(st.integers(1, 6), st.integers(1, 20), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_groups_are_valid_and_cost_no_bubble(p: int, m: int, groups: list[int]) -> None:
    groups = [size for index, size in enumerate(groups) if sum(groups[:index]) < m]
    schedule = build("kFkB", ranks=p, micro_batches=m, groups=groups)
    schedule.verify()
    schedule.lower().verify()
    timeline = schedule.simulate()
    assert timeline.bubble == 3 * (p - 1)
    k = max(groups)
    limits = [min(m, k * (p - rank)) for rank in range(p)]
    assert all(peak <= most for peak, most in zip(timeline.peak_activations, limits))


def test_groups_of_one_are_1f1b_and_one_group_is_f_then_b() -> None:
    def actions(name: str, **options: object) -> object:
        return build(name, ranks=3, micro_batches=7, **options).actions

    assert actions("kFkB", groups=[1]) == actions("1F1B")
    assert actions("kFkB", groups=[7]) == actions("FThenB")
    assert actions("kFkB") == actions("kFkB", groups=(2, 2, 2, 2))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("comm", [0.25, 1, 1.5, 3, 4.5])
def test_groups_hide_latency(k: int, comm: float) -> None:
    schedule = build("kFkB", ranks=4, micro_batches=24, groups=[k])
    whole = 81 + 2 * 3 * comm
    hidden = (k - 1) * 3 >= 2 * comm
    assert (schedule.simulate(Costs(comm=comm)).span == whole) == hidden


@pytest.mark.parametrize(
    ("groups", "message"),
    [([], "no list"), (2, "no list"), ([0], "groups=0"), ([4, 4, 4], "below 8")],
)
def test_groups_that_do_not_fit_are_refused(groups: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("kFkB", ranks=2, micro_batches=8, groups=groups)


@pytest.mark.parametrize(
    ("p", "waves", "bubble"),
    [(2, 1, 4), (2, 4, 4), (3, 2, 8), (4, 1, 12), (4, 2, 13), (8, 1, 28), (8, 2, 30), (8, 4, 30)],
)
def test_the_bubble_with_as_many_micro_batches_as_ranks(p: int, waves: int, bubble: int) -> None:
    timeline = build("Hanayo", ranks=p, micro_batches=p, chunks=2 * waves).simulate()
    assert (timeline.bubble, timeline.busy) == (bubble, 6 * waves * p)
    assert max(timeline.peak_activations) == 2 * waves * p
    cited = (2 * p - 2) / (3 * waves * p + p - 1)
    assert timeline.bubble_rate < cited + 0.002
    assert waves == 1 or timeline.bubble_rate > cited - 0.02


@pytest.mark.parametrize(("p", "m", "w"), [(4, 4, 1), (4, 2, 2), (5, 3, 3), (3, 3, 2), (6, 1, 1)])
def test_the_peaks_of_waves(p: int, m: int, w: int) -> None:
    peaks = build("Hanayo", ranks=p, micro_batches=m, chunks=2 * w).simulate().peak_activations
    assert peaks[0] == value(OF_HANAYO["first rank"], w=w, m=m)
    assert peaks[-1] == value(OF_HANAYO["last rank"], w=w, m=m)
    more = build("Hanayo", ranks=p, micro_batches=p + 2, chunks=2 * w).simulate()
    assert max(more.peak_activations) <= 2 * w * (p + 2)


@pytest.mark.parametrize("p", range(1, 6))
@pytest.mark.parametrize("chunks", [2, 4, 6])
def test_it_is_valid_for_every_number_of_micro_batches(p: int, chunks: int) -> None:
    for m in (1, 2, 3, 7):
        schedule = build("wave", ranks=p, micro_batches=m, chunks=chunks)
        schedule.verify()
        schedule.lower().verify()
        # A single device takes the micro-batches of each stage in this order too.
        for row in schedule.actions:
            actions = [action for action in row if isinstance(action, Action)]
            kinds = {action[:2] for action in actions}
            for kind in kinds:
                assert [a.micro_batch for a in actions if a[:2] == kind] == list(range(m))


def test_odd_numbers_of_chunks_are_refused() -> None:
    with pytest.raises(ConfigError, match="a whole number of times two chunks"):
        build("Hanayo", ranks=2, micro_batches=4, chunks=3)
