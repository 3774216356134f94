"""Costs of slices of sequences: what they may be, and how they are read."""

from __future__ import annotations

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Costs, build


def test_slices_that_cost_more_are_played_so() -> None:
    costs = Costs(forward=4, backward=8, each_slice=(Costs(1, backward=2), Costs(3, backward=6)))
    timeline = build("Seq1F1B", ranks=1, micro_batches=2, slices=2).simulate(costs)
    assert timeline.ends == ((1, 4, 10, 11, 13, 16, 22, 24),)
    whole = build("1F1B", ranks=1, micro_batches=2).simulate(costs)
    assert whole.makespan == timeline.makespan == 24


def test_bytes_and_latencies_are_those_of_the_slice() -> None:
    each = (Costs(bytes=(10, 1), comm=(5, 0)), Costs(bytes=(20, 2), comm=(7, 0)))
    costs = Costs(bytes=(30, 3), comm=(9, 0), each_slice=each)
    timeline = build("Seq1F1B", ranks=2, micro_batches=1, slices=2).simulate(costs)
    assert timeline.peak_bytes == (30, 3)
    assert timeline.starts[1][:2] == (6, 9)


def test_parts_of_the_costs_of_a_whole_micro_batch() -> None:
    costs = Costs(forward=(6, 12), backward=18, comm=0.5, bytes=6).parted([2, 1])
    assert costs.each_slice is not None
    first, second = costs.each_slice
    assert (first.forward, first.backward, first.bytes, first.comm) == ((4, 8), 12, 4, 0.5)
    assert (second.forward, second.input_grad) == ((2, 4), pytest.approx(1 / 3))
    assert costs.forward == (6, 12)


def test_the_json_form_has_the_costs_of_slices() -> None:
    text = '{"forward": [4, 4], "each_slice": [{"forward": [1, 1]}, {"forward": 3}]}'
    assert Costs.from_json(text) == Costs(
        forward=(4, 4), each_slice=(Costs(forward=(1, 1)), Costs(forward=3))
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"each_slice": []}',
        '{"each_slice": [1, 2]}',
        '{"each_slice": [{"each_slice": [{}]}]}',
        '{"bytes": 1, "each_slice": [{}]}',
        '{"each_slice": [{"forwards": 1}]}',
        '{"each_slice": [{"forward": -1}]}',
    ],
)
def test_what_is_no_cost_of_slices_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Costs.from_json(text)


def test_costs_of_another_number_of_slices_are_refused() -> None:
    costs = Costs().parted([1, 1, 1])
    with pytest.raises(ConfigError, match="expected: 3 slices"):
        build("Seq1F1B", ranks=2, micro_batches=2, slices=2).simulate(costs)
    with pytest.raises(ConfigError, match="2 figures"):
        build("1F1B", ranks=2, micro_batches=2).simulate(
            Costs(each_slice=(Costs(forward=(1, 2, 3)),))
        )
