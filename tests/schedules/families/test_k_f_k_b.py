from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Costs, build


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
