from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.contrib.search.fill_weight_grads import Policy, fill
from fleetpipe.contrib.search.list_scheduler import Preference, listed_order
from fleetpipe.contrib.search.problem import Problem
from fleetpipe.contrib.search.warm_up import is_allowed, most_forwards, warm_up_order, warm_ups
from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Costs, Placement, Schedule, build
from tests.schedules.helpers import schedule_of


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
