"""Folders, files and standard streams that cannot be written, or that nobody reads any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpipe import cli
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


SMALL_COMMAND = "schedule 1F1B --ranks 2 --micro-batches 2"


def shell(words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``fleetpipe`` as a shell does; F stands for it."""
    line = words.replace("F ", f"{sys.executable} -m fleetpipe ", 1)
    return command("bash", "-c", line, cwd=folder, **environment)


CLOSED = "<&- >&- 2>&-"


@pytest.mark.parametrize(
    ("command", "code", "closed"),
    [
        *((SMALL_COMMAND, 0, ">&-"), (SMALL_COMMAND, 0, "2>&-"), (SMALL_COMMAND, 0, CLOSED)),
        *(("verify bad", 1, ">&-"), ("verify bad", 1, "2>&-"), ("run train.py", 3, CLOSED)),
    ],
)
def test_a_closed_stream_changes_no_exit_code(
    command: str, code: int, closed: str, tmp_path: Path
) -> None:
    (tmp_path / "bad").write_text("F0.0 F0.0\n")
    # A file that a script opens does not become its stdout.
    (tmp_path / "train.py").write_text(
        "import os\nprint('lost')\nassert os.open('bad', os.O_RDONLY) > 2\nraise SystemExit(3)\n"
    )
    done = shell(f"F {command} {closed}", tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "" or ">&-" not in closed.replace("2>&-", "")


def without_reader(words: str, streams: str, folder: Path) -> int:
    """Returns the exit code of a command whose standard streams are a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        line = f"{sys.executable} -m fleetpipe {words} {streams.replace('PIPE', str(write))}"
        done = subprocess.run(["bash", "-c", line], cwd=folder, pass_fds=[write], check=False)
        return done.returncode
    finally:
        os.close(write)


GONE = [">&PIPE", "2>&PIPE", ">&PIPE 2>&PIPE"]


@pytest.mark.parametrize(
    ("command", "code", "gone"),
    [*(("verify bad", 1, gone) for gone in GONE), ("run train.py", 3, GONE[-1]), ("x", 2, GONE[1])],
)
def test_a_reader_that_is_gone_changes_no_exit_code(
    command: str, code: int, gone: str, tmp_path: Path
) -> None:
    (tmp_path / "bad").write_text("F0.0 F0.0\n")
    (tmp_path / "train.py").write_text("print('lost')\nraise SystemExit(3)\n")
    assert without_reader(command, gone, tmp_path) == code


@pytest.mark.processes
@pytest.mark.parametrize("command", ["run --nproc 2", "launch --max-restart 1 --nproc 2"])
def test_ranks_fail_and_are_restarted_where_nobody_reads(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "open('attempts', 'a').write('0')\nprint('lost\\n' * 9999)\nraise ValueError('lost')\n"
    )
    assert without_reader(f"{command} train.py", GONE[-1], tmp_path) == 1
    attempts = 2 if "launch" in command else 1
    # In each, the second rank may be ended before it has begun.
    assert attempts <= len((tmp_path / "attempts").read_text()) <= 2 * attempts


@pytest.mark.processes
@pytest.mark.parametrize("command", ["run --nproc 2", "launch --nproc_per_node 2"])
def test_ranks_run_where_stdout_is_closed(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('kept in the log')\n")
    done = shell(f"F {command} train.py >&-", tmp_path)
    assert done.returncode == 0, done.stderr
    # Paddle's package for GPUs warns there that it finds none.
    assert "Traceback" not in done.stderr
    assert "fleetpipe: " not in done.stderr
    assert "kept in the log" in (tmp_path / "log" / "workerlog.1").read_text()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_is_lost_on_a_full_disk_is_said_in_one_line(
    unbuffered: str, tmp_path: Path
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    done = shell(f"F {SMALL_COMMAND} > /dev/full", tmp_path, PYTHONUNBUFFERED=unbuffered)
    lost = "fleetpipe: the output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, lost)
    (tmp_path / "train.py").touch()
    assert shell("F run train.py > /dev/full", tmp_path, PYTHONUNBUFFERED="1").returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", [f"{SMALL_COMMAND}000 --format actions", f"{SMALL_COMMAND}", "--help"]
)
def test_a_reader_that_goes_away_is_no_error(command: str, unbuffered: str, tmp_path: Path) -> None:
    done = shell(
        f"F {command} | head -c 1; exit ${{PIPESTATUS[0]}}", tmp_path, PYTHONUNBUFFERED=unbuffered
    )
    assert (done.returncode, done.stderr, len(done.stdout)) == (0, "", 1)


def test_a_connection_that_breaks_is_not_taken_for_the_reader(
    monkeypatch: Patch,
) -> None:
    def broken(_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(
        cli, "_import_function", lambda path: broken if "run_" in path else lambda _: None
    )
    with pytest.raises(BrokenPipeError):
        cli.main(["schedule"])
