"""Runs the script of a rank in a session of its own, and ends that with the worker it belongs to.

Run by its path, with a folder. Each line of its input is a script to start, an object of JSON with
``command, environment, folder, log``; it answers with the process's number, and with the exit code
when that has ended. Where its input ends, because the worker is gone, however it was ended, it
kills the session, whose processes the script may have forked, and removes the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    # Run isolated, it has to be told where the package stands.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from fleetpipe import systems


def main(folder: str) -> None:
    """Serves a worker until that is gone."""
    # A worker that Ray ends kills its children with it: this process is to be none. And what Ray
    # starts has Ctrl-C blocked, and would hand that on to the script.
    systems.leave_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in systems.STOP_SIGNALS:  # which a scheduler sends to all; the script is not deaf
        signal.signal(number, lambda *_: None)
    started: list[int] = []
    for line in sys.stdin:
        process = _start(**json.loads(line))
        started.append(process.pid)
        _answer("process", process.pid)
        threading.Thread(target=_tell_end, args=(process,), daemon=True).start()
    for session in started:
        systems.end_session(session)
    shutil.rmtree(folder, ignore_errors=True)


def _start(
    command: list[str], environment: dict[str, str], folder: str, log: str
) -> subprocess.Popen[bytes]:
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=folder if os.path.isdir(folder) else None,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _tell_end(process: subprocess.Popen[bytes]) -> None:
    code = process.wait()
    systems.end_session(process.pid)
    _answer("code", code)


def _answer(name: str, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps({name: number}).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
