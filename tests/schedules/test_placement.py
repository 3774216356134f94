from __future__ import annotations

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Placement


def test_a_loop_goes_round() -> None:
    loop = Placement("loop", 3, 2)
    assert [loop.rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert loop.stages_of(1) == (1, 4)


def test_a_vee_comes_back() -> None:
    vee = Placement("vee", 3, 2)
    assert [vee.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert vee.stages_of(0) == (0, 5)


def test_a_wave_comes_back_again_and_again() -> None:
    wave = Placement("wave", 3, 4)
    assert [wave.rank_of(stage) for stage in range(12)] == [0, 1, 2, 2, 1, 0] * 2
    assert wave.stages_of(1) == (1, 4, 7, 10)


@pytest.mark.parametrize(
    "placement", [Placement("loop", 5, 3), Placement("vee", 4, 2), Placement("wave", 3, 6)]
)
def test_every_stage_is_on_the_rank_that_lists_it(placement: Placement) -> None:
    listed = [
        (stage, rank) for rank in range(placement.ranks) for stage in placement.stages_of(rank)
    ]
    assert sorted(listed) == [(s, placement.rank_of(s)) for s in range(placement.stages)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vee", 2, 1), "exactly two chunks"),
        (("wave", 2, 3), "even number of chunks"),
        (("loop", 0, 1), "ranks=0"),
        (("loop", 2, 0), "chunks=0"),
        (("loop", True, 1), "ranks=True"),
        (("lop", 2, 1), "did you mean 'loop'"),
    ],
)
def test_what_cannot_be_placed_is_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement(*arguments)


def test_a_stage_or_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no stage 2"):
        Placement("loop", 2).rank_of(2)
    with pytest.raises(ConfigError, match="no stage -1"):
        Placement("loop", 2).rank_of(-1)
    with pytest.raises(ConfigError, match="no rank 2"):
        Placement("loop", 2).stages_of(2)
