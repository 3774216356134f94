from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleetpipe.cli import main
from tests.fixtures import Capture, Patch

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    DOCS / "schedules.md",
    DOCS / "schedules/search.md",
    DOCS / "schedules/reading-a-trace.md",
    DOCS / "schedules/seq_one_f_one_b.md",
]


def blocks(language: str) -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
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
