"""Folders and files that cannot be written are refused before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fleetpipe.arguments import require_folder
from fleetpipe.cli import main
from fleetpipe.errors import ConfigError
from tests.fixtures import Capture, Patch
from tests.launching import command

SMALL = ["schedule", "1F1B", "--ranks", "2", "--micro-batches", "2"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Returns a script that leaves word where it ran, beside a file that is in the way."""
    (tmp_path / "file").write_text("of the user\n")
    (tmp_path / "train.py").write_text("open(__file__ + '.ran', 'w')\n")
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    ("words", "option", "cause"),
    [
        (["run", "--nproc", "2", "--log-dir", "{}/file"], "--log-dir", "a file of that name"),
        (["run", "--nproc", "2", "--log-dir", "{}/file/a"], "--log-dir", "Not a directory"),
        (["launch", "--log-dir", "{}/file"], "--log-dir", "a file of that name"),
        (["launch", "--log-dir", "/proc/log"], "--log-dir", "No such file"),
        (["launch", "--checkpoint-dir", "{}/file"], "--checkpoint-dir", "a file of that name"),
        (["parity", "--report", "{}/file/a.json"], "--report", "there is no folder"),
        (["parity", "--report", "/proc/a.json"], "--report", "No such file"),
        (["profile", "--output", "/proc/a.json"], "-o/--output", "No such file"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_script_runs(
    words: list[str], option: str, cause: str, script: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    if "/proc" in " ".join(words) and not Path("/proc/self").exists():
        pytest.skip("this system has no /proc, in which nobody can write")
    monkeypatch.chdir(script.parent)
    assert main([*(word.format(script.parent) for word in words), str(script)]) == 2
    told = capsys.readouterr().err
    place = words[-1].format(script.parent)
    assert all(part in told for part in (option, cause)), told
    assert place in told or str(Path(place).parent) in told
    assert "begins" not in told  # of a restart
    assert sorted(path.name for path in script.parent.iterdir()) in (
        ["file", "train.py"],
        ["file", "log", "train.py"],
    )


def test_a_file_to_write_is_tried_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "kept.svg").write_text("as it was")
    assert main(["verify", "--help"]) == 0
    for words in (["--plot", str(tmp_path / "kept.svg"), "--chunks", "0"],):
        assert main([*SMALL, *words]) == 2
    assert (tmp_path / "kept.svg").read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["kept.svg"]
    assert main([*SMALL, "--trace", os.devnull]) == 0


def test_a_full_disk_takes_an_empty_folder_and_is_refused_all_the_same(tmp_path: Path) -> None:
    program = (
        "import sys; from fleetpipe.arguments import require_folder as require\n"
        "require('--log-dir', sys.argv[1] + '/room/log')\n"
        "open(sys.argv[1] + '/room/all', 'wb', 0).write(bytes(1 << 16))\n"
        "require('--log-dir', sys.argv[1] + '/room/log')\n"
    )
    (tmp_path / "room").mkdir()
    mounted = 'mount -t tmpfs -o size=32k none "$2/room" || exit 99\nexec "$0" -c "$1" "$2"'
    words = ("unshare", "-m", "sh", "-c", mounted, sys.executable, program, tmp_path)
    done = command(*words) if sys.platform == "linux" else None
    if done is None or done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("no small disk can be mounted here: it takes Linux, root and unshare")
    assert f"--log-dir: cannot use {tmp_path}/room/log" in done.stderr
    assert "likely cause: No space left on device" in done.stderr


def test_a_folder_is_made_with_those_above_it_and_nothing_in_it(tmp_path: Path) -> None:
    require_folder("--log-dir", tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    if os.geteuid() == 0:
        return  # whom no mode of a folder stops
    (tmp_path / "a").chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        require_folder("--log-dir", tmp_path / "a" / "c")
