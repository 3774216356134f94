from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Costs, Placement, Schedule
from fleetpipe.schedules.search.fill_weight_grads import Policy, fill
from fleetpipe.schedules.search.list_scheduler import Preference, listed_order
from fleetpipe.schedules.search.problem import Problem


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
