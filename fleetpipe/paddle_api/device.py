"""Asks for the device that computes and its memory, waits for it, and switches to dynamic mode.

All names are the same in 2.6.2 and 3.3.x, except that 2.6.2 cannot restart a peak of memory.
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

#: Whether this Paddle can restart a peak of memory.
_RESTARTS = hasattr(core, "host_memory_stat_reset_peak_value")


def device_kind() -> str:
    """Returns the kind of this process's device: ``"cpu"``, ``"gpu"`` or Paddle's name of another.

    A Paddle that was built for GPUs runs on a CPU if there is no GPU or ``CUDA_VISIBLE_DEVICES``
    hides them all.
    """
    device: str = paddle.device.get_device()
    return device.partition(":")[0]


def synchronize() -> None:
    """Waits until the device has computed all work that this process has queued.

    It returns at once on a CPU, where a call has finished when it returns. It does not wait for
    transfers, which have streams of their own and may last until a peer receives. Other threads run
    meanwhile, unlike in Paddle's own ``synchronize()``.
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
    """Returns a clock, in seconds, that counts the work of this process's device.

    A call only queues the work of a GPU, so the clock waits until that work is done before it reads
    the time. That slows a step down: use the clock only in steps that somebody wants to measure.

    Args:
        clock: The clock to return on a CPU.
    """
    if device_kind() == "cpu":
        return clock

    def read() -> float:
        synchronize()
        return time.perf_counter()

    return read


@contextmanager
def dynamic_mode() -> Iterator[None]:
    """Opens a context in dynamic mode; in static mode tensors cannot be created."""
    if paddle.in_dynamic_mode():
        yield
    else:
        with guard():
            yield


def expected_place() -> Place:
    """Returns the device of this process, as a place of Paddle's."""
    # The function without the last underscore returns none while static mode of 3.3 is on.
    framework: ModuleType = paddle.framework
    return framework._current_expected_place_()


def device_setter() -> Callable[[], None]:
    """Returns a function that makes another thread use the device of this one."""
    framework: ModuleType = paddle.framework
    place = expected_place()
    return lambda: framework._set_expected_place(place)


def device_id() -> int:
    """Returns the number of this process's GPU among those it sees; 0 on a CPU."""
    return int(getattr(expected_place(), "get_device_id", int)())


def gpu_count() -> int:
    """Returns the number of GPUs that this process may use; 0 if its device is no GPU."""
    return int(paddle.device.cuda.device_count()) if device_kind() == "gpu" else 0


def allocated_bytes() -> int:
    """Returns the bytes of live tensors on this process's device; any thread may ask."""
    if device_kind() == "gpu":
        # By default a thread asks for its own device, which is the first of the host.
        return int(paddle.device.cuda.memory_allocated(paddle.device.get_device()))
    return int(core.host_memory_stat_current_value("Allocated", 0))


def reserved_bytes() -> int:
    """Returns the bytes of the device's memory that this process occupies, also for freed tensors.

    On a CPU these are the resident bytes (0 if the system does not tell them), on a GPU the bytes
    that Paddle has reserved.
    """
    if device_kind() == "gpu":
        return int(paddle.device.cuda.memory_reserved(paddle.device.get_device()))
    return systems.resident_bytes()


def restart_peak() -> None:
    """Makes :func:`peak_bytes` count from now on; does nothing on 2.6.2."""
    if not _RESTARTS:
        return
    if device_kind() == "gpu":
        paddle.device.cuda.reset_max_memory_allocated()
    else:
        core.host_memory_stat_reset_peak_value("Allocated", 0)


def peak_bytes() -> int:
    """Returns the largest :func:`allocated_bytes` since :func:`restart_peak`.

    On 2.6.2, which cannot restart the peak, it returns the bytes that are allocated now.
    """
    if not _RESTARTS:
        return allocated_bytes()
    if device_kind() == "gpu":
        return int(paddle.device.cuda.max_memory_allocated())
    return int(core.host_memory_stat_peak_value("Allocated", 0))


def memory_limit() -> int:
    """Returns the most bytes that :func:`process_bytes` can return.

    On a GPU they are all its memory; on a CPU the memory of the host or of its container, which all
    processes there share, or the largest number if that is unknown.
    """
    if device_kind() == "gpu":
        return int(paddle.device.cuda.get_device_properties().total_memory)
    return systems.memory_limit()


def process_bytes() -> int:
    """Returns the bytes that this process uses now.

    On a GPU they are those of its live tensors; on a CPU the resident memory of the process.
    """
    return allocated_bytes() if device_kind() == "gpu" else systems.resident_bytes()
