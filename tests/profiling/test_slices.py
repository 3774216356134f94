"""Plans beside the best of all cuts and schedules, and of sequences that are cut."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError
from fleetpipe.profiling import LayerCost, Link, PipelinePlan, Profile, Transfer, plan, recosted
from fleetpipe.profiling.candidates import Candidate, PlanTask
from fleetpipe.profiling.cost_model import StageCost
from fleetpipe.profiling.memory import activation_peak, choose_recompute, peak_bytes
from fleetpipe.profiling.plan_commands import estimates
from fleetpipe.profiling.splits import balanced
from fleetpipe.schedules import Placement, build
from fleetpipe.schedules.action import flatten
from tests.profiling.test_profile import BLOCK, MIB, big_vocabulary, even, times, uneven, whole_only


def cut(profile: Profile, shares: tuple[float, ...]) -> Profile:
    """The profile of a model whose slices take these shares of times and bytes."""

    def part(layer: LayerCost, share: float) -> LayerCost:
        return replace(
            times(layer, share),
            backward=layer.whole * share,
            held=int(layer.held * share),
            output=int(layer.output * share),
            working=int(layer.working * share),
        )

    slices = tuple(tuple(part(layer, s) for layer in profile.layers) for s in shares)
    return replace(profile, slices=slices, slice_lengths=(1,) * len(shares))


def test_slices_are_chosen_where_they_save_time_or_memory() -> None:
    whole = whole_only(even(8))
    sliced = cut(whole, (0.22, 0.24, 0.26, 0.28))
    assert Profile.loads(sliced.dumps()) == sliced
    before, after = (plan(profile, 4, 4, search=("schedule",)) for profile in (whole, sliced))
    assert before.schedule.slices == 1
    assert (after.schedule.name, after.schedule.slices) == ("Seq1F1B", 4)
    assert after.predicted.time < 0.8 * before.predicted.time
    assert max(after.predicted.peak_bytes) < max(before.predicted.peak_bytes)
    assert "4 micro-batches of 4 slices" in str(after)
    assert "waiting" in after.explain()
    assert after.predicted.bound <= after.predicted.time
    assert PipelinePlan.loads(after.dumps()) == after
    for name in ("slices", "slice_comm"):
        for wrong in (None, json.loads(after.dumps())[name][1:]):
            with pytest.raises(ConfigError, match="for the 4 slices of its schedule"):
                PipelinePlan.loads(json.dumps({**json.loads(after.dumps()), name: wrong}))
    assert after.schedule_for(6) == build("Seq1F1B", ranks=4, micro_batches=6, slices=4)
    # A cap under which whole sequences would be recomputed.
    cap = max(after.predicted.peak_bytes)
    assert plan(sliced, 4, 4, memory_cap=cap, search=("schedule",)).schedule == after.schedule
    with pytest.raises(ConfigError, match="a memory cap"):
        plan(sliced, 4, 4, memory_cap=cap - 1, search=("schedule",))


def test_slices_that_take_longer_than_what_they_save_are_not() -> None:
    slow = cut(whole_only(even(8)), (0.6, 0.7))
    assert plan(slow, 2, 8, search=("schedule",)).schedule.slices == 1
    # Without slices in the profile nothing is known of them.
    named = {one.schedule for one in estimates(whole_only(even(8)), [2], 4)}
    assert "Seq1F1B" not in named
    (known,) = (one for one in estimates(slow, [2], 4) if one.schedule == "Seq1F1B")
    assert known.seconds > 1.3 * 4 * 4 * 3e-3


def test_each_slice_that_crosses_keeps_both_ranks_busy() -> None:
    profile = cut(whole_only(even(4)), (0.2, 0.2)).with_links(Link(0, 0))
    # Of a slice of 0.2 MiB: 1 ms to send or receive, and 0.2 ms for its bytes.
    busy = replace(profile, transfer=Transfer(1e-3, 1e-3, 1e-3 / MIB))
    before, after = (plan(each, 2, 4, search=("schedule",)) for each in (profile, busy))
    assert [made.schedule.slices for made in (before, after)] == [2, 2]
    # Both slices of 4 micro-batches, forward and backward, in and out.
    for free, waiting in zip(before.predicted.busy, after.predicted.busy):
        assert waiting == pytest.approx(free + 2 * 4 * 2 * 1.2e-3, rel=1e-4)
    assert recosted(after, busy) == after
    assert recosted(after, profile) == before
    with pytest.raises(ConfigError, match="a profile of 2 slices"):
        recosted(after, replace(busy, slices=(), slice_lengths=()))


def test_the_peak_counts_what_each_slice_holds() -> None:
    profile = cut(even(2), (0.25, 0.75))
    schedule = build("Seq1F1B", ranks=2, micro_batches=2, slices=2)
    bare = replace(
        profile,
        slices=tuple(
            tuple(replace(layer, working=0, output=0) for layer in part) for part in profile.slices
        ),
    )
    parts = [stages.cut((0, 1, 2)) for stages in bare.stages_of_slices]
    costs = bare.stages.cut((0, 1, 2))
    peaks = peak_bytes(schedule, costs, 0, parts)
    # Rank 0: both slices of a micro-batch and the first of the next; rank 1: both of one.
    static = 8 * MIB
    assert peaks == (static + int(1.25 * 8 * MIB), static + 8 * MIB)


def test_groups_and_waves_are_planned() -> None:
    slow = whole_only(even(4).with_links(Link(latency=9e-3)))
    found = plan(slow, 4, 12, search=("schedule",))
    eager = {one.schedule: one for one in estimates(slow, [4], 12) if one.chunks == 1}
    assert found.schedule.name in ("kFkB", "FThenB")
    assert found.predicted.time <= eager["kFkB"].seconds < 0.95 * eager["Eager1F1B"].seconds
    if found.schedule.name == "kFkB":
        assert found.schedule_for(12) == found.schedule
        again = found.schedule_for(20)
        assert again.micro_batches == 20
    waves = {(one.schedule, one.chunks) for one in estimates(slow, [2], 4)}
    assert ("Hanayo", 2) in waves
    few = replace(whole_only(even(8)), links=(Link(latency=3e-4, per_byte=0),))
    wave = plan(few, 2, 2, search=("placement", "schedule"))
    assert (wave.schedule.name, wave.chunks, wave.schedule.placement.name) == ("Hanayo", 4, "wave")
    assert PipelinePlan.loads(wave.dumps()) == wave


@given(
    st.integers(2, 8),
    st.integers(2, 8),
    st.integers(64, 4096),
    st.floats(0, 1),
)
def test_balanced_slices_cost_the_same(
    known: int, slices: int, length: int, attention: float
) -> None:
    """As far as whole places allow."""

    def cost(begin: int, end: int) -> float:
        seen = (end**2 - begin**2) / length**2
        return (1 - attention) * (end - begin) / length + attention * seen

    measured = [length // known] * (known - 1)
    measured.append(length - sum(measured))
    ends = list(accumulate(measured))
    found = balanced(measured, [cost(e - n, e) for n, e in zip(measured, ends)], slices)
    assert sum(found) == length
    assert len(found) == slices
    assert min(found) >= 1
    ends = list(accumulate(found))
    costs = [cost(end - size, end) for size, end in zip(found, ends)]
    assert max(costs) - min(costs) <= 4.1 / length
    assert all(first >= second - 1 for first, second in pairwise(found))


def test_what_cannot_be_balanced_is_refused() -> None:
    with pytest.raises(ConfigError, match="the costs of slices are not known"):
        even().balanced_slices()
    profile = replace(cut(even(), (0.4, 0.6)), slice_lengths=(8, 8))
    assert profile.balanced_slices() == (10, 6)
    assert profile.balanced_slices(1) == (16,)
    with pytest.raises(ConfigError, match="at most 16 slices"):
        profile.balanced_slices(17)
    with pytest.raises(ConfigError, match="each slice has the costs of all layers"):
        replace(profile, slices=((BLOCK,),))


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
        assert choose_recompute(schedule, layers, stages, (0, 2, 4), cap, 2) == chosen


SMALL_MODELS = [
    (uneven(6), 2, 4),
    (uneven(6), 3, 4),
    (uneven(6, 2), 4, 4),
    (whole_only(uneven(6)), 3, 4),
    (whole_only(big_vocabulary(5)), 3, 4),
    (whole_only(uneven(6, 1)), 4, 4),
]


@pytest.mark.parametrize(("profile", "ranks", "micro_batches"), SMALL_MODELS)
def test_a_plan_is_the_best_of_all_cuts_and_schedules(
    profile: Profile, ranks: int, micro_batches: int
) -> None:
    task = PlanTask(profile, ranks, micro_batches, math.inf, frozenset(("schedule",)), 2)
    inner_boundaries = itertools.combinations(profile.cuts, ranks - 1)
    cuts = [(0, *inner, len(profile.layers)) for inner in inner_boundaries]
    tried = [
        task.evaluate(schedule, cut)
        for schedule in task.schedules(Placement("loop", ranks))
        for cut in cuts
    ]
    least = min(one.seconds for one in tried if isinstance(one, Candidate))
    made = plan(profile, ranks, micro_batches, search=("partition", "schedule"))
    assert made.bound <= least * (1 + 1e-6)
    # Of plans as fast within 1 % the one with the least memory is taken.
    assert least * (1 - 1e-6) <= made.predicted.time <= 1.01 * least
