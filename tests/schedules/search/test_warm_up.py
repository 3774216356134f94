from __future__ import annotations

import pytest

from fleetpipe.schedules import Costs, Placement, build
from fleetpipe.schedules.search.problem import Problem
from fleetpipe.schedules.search.warm_up import allowed, most_forwards, warm_up_order, warm_ups


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
        assert allowed(warm_up, most_forwards(problem))


def test_what_is_not_allowed() -> None:
    assert allowed((3, 2, 2, 1), [3, 3, 3, 3])
    assert not allowed((4, 2, 2, 1), [3, 3, 3, 3])
    assert not allowed((2, 3, 2, 1), [3, 3, 3, 3])
    assert not allowed((2, 1, 1, 0), [3, 3, 3, 3])
