"""Which device runs, what memory it has in use, and the mode in which tensors can be made.

Alike in 2.6.2 and 3.3.x, but for :func:`restart_peak`: 2.6.2 can restart a peak on no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from paddle.base import core
from paddle.base.dygraph.base import guard

from fleetpipe import systems
from fleetpipe.aliases import Place
from fleetpipe.paddle_api import paddle

_RESTARTS = hasattr(core, "host_memory_stat_reset_peak_value")


def device_kind() -> str:
    """Returns on what this process computes: ``"cpu"``, ``"gpu"`` or Paddle's name of another kind.

    That is the device that runs: a Paddle that was built for GPUs runs on a CPU where there is none
    and where ``CUDA_VISIBLE_DEVICES`` hides them all.
    """
    device: str = paddle.device.get_device()
    return device.partition(":")[0]


def synchronize() -> None:
    """Waits until what this process has given the device to compute is done.

    On a CPU it is when a call returns. Transfers have streams of their own and are not waited for:
    what is sent may lie there until a peer takes it. Other threads run meanwhile, as they would not
    in Paddle's own ``synchronize()``: what is computed may wait for a peer that is gone.
    """
    if device_kind() == "cpu":
        return
    try:
        stream = paddle.device.current_stream()
    except TypeError:  # 2.6.2 knows no streams of an XPU
        paddle.device.synchronize()
    else:
        while not stream.query():
            time.sleep(0)


def device_clock(clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """Returns a clock for what a device computes: on a CPU ``clock``.

    A call only queues the work of a GPU: there it waits until that is done, and then reads the
    time. So it stands where somebody wants a figure, and in no step where nobody does.
    """
    if device_kind() == "cpu":
        return clock

    def synchronized() -> float:
        synchronize()
        return time.perf_counter()

    return synchronized


@contextmanager
def dynamic_mode() -> Iterator[None]:
    """Runs its body in dynamic graph mode: no tensor can be made or shared in the other one."""
    if paddle.in_dynamic_mode():
        yield
    else:
        with guard():
            yield


def expected_place() -> Place:
    """Returns the device of this process, as Paddle knows it."""
    # Without the last underscore it has none while static mode of 3.3 is on.
    framework: ModuleType = paddle.framework
    return framework._current_expected_place_()


def used_here() -> Callable[[], None]:
    """Returns what has another thread use the device of this one."""
    framework: ModuleType = paddle.framework
    place = expected_place()
    return lambda: framework._set_expected_place(place)


def device_id() -> int:
    """Returns which of the cards that this process sees is its own; 0 on a CPU."""
    return int(getattr(expected_place(), "get_device_id", int)())


def cards() -> int:
    """Returns how many GPUs this process may use; 0 where it computes on something else."""
    return int(paddle.device.cuda.device_count()) if device_kind() == "gpu" else 0


def allocated_bytes() -> int:
    """Returns how many bytes of tensors are alive on this process's device, from any thread."""
    if device_kind() == "gpu":
        # Unless told, each thread is asked for its own device, which is the first of the host.
        return int(paddle.device.cuda.memory_allocated(paddle.device.get_device()))
    return int(core.host_memory_stat_current_value("Allocated", 0))


def restart_peak() -> None:
    """Has :func:`peak_bytes` count from now on."""
    if not _RESTARTS:
        return
    if device_kind() == "gpu":
        paddle.device.cuda.reset_max_memory_allocated()
    else:
        core.host_memory_stat_reset_peak_value("Allocated", 0)


def peak_bytes() -> int:
    """Returns the most bytes of tensors that were alive at once since :func:`restart_peak`.

    On 2.6.2, where nothing restarts it, it is what is alive now.
    """
    if not _RESTARTS:
        return allocated_bytes()
    if device_kind() == "gpu":
        return int(paddle.device.cuda.max_memory_allocated())
    return int(core.host_memory_stat_peak_value("Allocated", 0))


def memory_limit() -> int:
    """Returns the most that :func:`process_bytes` may come to, as far as the system tells."""
    if device_kind() == "gpu":
        return int(paddle.device.cuda.get_device_properties().total_memory)
    return systems.memory_limit()


def process_bytes() -> int:
    """Returns what this process has in use: the GPU's memory where it has one, else the host's."""
    return allocated_bytes() if device_kind() == "gpu" else systems.resident_bytes()
