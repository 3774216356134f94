"""Paddle's launcher with its faults bridged; its private names are used here (2.6.2 and 3.3.1).

On a machine without GPUs it takes for one whatever ``CUDA_VISIBLE_DEVICES`` names, and dies where
these are fewer than the ranks. It ends with the code of the lowest rank that failed, which may be
the signal by which it ended that rank itself because another had failed. And it looks only once a
second at whether one has. What it knows of their processes is left in the attempt's folder.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any

from paddle.distributed.launch.context import device as _device
from paddle.distributed.launch.controllers import controller as _controller
from paddle.distributed.launch.job import pod as _pod
from paddle.distributed.launch.main import launch as _launch

from fleetpipe.job import attempt_files
from fleetpipe.job.watching.watch import EXIT_CODE
from fleetpipe.launch.script import in_a_shell
from fleetpipe.paddle_api.device import device_kind

#: Seconds between two looks at the processes.
_LOOK_SECONDS = 0.1

_Device: Any = _device.Device
_Pod: Any = _pod.Pod
_Controller: Any = _controller.ControllerBase


def launch() -> None:
    """Runs Paddle's launcher with the arguments of this process, which it ends.

    Raises:
        SystemExit: With the exit code of the rank that failed first, 128 + n where signal n ended
            it; else with 0.
    """
    _Pod.deploy = _deploy_and_note
    _Pod.exit_code = property(_exit_code)
    _Pod.watch = functools.partialmethod(_watch, interval=_LOOK_SECONDS)
    _Device.parse_device = _present_device
    _Controller.signal_handler = _on_signal
    _launch()


_deploy, _watch, _named_device = _Pod.deploy, _Pod.watch, _Device.parse_device
_stock_on_signal = _Controller.signal_handler


class _Cpu(_Device):  # type: ignore[misc]
    """One process for each device that the environment names, and none of them to select."""

    def get_selected_devices(self, devices: str = "") -> list[str]:
        return []


def _present_device() -> Any:
    named = _named_device()
    return named if device_kind() != "cpu" else _Cpu(_device.DeviceType.CPU, labels=named.labels)


def _on_signal(controller: Any, number: int, frame: Any) -> None:
    """Leaves Ctrl-C, which a terminal sends to this process too, to who started the launcher."""
    if number != signal.SIGINT:
        _stock_on_signal(controller, number, frame)


def _deploy_and_note(pod: Any) -> None:
    """Starts the ranks, and leaves word of each when its process begins and ends."""
    home = _home()

    def wait_for(container: Any) -> None:
        attempt_files.note_end(home, _rank_of(container), int(container._proc._proc.wait()))

    _deploy(pod)
    for container in pod.containers:
        attempt_files.note_start(home, _rank_of(container), container._proc._proc.pid)
        threading.Thread(target=wait_for, args=[container], daemon=True).start()


def _exit_code(pod: Any) -> int:
    """Returns the exit code of the rank that failed first.

    A rank that fails because of another one may have ended before it, and says so by its code.
    """
    home = _home()
    codes = dict(attempt_files.ended(home))
    for container in pod.containers:
        codes.setdefault(_rank_of(container), int(container.exit_code or 0))
    # The launcher may end a rank while that cleans up, and would see its signal alone.
    told = [attempt_files.code_of(home, rank) or code for rank, code in codes.items()]
    failed = [code for code in told if code]
    return in_a_shell(next((code for code in failed if code != EXIT_CODE), [*failed, 0][0]))


def _rank_of(container: Any) -> int:
    return int(container.env["PADDLE_TRAINER_ID"])


def _home() -> Path:
    return Path(os.environ[attempt_files.FOLDER])
