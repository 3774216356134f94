"""What the files and pages of the families show is what the schedules are."""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from inspect import cleandoc
from math import floor
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.cli import main
from fleetpipe.schedules import Action, Costs, Item, build, names
from fleetpipe.schedules.action import SliceNumber
from tests.fixtures import Capture, Patch


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
PAGES = ROOT / "docs" / "schedules"


@pytest.mark.parametrize("family", GRIDS)
def test_the_picture_of_a_page_is_one_of_its_schedules(family: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = (PAGES / f"{family}.md").read_text(encoding="utf-8")
    pictures = [words.split() for words in re.findall("<!-- picture: (.*) -->", page)]
    assert {words[0] for words in pictures} & {name for name, _, _ in GRIDS[family]}
    for words in pictures:
        file = tmp_path / "picture.svg"
        assert main(["schedule", *words, "--plot", str(file)]) == 0
        assert f">{words[0]}: {words[2]} ranks" in file.read_text(encoding="utf-8")


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


FUNCTIONS = {"min": min, "max": max, "floor": floor}
TOKEN = re.compile(r"min|max|floor|and|FB|g0|[A-Za-z]|\d+|[<>=]+|\S")


def computed(text: str, **names: float) -> float:
    """The value of a formula as pages print it: ``2(2p-1-m)``, ``F = I = W``."""
    code: list[str] = []
    for token in TOKEN.findall(text):
        is_operand = token[0].isalnum() and token != "and"
        follows = code and (code[-1] == ")" or code[-1][0].isalnum())
        if follows and (is_operand or token == "(") and code[-1] not in ("and", *FUNCTIONS):
            code.append("*")
        code.append("==" if token == "=" else token)
    return float(eval(" ".join(code), dict(FUNCTIONS), dict(names)))


def value(cell: str, **names: float) -> float | None:
    """What a cell says, as ``0 for m >= 2p-1; 2(2p-1-m) for fewer``; None of what it leaves out."""
    for part in cell.split(";"):
        formula, _, condition = part.partition(" for ")
        words = re.sub(r",.*|\(\d for.*", "", condition).strip()
        if words in ("", "fewer") or computed(words, **names):
            text = re.sub(r"^at most|chunks.*| or .*", "", formula.strip())
            return computed(text, **names)
    return None


def rows(page: str, column: int = 1) -> dict[str, str]:
    """A column of a page's tables, by the first one."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:]] for line in lines if line[:1] == "|"]
    return {row[0]: row[column] for row in cells if len(row) > column}


def played(name: str, p: int, m: int, costs: tuple[int, ...] = (1, 1, 1, 3), **options: int) -> Any:
    """A timeline, and the names of formulas; costs are those of F, I, W and FB."""
    f, i, w, pair = costs
    timeline = build(name, ranks=p, micro_batches=m, **options).simulate(
        Costs(f, i, w, overlapped=pair)
    )
    return timeline, {"p": p, "m": m, "F": f, "I": i, "W": w, "B": i + w, "FB": pair}


@pytest.mark.parametrize("p", [2, 3, 4, 7])
def test_the_formulas_of_zbv_and_dualpipev_hold_for_any_number_of_micro_batches(p: int) -> None:
    for name in ("ZBV", "DualPipeV"):
        table = rows(f"schedules/{name.lower()}.md")
        bubble = "bubble" if name == "ZBV" else "bubble, where F = I = W = 1 and FB = 3"
        for m in range(1, 2 * p + 3):
            timeline, names = played(name, p, m)
            assert timeline.bubble == value(table[bubble], **names)
            if name == "ZBV":
                assert timeline.makespan == value(table["makespan"], **names)
            peaks = [value(table["peak on rank r"], r=rank, **names) for rank in range(p)]
            assert list(timeline.peak_activations) == peaks


@pytest.mark.parametrize(
    "costs", [(1, 1, 1, 3), (1, 1, 2, 4), (2, 2, 1, 5), (2, 2, 5, 12), (3, 3, 2, 8), (3, 3, 7, 15)]
)
def test_the_bubble_of_dualpipev_is_the_pages(costs: tuple[int, ...]) -> None:
    cell = rows("schedules/dualpipev.md")["bubble, where F = I and FB >= F+B"]
    for p, m in ((2, 4), (4, 8), (4, 11), (5, 10)):
        timeline, names = played("DualPipeV", p, m, costs)
        assert timeline.bubble == value(cell, **names)
        f, i, w, _ = costs
        for pair in (i + w, i + w + f / 2):
            shorter, names = played("DualPipeV", p, m, (f, i, w, pair))  # type: ignore[arg-type]
            assert shorter.bubble <= (value(cell, **names) or 0) + 1e-9


def test_the_peaks_of_hanayo_are_the_pages() -> None:
    cell = rows("schedules/hanayo.md")["peak for m <= p"]
    last, first = (
        cell.partition(" forwards")[0],
        cell.partition("last rank, ")[2].partition(" on")[0],
    )
    for p, m, w in ((4, 4, 1), (4, 2, 2), (5, 3, 3), (3, 3, 2), (6, 1, 1)):
        timeline, names = played("Hanayo", p, m, chunks=2 * w)
        found = [computed(text, w=w, **names) for text in (first, last)]
        assert [timeline.peak_activations[0], timeline.peak_activations[-1]] == found
        more, _ = played("Hanayo", p, p + 2, chunks=2 * w)
        assert max(more.peak_activations) <= 2 * w * (p + 2)


@pytest.mark.parametrize("costs", [(1, 1, 1, 3), (3, 3, 2, 8)])
def test_the_table_of_schedules_is_what_they_are(costs: tuple[int, ...]) -> None:
    bubbles, peaks = (rows("schedules.md", column) for column in (2, 3))
    compared = 0
    for row, cell in bubbles.items():
        name = row.partition("`")[2].partition("`")[0]
        if name not in names() or name in ("kFkB", "Seq1F1B", "Hanayo", "auto"):
            continue
        p = 3 if name == "VMin" else 4
        for m in (2 * p, 3 * p):
            chunks = 2 if name == "Interleaved1F1B" else 1
            options = {"chunks": chunks} if chunks > 1 else {}
            timeline, known = played(name, p, m, costs, **options)
            expected = value(cell, **known)
            compared += expected is not None
            assert expected in (None, timeline.bubble), name
            for rank, peak in enumerate(timeline.peak_activations):
                told = value(peaks[row], r=rank, v=chunks, g0=p, **known)
                assert told is not None
                assert peak <= told if "at most" in peaks[row] else peak == told, name
    assert compared == (20 if costs[0] == 1 else 14)


DOCS = Path(__file__).parents[2] / "docs"
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
