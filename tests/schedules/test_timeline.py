"""The timeline of a schedule: when each action runs, and what waits and memory follow."""

from __future__ import annotations

from typing import Any

import pytest

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules import Action, Costs, Edge, Fused, Placement, Recv, build, chain
from fleetpipe.schedules.forms.trace import Event, events_of, figures_of
from tests.schedules.sample_schedules import WHOLE, schedule_of

pytestmark = pytest.mark.no_paddle


@pytest.mark.parametrize(
    ("name", "comm", "span"),
    [
        *((name, 0, 45) for name in WHOLE),
        ("FThenB", 0.25, 46.5),
        ("1F1B", 0.25, 50.5),
        ("Eager1F1B", 0.25, 46.5),
        ("FThenB", 1, 51),
        ("1F1B", 1, 67),
        ("Eager1F1B", 1, 51),
    ],
)
def test_only_1f1b_shows_its_latency(name: str, comm: float, span: float) -> None:
    timeline = build(name, ranks=4, micro_batches=12).simulate(Costs(comm=comm))
    assert timeline.span == span


def test_a_fused_pair_has_its_own_cost_and_waits_for_all_its_inputs() -> None:
    schedule = schedule_of(Placement("loop", 2), 2, "F0.0 F0.1 B0.0 B0.1", "F1.0 (F1.1|B1.0) B1.1")
    assert schedule.simulate().events[1][1][1:] == (2, 5)
    assert schedule.simulate(Costs(overlapped=2.5)).events[1][1][1:] == (2, 4.5)
    late = schedule.simulate(Costs(comm=4, overlapped=2.5))
    assert late.events[1][1][1:] == (6, 8.5)
    # B0.0 leaves with the pair, not after the part of it that is B.
    assert late.events[0][2][1:] == (12.5, 14.5)
    assert late.peak_activations == (2, 2)


@pytest.mark.parametrize(("exchange", "pair"), [(0, 8), (1, 6), ((0, 2, 1, 0), 5), (2, 5)])
def test_a_fused_pair_hides_its_exchanges(exchange: Any, pair: float) -> None:
    """As far as the other half computes; nothing else does."""
    costs = Costs(forward=3, backward=5, input_grad=3, weight_grad=2, exchange=exchange)
    timeline = build("DualPipeV", ranks=2, micro_batches=6).simulate(costs)
    lengths = {"F": 3, "B": 5, "I": 3, "W": 2}
    for item, begin, end in timeline.events[1]:
        expected = pair if isinstance(item, Fused) else lengths[item.kind]
        assert end - begin == expected, item
        # What its other half, or nothing, does not hide.
        waits = timeline.exchange_in(item)
        if isinstance(item, Fused):
            hidden = exchange if isinstance(exchange, tuple) else (exchange,) * 4
            stages = [action.stage for action in item.actions]
            assert waits == pair - (8 - sum(hidden[stage] for stage in stages))
        else:
            stage = exchange[item.stage] if isinstance(exchange, tuple) else exchange
            assert waits == (0 if item.kind == "W" else stage)


def test_only_a_forward_and_a_whole_backward_overlap() -> None:
    schedule = schedule_of(
        Placement("loop", 2), 2, "F0.0 F0.1 B0.0 B0.1", "F1.0 (F1.1|I1.0) W1.0 B1.1"
    )
    assert schedule.simulate(Costs(overlapped=1)).events[1][1][1:] == (2, 4)


def test_a_slow_link_delays_what_crosses_it_both_ways() -> None:
    schedule = build("1F1B", ranks=3, micro_batches=1)
    events = schedule.simulate(Costs(comm=(0.5, 4, 0))).events
    assert [row[0][1] for row in events] == [0, 1.5, 6.5]
    assert [row[-1][1] for row in events] == [16, 13.5, 7.5]


def test_input_gradients_may_release_a_part() -> None:
    schedule = schedule_of(Placement("loop", 1), 3, "F0.0 I0.0 F0.1 I0.1 F0.2 W0.0 W0.1 B0.2")
    peaks = [
        schedule.simulate(Costs(input_grad_frees=share)).peak_activations for share in (0, 0.25, 1)
    ]
    assert peaks == [(3,), (2.5,), (1,)]


def test_costs_per_stage_and_bytes() -> None:
    costs = Costs(forward=(1, 5), input_grad=(2, 1), weight_grad=(3, 1), bytes=(10, 100))
    timeline = build("1F1B", ranks=2, micro_batches=1).simulate(costs)
    assert timeline.makespan == 1 + 5 + 2 + 5
    assert timeline.busy == 7
    assert list(timeline.peak_bytes or ()) == [10, 100]
    uniform = build("1F1B", ranks=3, micro_batches=4).simulate(Costs(bytes=10))
    assert uniform.peak_bytes == (30, 20, 10)


def test_latency_counts_between_ranks_only() -> None:
    schedule = schedule_of(Placement("vee", 1, 2), 1, "F0.0 F1.0 B1.0 B0.0")
    assert schedule.simulate(Costs(comm=10)).makespan == 6


def test_a_value_under_way_is_waited_for() -> None:
    # F0.1 ends at 2, before F1.0 does at 2.25, but arrives after it.
    costs = Costs(forward=(1, 0.75), comm=0.5)
    events = build("FThenB", ranks=2, micro_batches=2).simulate(costs).events
    assert [start for _, start, _ in events[1][:2]] == [1.5, 2.5]


def test_a_skip_connection_is_waited_for() -> None:
    schedule = build("1F1B", ranks=3, micro_batches=1)
    edges = (Edge(1, 2), Edge(0, 2, "skip"))
    timeline = schedule.simulate(edges=edges)
    assert [start for row in timeline.events for _, start, _ in row] == [0, 4, 0, 4, 1, 2]
    assert schedule.simulate(edges=chain(3)).makespan == 9


def test_free_actions_have_no_bubble_rate_to_divide_by() -> None:
    costs = Costs(forward=0, input_grad=0, weight_grad=0)
    assert build("1F1B", ranks=2, micro_batches=1).simulate(costs).bubble_rate == 0


def test_times_of_whole_numbers_are_not_those_of_equal_fractions() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    spans = [schedule.simulate(Costs(forward=forward)).span for forward in (1, 1.0, 2, 1)]
    assert list(map(repr, spans)) == ["9", "9.0", "12", "9"]


def test_the_edges_of_one_simulation_are_not_those_of_the_next() -> None:
    schedule = build("FThenB", ranks=2, micro_batches=1)
    spans = [schedule.simulate(edges=edges).makespan for edges in (None, (), None)]
    assert spans == [6, 3, 6]


def test_an_invalid_schedule_is_not_simulated() -> None:
    with pytest.raises(ScheduleError, match=r"B0\.0 stands before F0\.0"):
        schedule_of(Placement("loop", 1), 1, "B0.0 F0.0").simulate()


def test_costs_are_read_from_json() -> None:
    costs = Costs.from_json('{"forward": [1, 2], "input_grad": 1.5, "comm": 0.5, "bytes": [3, 4]}')
    assert costs == Costs(forward=(1, 2), input_grad=1.5, comm=0.5, bytes=(3, 4))
    text = '{"forward": [4, 4], "each_slice": [{"forward": [1, 1]}, {"forward": 3}]}'
    assert Costs.from_json(text) == Costs(
        forward=(4, 4), each_slice=(Costs(forward=(1, 1)), Costs(forward=3))
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "(?s)no costs.*expected: JSON"),
        ("[1]", r"(?s)expected: an object.*got: \[1\]"),
        ('{"forwards": 1}', "did you mean 'forward'"),
        ('{"forward": [1, -1]}', "forward=-1"),
        ('{"forward": "1"}', "forward='1'"),
        ('{"comm": null}', "comm=None"),
        ('{"bytes": [1, null]}', "bytes=None"),
        ('{"comm": NaN}', "comm=nan"),
        ('{"comm": [1, -1]}', "comm=-1"),
        ('{"forward": true}', "forward=True"),
        ('{"input_grad_frees": 1.5}', "share"),
        ('{"each_slice": []}', "each_slice"),
        ('{"each_slice": [1, 2]}', "each_slice"),
        ('{"each_slice": [{"each_slice": [{}]}]}', "each_slice"),
        ('{"bytes": 1, "each_slice": [{}]}', "bytes"),
        ('{"each_slice": [{"forwards": 1}]}', "forward"),
        ('{"each_slice": [{"forward": -1}]}', "forward=-1"),
    ],
)
def test_costs_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Costs.from_json(text)


def test_costs_must_fit_the_number_of_stages() -> None:
    with pytest.raises(ConfigError, match="2 figures"):
        build("1F1B", ranks=2, micro_batches=1).simulate(Costs(forward=(1, 2, 3)))


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


def test_costs_of_another_number_of_slices_are_refused() -> None:
    costs = Costs(each_slice=(Costs(),) * 3)
    with pytest.raises(ConfigError, match="expected: 3 slices"):
        build("Seq1F1B", ranks=2, micro_batches=2, slices=2).simulate(costs)
    with pytest.raises(ConfigError, match="2 figures"):
        build("1F1B", ranks=2, micro_batches=2).simulate(
            Costs(each_slice=(Costs(forward=(1, 2, 3)),))
        )


@pytest.mark.parametrize("name", ["1F1B", "ZBH1", "DualPipeV"])
def test_the_figures_of_events_are_those_of_the_timeline(name: str) -> None:
    timeline = build(name, ranks=3, micro_batches=6).simulate(Costs(comm=0.25, overlapped=1.5))
    figures = figures_of(events_of(timeline))
    assert figures.span == timeline.span
    assert figures.busy == timeline.busy
    assert figures.bubble_rate == timeline.bubble_rate


def test_only_actions_count() -> None:
    events = [
        Event(0, "SF0>1.0", 0, 1),
        Event(0, "F0.0", 1, 2),
        Event(0, "B0.0", 5, 7),
        Event(0, "STEP", 7, 20),
        Event(0, "data", 0, 1),
    ]
    assert tuple(figures_of(events)) == (6, 3)
    assert figures_of(events).bubble == 3
    assert figures_of([]).bubble_rate == 0


def test_what_a_name_says() -> None:
    assert Event(0, "F0.3", 0, 1).actions == (Action("F", 0, 3),)
    fused = Event(0, "(F0.1|B1.0)", 0, 1).actions
    assert fused == (Action("F", 0, 1), Action("B", 1, 0))
    assert isinstance(Event(0, "RF0>1.3", 0, 1).op, Recv)
    assert Event(0, "data", 0, 1).op is None
    assert Event(0, "SF0>1.3", 0, 1).actions == ()
