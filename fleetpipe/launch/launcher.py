"""Paddle's launcher with two faults bridged, run by its path; its private names are used here.

With ``CUDA_VISIBLE_DEVICES=""``, which means no GPU, it looks for the second of one device that has
no name. And it ends with the code of the lowest rank that failed, which may be the signal by which
it ended that rank itself because another had failed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

# Run by path, this file's folder stands first on the path of modules, and must not.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from paddle.distributed.launch.context import device as _device  # noqa: E402
from paddle.distributed.launch.job import pod as _pod  # noqa: E402
from paddle.distributed.launch.main import launch  # noqa: E402

from fleetpipe.job.watch import EXIT_CODE  # noqa: E402
from fleetpipe.launch.script import EXIT_CODES, in_a_shell  # noqa: E402

_Device: Any = _device.Device
_Pod: Any = _pod.Pod


def _note_ends(pod: Any, ended: list[Any]) -> None:
    """Starts the ranks, and puts each at the end of a list when its process ends."""

    def wait_for(container: Any, pid: int) -> None:
        # Whose code it was is asked of the container: it may have been quicker to fetch it.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        ended.append(container)

    _deploy(pod)
    for container in pod.containers:
        pid = container._proc._proc.pid
        threading.Thread(target=wait_for, args=(container, pid), daemon=True).start()


def _exit_code(pod: Any) -> int:
    """Returns the exit code of the rank that failed first.

    A rank that fails because of another one may have ended before it, and says so by its code.
    """
    codes = [_code_of(container) for container in (*_ended, *pod.containers)]
    failed = [code for code in codes if code]
    return in_a_shell(next((code for code in failed if code != EXIT_CODE), [*failed, 0][0]))


def _code_of(container: Any) -> int:
    """Returns the failure that a rank has told, or the code with which its process ended."""
    told = Path(os.environ[EXIT_CODES], str(container.rank))
    return (int(told.read_text()) if told.exists() else 0) or int(container.exit_code or 0)


_ended: list[Any] = []
_deploy = _Pod.deploy
_Pod.deploy = lambda pod: _note_ends(pod, _ended)
_Pod.exit_code = property(_exit_code)
if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    _Device.parse_device = lambda: _Device(_device.DeviceType.CPU)
launch()
