"""What the files and pages of the families show is what the schedules are."""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from inspect import cleandoc
from pathlib import Path

import pytest

from fleetpipe.cli import main
from fleetpipe.schedules import Action, Item, build, names
from fleetpipe.schedules.action import SliceNumber
from tests.fixtures import Capture, Patch
from tests.schedules.declared import BUBBLES, OF_DUALPIPEV, OF_HANAYO, OF_ZBV, PEAKS

pytestmark = pytest.mark.no_paddle


def grid(name: str, ranks: int, micro_batches: int, until: int = 28) -> str:
    """Returns three characters for each unit of time, up to time ``until``.

    ``F0`` is of a rank's first chunk and micro-batch 0, ``f0`` of its second; ``F3|b0`` is fused.
    Where sequences are cut in two, ``f0`` is of the second slice.
    """
    schedule = build(name, ranks=ranks, micro_batches=micro_batches)
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


@pytest.mark.parametrize("family", GRIDS)
def test_the_grids_are_the_schedules(family: str) -> None:
    module = import_module(f"fleetpipe.schedules.families.{family}")
    opening = cleandoc(module.__doc__ or "").replace("\n    ", "\n")
    page = (PAGES / f"{family}.md").read_text(encoding="utf-8")
    for drawn in GRIDS[family]:
        assert grid(*drawn) in opening
        assert grid(*drawn) in page


def test_every_schedule_has_its_grid() -> None:
    drawn = [name for grids in GRIDS.values() for name, _, _ in grids]
    assert sorted(drawn) == sorted(name for name in names() if name != "auto")


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
    DOCS / "schedules/search.md",
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
