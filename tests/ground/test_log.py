"""Notices are records of ``logging``, and files are the old ones or the new ones whole."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetpipe import atomic_file, log
from fleetpipe.launch.streams import quiet
from tests.check_types import tree
from tests.fixtures import Capture, LogCapture, Patch
from tests.launching import ROOT
from tests.test_house import modules

pytestmark = pytest.mark.no_paddle

#: What is written without logging: the error that ends a process, as Python prints one; what a
#: callback puts out when ``verbose`` asks for it; the output of commands.
WRITES = (
    *("log", "job/watch", "fit/callbacks/rank_policy", "cli"),
    *("checkpoint/checkpoint_commands", "contrib/doctor/doctor_command"),
    "contrib/healing/replacing",
    *("contrib/locator/locate_command", "launch/noted_launch", "launch/profile_command"),
    *("launch/script", "contrib/view/serving", "launch/supervisor/", "parity/parity_command"),
    "compare/whole_runs",
    *("profiling/plan_commands", "contrib/view/run_folder"),
    *("schedules/schedule_commands", "contrib/starter/__init__"),
    *("contrib/view/watch_command", "contrib/view/why_command", "launch/streams"),
)

SCRIPT = """
import logging
shape = "%(levelname)s %(name)s %(rank)s: %(message)s"
if {before}:
    logging.basicConfig(format=shape)
import paddle
from fleetpipe import log
base, own = logging.getLogger("fleetpipe"), log.logger("fleetpipe.test")
base.addHandler(log.LogObserver(lambda record: None, logging.INFO))
own.info("as it is")
base.setLevel("WARNING")
own.info("below the level")
base.setLevel("INFO")
nowhere = logging.NullHandler()
base.addHandler(nowhere)
own.info("by a handler")
base.removeHandler(nowhere)
logging.basicConfig(format=shape, force=True)
own.info("configured behind Paddle")
"""
LAST = "INFO fleetpipe.test 0: configured behind Paddle"


def test_the_library_writes_to_no_stream() -> None:
    streams = ("print", "tqdm.write", "sys.stdout.write", "sys.stderr.write", "traceback.print_exc")
    allowed = tuple(f"fleetpipe/{name}" for name in WRITES)
    for name, path in modules().items():
        calls = [
            ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)
        ]
        if not name.replace(".", "/").startswith(allowed):
            assert not set(calls).intersection(streams), name


@pytest.mark.parametrize(
    ("before", "first"),
    [
        (False, ["fleetpipe: as it is"]),
        (True, ["INFO fleetpipe.test 0: as it is", "INFO fleetpipe.test 0: by a handler"]),
    ],
)
def test_a_notice_is_seen_once_as_the_user_configured(before: bool, first: list[str]) -> None:
    """Paddle gives the root logger a handler of its own, which would show each a second time."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before)],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if not name.startswith("PADDLE_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == ""
    told = [line for line in done.stderr.splitlines() if "fleetpipe" in line and "/" not in line]
    assert told == [*first, LAST]


def test_the_record_has_the_rank_and_its_origin(caplog: LogCapture, monkeypatch: Patch) -> None:
    log.once.cache_clear()
    own = log.logger("fleetpipe.test")
    for rank in (3, 0, 0):
        monkeypatch.setenv("PADDLE_TRAINER_ID", str(rank))
        log.once(own.info, "for all ranks")
        log.once(own.warning, f"of rank {rank}", any_rank=True)
    told = [(one.__dict__["rank"], one.name, one.filename, one.message) for one in caplog.records]
    assert [(rank, text) for rank, _, _, text in told] == [(3, "of rank 3"), (0, "of rank 0")]
    assert {(name, file) for _, name, file, _ in told} == {("fleetpipe.test", "test_log.py")}


def test_two_that_are_slow_at_once_are_said_once(monkeypatch: Patch) -> None:
    monkeypatch.setattr(log, "_PATIENCE", 0.0)
    said = []

    def info(text: str, stacklevel: int) -> None:
        time.sleep(0.05)
        said.append(text)

    with log.once_if_slow(info, "this takes long"), log.once_if_slow(info, "this takes long"):
        time.sleep(0.3)
    assert said == ["this takes long"]


@pytest.mark.parametrize(
    ("level", "shown"), [("DEBUG", 4), ("INFO", 3), ("WARNING", 3), ("ERROR", 1)]
)
def test_a_commands_level_is_fleetpipes_too(
    monkeypatch: Patch, capsys: Capture, level: str, shown: int
) -> None:
    """Notices stay at the default, WARNING."""
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    own = log.logger("fleetpipe.test")
    names = ("debug", "info", "warning", "error")
    with quiet(level):
        for name in names:
            getattr(own, name)(f"of level {name}")
    told = capsys.readouterr().err.splitlines()
    assert told == [f"fleetpipe: of level {name}" for name in names[-shown:]]


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "figures"
    atomic_file.replace_text(file, "old")

    def fail() -> None:
        with atomic_file.draft_of(file) as draft:
            draft.write_text("ne")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert (file.read_text(), [*tmp_path.iterdir()]) == ("old", [file])
    atomic_file.replace_text(file, "new")
    assert (file.read_text(), [*tmp_path.iterdir()]) == ("new", [file])


def test_several_files_stay_where_the_body_fails(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def fail() -> None:
        with atomic_file.replacing(tmp_path) as folder:
            (folder / "a").write_text("new")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old"}


def test_of_several_writers_the_first_one_counts(tmp_path: Path) -> None:
    file = tmp_path / "failure"
    texts = [f"{number}" * 1000 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        [*threads.map(lambda text: atomic_file.write_once(file, text), texts)]
    first = file.read_text()
    assert first in texts
    atomic_file.write_once(file, "late")
    assert (file.read_text(), [*tmp_path.iterdir()]) == (first, [file])
