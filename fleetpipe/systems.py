"""Hides the differences between operating systems from all other code.

Ranks run on Linux and, within one host, on macOS. On Windows one process plays all ranks, so no
import may need a feature that Windows lacks.

Paddle allocates a tensor on a CPU by the C library. glibc returns the end of its heap to the system
as soon as twice the largest freed block is free there. A stage that allocates gradients and frees
them gets the same pages from the system again in each micro-batch: a page fault for every 4 KiB.
``keep_freed_memory`` keeps freed pages in the process.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap
import os
import re
import signal
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleetpipe.errors import UsageError

# On each system, code for the others is unreachable.
# mypy: disable-error-code="unreachable"


#: The flag with which a send to a peer that is gone raises an error and causes no signal.
MSG_NOSIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
#: The family of unix-domain sockets; -1, which no socket has, on systems without them.
AF_UNIX: int = getattr(socket, "AF_UNIX", -1)
#: Whether :func:`lock` locks files on this system.
HAS_LOCKS = sys.platform != "win32"
#: Ends a process at once.
SIGKILL = signal.Signals["SIGKILL" if hasattr(signal, "SIGKILL") else "SIGTERM"]
#: Signals that ask a job to finish its step, save and end; schedulers send one before they kill.
STOP_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)

#: Linux's request for the addresses of all interfaces: a length and a pointer to the table, whose
#: entries are a name and a socket's address: family, port and four bytes.
_SIOCGIFCONF = 0x8912
_IFCONF = struct.Struct("iP")
_IFREQ = struct.Struct("16s4x4s16x")
_MOST_INTERFACES = 512
#: How Linux describes the other end of a unix-domain socket: its process, user and group.
_PEERCRED = struct.Struct("iII")
#: macOS's option for the bytes of a socket that its peer has not acknowledged.
_SO_NWRITE = 0x1024
#: The option TCP_RTO_MAX_MS of Linux from 6.15 on: the longest time before the kernel repeats data
#: that was not acknowledged. By default it doubles that time, 15 times, for 925 s in all.
_TCP_RTO_MAX_MS = 44
_REPEAT_MILLISECONDS = 1000
_GIVE_UP_MILLISECONDS = 925_000
#: The zeros that :func:`reserve` writes at once, where a file system cannot allocate them.
_BLOCK = bytes(1 << 20)

#: Parameters of ``mallopt`` in glibc's ``malloc.h``: the free bytes that stay at the end of the
#: heap, and the size from which a block is allocated outside of the heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The size from which :func:`keep_freed_memory` allocates a block outside of the heap, in bytes.
#: Most weights are smaller; larger blocks would leave holes in the heap that no other block fits.
MMAP_THRESHOLD = 16 * 2**20
#: The free bytes that :func:`keep_freed_memory` leaves at the end of the heap.
TRIM_THRESHOLD = 512 * 2**20

#: The environment variables by which a user sets these two.
_HEAP_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def require_ranks() -> None:
    """Refuses Windows, on which a job cannot have several ranks."""
    if sys.platform == "win32":
        raise UsageError(
            "on Windows one process plays all ranks", fix="run several ranks in WSL: wsl --install"
        )


def processors() -> int:
    """Returns the number of processors that this process may use; on macOS, that the host has."""
    return len(processor_numbers())


def processor_numbers() -> list[int]:
    """Returns the indices of the processors that this process may use, as the kernel has them.

    On other systems than Linux they are those of all processors of the host.
    """
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def load() -> float:
    """Returns the load of this host: threads that run or wait for a processor, over a minute.

    It is 0 on Windows.
    """
    if sys.platform == "win32":
        return 0.0
    return os.getloadavg()[0]


def stolen_seconds() -> float:
    """Returns the seconds since the host's start that a hypervisor gave to other machines.

    It is the mean over the processors, in steps of 0.01 s; 0 if unknown.
    """
    if sys.platform != "linux":
        return 0.0
    fields: list[str] = []
    with contextlib.suppress(OSError):
        fields = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()
    seconds = int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0
    return seconds / (os.cpu_count() or 1)


def memory_bytes() -> int:
    """Returns the bytes of this host's memory; the largest number if they are unknown."""
    if sys.platform == "win32":
        return sys.maxsize
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limit() -> int:
    """Returns the bytes that the processes of this host, or of its container, may have together.

    It is the largest number if they are unknown.
    """
    limit = ""
    with contextlib.suppress(OSError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    return min(memory_bytes(), int(limit)) if limit.isdecimal() else memory_bytes()


def descriptor_limits() -> tuple[float, float]:
    """Returns the soft and the hard limit of descriptors of this process, the files it may open."""
    if sys.platform == "win32":
        return float("inf"), float("inf")
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (float("inf") if n == resource.RLIM_INFINITY else n for n in limits)
    return soft, hard


def resident_bytes(peak: bool = False) -> int:
    """Returns the bytes of memory that this process has; with ``peak`` the most that it had.

    The result is 0 if it is unknown, and on macOS always the peak. On Linux it is read from
    ``/proc``, since ``getrusage`` counts the process that started this one, too.
    """
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    name = "VmHWM:" if peak else "VmRSS:"
    matches = (line.split()[1] for line in text.splitlines() if line.startswith(name))
    return int(next(matches, "0")) * 1024


class ProcessorQueue:
    """Measures how long the thread that creates it is ready to run and waits for a processor."""

    def __init__(self) -> None:
        """Opens the kernel's statistics of this thread and its control group, if there are any."""
        self._file = self._open_file("/proc/thread-self/schedstat")
        self._group: int | None = None
        with contextlib.suppress(OSError):
            groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
            limited = _limited_group(groups, Path("/sys/fs/cgroup"))
            self._group = None if limited is None else self._open_file(str(limited / "cpu.stat"))

    def _open_file(self, path: str) -> int | None:
        """Returns a descriptor of a file, which this object closes; None without the file."""
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            # Not at exit: transports still use it while their last messages leave.
            weakref.finalize(self, os.close, file).atexit = False
            return file
        return None

    def seconds(self) -> float:
        """Returns the seconds that the thread has waited since it began.

        The result is 0 if the time is unknown, or the thread has ended.
        """
        if sys.platform == "win32" or self._file is None:
            return 0.0
        fields: list[bytes] = []
        with contextlib.suppress(OSError):
            fields = os.pread(self._file, 100, 0).split()
        return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0

    def limited_seconds(self) -> float:
        """Returns the seconds in which a limit of processor time stopped this thread's group.

        They are summed over processors, and always 0 if the control group (that of the container)
        had no limit when this object was created.
        """
        if sys.platform == "win32" or self._group is None:
            return 0.0
        match = re.search(rb"throttled_(time|usec) (\d+)", os.pread(self._group, 1000, 0))
        if match is None:
            return 0.0
        unit, figure = match.groups()
        return int(figure) / (1e9 if unit == b"time" else 1e6)


def _limited_group(groups: str, root: Path) -> Path | None:
    """Returns the folder of the nearest control group of a process that limits processor time.

    Args:
        groups: The process's control groups, as ``/proc/self/cgroup`` lists them.
        root: The folder in which groups are mounted; a container's own group may be at its top.
    """
    for line in groups.splitlines():
        _, names, path = line.split(":", 2)
        if names and "cpu" not in names.split(","):
            continue
        mounted = root / "cpu" if names else root
        group = mounted / path.strip("/")
        for folder in (group, *group.parents):
            for name in ("cpu.max", "cpu.cfs_quota_us"):
                with contextlib.suppress(OSError):
                    if (folder / name).read_text(encoding="ascii")[0].isdigit():
                        return folder
            if folder == mounted:
                break
    return None


def anonymous_memory(size: int) -> mmap.mmap:
    """Returns ``size`` bytes of new private memory, in large pages if the system has them."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def reserve(descriptor: int, size: int) -> None:
    """Allocates the first ``size`` bytes of an empty file on the disk; they are zeros.

    Args:
        descriptor: The file, opened to be written.
        size: The number of bytes.

    Raises:
        OSError: The disk has less room; ``errno`` is ``ENOSPC``, or ``EFBIG`` beyond a limit on the
            size of files.
    """
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, size)
    else:
        for begin in range(0, size, len(_BLOCK)):
            os.write(descriptor, _BLOCK[: size - begin])
        os.lseek(descriptor, 0, os.SEEK_SET)


def open_in_place(path: Path, flags: int) -> int:
    """Returns a descriptor of a file: ``os.open`` that refuses a link and never waits for a pipe.

    Args:
        path: The file.
        flags: The flags of ``os.open``. A file that is created has the mode that the umask allows.

    Raises:
        OSError: The file cannot be opened, or is a link.
    """
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, flags, 0o666)


def sync_folder(path: Path) -> None:
    """Waits until a folder's entries are on the disk; does nothing on Windows."""
    if sys.platform != "win32":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_running(process: int) -> bool:
    """Returns whether a process exists; always True on Windows, where the check might end it."""
    if sys.platform != "win32":
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it belongs to another user
    return True


def end_session(leader: int) -> None:
    """Kills the process group whose first process is ``leader``; does nothing on Windows."""
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


def lock(descriptor: int, *, shared: bool = False, wait: bool = True) -> bool:
    """Locks a file until this descriptor and its copies in forked processes are closed.

    The lock stays if another process opens and closes the file, for example to copy the folder.

    Args:
        descriptor: The file, opened to be written or, for a shared lock, to be read.
        shared: Whether the lock allows other shared locks of the file.
        wait: Whether to wait until the file is free.

    Returns:
        Whether this process has locked the file; always False on Windows, which starts no ranks.

    Raises:
        OSError: The file system has no locks.
    """
    if sys.platform == "win32":
        return False
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lower_priority(nice: int) -> None:
    """Raises the nice value of the calling thread to at least ``nice``; only on Linux."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            nice = max(nice, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def call_in_forked_child(function: Callable[[], None]) -> None:
    """Makes every child that this process forks from now on call ``function`` first.

    Windows has no forks.
    """
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=function)


def interfaces() -> list[tuple[str, str]]:
    """Returns the name and the IPv4 address of each network interface of this host that is up.

    On other systems than Linux it returns loopback alone: all ranks are on one host there.
    """
    if sys.platform == "linux":
        import fcntl

        table = array.array("B", bytes(_MOST_INTERFACES * _IFREQ.size))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = _IFCONF.pack(len(table), table.buffer_info()[0])
            length, _ = _IFCONF.unpack(fcntl.ioctl(probe, _SIOCGIFCONF, request))
        entries = _IFREQ.iter_unpack(table.tobytes()[:length])
        # An address that was added to an interface later may have a label such as eth0:1.
        return [
            (name.split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(address))
            for name, address in entries
        ]
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return [(name, "127.0.0.1") for name in names[:1]]


def unix_domain() -> str:
    """Returns a text that two processes share if a unix-domain socket can connect them; else "".

    It names the running kernel and the network namespace, in which abstract addresses are visible,
    and the user, since other users are refused. It is "" on a system without abstract addresses.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "user")]
            return " ".join([boot, *spaces, f"user:{os.geteuid()}"])
    return ""


def is_other_user(sock: socket.socket) -> bool:
    """Returns whether the other end of a connected unix-domain socket belongs to another user."""
    if sys.platform == "linux" and sock.family == AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        _, user, _ = _PEERCRED.unpack(credentials)
        return bool(user != os.geteuid())
    return False


def send_again_soon(sock: socket.socket) -> None:
    """Makes a TCP socket repeat lost data each second, if the kernel has an option for that.

    By default the kernel waits twice as long each time. A wait for a message could then be longer
    than its limit, although the network's outage was shorter.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # an older kernel
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _REPEAT_MILLISECONDS)
            # By default the kernel would give up after 15 repetitions, which now take 15 s.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVE_UP_MILLISECONDS)


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Returns how many sent bytes a TCP socket's peer has not acknowledged; 0 if unknown."""
    if sys.platform == "linux":
        import fcntl
        import termios

        count = bytearray(4)
        fcntl.ioctl(sock, termios.TIOCOUTQ, count)
        return int.from_bytes(count, sys.byteorder)
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            return sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
    return 0


def send_pieces(sock: socket.socket, pieces: Sequence[bytes | memoryview]) -> int:
    """Sends buffers one after another, as far as the kernel takes them; returns the bytes sent.

    Args:
        sock: A socket that does not block.
        pieces: The buffers.

    Raises:
        BlockingIOError: The kernel takes no bytes now.
        OSError: The stream has ended.
    """
    if sys.platform == "win32":
        return sock.send(pieces[0])
    if len(pieces) == 1:
        return sock.send(pieces[0], MSG_NOSIGNAL)
    return sock.sendmsg(pieces, (), MSG_NOSIGNAL)


def keep_freed_memory() -> bool:
    """Makes glibc keep up to ``TRIM_THRESHOLD`` free bytes at the end of the heap.

    The setting of a user stays: ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, or either
    in ``GLIBC_TUNABLES``. ``FLEETPIPE_HEAP=0`` turns this off.

    Returns:
        Whether this call has set glibc's limits; False with another C library.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    by_tunables = "glibc.malloc.trim_threshold" in tunables or "glibc.malloc.mmap_thr" in tunables
    by_variables = any(name in os.environ for name in _HEAP_VARIABLES)
    if by_tunables or by_variables or os.environ.get("FLEETPIPE_HEAP", "1") == "0":
        return False
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    options = {_M_MMAP_THRESHOLD: MMAP_THRESHOLD, _M_TRIM_THRESHOLD: TRIM_THRESHOLD}
    return all(library.mallopt(option, value) == 1 for option, value in options.items())
