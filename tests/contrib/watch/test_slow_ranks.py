"""Who is called slow, in steps whose times are drawn by chance."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from fleetpipe.contrib.watch.slow_ranks import LIMIT, MACHINE, Notices, SlowRank, SlowRanks
from fleetpipe.job.records import StepRow

pytestmark = pytest.mark.no_paddle

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

    def flights(rank: int) -> tuple[float, ...]:
        """Of both neighbours, by clocks that differ; it waited for four messages of each."""
        peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < RANKS]
        return tuple(n for peer in peers for n in (peer, 5.0 * (rank - peer) + drawn(0.002), 4))

    return [
        StepRow(
            step,
            STEP * machine,
            cpu := drawn(0.04),
            cpu * chance.uniform(1.0, 1.02),
            drawn(0.02),
            drawn(0.02) if step % 5 == 0 else 0.0,
            flights=flights(rank),
            probe=5e-6 * machine * max(0.2, chance.gauss(1.0, noise / 2)),
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


@pytest.mark.parametrize(("factor", "slow"), [(1.5, {(2, "compute")}), (1.0, set())])
def test_of_steps_of_which_one_in_ten_is_measured_those_count(factor: float, slow: Any) -> None:
    def measured(step: int, rank: int, row: StepRow) -> StepRow:
        row = longer(["cpu", "wall"], factor, since=500)(step, rank, row)._replace(probe=0.0)
        row = row._replace(data=row.data if step % 10 == 1 else 0.0)
        return row if step % 10 == 0 else row._replace(cpu=0.0, wall=0.0)

    assert set(named(1000, measured)) == slow


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


def swinging(change: Change, seed: int) -> Change:
    """Each rank computes 1.5 times as long, and probes 1.65, in phases of up to 60 steps."""
    chance = random.Random(seed)
    phases = {rank: [chance.randrange(5, 60) for _ in range(200)] for rank in range(RANKS)}
    slow = {
        rank: [n % 2 == 1 for n, length in enumerate(lengths) for _ in range(length)]
        for rank, lengths in phases.items()
    }

    def changed(step: int, rank: int, row: StepRow) -> StepRow:
        row = change(step, rank, row)
        if slow[rank][step]:
            row = row._replace(cpu=1.5 * row.cpu, wall=1.5 * row.wall, probe=1.65 * row.probe)
        return row

    return changed


@pytest.mark.parametrize("places", [ALONE, REPLICAS])
def test_a_machine_that_swings_hides_no_rank_that_computes_1_3_times_as_much(
    places: Places,
) -> None:
    """In 19 of 20 jobs; and nobody is named for what the machine does, in 1,000 steps."""
    assert named(1000, swinging(longer([], 1.0), 1), places, seed=1) == {}
    late = 0
    for seed in range(20):
        rank, since = seed % RANKS, 100 + 3 * seed
        computing = swinging(longer(["cpu", "wall"], 1.3, rank, since), seed)
        first = named(since + 20, computing, places, seed=seed)
        assert set(first) <= {(rank, "compute")}
        late += not since <= first.get((rank, "compute"), 0) < since + 10
    assert late <= 1


@pytest.mark.parametrize("places", [ALONE, REPLICAS])
def test_a_machine_that_is_much_slower_is_named_as_such(places: Places) -> None:
    assert named(200, longer(["cpu", "wall", "probe"], 1.5), places) == {}
    chance, slow, change = (
        random.Random(0),
        SlowRanks(places),
        longer(["cpu", "wall", "probe"], 2.5),
    )
    for step in range(140):
        drawn = enumerate(rows(step, chance, 0.05))
        slow.add({rank: [change(step, rank, row)] for rank, row in drawn})
        if not 100 <= step < 110:
            assert {(one.rank, one.what) for one in slow.slow} == (
                {(2, MACHINE)} if step > 100 else set()
            )
    assert "look for what else runs on its host" in str(
        SlowRank(2, MACHINE, 2.5, "in the steps before")
    )


def later(seconds: float, since: int, awaited: float = 4) -> Change:
    """What comes to rank 2 from rank 1 is longer on its way; all wait for so many messages."""

    def change(step: int, rank: int, row: StepRow) -> StepRow:
        flights = list(row.flights)
        flights[2::3] = [awaited] * len(flights[2::3])
        flights[1] += seconds if rank == 2 and step >= since else 0.0
        return row._replace(flights=tuple(flights))

    return change


@pytest.mark.parametrize(("places", "noise"), [(ALONE, 0.05), (ALONE, 0.2), (REPLICAS, 0.05)])
def test_a_link_that_makes_steps_1_3_times_as_long_is_named_within_ten_steps(
    places: Places, noise: float
) -> None:
    """Each of four messages is awaited 7.5 ms longer; in 19 of 20 jobs, and nobody else in any."""
    late = 0
    for seed in range(20):
        since = 60 + seed
        first = named(since + 20, later(0.3 * STEP / 4, since), places, noise, seed)
        assert set(first) <= {(1, "link to rank 2")}
        late += not since <= first.get((1, "link to rank 2"), 0) < since + 10
    assert late <= 1


def test_a_link_for_which_nobody_waits_is_not_named() -> None:
    """Nor one that costs little of a step."""
    assert named(200, later(0.3 * STEP / 4, 100, awaited=0)) == {}
    assert named(200, later(0.01 * STEP / 4, 100)) == {}


def test_messages_for_which_nobody_waits_say_little_of_a_link() -> None:
    """They are noticed late; where the link is slow some end waits, and it is named."""

    def change(step: int, rank: int, row: StepRow) -> StepRow:
        if rank != 1 or not 60 <= step < 200:
            return later(0.3 * STEP / 4, 200)(step, rank, row)
        flights = list(row.flights)
        flights[4] += 0.5
        flights[5] = 0
        return row._replace(flights=tuple(flights))

    assert set(named(195, change)) == set()
    assert set(named(215, change)) == {(1, "link to rank 2")}


@pytest.mark.parametrize(("period", "usual"), [(0.1, STEP), (0.25, STEP), (0.1, 0.02)])
def test_a_rank_whose_processor_is_limited_is_named_for_that(period: float, usual: float) -> None:
    """A step takes 1.3 times as long; the kernel takes the processor away once in a period."""

    def change(step: int, rank: int, row: StepRow) -> StepRow:
        if rank != 2 or step < 100:
            return row._replace(span=usual)
        span = 1.3 * usual
        passed = (step - 100) * span
        periods = int((passed + span) / period) - int(passed / period)
        limited = 0.3 / 1.3 * period * periods
        return row._replace(span=span, limited=limited)

    first = named(200, change)
    assert set(first) == {(2, LIMIT)}
    assert 100 <= first[2, LIMIT] < 110
    text = str(SlowRank(2, LIMIT, 1.3, SlowRanks(ALONE)._reference(2, LIMIT)))
    assert text == (
        "rank 2 is slow: compute (processor limit) takes 1.3 times as long as without the limit; "
        "give its container more processor time (cpu.max, docker's --cpus)"
    )


def test_a_limit_that_is_reached_now_and_then_is_none_that_matters() -> None:
    def change(step: int, rank: int, row: StepRow) -> StepRow:
        return row._replace(limited=0.03 * (step % 10 == 0))

    assert named(300, change) == {}


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


def test_one_that_was_slow_before_is_named_as_soon_again() -> None:
    """What was seen of it then is not what chance does."""

    def change(step: int, rank: int, row: StepRow) -> StepRow:
        before = longer(["cpu", "wall"], 2.0 if step < 115 else 1.0)(step, rank, row)
        return longer(["cpu", "wall"], 1.3, since=150)(step, rank, before)

    chance, slow, seen = random.Random(1), SlowRanks(ALONE), []
    for step in range(170):
        drawn = enumerate(rows(step, chance, 0.05))
        seen.append(bool(slow.add({r: [change(step, r, row)] for r, row in drawn})))
    assert seen[110]
    assert not seen[130]
    assert seen[160]


def test_what_was_slow_too_early_to_be_named_hides_nothing_later() -> None:
    def change(step: int, rank: int, row: StepRow) -> StepRow:
        return longer(["cpu", "wall"], 1.3, since=12 if step < 21 else 100)(step, rank, row)

    first = named(110, change)
    assert set(first) == {(2, "compute")}
    assert first[2, "compute"] >= 100


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


@pytest.mark.parametrize(
    ("places", "reference"),
    [(ALONE, "in the steps before"), (REPLICAS, "on ranks with the same stages")],
)
def test_it_is_said_what_a_rank_is_compared_with(places: Places, reference: str) -> None:
    chance, slow, change = random.Random(0), SlowRanks(places), longer(["data"], 7.2)
    for step in range(115):
        drawn = enumerate(rows(step, chance, 0.05))
        slow.add({rank: [change(step, rank, row)] for rank, row in drawn})
    (one,) = slow.slow
    assert re.fullmatch(
        rf"rank 2 is slow: data takes [67]\.\d times as long as {reference}", str(one)
    )


def test_what_comes_and_goes_is_logged_when_it_lasts_and_after_longer_pauses() -> None:
    """Of 40 times a minute apart, each six seconds long, and as many of two seconds."""
    notices, one = Notices(), SlowRank(0, "data", 2.0, "in the steps before")
    short = SlowRank(1, "data", 2.0, "in the steps before")
    seen = []
    for second in range(2400):
        slow = [one] * (second % 60 < 6) + [short] * (second % 60 < 2)
        seen += [(second, named.rank) for named in notices.choose(slow, float(second))]
    assert seen == [(5, 0), (605, 0), (1805, 0)]
