"""Who is called slow, in steps whose times are drawn by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from fleetpipe.watch.records import StepRow
from fleetpipe.watch.slow_ranks import SlowRanks

RANKS = 4
#: Each with stages of its own; and two stages of two replicas.
ALONE = {rank: ((rank,), 0) for rank in range(RANKS)}
REPLICAS = {rank: ((rank % 2,), 0) for rank in range(RANKS)}
STEP = 0.1

Places = Mapping[int, tuple[tuple[int, ...], int]]
Change = Callable[[int, int, StepRow], StepRow]


def rows(step: int, chance: random.Random, noise: float) -> list[StepRow]:
    """A step of a pipeline of four; all become slower and faster together, and by themselves."""
    machine = chance.choice([1.0, 1.0, 1.0, 1.2])

    def drawn(mean: float) -> float:
        return mean * machine * max(0.2, chance.gauss(1.0, noise))

    def pairs(rank: int, moment: float) -> tuple[float, ...]:
        peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < RANKS]
        return tuple(number for peer in peers for number in (peer, moment))

    return [
        StepRow(
            step,
            STEP * machine,
            cpu := drawn(0.04),
            cpu * chance.uniform(1.0, 1.02),
            drawn(0.02),
            drawn(0.02) if step % 5 == 0 else 0.0,
            pairs(rank, step),
            pairs(rank, step + drawn(0.002)),
        )
        for rank in range(RANKS)
    ]


def named(
    steps: int,
    change: Change = lambda step, rank, row: row,
    places: Places = ALONE,
    noise: float = 0.05,
    seed: int = 0,
) -> dict[tuple[int, str], int]:
    """Returns who is named, and in which step first."""
    chance, slow = random.Random(seed), SlowRanks(places)
    first: dict[tuple[int, str], int] = {}
    for step in range(steps):
        drawn = enumerate(rows(step, chance, noise))
        for one in slow.add({rank: [change(step, rank, row)] for rank, row in drawn}):
            first.setdefault((one.rank, one.what), step)
    return first


def longer(names: Sequence[str], factor: float, rank: int = 2, since: int = 100) -> Change:
    def change(step: int, of: int, row: StepRow) -> StepRow:
        if of != rank or step < since:
            return row
        return row._replace(**{name: getattr(row, name) * factor for name in names})

    return change


@pytest.mark.parametrize(("places", "noise"), [(ALONE, 0.08), (ALONE, 0.2), (REPLICAS, 0.08)])
def test_undisturbed_steps_name_nobody(places: Places, noise: float) -> None:
    assert named(1000, places=places, noise=noise) == {}


@pytest.mark.parametrize("places", [ALONE, REPLICAS])
@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["cpu", "wall"], "compute"),
        (["wall"], "compute"),
        (["data"], "data"),
    ],
)
def test_a_rank_that_takes_1_3_times_as_long_is_named_within_ten_steps(
    places: Places, names: Sequence[str], what: str
) -> None:
    """In 19 of 20 jobs, each with other chances, and nobody else in any."""
    late = 0
    for seed in range(20):
        rank, since = seed % RANKS, 60 + seed
        first = named(since + 20, longer(names, 1.3, rank, since), places, seed=seed)
        assert set(first) <= {(rank, what)}
        late += not since <= first.get((rank, what), 0) < since + 10
    assert late <= 1


def test_a_link_is_named_with_both_of_its_ranks() -> None:
    def change(step: int, rank: int, row: StepRow) -> StepRow:
        if rank != 1 or step < 100:
            return row
        peer, moment, *rest = row.taken
        return row._replace(taken=(peer, moment + 0.01, *rest))

    assert named(120, change) == {(0, "link to rank 1"): 106}


def test_saving_is_compared_where_all_have_saved() -> None:
    first = named(200, longer(["save"], 1.5))
    assert set(first) == {(2, "save")}


def test_what_costs_little_of_a_step_is_not_named() -> None:
    def small(step: int, rank: int, row: StepRow) -> StepRow:
        return longer(["data"], 3.0)(step, rank, row._replace(data=row.data / 50))

    assert named(200, small) == {}


def test_a_machine_that_has_become_slower_names_nobody() -> None:
    def change(step: int, rank: int, row: StepRow) -> StepRow:
        return longer(["cpu", "wall", "data"], 1.0 if step < 100 else 1.6, rank)(step, rank, row)

    assert named(300, change) == {}


def test_one_that_is_slow_no_longer_is_named_no_longer() -> None:
    chance, slow = random.Random(1), SlowRanks(ALONE)
    change, seen = longer(["cpu", "wall"], 1.5), []
    for step in range(160):
        drawn = enumerate(rows(step, chance, 0.05))
        rows_of = {r: [row if step >= 130 else change(step, r, row)] for r, row in drawn}
        seen.append({one.rank for one in slow.add(rows_of)})
    assert seen[110] == seen[129] == {2}
    assert seen[140] == set()


def test_steps_that_a_rank_does_not_tell_are_left_out() -> None:
    chance, slow = random.Random(1), SlowRanks(ALONE)
    change = longer(["cpu", "wall"], 1.5)
    for step in range(0, 130, 2):
        both = [rows(number, chance, 0.05) for number in (step, step + 1)]
        told = {
            rank: [change(step + n, rank, both[n][rank]) for n in range(2) if rank != n]
            for rank in range(RANKS)
        }
        slow.add(told)
    assert slow.slow == []
