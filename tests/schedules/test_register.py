from __future__ import annotations

from typing import Any

import pytest

from fleetpipe.config import PipelineConfig
from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.fleet import DistributedStrategy
from fleetpipe.schedules import Action, Item, Placement, Schedule, build, names, register

pytestmark = pytest.mark.usefixtures("own_names")


def one_by_one(placement: Placement, micro_batches: int, twice: bool = False) -> list[list[Item]]:
    """Returns each micro-batch forward and backward before the next one begins."""
    return [
        [
            Action(kind, rank, k)
            for k in range(micro_batches)
            for kind in "FB"
            for _ in range(1 + twice)
        ]
        for rank in range(placement.ranks)
    ]


def test_it_is_built_like_any_other() -> None:
    register("OneByOne", one_by_one, aliases=("naive",))
    assert names()[-1] == "OneByOne"
    schedule = build("one-by-one", ranks=3, micro_batches=4)
    assert type(schedule) is Schedule
    assert schedule.name == "OneByOne"
    assert schedule == build("Naive", ranks=3, micro_batches=4)
    assert schedule.simulate().makespan == 3 * 4 * 3
    assert Schedule.parse(str(schedule)) == schedule
    schedule.lower().verify()


def test_its_options_are_kept_and_a_strategy_takes_them() -> None:
    def grouped(placement: Placement, micro_batches: int, group: int = 1) -> Any:
        groups = [range(k, min(k + group, micro_batches)) for k in range(0, micro_batches, group)]
        return [
            [Action(kind, rank, k) for ks in groups for kind in "FB" for k in ks]
            for rank in range(placement.ranks)
        ]

    strategy = DistributedStrategy()
    with pytest.raises(ConfigError, match="no option 'group'"):
        strategy.fleetpipe_configs = {"group": 4}
    register("Grouped", grouped)
    strategy.pipeline_configs = {"accumulate_steps": 8, "schedule_mode": "Grouped"}
    strategy.fleetpipe_configs = {"group": 4}
    schedule = PipelineConfig.from_strategy(strategy).schedule_for(2, None)
    assert schedule.options == (("group", 4),)
    assert schedule == build("Grouped", ranks=2, micro_batches=8, group=4)
    assert str(schedule).split("\n")[1].startswith("F0.0 F0.1 F0.2 F0.3 B0.0")
    # Another schedule does not take it.
    strategy.pipeline_configs = {"schedule_mode": "ZBH1"}
    with pytest.raises(ConfigError, match="ZBH1 has no option 'group'"):
        PipelineConfig.from_strategy(strategy).schedule_for(2, None)
    with pytest.raises(ConfigError, match="a number, a word, or a list of them"):
        build("Grouped", ranks=2, micro_batches=8, group=object())


def test_an_option_that_means_something_else_is_refused() -> None:
    register("Ordered", lambda placement, micro_batches, order="fixed": [])
    with pytest.raises(ConfigError, match=r"for something else(.|\n)*got: order"):
        PipelineConfig.from_strategy(DistributedStrategy())


def test_what_it_makes_is_verified() -> None:
    register("OneByOne", one_by_one)
    with pytest.raises(ScheduleError, match=r"OneByOne made no valid schedule: F0\.0 stands twice"):
        build("OneByOne", ranks=3, micro_batches=4, twice=True)
    with pytest.raises(ConfigError, match="no option 'thrice'"):
        build("OneByOne", ranks=3, micro_batches=4, thrice=True)
    with pytest.raises(ConfigError, match="cannot place 2 chunks"):
        build("OneByOne", ranks=3, micro_batches=4, chunks=2)
    register("Short", lambda placement, m: [])
    with pytest.raises(ScheduleError, match="one row of actions for each rank"):
        build("Short", ranks=1, micro_batches=1)
    register("Plain", lambda placement, m: [["F0.0", "B0.0"]])
    with pytest.raises(ScheduleError, match=r"no action(.|\n)*'F0\.0'"):
        build("Plain", ranks=1, micro_batches=1)


def test_a_name_of_ones_own_may_mean_something_new() -> None:
    register("Mine", one_by_one)
    register(
        "Mine", lambda placement, m: build("1F1B", ranks=placement.ranks, micro_batches=m).actions
    )
    assert (
        build("Mine", ranks=2, micro_batches=4).actions
        == build("1F1B", ranks=2, micro_batches=4).actions
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("1f1b", {}, "'1F1B' already"),
        ("G-Pipe", {}, "'GPipe' already"),
        ("New", {"aliases": ("zbv",)}, "'ZBV' already"),
        ("mine", {}, "'Mine' already"),
        ("two words", {}, "one word"),
        ("New", {"placement": "round"}, "no placement 'round'"),
        ("New", {"placement": "vee", "chunks": 3}, "exactly two chunks"),
    ],
)
def test_what_cannot_be_registered_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    register("Mine", one_by_one)
    before = names()
    with pytest.raises(ConfigError, match=message):
        register(name, one_by_one, **options)
    assert names() == before


def test_a_vee_and_any_number_of_chunks() -> None:
    def taken_over(placement: Placement, m: int) -> tuple[tuple[Item, ...], ...]:
        name = "ZBV" if placement.name == "vee" else "FThenB"
        return build(name, ranks=placement.ranks, micro_batches=m, chunks=placement.chunks).actions

    register("Vee", taken_over, placement="vee")
    assert build("Vee", ranks=2, micro_batches=3).placement == Placement("vee", 2, 2)
    register("Loops", taken_over, chunks=2, any_chunks=True)
    assert build("Loops", ranks=2, micro_batches=3).placement.chunks == 2
    assert build("Loops", ranks=2, micro_batches=3, chunks=4).placement.chunks == 4
