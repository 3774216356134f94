"""A rank's processes end with the worker, whichever way that does."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fleetpipe

_KEEPER = Path(fleetpipe.__file__).parent / "ray" / "keeper.py"
#: Forks, as Paddle does, says both numbers, and sleeps where it is asked to.
_SCRIPT = """
import os, signal, sys, time
if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
    sys.exit("Ctrl-C is ignored")
if signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    sys.exit("signals are blocked")
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
if len(sys.argv) > 1:
    time.sleep(60)
elif not child:
    time.sleep(60)
sys.exit(3)
"""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork"),
]


def _keeper(room: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(_KEEPER), str(room)]
    pipe = subprocess.PIPE
    # As Ray starts its processes.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _start(keeper: subprocess.Popen[bytes], folder: Path, *words: str) -> list[int]:
    """Has it start the script; returns the numbers of the script's process and its fork."""
    log = folder / "log"
    order = {
        "command": [sys.executable, "-c", _SCRIPT, *words],
        "environment": dict(os.environ),
        "folder": str(folder),
        "log": str(log),
    }
    assert keeper.stdin is not None
    keeper.stdin.write(json.dumps(order).encode() + b"\n")
    until = time.monotonic() + 60
    while not (log.exists() and log.read_bytes().endswith(b"\n")):
        assert time.monotonic() < until
        time.sleep(0.02)
    return [int(number) for number in log.read_text(encoding="ascii").split()]


def _gone(process: int) -> bool:
    """Whether it has ended within a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{process}/stat").read_text(encoding="ascii").split()[2] == "Z":
                return True
        # The second comes where it ends between the opening and the reading.
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_what_a_rank_forked_ends_with_the_worker(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    with _keeper(room) as keeper:
        processes = _start(keeper, tmp_path, "sleep")
        assert keeper.stdin is not None
        # Ray kills the children of a worker that it ends; this one must not be among them.
        assert keeper.wait(60) == 0
        keeper.stdin.close()  # as the system does for a worker that is killed
        assert all(_gone(process) for process in processes)
    until = time.monotonic() + 60
    while room.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_a_rank_that_ends_takes_its_forks_with_it_and_its_code_is_told(tmp_path: Path) -> None:
    with _keeper(tmp_path / "room") as keeper:
        processes = _start(keeper, tmp_path)
        assert keeper.stdout is not None
        answers = []
        while len(answers) < 2:
            assert select.select([keeper.stdout], [], [], 60)[0]
            answers.append(json.loads(keeper.stdout.readline()))
        assert answers == [{"process": processes[0]}, {"code": 3}]
        assert all(_gone(process) for process in processes)
