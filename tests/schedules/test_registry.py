"""What every schedule declares is what it does, and what its file and its page show."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import re
import runpy
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.cli import main
from fleetpipe.errors import ConfigError
from fleetpipe.schedules import (
    Action,
    Item,
    Placement,
    Plan,
    Schedule,
    build,
    canonical_name,
    forward_only,
    names,
    rebuild,
)
from fleetpipe.schedules.action import SliceNumber
from fleetpipe.schedules.families.table import FAMILIES
from tests.fixtures import Capture, Patch
from tests.schedules.sample_schedules import (
    BUBBLES,
    OF_DUALPIPEV,
    OF_HANAYO,
    OF_ZBV,
    PEAKS,
    assert_forms_agree,
    bubble,
    peaks,
    takes,
    value,
)

pytestmark = pytest.mark.no_paddle

NAMES = (
    *("FThenB", "1F1B", "Eager1F1B", "kFkB", "Interleaved1F1B"),
    *("ZBH1", "ZBH2", "ZBV", "VHalf", "VMin", "DualPipeV"),
)


@pytest.mark.parametrize("name", NAMES)
def test_bubble_and_peaks_of_every_size_are_those_declared(name: str) -> None:
    for p, v in itertools.product(range(1, 6), range(1, 4)):
        if not takes(name, v):
            with pytest.raises(ConfigError, match=rf"{v} chunks on a rank|exactly two chunks"):
                build(name, ranks=p, micro_batches=4, chunks=v)
            continue
        for m in range(1, 3 * p + 2):
            timeline = build(name, ranks=p, micro_batches=m, chunks=v).simulate()
            limit, is_exact = bubble(name, p, v, m)
            assert timeline.bubble <= limit
            assert not is_exact or timeline.bubble == limit
            most = peaks(name, p, v, m)
            if name in ("VHalf", "VMin"):
                assert all(peak <= n for peak, n in zip(timeline.peak_activations, most))
                assert m < 2 * p + 4 or max(timeline.peak_activations) == max(most)
            else:
                assert list(timeline.peak_activations) == most
            assert name != "ZBV" or timeline.makespan == value(OF_ZBV["makespan"], p=p, m=m)


@given(st.sampled_from(names()), st.integers(1, 7), st.integers(1, 16))
def test_every_schedule_and_its_plan_can_run_and_are_what_their_texts_say(
    name: str, p: int, m: int
) -> None:
    schedule = build(name, ranks=p, micro_batches=m)
    schedule.verify(memory_cap=max(schedule.simulate().peak_activations) / schedule.slices)
    assert_forms_agree(schedule)
    assert schedule.lower().schedule.lower() == schedule.lower()


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("fthenb", "FThenB"),
        ("F-then-B", "FThenB"),
        ("f then b", "FThenB"),
        ("GPipe", "FThenB"),
        ("afab", "FThenB"),
        ("1f1b", "1F1B"),
        ("1_F-1 B", "1F1B"),
        ("EAGER_1F1B", "Eager1F1B"),
        ("vpp", "Interleaved1F1B"),
        ("zb-h1", "ZBH1"),
        ("interleaved zero bubble", "ZBH1"),
        ("ZBVPP", "ZBV"),
        ("v-min", "VMin"),
        ("Dual Pipe V", "DualPipeV"),
        ("Schedule1F1B", "1F1B"),
        ("ScheduleGPipe", "FThenB"),
        ("ScheduleZBVZeroBubble", "ZBV"),
    ],
)
def test_spelling_does_not_count(spelling: str, name: str) -> None:
    assert canonical_name(spelling) == name
    assert build(spelling, ranks=2, micro_batches=2).name == name


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("1F1", {}, "'1F1'(.|\n)*'1F1B'"),
        ("ZBH3", {}, "'ZBH3'(.|\n)*'ZBH1'"),
        ("", {}, "''(.|\n)*known: "),
        ("Auto", {}, "run `fleetpipe plan`, or choose by docs/schedules/choosing.md"),
        ("Eager1F1B", {"ranks": 0}, "ranks=0"),
        ("Eager1F1B", {"micro_batches": 0}, "micro_batches=0"),
        ("Eager1F1B", {"micro_batches": 2.0}, "micro_batches=2.0"),
        ("Eager1F1B", {"chunks": 0}, "chunks=0"),
        ("Eager1F1B", {"chunks": 2}, "Eager1F1B cannot place 2 chunks"),
        ("Eager1F1B", {"slack": 2}, "Eager1F1B has no option 'slack'"),
        ("Seq1F1B", {"slices": True}, "slices=True"),
    ],
)
def test_what_no_schedule_can_be_built_of_is_refused(
    name: str, arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **{"ranks": 2, "micro_batches": 2, **arguments})


def test_names_are_those_of_the_table() -> None:
    assert names() == (*NAMES, "Seq1F1B", "Hanayo")


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("1F1B", {}, ()),
        ("kFkB", {"groups": [4]}, (("groups", (4,)),)),
        ("VPP", {"warmup_slack": 1, "groups": None}, (("warmup_slack", 1),)),
        ("VPP", {"warmup_slack": 2}, ()),
        ("Seq1F1B", {"slices": 3}, ()),
    ],
)
def test_a_schedule_carries_its_options_through_text_plan_and_rebuilding(
    name: str, given: dict[str, object], kept: tuple[tuple[str, object], ...]
) -> None:
    schedule = build(name, ranks=3, micro_batches=6, **given)
    assert schedule.options == kept
    assert Schedule.parse(str(schedule)) == schedule
    plan = schedule.lower()
    assert Plan.parse(str(plan)).schedule.options == kept
    for count in (2, 6, 9):
        again = build(name, ranks=3, micro_batches=count, **given)
        assert rebuild(Schedule.parse(str(schedule)), count) == again


def test_options_that_fit_one_number_of_micro_batches_are_not_bent_to_another() -> None:
    schedule = build("VPP", ranks=2, micro_batches=6, groups=[4, 2])
    assert rebuild(schedule, 6) == schedule
    with pytest.raises(ConfigError, match="sizes with the sum 8"):
        rebuild(schedule, 8)
    with pytest.raises(ConfigError, match="no schedule 'Mine'"):
        rebuild(Schedule("Mine", schedule.placement, 6, schedule.actions), 8)


def test_values_stay_what_they_are_when_copied_and_sent() -> None:
    schedule = build("ZBV", ranks=2, micro_batches=3)
    plan = schedule.lower()
    plan.verify()
    assert plan.order
    for each in (schedule, plan):
        for again in (pickle.loads(pickle.dumps(each)), copy.deepcopy(each)):
            assert type(again) is type(each)
            assert (again, hash(again), str(again)) == (each, hash(each), str(each))
    renamed = dataclasses.replace(schedule, name="Other")
    assert type(renamed) is Schedule
    assert renamed != schedule
    renamed.verify()


def test_a_long_schedule_has_a_short_repr() -> None:
    schedule = build("ZBV", ranks=2, micro_batches=50)
    assert repr(schedule) == "<Schedule ZBV: 2 ranks, 50 micro-batches, 2 chunks, vee>"
    assert repr(schedule.lower()) == "<Plan ZBV: 2 ranks, 50 micro-batches, 1204 ops>"


def grid(schedule: Schedule, until: int = 28) -> str:
    """Returns three characters for each unit of time, up to time ``until``.

    ``F0`` is of a rank's first chunk and micro-batch 0, ``f0`` of its second; ``F3|b0`` is fused.
    Where sequences are cut in two, ``f0`` is of the second slice.
    """
    timeline = schedule.simulate()
    lines = []
    for rank, events in enumerate(timeline.events):
        first = schedule.placement.stages_of(rank)[0]
        line = ""
        for item, start, end in events:
            idle = int(start) - len(line) // 3
            line += ".  " * idle + _token(item, first).ljust(3 * int(end - start) - 1, "-") + " "
        line += ".  " * (int(timeline.makespan) - len(line) // 3)
        cut = " .." if len(line) > 3 * until else ""
        lines.append(f"rank {rank}  {line[: 3 * until].rstrip()}{cut}")
    return "\n".join(lines)


def _token(item: Item, first: int) -> str:
    if not isinstance(item, Action):
        return "|".join(_token(action, first) for action in item.actions)
    number, later = int(item.micro_batch), item.stage != first
    if isinstance(item.micro_batch, SliceNumber):
        number, later = divmod(number, item.micro_batch.slices)
    return f"{item.kind.lower() if later else item.kind}{number}"


#: For each family's file: name, p and m of the schedules that it draws.
GRIDS = {
    "f_then_b": (("FThenB", 4, 4),),
    "one_f_one_b": (("1F1B", 4, 6), ("Eager1F1B", 4, 6)),
    "k_f_k_b": (("kFkB", 3, 6),),
    "interleaved": (("Interleaved1F1B", 3, 3),),
    "zero_bubble": (("ZBH1", 4, 6), ("ZBH2", 4, 7)),
    "zbv": (("ZBV", 3, 5),),
    "controllable_memory": (("VHalf", 4, 4), ("VMin", 4, 4)),
    "dualpipev": (("DualPipeV", 3, 6),),
    "hanayo": (("Hanayo", 2, 3),),
    "seq_one_f_one_b": (("Seq1F1B", 3, 3),),
}


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = DOCS / "schedules"


@pytest.mark.parametrize("page", GRIDS)
def test_the_grids_are_the_schedules(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    for name, ranks, micro_batches in GRIDS[page]:
        drawn = grid(build(name, ranks=ranks, micro_batches=micro_batches))
        assert drawn in opening(FAMILIES[name].rows)
        assert drawn in text
    assert grid(forward_only(Placement("loop", 4), 4)) in opening(FAMILIES["1F1B"].rows)


def opening(function: Any) -> str:
    """Returns the docstring of a function's module, without the indentation of drawings."""
    return cleandoc(import_module(function.__module__).__doc__ or "").replace("\n    ", "\n")


def test_every_schedule_has_its_grid() -> None:
    drawn = [name for grids in GRIDS.values() for name, _, _ in grids]
    assert sorted(drawn) == sorted(names())


def test_the_table_is_what_the_simulator_says() -> None:
    table = runpy.run_path(str(ROOT / "benchmarks" / "schedules" / "compare_schedules.py"))["table"]
    assert table(4, 16) in (PAGES / "choosing.md").read_text(encoding="utf-8")


def shown(formula: str) -> str:
    """Returns a formula of Python's as pages print it: products without a sign, but for calls."""
    return re.sub(r"\*(?!max|floor)", "", formula)


def test_the_table_of_schedules_shows_their_formulas() -> None:
    lines = (DOCS / "schedules.md").read_text(encoding="utf-8").splitlines()
    rows = {name: line for line in lines for name in names() if line.startswith(f"| [`{name}`]")}
    for formulas in (BUBBLES, PEAKS):
        for name, formula in formulas.items():
            assert shown(formula) in rows[name]


@pytest.mark.parametrize(
    ("page", "formulas"), [("zbv", OF_ZBV), ("dualpipev", OF_DUALPIPEV), ("hanayo", OF_HANAYO)]
)
def test_the_page_of_a_family_shows_its_formulas(page: str, formulas: dict[str, str]) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    assert [formula for formula in formulas.values() if shown(formula) not in text] == []


SHOWN = [
    DOCS / "schedules.md",
    DOCS / "schedules/reading-a-trace.md",
    DOCS / "schedules/seq_one_f_one_b.md",
]


def blocks(language: str) -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in SHOWN)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("block", blocks("console"))
def test_the_commands_print_what_the_page_shows(
    block: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for part in block.split("$ ")[1:]:
        command, _, shown = part.partition("\n")
        words = command.split()
        if words[0] == "cat":
            (tmp_path / words[1]).write_text(shown)
            continue
        assert words[:3] == ["python", "-m", "fleetpipe"]
        main(words[3:])
        output = capsys.readouterr()
        assert output.out + output.err == shown
