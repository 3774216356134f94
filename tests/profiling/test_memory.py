"""What ranks hold, and which layers to recompute: beside what is counted the slow way."""

from __future__ import annotations

import random

import pytest

from fleetpipe.profiling import Profile
from fleetpipe.profiling.cost_model import StageCost
from fleetpipe.profiling.memory import activation_peak, peak_bytes
from fleetpipe.profiling.recomputing import choose
from fleetpipe.schedules import build
from fleetpipe.schedules.action import flatten
from tests.profiling.models import BLOCK, even, times

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


def test_the_cheapest_bytes_are_recomputed_first_and_no_more_than_it_takes() -> None:
    layers = [times(BLOCK, factor) for factor in (3, 1, 4, 2)]
    stages, schedule = Profile(tuple(layers)).stages, build("1F1B", ranks=2, micro_batches=4)

    def peaks(*recompute: tuple[int, ...]) -> tuple[int, ...]:
        return peak_bytes(schedule, stages.cut((0, 2, 4), recompute), 2)

    free = peaks((1,), ())[0]
    for cap, chosen in [
        (max(peaks()), ((), ())),
        (free, ((1,), ())),
        (free - 1, ((0, 1), ())),
        # Neither rank fits; the second has less in flight.
        (0, ((0, 1), (2, 3))),
    ]:
        assert choose(schedule, layers, stages, (0, 2, 4), cap, 2) == chosen
