"""What a replay says of traces whose one cause is known, and of steps that a hand can add up."""

from __future__ import annotations

import random

import pytest

from fleetpipe.contrib.view import Slowdown, TracedOperation, slowdown_of, steps_of
from fleetpipe.errors import ConfigError
from tests.contrib.view.traces import Slow, trace

pytestmark = pytest.mark.no_paddle


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


def test_the_last_stage_takes_its_share() -> None:
    slowdown = of(trace(Slow("stage", stage=3, factor=2), noise=0))
    # F and B of 2 and 4 seconds instead of 1 and 2: the ideal takes the mean of four stages.
    assert slowdown.last_stage == pytest.approx(1, abs=0.5)
    assert slowdown.last_stage > 0.9
    other = of(trace(Slow("stage", stage=1, factor=2), noise=0))
    assert other.last_stage < 0.1


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
