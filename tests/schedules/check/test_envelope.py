"""A schedule as a hint: which entries may run early, and every arrival of messages tried."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import cache
from typing import Any

import pytest

from fleetpipe.schedules import Costs, Edge, Schedule, build, chain, names
from fleetpipe.schedules.action import parts
from fleetpipe.schedules.envelope import Envelope, without_fusion
from fleetpipe.schedules.placement import Dependencies, checked_edges

pytestmark = pytest.mark.no_paddle

FAMILIES = names()


def early(envelope: Envelope, schedule: Schedule) -> list[str]:
    """What a rank may run before the head of its row."""
    row = schedule.actions[envelope.rank]
    return [str(row[place]) for place in envelope.candidates() if place != envelope.head]


def ran(schedule: Schedule, rank: int, count: int, **options: Any) -> Envelope:
    """A rank that has run the first entries of its row."""
    envelope = Envelope(schedule, rank, **options)
    for place in range(count):
        envelope.take(place)
    return envelope


def explore(schedule: Schedule, **options: Any) -> int:
    """Tries all arrivals; returns the number of states that ranks can reach.

    A message may come at any time after its send: a rank may run any of the entries whose inputs
    are sent. In each state, bits for the entries of each rank that have run, a rank can go on.
    """
    rows, placement = schedule.actions, schedule.placement
    dependencies = Dependencies(checked_edges(options.get("edges"), placement), placement.stages)
    places = {
        ("B" if kind == "I" else kind, stage, number): (rank, place)
        for rank, row in enumerate(rows)
        for place, item in enumerate(row)
        for kind, stage, number in parts(item)
    }
    envelopes = [{0: Envelope(schedule, rank, **options)} for rank in range(len(rows))]

    @cache
    def steps(rank: int, done: int) -> list[tuple[list[tuple[int, int]], int]]:
        """What each entry that a rank may run needs, and the rank's bits after it."""
        made = []
        for place in envelopes[rank][done].candidates():
            envelope = pickle.loads(pickle.dumps(envelopes[rank][done]))
            envelope.take(place)
            assert envelope.in_flight <= envelope.cap, "a rank holds more than its cap"
            envelopes[rank].setdefault(done | 1 << place, envelope)
            needs = [
                places[other, at, number]
                for kind, stage, number in parts(rows[rank][place])
                for other, at in dependencies.of(kind, stage)
            ]
            made.append((needs, done | 1 << place))
        return made

    seen, waiting = {(0,) * len(rows)}, [(0,) * len(rows)]
    while waiting:
        state = waiting.pop()
        goes_on = all(envelopes[rank][done].finished for rank, done in enumerate(state))
        for rank, done in enumerate(state):
            for needs, after in steps(rank, done):
                if all(state[other] >> place & 1 for other, place in needs):
                    goes_on, move = True, (*state[:rank], after, *state[rank + 1 :])
                    if move not in seen:
                        seen.add(move)
                        waiting.append(move)
        assert goes_on, "some arrival blocks the ranks"
    return len(seen)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_arrival_blocks_the_ranks_or_passes_the_cap(name: str) -> None:
    for ranks, most in ((1, 2), (2, 4), (3, 3)):
        for micro_batches in range(1, most + 1):
            schedule = without_fusion(build(name, ranks=ranks, micro_batches=micro_batches))
            schedule.verify()
            entries = sum(map(len, schedule.actions))
            assert explore(schedule) > entries
            held = 1 + max(schedule.simulate().peak_activations) / schedule.slices
            assert explore(schedule, memory_cap=held) > entries


def test_options_edges_and_other_memory_are_explored_too() -> None:
    halves = Costs(input_grad_frees=0.5)
    skip = (*chain(3), Edge(0, 2, "mask"))
    in_bytes = Costs(bytes=[3.0, 1.0, 2.0])
    grouped = build("Interleaved1F1B", ranks=2, micro_batches=4, groups=[2, 2], warmup_slack=1)
    assert explore(grouped) > 32
    assert explore(build("ZBH1", ranks=2, micro_batches=4), costs=halves) > 24
    assert explore(build("1F1B", ranks=3, micro_batches=4), edges=skip) > 24
    assert explore(build("1F1B", ranks=3, micro_batches=4), memory_cap=9, costs=in_bytes) > 24
    assert explore(build("1F1B", ranks=2, micro_batches=3, head=True)) > 24


def test_a_backward_runs_early_where_a_forward_is_late_and_memory_allows_no_forward() -> None:
    schedule = build("1F1B", ranks=3, micro_batches=6)
    # F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 ..
    assert early(ran(schedule, 0, 3), schedule) == []
    assert early(ran(schedule, 0, 4), schedule) == ["B0.1"]


def test_a_larger_cap_lets_forwards_run_early() -> None:
    schedule = build("1F1B", ranks=3, micro_batches=6)
    envelope = ran(schedule, 0, 3, memory_cap=5)
    taken = []
    while names_of := early(envelope, schedule):
        taken += names_of
        envelope.take([str(item) for item in schedule.actions[0]].index(names_of[0]))
    assert taken == ["F0.3", "F0.4"]
    assert envelope.in_flight == envelope.cap == 5


def test_a_weight_gradient_fills_a_wait() -> None:
    schedule = build("ZBH1", ranks=3, micro_batches=6)
    row = [str(item) for item in schedule.actions[2]]
    assert row[:5] == ["F2.0", "I2.0", "F2.1", "I2.1", "F2.2"]
    assert early(ran(schedule, 2, 2), schedule) == ["W2.0"]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_stage_keeps_the_order_of_what_it_adds_up(name: str) -> None:
    schedule = build(name, ranks=2, micro_batches=4)
    for rank, row in enumerate(schedule.actions):
        for shared in (False, True):
            envelope = Envelope(schedule, rank, memory_cap=100, shared=shared)
            order = []
            while not envelope.finished:  # always as far from the row as may be
                order.append([*envelope.candidates()][-1])
                envelope.take(order[-1])
            assert sorted(order) == [*range(len(row))]
            for kinds in ("F", "BI", "BW"):
                hinted, taken = (
                    [a for place in places for a in parts(row[place]) if a.kind in kinds]
                    for places in (range(len(row)), order)
                )
                stages = [None] if shared else schedule.placement.stages_of(rank)
                for stage in stages:
                    assert [a for a in hinted if stage in (None, a.stage)] == [
                        a for a in taken if stage in (None, a.stage)
                    ]


def test_what_is_held_is_counted_like_the_schedule_counts_it() -> None:
    schedule = build("ZBV", ranks=3, micro_batches=6)
    for rank, row in enumerate(schedule.actions):
        envelope, count = Envelope(schedule, rank), Counter[str]()
        while not envelope.finished:
            place = [*envelope.candidates()][-1]
            (action,) = parts(row[place])
            count[action.kind] += 1
            assert count["F"] - count["W"] <= envelope.cap
            envelope.take(place)
        assert count["F"] == count["W"]


def test_a_batch_begins_anew() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=3)
    envelope = ran(schedule, 0, 6)
    assert (envelope.finished, envelope.in_flight) == (True, 0)
    envelope.restart()
    assert ([*envelope.candidates()], envelope.finished) == ([0], False)
