"""Who is called slow, in steps drawn by chance, and in replays of traces whose cause is known."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from fleetpipe.contrib.view.slow_ranks import LIMIT, MACHINE, Notices, SlowRank, SlowRanks
from fleetpipe.contrib.view.slowdown import Slowdown, slowdown_of
from fleetpipe.contrib.view.trace_replay import steps_of
from fleetpipe.contrib.view.traced_ops import TracedOperation
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import StepRow
from tests.contrib.view.job_records import Slow, trace

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


def unchanged(step: int, rank: int, row: StepRow) -> StepRow:
    return row


def slow_by_step(
    steps: int,
    change: Change = unchanged,
    places: Places = ALONE,
    noise: float = 0.05,
    seed: int = 0,
) -> list[list[SlowRank]]:
    """Returns who is slow in each step."""
    chance, slow = random.Random(seed), SlowRanks(places)
    return [
        slow.add({r: [change(step, r, row)] for r, row in enumerate(rows(step, chance, noise))})
        for step in range(steps)
    ]


def named(*args: Any, **options: Any) -> dict[tuple[int, str], int]:
    """Returns who is named, and in which step first."""
    first: dict[tuple[int, str], int] = {}
    for step, slow in enumerate(slow_by_step(*args, **options)):
        for one in slow:
            first.setdefault((one.rank, one.what), step)
    return first


def require_found(
    job: Callable[[int], tuple[tuple[int, str], int, Change]],
    places: Places = ALONE,
    noise: float = 0.05,
) -> None:
    """In 19 of 20 jobs, each with other chances, one is named within ten steps; no other in any.

    Args:
        job: Returns of a seed who is to be named, since when it is slow, and what changes.
        places: Those of the ranks.
        noise: Of the times.
    """
    late = 0
    for seed in range(20):
        key, since, change = job(seed)
        first = named(since + 20, change, places, noise, seed)
        assert set(first) <= {key}
        late += not since <= first.get(key, 0) < since + 10
    assert late <= 1


def longer(names: Sequence[str], factor: float, rank: int = 2, since: int = 100) -> Change:
    def change(step: int, of: int, row: StepRow) -> StepRow:
        if of != rank or step < since:
            return row
        return row._replace(**{name: getattr(row, name) * factor for name in names})

    return change


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


def later(seconds: float, since: int, awaited: float = 4) -> Change:
    """What comes to rank 2 from rank 1 is longer on its way; all wait for so many messages."""

    def change(step: int, rank: int, row: StepRow) -> StepRow:
        flights = list(row.flights)
        flights[2::3] = [awaited] * len(flights[2::3])
        flights[1] += seconds if rank == 2 and step >= since else 0.0
        return row._replace(flights=tuple(flights))

    return change


def limited_now_and_then(step: int, rank: int, row: StepRow) -> StepRow:
    return row._replace(limited=0.03 * (step % 10 == 0))


def little_data(step: int, rank: int, row: StepRow) -> StepRow:
    return longer(["data"], 3.0)(step, rank, row._replace(data=row.data / 50))


def slower_machine(step: int, rank: int, row: StepRow) -> StepRow:
    return longer(["cpu", "wall", "data"], 1.6, rank)(step, rank, row)


@pytest.mark.parametrize(
    ("steps", "change", "options"),
    [
        (1000, unchanged, {"noise": 0.08}),
        (1000, unchanged, {"noise": 0.2}),
        (1000, unchanged, {"noise": 0.08, "places": REPLICAS}),
        (1000, swinging(unchanged, 1), {"seed": 1}),
        (1000, swinging(unchanged, 1), {"seed": 1, "places": REPLICAS}),
        (200, longer(["cpu", "wall", "probe"], 1.5), {}),
        (200, longer(["cpu", "wall", "probe"], 1.5), {"places": REPLICAS}),
        # A link for which nobody waits, and one that costs little of a step.
        (200, later(0.3 * STEP / 4, 100, awaited=0), {}),
        (200, later(0.01 * STEP / 4, 100), {}),
        (300, limited_now_and_then, {}),
        (200, little_data, {}),
        (300, slower_machine, {}),
    ],
)
def test_nobody_is_named_for_what_does_not_matter(
    steps: int, change: Change, options: dict[str, Any]
) -> None:
    assert named(steps, change, **options) == {}


@pytest.mark.parametrize(("factor", "slow"), [(1.5, {(2, "compute")}), (1.0, set())])
def test_of_steps_of_which_one_in_ten_is_measured_those_count(factor: float, slow: Any) -> None:
    def measured(step: int, rank: int, row: StepRow) -> StepRow:
        row = longer(["cpu", "wall"], factor, since=500)(step, rank, row)._replace(probe=0.0)
        row = row._replace(data=row.data if step % 10 == 1 else 0.0)
        return row if step % 10 == 0 else row._replace(cpu=0.0, wall=0.0)

    assert set(named(1000, measured)) == slow


@pytest.mark.parametrize("places", [ALONE, REPLICAS])
@pytest.mark.parametrize(
    ("names", "what"),
    [(["cpu", "wall"], "compute"), (["wall"], "compute"), (["data"], "data")],
)
def test_a_rank_that_takes_1_3_times_as_long_is_named(
    places: Places, names: Sequence[str], what: str
) -> None:
    def job(seed: int) -> tuple[tuple[int, str], int, Change]:
        rank, since = seed % RANKS, 60 + seed
        return (rank, what), since, longer(names, 1.3, rank, since)

    require_found(job, places)


@pytest.mark.parametrize("places", [ALONE, REPLICAS])
def test_a_machine_that_swings_hides_no_rank_that_computes_1_3_times_as_much(
    places: Places,
) -> None:
    def job(seed: int) -> tuple[tuple[int, str], int, Change]:
        rank, since = seed % RANKS, 100 + 3 * seed
        change = swinging(longer(["cpu", "wall"], 1.3, rank, since), seed)
        return (rank, "compute"), since, change

    require_found(job, places)


@pytest.mark.parametrize("places", [ALONE, REPLICAS])
def test_a_machine_that_is_much_slower_is_named_as_such(places: Places) -> None:
    seen = slow_by_step(140, longer(["cpu", "wall", "probe"], 2.5), places)
    for step, slow in enumerate(seen):
        if not 100 <= step < 110:
            assert [(one.rank, one.what) for one in slow] == [(2, MACHINE)] * (step > 100)
    assert "look for what else runs on its host" in str(seen[-1][0])


@pytest.mark.parametrize(("places", "noise"), [(ALONE, 0.05), (ALONE, 0.2), (REPLICAS, 0.05)])
def test_a_link_that_makes_steps_1_3_times_as_long_is_named(places: Places, noise: float) -> None:
    """Each of four messages is awaited 7.5 ms longer."""
    require_found(
        lambda seed: ((1, "link to rank 2"), 60 + seed, later(0.3 * STEP / 4, 60 + seed)),
        *(places, noise),
    )


def test_messages_for_which_nobody_waits_say_little_of_a_link() -> None:
    """They are noticed late; where the link is slow some end waits, and it is named."""

    def change(step: int, rank: int, row: StepRow) -> StepRow:
        if rank != 1 or not 60 <= step < 200:
            return later(0.3 * STEP / 4, 200)(step, rank, row)
        flights = list(row.flights)
        flights[4] += 0.5
        flights[5] = 0
        return row._replace(flights=tuple(flights))

    first = named(215, change)
    assert set(first) == {(1, "link to rank 2")}
    assert first[1, "link to rank 2"] >= 195


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

    seen = slow_by_step(200, change)
    named_in = [step for step, slow in enumerate(seen) if slow]
    assert {(one.rank, one.what) for slow in seen for one in slow} == {(2, LIMIT)}
    assert 100 <= named_in[0] < 110
    assert re.fullmatch(
        r"rank 2 is slow: compute \(processor limit\) takes 1\.\d times as long as without the "
        r"limit, since step \d+; "
        r"give its container more processor time \(cpu\.max, docker's --cpus\)",
        str(seen[named_in[-1]][0]),
    )


def test_saving_is_compared_where_all_have_saved() -> None:
    assert set(named(200, longer(["save"], 1.5))) == {(2, "save")}


def test_one_that_is_slow_no_longer_is_named_no_longer() -> None:
    slow = longer(["cpu", "wall"], 1.5)
    seen = slow_by_step(160, lambda n, r, row: row if n >= 130 else slow(n, r, row), seed=1)
    assert [[one.rank for one in seen[step]] for step in (110, 129, 140)] == [[2], [2], []]
    text = r"rank 2 is slow: compute takes 1\.\d times as long as in the steps before, since step "
    assert re.match(text + "10[01]; likely its rows are longer", str(seen[110][0]))


def test_one_that_was_slow_before_is_named_as_soon_again() -> None:
    """What was seen of it then is not what chance does."""

    def change(step: int, rank: int, row: StepRow) -> StepRow:
        before = longer(["cpu", "wall"], 2.0 if step < 115 else 1.0)(step, rank, row)
        return longer(["cpu", "wall"], 1.3, since=150)(step, rank, before)

    seen = slow_by_step(170, change, seed=1)
    assert [bool(seen[step]) for step in (110, 130, 160)] == [True, False, True]


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


def test_what_comes_and_goes_is_logged_when_it_lasts_and_after_longer_pauses() -> None:
    """Of 40 times a minute apart, each six seconds long, and as many of two seconds."""
    notices, one = Notices(), SlowRank(0, "data", 2.0, "in the steps before")
    short = SlowRank(1, "data", 2.0, "in the steps before")
    seen = []
    for second in range(2400):
        slow = [one] * (second % 60 < 6) + [short] * (second % 60 < 2)
        seen += [(second, named.rank) for named in notices.choose(slow, float(second))]
    assert seen == [(5, 0), (605, 0), (1805, 0)]


def of(operations: list[TracedOperation]) -> Slowdown:
    return slowdown_of(steps_of(operations))


@pytest.mark.parametrize("kind", ["rank", "stage", "link", "micro-batch"])
def test_the_one_cause_of_a_slow_run_is_named_with_its_factor(kind: str) -> None:
    numbers = random.Random(kind)
    for seed in range(25):
        replicas, ranks, micro_batches = numbers.choice((2, 3, 4)), numbers.choice((2, 4)), 8
        slow = Slow(
            kind,
            numbers.randrange(replicas),
            numbers.randrange(ranks - 1),
            numbers.randrange(micro_batches),
            numbers.uniform(1.2, 4),
        )
        sizes = {"replicas": replicas, "ranks": ranks, "micro_batches": micro_batches}
        cause = of(trace(slow, **sizes, noise=0.04, seed=seed)).causes[0]
        assert (cause.kind, cause.name) == (kind, slow.name)
        assert cause.factor == pytest.approx(slow.factor, rel=0.1)


def test_a_run_without_a_straggler_has_no_cause_and_its_time_is_replayed() -> None:
    for seed in range(10):
        slowdown = of(trace(Slow(), noise=0.02, seed=seed))
        assert slowdown.causes == ()
        assert 1 <= slowdown.slowdown < 1.05
        for measured, replayed, _ in slowdown.step_times:
            assert replayed == pytest.approx(measured, rel=1e-9)


def test_a_small_step_is_what_a_hand_adds_up() -> None:
    # Two stages, one micro-batch: F 1, F 3, B 2, B 2, without transfers. Means: F 2, B 2.
    step = [
        TracedOperation(0, 0, 0, 0, "F", 0, 0.0, 1.0),
        TracedOperation(0, 0, 1, 1, "F", 0, 1.0, 3.0),
        TracedOperation(0, 0, 1, 1, "B", 0, 4.0, 2.0),
        TracedOperation(0, 0, 0, 0, "B", 0, 6.0, 2.0),
    ]
    slowdown = of(step)
    assert slowdown.step_times == ((8.0, 8.0, 8.0),)
    assert slowdown.slowdown == 1
    # Beside a replica in which all take 1: F's mean is 1.5, B's 1.5.
    fast = [one._replace(replica=1, duration=1.0, start=float(i)) for i, one in enumerate(step)]
    slowdown = of([*step, *fast])
    assert slowdown.step_times == ((8.0, 8.0, 6.0),)
    assert slowdown.slowdown == pytest.approx(8 / 6)
    # The last stage ideal: 1 + 1.5 + 1.5 + 2 = 6.
    assert slowdown.last_stage == pytest.approx(1)
    assert slowdown.slowest_ranks == pytest.approx(1)


def test_a_collective_ends_together_and_the_optimizer_waits_for_it() -> None:
    def replica(number: int, seconds: float) -> list[TracedOperation]:
        end = 2 * seconds
        return [
            TracedOperation(0, number, 0, 0, "F", 0, 0.0, seconds),
            TracedOperation(0, number, 0, 0, "B", 0, seconds, seconds),
            TracedOperation(0, number, 0, 0, "grads-reduce-scatter", 0, end, 7 - end),
            TracedOperation(0, number, 0, 0, "optimizer", 0, 7.0, 0.5),
        ]

    slowdown = of([*replica(0, 1.0), *replica(1, 3.0)])
    # The transfer takes 1, from when the slower one has come; ideal: 2 + 2 + 1 + 0.5.
    assert slowdown.step_times == ((7.5, 7.5, 5.5),)
    assert slowdown.causes[0].name == "replica 1"


def test_the_parameters_come_before_the_forward_and_after_the_optimizer() -> None:
    first = TracedOperation(0, 0, 0, 0, "params-all-gather", 0, 0.0, 2.0)
    step = [
        first,
        TracedOperation(0, 0, 0, 0, "F", 0, 2.0, 1.0),
        TracedOperation(0, 0, 0, 0, "B", 0, 3.0, 1.0),
    ]
    assert of(step).step_times == ((4.0, 4.0, 4.0),)
    late = first._replace(start=5.0)
    moved = [one._replace(start=one.start - 2) for one in step[1:]]
    step = [*moved, TracedOperation(0, 0, 0, 0, "optimizer", 0, 2.0, 3.0), late]
    assert of(step).step_times == ((7.0, 7.0, 7.0),)


def test_an_order_that_cannot_have_been_is_refused() -> None:
    step = [
        TracedOperation(0, 0, 1, 1, "B", 0, 0.0, 1.0),
        TracedOperation(0, 0, 1, 1, "F", 0, 1.0, 1.0),
        TracedOperation(0, 0, 0, 0, "F", 0, 0.0, 1.0),
    ]
    with pytest.raises(ConfigError, match="wait for each other in a circle"):
        steps_of(step)
