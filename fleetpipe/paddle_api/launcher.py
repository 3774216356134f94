"""Runs Paddle's launcher and works around its faults, for 2.6.2 and 3.3.x alike.

On a machine without GPUs, Paddle's launcher takes every entry of ``CUDA_VISIBLE_DEVICES`` for a
GPU, and fails if there are fewer of them than ranks. It exits with the code of the lowest failed
rank, which may be the signal by which the launcher ended that rank after another had failed. It
checks only once a second whether a rank has failed. With more ranks than GPUs it ends with an
IndexError.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from paddle.distributed.launch.context import device as _device
from paddle.distributed.launch.controllers import controller as _controller
from paddle.distributed.launch.job import container as _container
from paddle.distributed.launch.job import pod as _pod
from paddle.distributed.launch.main import launch as _launch
from paddle.distributed.launch.utils import process_context as _process_context

from fleetpipe.paddle_api.device import device_kind, gpu_count
from fleetpipe.systems import STOP_SIGNALS

#: Seconds between two checks of the processes.
_CHECK_SECONDS = 0.1

_Device: Any = _device.Device
_Pod: Any = _pod.Pod
_Container: Any = _container.Container
_Collective: Any = _controller.Controller
_processes: Any = _process_context

# Paddle's own functions, which the replacements call.
_deploy, _watch, _parse_device = _Pod.deploy, _Pod.watch, _Device.parse_device
_start, _tail = _Container.start, _Container.tail
_stock_replicas = _Collective.pod_replicas


class RankProcess(NamedTuple):
    """A process that Paddle's launcher has started.

    Attributes:
        rank: Its rank.
        process: The process.
        words: Its command line, with the interpreter.
        environment: Its environment.
        log: The file that gets its output; None or empty for the launcher's own.
    """

    rank: int
    process: Any
    words: Sequence[str]
    environment: Mapping[str, str]
    log: str | None


def launch(
    on_start: Callable[[int, int], None],
    on_end: Callable[[int, int], None],
    exit_code: Callable[[Mapping[int, int]], int],
    is_explained: Callable[[], bool],
    allow_sharing: Callable[[int, int], None],
    popen: Callable[..., Any],
    adopt: Callable[[RankProcess], Any] | None = None,
) -> None:
    """Runs Paddle's launcher with the arguments of this process, and then ends this process.

    Args:
        on_start: Called with a rank and the id of its process, when the process has begun.
        on_end: Called with a rank and the exit code of its process, in a thread for that rank.
        exit_code: Returns the code to exit with, given the codes of all ranks.
        is_explained: Returns whether some rank has said why it failed: then the launcher does not
            repeat the end of that rank's log.
        allow_sharing: Called before any rank starts, with the number of ranks and a smaller number
            of GPUs. Raises an error if the ranks may not share the GPUs.
        popen: Starts each rank, instead of ``subprocess.Popen``.
        adopt: Called with each process that has begun; returns an object with the methods of
            ``subprocess.Popen``, which the launcher watches instead. ``on_end`` is then not called.

    Raises:
        SystemExit: With the code that ``exit_code`` returns.
    """
    wait_threads: list[threading.Thread] = []

    def deploy(pod: Any) -> None:
        """Starts the ranks of this host, and then a thread for each that waits for its end."""
        # A terminal sends Ctrl-C here too; the process that started the launcher handles it.
        signal.signal(signal.SIGINT, lambda *_: None)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, _: _send_to_ranks(pod, number))
        with _delaying_signals(*STOP_SIGNALS, signal.SIGABRT):
            _deploy(pod)
            # Only now, since a rank may be a fork of this process.
            for thread in wait_threads:
                thread.start()

    def start(container: Any) -> None:
        """Starts a rank."""
        _start(container)
        rank, process = _rank_of(container), container._proc._proc
        on_start(rank, process.pid)
        if adopt is not None:
            words, environment = container.entrypoint, dict(container.env)
            adopted = adopt(RankProcess(rank, process, words, environment, container.outfile))
            container._proc._proc = adopted
            return
        wait = threading.Thread(
            target=lambda: on_end(rank, int(process.wait())),
            name=f"wait for rank {rank}",
            daemon=True,
        )
        wait_threads.append(wait)

    def code(pod: Any) -> int:
        """Returns the exit code of the launcher."""
        return exit_code({_rank_of(c): int(c.exit_code or 0) for c in pod.containers})

    def show_end(container: Any) -> None:
        """Shows the end of a failed rank's log."""
        if not is_explained():
            _tail(container)

    _processes.subprocess = SimpleNamespace(Popen=popen)
    _Pod.deploy, _Container.start = deploy, start
    _Container.tail = show_end
    _Pod.exit_code = property(code)
    _Pod.watch = functools.partialmethod(_watch, interval=_CHECK_SECONDS)
    _Device.parse_device = _present_device
    _Collective.pod_replicas = functools.partialmethod(_ranks_of_host, allow_sharing=allow_sharing)
    _launch()


class _Cpu(_Device):  # type: ignore[misc]
    """A CPU "device" for each entry of the environment, so that no GPU is selected."""

    def get_selected_devices(self, devices: str = "") -> list[str]:
        """Returns no GPU, whatever the launcher's option ``devices`` selects."""
        return []


def _present_device() -> Any:
    """Returns the launcher's description of this host's devices, without missing ones."""
    device, kind = _parse_device(), device_kind()
    if kind == "cpu":
        return _Cpu(_device.DeviceType.CPU, labels=device.labels)
    if kind == "gpu":
        # CUDA hides the devices that the environment names after one that does not exist.
        device.labels = device.labels[: gpu_count()]
    return device


def _ranks_of_host(controller: Any, allow_sharing: Callable[[int, int], None]) -> int:
    """Returns the number of ranks to start on this host; lets them share GPUs if there are too few.

    ``controller`` is the launcher's controller of this host; ``allow_sharing`` raises an error if
    the ranks may not share GPUs.
    """
    ranks, context = int(_stock_replicas(controller)), controller.ctx
    device = context.node.device
    selected = device.get_selected_devices(context.args.devices)
    if 0 < len(selected) < ranks:
        allow_sharing(ranks, len(selected))
        gpu_by_rank = [selected[rank % len(selected)] for rank in range(ranks)]
        device.get_selected_devices = lambda devices: gpu_by_rank
        context.envs["PADDLE_DISTRI_BACKEND"] = "gloo"
    return ranks


@contextlib.contextmanager
def _delaying_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Opens a context in which signals are delayed until its end.

    During the start of the ranks, a signal would be passed on to some of them only. A rank that is
    a fork of this process leaves the context by an exception, without the delayed signals.
    """
    arrived: list[int] = []
    before = {n: signal.signal(n, lambda number, _: arrived.append(number)) for n in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    for arrived_number in arrived:
        signal.raise_signal(arrived_number)


def _send_to_ranks(pod: Any, number: int) -> None:
    """Sends the ranks of a pod a signal that ends the job; exits if no rank runs yet.

    Paddle itself would kill the ranks 30 s after the signal.
    """
    processes = [c._proc._proc for c in pod.containers if c._proc and c._proc._proc]
    if not processes:
        raise SystemExit(128 + number)
    for process in processes:
        process.send_signal(number)


def _rank_of(container: Any) -> int:
    """Returns the rank of the job that a container of Paddle's launcher runs."""
    return int(container.env["PADDLE_TRAINER_ID"])
