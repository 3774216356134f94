"""Runs Paddle's launcher and works around its faults, for 2.6.2 and 3.3.x alike.

On a machine without GPUs Paddle's takes every entry of ``CUDA_VISIBLE_DEVICES`` for a GPU, and
fails if there are fewer of them than ranks. It exits with the code of the lowest failed rank, which
may be the signal by which it ended that rank itself after another had failed. It checks only once a
second whether a rank has failed. With more ranks than GPUs it ends with an IndexError.
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
_LOOK_SECONDS = 0.1

_Device: Any = _device.Device
_Pod: Any = _pod.Pod
_Container: Any = _container.Container
_Collective: Any = _controller.Controller
_processes: Any = _process_context

_deploy, _watch, _named_device = _Pod.deploy, _Pod.watch, _Device.parse_device
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
    started: Callable[[int, int], None],
    ended: Callable[[int, int], None],
    exit_code: Callable[[Mapping[int, int]], int],
    explained: Callable[[], bool],
    share: Callable[[int, int], None],
    popen: Callable[..., Any],
    hold: Callable[[RankProcess], Any] | None = None,
) -> None:
    """Runs Paddle's launcher with the arguments of this process, and then ends this process.

    Args:
        started: Called with a rank and the id of its process, when the process has begun.
        ended: Called with a rank and the exit code of its process, in a thread for that rank.
        exit_code: Returns the code to exit with, given the codes of all ranks.
        explained: Returns whether a rank has said why it failed: then the launcher does not repeat
            the end of its log.
        share: Called with a number of ranks and a smaller number of GPUs, before any rank starts.
            Raises an error if the ranks may not share them.
        popen: Starts each rank, instead of ``subprocess.Popen``.
        hold: Called with each process that has begun; returns an object with the methods of
            ``subprocess.Popen``, which the launcher watches instead. ``ended`` is then not called.

    Raises:
        SystemExit: With that code.
    """
    waiting: list[threading.Thread] = []

    def deploy(pod: Any) -> None:
        # A terminal sends Ctrl-C here too; the process that started the launcher handles it.
        signal.signal(signal.SIGINT, lambda *_: None)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, _: _pass_on(pod, number))
        with _hold_signals(*STOP_SIGNALS, signal.SIGABRT):
            _deploy(pod)
            # Only now, since a rank may be a fork of this process.
            for thread in waiting:
                thread.start()

    def start(container: Any) -> None:
        _start(container)
        process = container._proc._proc
        started(_rank_of(container), process.pid)
        if hold is not None:
            words, environment = container.entrypoint, dict(container.env)
            one = RankProcess(_rank_of(container), process, words, environment, container.outfile)
            container._proc._proc = hold(one)
            return
        wait = threading.Thread(
            target=lambda: ended(_rank_of(container), int(process.wait())),
            name=f"wait for rank {_rank_of(container)}",
            daemon=True,
        )
        waiting.append(wait)

    def code(pod: Any) -> int:
        return exit_code({_rank_of(one): int(one.exit_code or 0) for one in pod.containers})

    def show_end(container: Any) -> None:
        if not explained():
            _tail(container)

    _processes.subprocess = SimpleNamespace(Popen=popen)
    _Pod.deploy, _Container.start = deploy, start
    _Container.tail = show_end
    _Pod.exit_code = property(code)
    _Pod.watch = functools.partialmethod(_watch, interval=_LOOK_SECONDS)
    _Device.parse_device = _present_device
    _Collective.pod_replicas = functools.partialmethod(_ranks_of_host, share=share)
    _launch()


class _Cpu(_Device):  # type: ignore[misc]
    """A CPU "device" for each entry of the environment, so that no GPU is selected."""

    def get_selected_devices(self, devices: str = "") -> list[str]:
        return []


def _present_device() -> Any:
    named, kind = _named_device(), device_kind()
    if kind == "gpu":
        # CUDA hides the devices that the environment names after one that does not exist.
        named.labels = named.labels[: gpu_count()]
    return _Cpu(_device.DeviceType.CPU, labels=named.labels) if kind == "cpu" else named


def _ranks_of_host(controller: Any, share: Callable[[int, int], None]) -> int:
    """Returns how many ranks start on this host. They share the GPUs if there are too few."""
    ranks, context = int(_stock_replicas(controller)), controller.ctx
    device = context.node.device
    selected = device.get_selected_devices(context.args.devices)
    if 0 < len(selected) < ranks:
        share(ranks, len(selected))
        turns = [selected[rank % len(selected)] for rank in range(ranks)]
        device.get_selected_devices = lambda devices: turns
        context.envs["PADDLE_DISTRI_BACKEND"] = "gloo"
    return ranks


@contextlib.contextmanager
def _hold_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Delays signals until the context ends: during the start of ranks they would miss some ranks.

    A rank that is a fork leaves the context by an exception, without the delayed signals.
    """
    arrived: list[int] = []
    before = {n: signal.signal(n, lambda number, _: arrived.append(number)) for n in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    for late in arrived:
        signal.raise_signal(late)


def _pass_on(pod: Any, number: int) -> None:
    """Sends the ranks a signal that ends the job; Paddle itself would kill them after 30 s."""
    ranks = [one._proc._proc for one in pod.containers if one._proc and one._proc._proc]
    if not ranks:
        raise SystemExit(128 + number)
    for rank in ranks:
        rank.send_signal(number)


def _rank_of(container: Any) -> int:
    return int(container.env["PADDLE_TRAINER_ID"])
