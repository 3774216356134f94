from __future__ import annotations

import importlib
import inspect
import re

import pytest

from fleetpipe.schedules import Costs, Placement, build, forward_only, render
from fleetpipe.schedules.forms.terminal import summary
from tests.schedules.helpers import schedule_of


def test_actions_are_as_long_as_they_take() -> None:
    assert render(build("1F1B", ranks=2, micro_batches=2).simulate(), width=80) == (
        "rank 0  F0 F1 .  .  B0--- .  B1---\n"
        "rank 1  .  F0 B0--- F1 B1--- .  .\n"
        "time 1 = 3 characters, . = idle"
    )


def test_where_it_does_not_fit_spaces_are_left_out() -> None:
    timeline = build("1F1B", ranks=2, micro_batches=2).simulate()
    assert render(timeline, width=28) == (
        "rank 0  F0F1....B0--..B1--\nrank 1  ..F0B0--F1B1--....\ntime 1 = 2 characters, . = idle"
    )


def test_where_that_does_not_fit_a_character_is_a_slice_of_time() -> None:
    timeline = build("1F1B", ranks=2, micro_batches=4).simulate()
    assert render(timeline, width=28) == (
        "rank 0  FF..BBFBBFBB.BB\nrank 1  .FBBFBBFBBFBB..\ntime 1 = 1 character, . = idle"
    )


def test_the_second_stage_of_a_rank_has_small_letters_where_numbers_do_not_fit() -> None:
    timeline = build("ZBV", ranks=2, micro_batches=2).simulate()
    full, short, shortest = (render(timeline, width=width) for width in (120, 50, 28))
    assert full.startswith("rank 0  F0.0 F0.1 .    F3.0 I3.0 W3.0 F3.1")
    assert short.startswith("rank 0  F0F1..f0i0w0f1i1w1")
    assert shortest.startswith("rank 0  FF.fiwfiw")
    assert "small letters" not in full
    for drawn in (short, shortest):
        assert drawn.endswith("small letters = the second stage of a rank")
    three = build("Interleaved1F1B", ranks=2, micro_batches=2, chunks=3).simulate()
    assert "small letters" not in render(three, width=50)


def test_exchanges_stand_at_the_end_of_their_actions() -> None:
    timeline = build("1F1B", ranks=2, micro_batches=1).simulate(Costs(2, backward=4, exchange=1))
    assert render(timeline, width=80) == (
        "rank 0  F0 .  .  .  B0-~~\nrank 1  .  F0 B0-~~ .  .\n"
        "time 1 = 1.5 characters, . = idle, ~ = waits for an exchange"
    )
    longer = build("1F1B", ranks=2, micro_batches=4).simulate(timeline.costs)
    assert render(longer, width=32).startswith("rank 0  F~..BB~BB~BB.BB\n")


def test_every_action_is_written_whole_where_times_fall_between_characters() -> None:
    costs = Costs(forward=18.522, input_grad=18.086, weight_grad=9.337, comm=0.601)
    timeline = build("ZBH1", ranks=4, micro_batches=12).simulate(costs)
    for width in (500, 290):
        for rank, line in enumerate(render(timeline, width=width).split("\n")[:-1]):
            tokens = re.findall(r"[FIW]\d+", line)
            row = timeline.schedule.actions[rank]
            assert tokens == [_short(str(action)) for action in row]


def _short(token: str) -> str:
    return token[0] + token.partition(".")[2]


def test_long_timelines_are_squeezed_into_the_width() -> None:
    drawn = render(build("1F1B", ranks=4, micro_batches=500).simulate(), width=100).split("\n")
    assert max(map(len, drawn)) == 100
    assert drawn[-1] == f"time {3 * 503 / 92:g} = 1 character, . = idle"


def test_chunks_are_told_apart_by_stage_and_fused_units_are_marked() -> None:
    vee = schedule_of(Placement("vee", 1, 2), 1, "F0.0 F1.0 B1.0 B0.0")
    assert "F0.0 F1.0 B1.0----- B0.0-----" in render(vee.simulate(), width=80)
    fused = schedule_of(Placement("loop", 1), 2, "F0.0 (F0.1|B0.0) B0.1")
    assert "F0 (F1|B0)- B1---" in render(fused.simulate(), width=80)
    many = schedule_of(
        Placement("loop", 1), 5, "F0.0 (F0.1|B0.0) F0.2 F0.3 F0.4 B0.1 B0.2 B0.3 B0.4"
    )
    assert "F***FFFBBBBBBBB" in render(many.simulate(), width=30)


def test_no_time_at_all_can_be_drawn() -> None:
    costs = Costs(forward=0, input_grad=0, weight_grad=0)
    assert render(build("1F1B", ranks=1, micro_batches=1).simulate(costs)).startswith("rank 0")


def test_the_summary_gives_the_figures() -> None:
    text = summary(build("1F1B", ranks=4, micro_batches=8).simulate(Costs(bytes=10)))
    assert "bubble            9 (27.27% of the span)" in text
    assert "peak activations  4 3 2 1" in text
    assert "peak bytes        40 30 20 10" in text


@pytest.mark.parametrize(
    ("module", "name", "m"),
    [("f_then_b", "FThenB", 4), ("one_f_one_b", "1F1B", 6), ("one_f_one_b", "Eager1F1B", 6)],
)
def test_the_grids_in_the_docstrings_are_true(module: str, name: str, m: int) -> None:
    text = inspect.getdoc(importlib.import_module(f"fleetpipe.schedules.families.{module}"))
    drawn = render(build(name, ranks=4, micro_batches=m).simulate(), width=100).split("\n")[:-1]
    assert text is not None
    for line in drawn:
        assert line in text


def test_the_grid_of_forward_only_is_true() -> None:
    text = inspect.getdoc(importlib.import_module("fleetpipe.schedules.families.forward_only"))
    assert text is not None
    for line in render(forward_only(Placement("loop", 4), 4).simulate(), width=80).split("\n")[:-1]:
        assert line in text


def test_costs_in_nanoseconds_are_drawn_alike() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    large = schedule.simulate(Costs(forward=1e9, input_grad=1e9, weight_grad=1e9))
    assert render(large).split("\n")[:2] == render(schedule.simulate()).split("\n")[:2]
