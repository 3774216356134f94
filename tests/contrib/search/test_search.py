"""Schedules that are found by search, and by scheduling the list of all actions."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedules.search import ROWS, measure
from fleetpipe.contrib.search import auto
from fleetpipe.contrib.search.orders import (
    Policy,
    Preference,
    Problem,
    fill,
    is_allowed,
    listed_order,
    most_forwards,
    warm_up_order,
    warm_ups,
)
from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules import Costs, Placement, Schedule, build, names, registry
from fleetpipe.schedules.registry import searched_costs
from fleetpipe.schedules.rows import names_of
from tests.schedules.sample_schedules import schedule_of

pytestmark = pytest.mark.no_paddle


def families_within(
    ranks: int, micro_batches: int, chunks: int, cap: float, costs: Costs
) -> list[float]:
    spans = []
    for name in names():
        if name == "auto":
            continue
        try:
            schedule = build(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
        except ConfigError:
            continue
        if schedule.slices > 1:
            continue
        timeline = schedule.simulate(costs)
        if max(timeline.peak_activations) <= cap:
            spans.append(timeline.span)
    return spans


# The last row, 32 ranks, takes as long as all others: benchmarks/schedules/search.py.
@pytest.mark.parametrize("row", ROWS[:-1])
@pytest.mark.parametrize("column", [1, 2])
def test_the_columns_zb_1p_and_zb_2p_of_the_paper(row: tuple[float, ...], column: int) -> None:
    found = measure(row, column)
    assert round(found["bubble_rate"], 4) <= found["paper"]
    assert found["peak"] <= found["cap"] == column * row[0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 8),
    st.sampled_from(
        [
            Costs(),
            Costs(forward=2, input_grad=3, weight_grad=1, comm=0.25, input_grad_frees=0.5),
            Costs(forward=1.3, input_grad=0.7, weight_grad=2.9, comm=0.1),
            Costs(forward=1, backward=1.5, comm=0.5),
            Costs(forward=0, input_grad=0, weight_grad=0),
        ]
    ),
)
def test_it_keeps_within_the_cap_and_is_never_worse_than_a_family(
    ranks: int, micro_batches: int, chunks: int, spare: int, costs: Costs
) -> None:
    cap = chunks + spare
    schedule = build(
        "auto", ranks=ranks, micro_batches=micro_batches, chunks=chunks, memory_cap=cap, costs=costs
    )
    schedule.verify(memory_cap=cap, costs=costs)
    schedule.lower().verify()
    timeline = schedule.simulate(costs)
    assert max(timeline.peak_activations) <= cap
    assert schedule.name == "auto"
    assert Schedule.parse(str(schedule)) == schedule
    for span in families_within(ranks, micro_batches, chunks, cap, costs):
        assert timeline.span <= span * (1 + 1e-8)


def test_it_finds_what_is_between_the_families() -> None:
    costs = Costs(forward=9, input_grad=9, weight_grad=5, comm=0.5)
    within = families_within(4, 16, 2, 6, costs)
    timeline = build(
        "auto", ranks=4, micro_batches=16, chunks=2, memory_cap=6, costs=costs
    ).simulate(costs)
    assert timeline.span < 0.99 * min(within)


def test_among_equal_spans_the_earlier_end_counts() -> None:
    # ZBH2 has the bubble of ZBH1 here, and ends at 16.
    assert build("auto", ranks=4, micro_batches=4).simulate().makespan <= 15


@pytest.mark.parametrize(
    ("chunks", "times", "cap"),
    [(1, (1, 2, 1, 3), 5), (2, (3, 1, 1, 1, 1, 1, 1, 3), 8), (2, (1, 1, 1, 3, 3, 1, 1, 1), 8)],
)
def test_stages_may_differ(chunks: int, times: tuple[int, ...], cap: int) -> None:
    # With two chunks a rank of a loop and one of a vee have other work to do.
    costs = Costs(forward=times, input_grad=times, weight_grad=1, comm=0.1)
    schedule = build("auto", ranks=4, micro_batches=8, chunks=chunks, memory_cap=cap, costs=costs)
    assert schedule.simulate(costs).span <= min(families_within(4, 8, chunks, cap, costs))


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_same_request_gives_the_same_schedule(chunks: int) -> None:
    costs = Costs(forward=1.1, weight_grad=0.7, comm=0.2, input_grad_frees=0.5)
    first, second = (
        build("auto", ranks=4, micro_batches=12, chunks=chunks, memory_cap=7, costs=costs)
        for _ in range(2)
    )
    assert first == second


def test_a_cap_in_bytes() -> None:
    costs = Costs(bytes=(100, 40, 40, 40))
    schedule = build("auto", ranks=4, micro_batches=8, memory_cap=300, costs=costs)
    peaks = schedule.simulate(costs).peak_bytes
    assert peaks is not None
    assert max(peaks) <= 300
    # Rank 0 holds three forwards, where the others have room for seven.
    assert peaks[0] == 300
    with pytest.raises(ScheduleError, match=r"at most 100 bytes .*\n.* 300 at the peak"):
        schedule.verify(memory_cap=100, costs=costs)


@pytest.mark.parametrize(
    ("chunks", "cap", "costs", "least"),
    [
        (1, 0.5, Costs(), "at least 1"),
        (2, 1, Costs(), "at least 2"),
        (1, 99, Costs(bytes=(80, 100.5)), "at least 100.5"),
        (2, 107, Costs(bytes=(80, 100, 7, 8)), "at least 108"),
        (1, float("nan"), Costs(), "at least 1"),
    ],
)
def test_a_cap_that_cannot_be_kept_is_refused_with_the_least_that_can(
    chunks: int, cap: float, costs: Costs, least: str
) -> None:
    with pytest.raises(ConfigError, match=least):
        build("auto", ranks=2, micro_batches=4, chunks=chunks, memory_cap=cap, costs=costs)
    build(
        "auto",
        ranks=2,
        micro_batches=4,
        chunks=chunks,
        memory_cap=float(least.split()[-1]),
        costs=costs,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_cap": "4"}, "memory_cap"),
        ({"memory_cap": True}, "memory_cap"),
        ({"costs": {"forward": 1}}, "from_json"),
        ({"costs": Costs(forward=(1, 2, 3))}, "2 figures"),
        ({"memorycap": 4}, "did you mean 'memory_cap'"),
        ({"placed": "vee"}, "expected: loop"),
        ({"slices": 0}, "slices"),
        ({"chunks": 4, "placed": "vee"}, "expected: loop or wave"),
    ],
)
def test_what_it_does_not_take_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("auto", ranks=2, micro_batches=2, **options)


@pytest.mark.parametrize("placed", ["loop", "vee"])
def test_stages_that_stand_stay_where_they_are(placed: str) -> None:
    for micro_batches in (2, 4):
        schedule = build("auto", ranks=3, micro_batches=micro_batches, chunks=2, placed=placed)
        assert schedule.placement.name == placed


#: A split backward takes longer than a whole one here, as measured ones do.
WHOLE = Costs(forward=1, input_grad=2, weight_grad=2, backward=2)


@pytest.mark.parametrize(
    ("name", "own", "options", "costs"),
    [
        ("kFkB", {"groups": [3]}, {"ranks": 4, "micro_batches": 24, "memory_cap": 12}, 3),
        ("Hanayo", {"chunks": 4}, {"ranks": 2, "micro_batches": 2, "chunks": 4}, 0.5),
        ("Hanayo", {}, {"ranks": 2, "micro_batches": 2, "chunks": 2, "placed": "wave"}, 0),
        ("Seq1F1B", {"slices": 6}, {"ranks": 4, "micro_batches": 4, "slices": 6}, 0),
        # Each slice waits as long as a whole micro-batch does, so that more of them do not pay.
        ("Seq1F1B", {"slices": 3}, {"ranks": 4, "micro_batches": 4, "slices": 8}, 0.2),
    ],
)
def test_waves_groups_and_slices_are_chosen_where_they_win(
    name: str, own: dict[str, object], options: dict[str, object], costs: float
) -> None:
    known = dataclasses.replace(WHOLE, comm=costs)
    shape = {key: options[key] for key in ("ranks", "micro_batches")}
    chosen, again = (build("auto", costs=known, **options) for _ in range(2))
    expected = build(name, **shape, **own)
    assert chosen == again
    assert chosen.actions == expected.actions
    assert (chosen.slices, chosen.placement) == (expected.slices, expected.placement)
    known = searched_costs(chosen, known)
    chosen.verify(memory_cap=options.get("memory_cap"), costs=known)
    chosen.lower().verify()
    if "placed" not in options:
        cap, chunks = options.get("memory_cap", 99), options.get("chunks", 1)
        others = families_within(**shape, chunks=chunks, cap=cap, costs=known)
        assert chosen.simulate(known).span <= min(others)


def test_a_cap_counts_whole_micro_batches_whatever_they_are_cut_into() -> None:
    chosen = build("auto", ranks=4, micro_batches=8, memory_cap=2, slices=4)
    # Seven slices of four, where 1F1B holds four micro-batches.
    assert chosen.simulate().peak_activations == (7, 6, 5, 4)
    assert chosen.slices == 4
    chosen.verify(memory_cap=1.75)
    with pytest.raises(ScheduleError, match=r"1\.75 at the peak"):
        chosen.verify(memory_cap=1.7)


def test_slices_of_a_known_cost_are_the_only_ones_that_are_tried() -> None:
    known = dataclasses.replace(WHOLE, bytes=9).parted([3, 2, 1])
    chosen = build("auto", ranks=3, micro_batches=3, costs=known)
    assert chosen.actions == build("Seq1F1B", ranks=3, micro_batches=3, slices=3).actions
    timeline = chosen.simulate(known)
    # The first slice takes as long as the others together, and holds 4.5 bytes; the last rank has
    # one of the next micro-batch while it still has two of this one.
    assert timeline.peak_bytes is not None
    assert timeline.peak_bytes[2] == 12
    assert timeline.starts[0][1] == 0.5
    for limit in (1, 2):
        assert build("auto", ranks=3, micro_batches=3, costs=known, slices=limit).slices == 1


def test_slices_need_one_chunk_on_each_rank() -> None:
    assert build("auto", ranks=2, micro_batches=4, chunks=2, slices=4).slices == 1


def test_the_registry_has_its_options_without_loading_it() -> None:
    assert names_of(registry.auto) == names_of(auto)


@given(
    st.sampled_from([("loop", 1), ("loop", 2), ("loop", 3), ("vee", 2)]),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 0.5]),
)
def test_any_cap_that_lets_one_micro_batch_pass_can_be_kept(
    shape: tuple[str, int],
    ranks: int,
    m: int,
    spare: int,
    alternate: bool,
    shallow: bool,
    frees: float,
) -> None:
    placement = Placement(shape[0], ranks, shape[1])
    costs = Costs(forward=1, input_grad=1.5, weight_grad=0.7, comm=0.2, input_grad_frees=frees)
    problem = Problem(placement, m, costs, shape[1] + spare)
    problem.check_cap()
    filled = fill(problem, listed_order(problem, Preference(alternate, shallow)), Policy())
    assert filled is not None
    schedule = Schedule.of(problem.schedule_of("Listed", filled.rows))
    schedule.verify(memory_cap=problem.cap, costs=costs)


@given(st.integers(1, 4), st.lists(st.integers(0, 9), min_size=4, max_size=4), st.integers(0, 12))
def test_stages_of_different_bytes(m: int, sizes: list[int], spare: int) -> None:
    costs = Costs(bytes=tuple(sizes))
    placement = Placement("vee", 2, 2)
    least = max(sizes[0] + sizes[3], sizes[1] + sizes[2])
    problem = Problem(placement, m, costs, least + spare)
    problem.check_cap()
    filled = fill(problem, listed_order(problem, Preference()), Policy())
    assert filled is not None
    if problem.cap > 0:
        Schedule.of(problem.schedule_of("Listed", filled.rows)).verify(
            memory_cap=problem.cap, costs=costs
        )
    with pytest.raises(ConfigError, match=f"at least {least}"):
        Problem(placement, m, costs, least - 1).check_cap()


def test_a_vee_without_a_cap_comes_without_a_bubble() -> None:
    problem = Problem(Placement("vee", 3, 2), 9, Costs())
    filled = fill(problem, listed_order(problem, Preference()), Policy())
    assert filled is not None
    assert max(filled.spans) <= 1.1 * problem.bound


@pytest.mark.parametrize("m", [1, 3, 9])
def test_the_order_of_1f1b_is_a_warm_up(m: int) -> None:
    problem = Problem(Placement("loop", 4), m, Costs())
    order = warm_up_order(problem, tuple(min(m, first) for first in (4, 3, 2, 1)))
    assert order == problem.order_of(build("1F1B", ranks=4, micro_batches=m))


def test_warm_ups_fill_the_time_until_the_first_i() -> None:
    found = warm_ups(Problem(Placement("loop", 4), 20, Costs()))
    assert (7, 5, 3, 1) in found
    assert (4, 3, 2, 1) in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("cap", [1, 3, 6.5])
@pytest.mark.parametrize("m", [1, 5, 20])
def test_warm_ups_keep_within_the_cap(cap: float, m: int) -> None:
    costs = Costs(forward=(1, 2, 0, 3), input_grad=1.5, comm=0.3)
    problem = Problem(Placement("loop", 4), m, costs, cap)
    for warm_up in warm_ups(problem):
        assert max(warm_up) <= min(cap, m)
        assert is_allowed(warm_up, most_forwards(problem))


def test_what_is_not_allowed() -> None:
    assert is_allowed((3, 2, 2, 1), [3, 3, 3, 3])
    assert not is_allowed((4, 2, 2, 1), [3, 3, 3, 3])
    assert not is_allowed((2, 3, 2, 1), [3, 3, 3, 3])
    assert not is_allowed((2, 1, 1, 0), [3, 3, 3, 3])


def tokens(problem: Problem, rows: list[list[int]], rank: int) -> str:
    return " ".join(map(str, problem.schedule_of("Filled", rows).actions[rank]))


def two_ranks(costs: Costs, cap: float = 9, m: int = 3) -> tuple[Problem, list[list[int]]]:
    problem = Problem(Placement("loop", 2), m, costs, cap)
    return problem, problem.order_of(build("1F1B", ranks=2, micro_batches=m))


def test_a_rank_runs_w_where_one_fits_into_its_wait() -> None:
    problem, order = two_ranks(Costs(weight_grad=0.5))
    filled = fill(problem, order, Policy(patience=99))
    assert filled is not None
    assert tokens(problem, filled.rows, 1) == "F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.0 W1.1 W1.2"
    assert tokens(problem, filled.rows, 0) == "F0.0 F0.1 I0.0 F0.2 I0.1 W0.0 W0.1 I0.2 W0.2"


@pytest.mark.parametrize(
    ("policy", "row"),
    [
        (Policy(patience=0), "F0.0 F0.1 I0.0 F0.2 I0.1 W0.0 W0.1 I0.2 W0.2"),
        (Policy(patience=99), "F0.0 F0.1 I0.0 F0.2 I0.1 I0.2 W0.0 W0.1 W0.2"),
        (Policy(patience=0, tail=1), "F0.0 F0.1 I0.0 F0.2 I0.1 W0.0 I0.2 W0.1 W0.2"),
    ],
)
def test_without_patience_it_runs_one_that_does_not_fit(policy: Policy, row: str) -> None:
    # On rank 1 the first W makes F1.2 late. So W0.0 fits before I0.2 arrives, and W0.1 does not.
    problem, order = two_ranks(Costs(forward=1, input_grad=1, weight_grad=5, comm=0.25))
    filled = fill(problem, order, policy)
    assert filled is not None
    assert tokens(problem, filled.rows, 0) == row


def test_a_forward_that_does_not_fit_waits_for_w() -> None:
    problem, order = two_ranks(Costs(), cap=2)
    filled = fill(problem, order, Policy(patience=99))
    assert filled is not None
    assert tokens(problem, filled.rows, 0) == "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2"
    half, order = two_ranks(Costs(input_grad_frees=0.5), cap=2.5)
    filled = fill(half, order, Policy(patience=99))
    assert filled is not None
    assert tokens(half, filled.rows, 0).startswith("F0.0 F0.1 I0.0 F0.2")


def test_what_cannot_be_is_none() -> None:
    problem, order = two_ranks(Costs(), cap=1)
    assert fill(problem, order, Policy()) is None
    problem, order = two_ranks(Costs())
    assert fill(problem, order, Policy()) is not None
    assert fill(problem, order, Policy(), longest=9) is None
    rows = schedule_of(Placement("loop", 2), 2, "F0.0 B0.0 F0.1 B0.1", "F1.1 B1.1 F1.0 B1.0")
    assert fill(Problem(rows.placement, 2, Costs()), problem.order_of(rows), Policy()) is None


@given(
    st.sampled_from(["loop", "vee"]),
    st.integers(1, 4),
    st.integers(1, 7),
    st.sampled_from([0, 0.4, 3, 99]),
    st.integers(0, 6),
    st.sampled_from([Costs(), Costs(forward=1.7, weight_grad=0.6, comm=0.3)]),
)
def test_its_times_are_those_of_the_simulator(
    placement: str, ranks: int, m: int, patience: float, tail: int, costs: Costs
) -> None:
    problem = Problem(Placement(placement, ranks, 2), m, costs, 2 * ranks)
    filled = fill(problem, listed_order(problem, Preference()), Policy(patience, tail))
    assert filled is not None
    schedule = Schedule.of(problem.schedule_of("Filled", filled.rows))
    schedule.verify(memory_cap=problem.cap)
    timeline = schedule.simulate(costs)
    assert timeline.spans == pytest.approx(filled.spans)
    assert timeline.makespan == pytest.approx(filled.makespan)
    assert max(filled.spans) >= problem.bound * (1 - 1e-9)
