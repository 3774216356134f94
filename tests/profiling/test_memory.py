"""What ranks hold, and which layers to recompute: beside what is counted the slow way."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from fleetpipe.profiling.cost_model import StageCost
from fleetpipe.profiling.memory import activation_peak, peak_bytes
from fleetpipe.profiling.recomputing import cheapest
from fleetpipe.schedules import build
from fleetpipe.schedules.action import flatten
from tests.profiling.models import BLOCK, even

CASES = [("FThenB", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("ZBH2", 1), ("ZBV", 2)]


def stage(numbers: random.Random) -> StageCost:
    """A stage whose bytes are any."""
    return StageCost(1, 2, 1, 1, *(numbers.randrange(100) for _ in range(8)))


@pytest.mark.parametrize(("name", "chunks"), [*CASES, ("DualPipeV", 2)])
@pytest.mark.parametrize("seed", range(3))
def test_the_peak_is_that_of_a_walk_along_the_row(name: str, chunks: int, seed: int) -> None:
    numbers = random.Random(seed)
    schedule = build(name, ranks=3, micro_batches=7, chunks=chunks)
    stages = [stage(numbers) for _ in range(schedule.placement.stages)]
    for rank in range(3):
        row = list(flatten(schedule.actions[rank]))
        split = {(action.stage, action.micro_batch) for action in row if action.kind == "I"}
        held: dict[tuple[int, int], int] = {}
        most = 0
        for kind, s, k in row:
            if kind == "F":
                held[s, k] = stages[s].held_split if (s, k) in split else stages[s].held
            most = max(most, sum(held.values()) + stages[s].working)
            held[s, k] = {"F": held[s, k], "I": stages[s].waiting}.get(kind, 0)
        assert activation_peak(schedule, rank, stages).bytes == most


def test_a_peak_counts_parameters_gradients_and_what_the_optimizer_keeps() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=4)
    first, second = peak_bytes(schedule, even(2).stages.cut((0, 1, 2)), optimizer_copies=2)
    static = 4 * BLOCK.parameters
    working = BLOCK.output + BLOCK.working
    assert first == static + 2 * BLOCK.held + working
    assert second == static + BLOCK.held + BLOCK.output + working


def test_a_recomputed_layer_holds_its_output_and_has_its_forward_run_again() -> None:
    stages = even(4).stages
    plain, again = stages.stage(0, 2), stages.stage(0, 2, [1])
    assert again.backward == pytest.approx(plain.backward + BLOCK.forward)
    assert again.input_grad == pytest.approx(plain.input_grad + BLOCK.forward + 1e-3)
    assert again.weight_grad == pytest.approx(plain.weight_grad - 1e-3)
    assert again.held == plain.held - (BLOCK.held - BLOCK.output)
    # What comes back needs its room while it is worked with.
    assert again.working == plain.working + BLOCK.held - BLOCK.output


@pytest.mark.parametrize("seed", range(30))
def test_the_knapsack_is_as_cheap_as_any_choice(seed: int) -> None:
    numbers = random.Random(seed)
    count = numbers.randrange(1, 9)
    prices = [numbers.randrange(1, 20) for _ in range(count)]
    # Multiples of a 256th of what is needed, so that nothing is rounded.
    gains = [numbers.randrange(0, 120) for _ in range(count)]
    choices = [
        (sum(prices[i] for i in chosen), chosen)
        for size in range(count + 1)
        for chosen in itertools.combinations(range(count), size)
        if sum(gains[i] for i in chosen) >= 256
    ]
    found = cheapest(prices, gains, 256)
    if found is None:
        assert not choices
    else:
        assert sum(gains[i] for i in found) >= 256
        assert sum(prices[i] for i in found) == min(choices)[0]


def test_a_knapsack_takes_little_more_than_it_must_where_it_rounds() -> None:
    found = cheapest([1.0] * 10, [0.31] * 10, 1.0)
    assert len(found or ()) == math.ceil(1 / 0.31)
