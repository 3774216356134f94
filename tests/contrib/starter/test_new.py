"""The project that ``fleetpipe new`` makes: it trains, launches and passes its tests as it is."""

from __future__ import annotations

import json
import re
import reprlib
import sys
from pathlib import Path

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib import starter
from tests import launching
from tests.fixtures import Capture, Launch, Patch
from tests.ground.test_without_paddle import without_paddle

pytestmark = pytest.mark.no_paddle


# The project needs it; so do the tests, whose extra names it.
pytest.importorskip("jsonargparse")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "my_project"
    assert main(["new", str(folder)]) == 0
    return folder


def done_in(folder: Path, *words: str) -> str:
    done = launching.command(*words, cwd=folder, timeout=200, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_tests_pass(project: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_train.py"]
    assert "5 passed" in done_in(project, *words)


def test_two_ranks_have_the_losses_of_one(project: Path, tmp_path: Path, launcher: Launch) -> None:
    train = str(project / "train.py")
    options = ["--train.epochs=2"]
    shown = done_in(tmp_path, sys.executable, train, *options, "--folder=alone")
    assert re.search(r"^accuracy \d\.\d{3} after 40 steps$", shown, re.MULTILINE)
    command = f"""
        import runpy, sys
        from fleetpipe.cli import main
        sys.exit(main(["launch", "--nproc_per_node", "2", {train!r}, *sys.argv[1:]]))
        """
    launcher(command, None, args=[*options, "--pipeline.stages=2", "--folder=ranks"], cwd=tmp_path)
    rows = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("alone", "ranks")
    }
    found = {name: [(row["phase"], row["loss"]) for row in each] for name, each in rows.items()}
    assert len(found["alone"]) == 42
    assert found["ranks"] == found["alone"]
    assert len(rows["ranks"][-2]["peak_memory_by_process"]) == 2


def test_the_targets_of_its_makefile(project: Path) -> None:
    shown = done_in(project, "make", "--dry-run", "train", "launch", "test", "report", "clean")
    assert "python -m fleetpipe launch --nproc 2 train.py" in shown
    for line in shown.splitlines():
        words = line.split()
        if words[1:3] == ["-m", "fleetpipe"] and words[3] != "launch":
            # The words of the command line are options that there are.
            assert words[3:] == ["report", "run", "-o", "report.html"]


def test_its_files_have_its_name_and_are_laid_out(project: Path) -> None:
    assert sorted(path.name for path in project.iterdir() if path.is_file()) == sorted(
        starter._FILES
    )
    readme = (project / "README.md").read_text().splitlines()
    assert readme[0] == "# my_project"
    assert len(readme) == 5
    pytest.importorskip("ruff", reason="only the environment of make test has ruff")
    words = ["ruff", "check", "--isolated", "--line-length", "100", "--select", "E,F,W,I"]
    files = ["train.py", "test_train.py"]
    done_in(project, sys.executable, "-m", *words, *files)
    done_in(
        *(project, sys.executable, "-m", "ruff", "format", "--isolated", "--check"),
        *("--line-length", "100", *files),
    )


def test_it_is_made_without_paddle(tmp_path: Path) -> None:
    (tmp_path / "here" / ".git").mkdir(parents=True)
    done = without_paddle(
        f"""
import os
from fleetpipe.cli import main
os.chdir({str(tmp_path / "here")!r})
assert main(["new", "."]) == 0
assert not any(name.startswith("paddle") for name in sys.modules)
"""
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "README.md").read_text().startswith("# here\n")


def test_a_bad_name_is_refused(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for name in ("1st", "my project", "paddle", "Fleetpipe", "a.b", "-", "é", "a" * 101):
        assert main(["new", "--", str(tmp_path / name)]) == 2
        assert f"{reprlib.repr(name)} cannot be the name of a project" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["new", ""]) == 2
    assert "a project needs a name" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_what_is_there_stays(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for folder, said in (
        ("full", "not empty: nothing was written"),
        ("file", "there is a file of that name"),
        ("nowhere/new", "there is no folder"),
    ):
        assert main(["new", str(tmp_path / folder)]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]
