"""Measures each transport between two ranks on this host, and compares bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetpipe import systems
from fleetpipe.contrib.doctor.finding import NOTE, OK, WRONG, Finding
from fleetpipe.errors import UsageError
from fleetpipe.launch.command_folder import command_folder
from fleetpipe.launch.script import LAUNCHED
from fleetpipe.transport.base import PROCESS_GROUP, SOCKETS

_WORKER = Path(__file__).with_name("worker.py")
#: Seconds that all ranks may take for everything.
LIMIT_SECONDS = 90.0
#: Seconds that they may take to end when they are asked to.
_END_SECONDS = 5.0
_LOG_LINES = 5
_FIXES = {
    SOCKETS: "see what is said above of ports and descriptors, and the ranks' error",
    PROCESS_GROUP: "train with FLEETPIPE_TRANSPORT=sockets, which is the default on CPUs; where "
    "each rank has a GPU, try Paddle's own paddle.distributed.send between two ranks",
    "parity": "send this output with a bug report: bits of a pipeline must not differ",
}


def findings(ranks: int) -> list[Finding]:
    """Starts the ranks and returns their findings."""
    try:
        systems.require_ranks()
    except UsageError as error:
        return [Finding("ranks", NOTE, str(error))]
    from fleetpipe.paddle_api.device import cards

    share = 0 < cards() < ranks
    with command_folder(large=True) as folder:
        environment = {"FLEETPIPE_TRANSPORT": SOCKETS} if share else {}
        results, words = _run(ranks, folder, environment)
    listed = [_of_transport(name, results, words) for name in (SOCKETS, PROCESS_GROUP)]
    return [*listed, _of_parity(ranks, results, words)]


def _run(ranks: int, folder: Path, more: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Runs the worker on every rank; returns its results so far, and the end of its output."""
    file, logs = folder / "results.json", folder / "log"
    command = [sys.executable, str(LAUNCHED), "run", "--nproc", str(ranks)]
    command += ["--log-dir", str(logs), "--log-level", "ERROR", str(_WORKER), str(file)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **more},
        start_new_session=True,
    )
    ended = ""
    try:
        process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        ended = f"the ranks did not end within {LIMIT_SECONDS:g} s"
        # As Ctrl-C: the first asks the ranks to end, the second ends them.
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
                break
        else:
            systems.end_session(process.pid)
            process.wait()
    last = [
        line
        for log in sorted(logs.glob("workerlog.*"))
        for line in log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    ]
    words = "; ".join(filter(None, [ended, *last])) or f"exit code {process.returncode}"
    return (json.loads(file.read_text()) if file.exists() else {}), words


def _of_transport(name: str, results: Mapping[str, Any], words: str) -> Finding:
    result = results.get(name, {"error": words})
    if "error" in result:
        # What cannot be chosen here is no fault of the machine's.
        state = NOTE if result.get("refused") else WRONG
        return Finding(name, state, result["error"].splitlines()[0], _FIXES[name])
    seconds = {int(nbytes): taken for nbytes, taken in result.items()}
    least, most = min(seconds), max(seconds)
    rate = most / seconds[most]
    text = f"{least} bytes in {1e6 * seconds[least]:.0f} us, {rate / 1e9:.2f} GB/s one way"
    figures = {"latency_seconds": seconds[least], "bytes_per_second": rate}
    return Finding(name, OK, text, figures=figures)


def _of_parity(ranks: int, results: Mapping[str, Any], words: str) -> Finding:
    result = results.get("parity", {"error": words})
    if "error" in result:
        return Finding("parity", WRONG, result["error"].splitlines()[0], _FIXES["parity"])
    last = result["verdict"].splitlines()[-1].removeprefix("parity: ")
    text = f"a small model on {ranks} ranks beside one device: {last}"
    return Finding("parity", OK if result["passed"] else WRONG, text, _FIXES["parity"])
