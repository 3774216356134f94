"""``fleetpipe doctor``: checks and measures this machine, and names what would make a job fail.

Start with ``doctor_command.py``: it checks Paddle and its device, starts some ranks of
``worker.py``, which measure each transport and compare bits, and checks the nodes of a Ray cluster.
This file has the result of one check, a ``Finding``, and the checks of a host that need no Paddle.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fleetpipe import numerics, systems
from fleetpipe.transport import hosts

#: The states of a ``Finding``.
OK, NOTE, WRONG = "ok", "note", "wrong"

#: The folder of shared memory, through which the workers of Paddle's data loaders pass tensors.
_SHARED = Path("/dev/shm")
#: The least free bytes there that are ok.
_SHARED_BYTES = 256 << 20
#: Descriptors of a rank beside those of its connections: files, Paddle's groups and stores.
_DESCRIPTORS = 200
#: A limit on descriptors is a note if it is not enough for so many ranks.
_MOST_RANKS = 100
#: The ports at which jobs listen; outgoing connections should take others.
_PORTS = range(20000, 32000)
#: The bytes that are written to measure the disk, and the least free bytes of it that are ok.
_WRITTEN_BYTES, _DISK_BYTES = 32 << 20, 1 << 30
#: Seconds by which two clocks may differ.
CLOCK_SECONDS = 2.0
_MIB = 1 << 20


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        subject: What was checked, in a word or two.
        state: "ok", "note" if it may matter, "wrong" if a job would fail.
        text: The state in words.
        fix: What the user should do, in words.
        figures: Measured values, by name with the unit.
    """

    subject: str
    state: str
    text: str
    fix: str = ""
    figures: Mapping[str, float] = {}


def run_checks(checks: Mapping[str, Callable[[], Finding]]) -> list[Finding]:
    """Runs checks, given by subject; returns a finding for each, even if a check fails."""
    findings = []
    for subject, check in checks.items():
        try:
            findings.append(check())
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            findings.append(Finding(subject, WRONG, text, "send this output with a bug report"))
    return findings


def wrong_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings with which a job would fail."""
    return [finding for finding in findings if finding.state == WRONG]


def check_host(ranks: int, folder: Path) -> list[Finding]:
    """Returns the findings on what a job on this host depends on, Paddle aside.

    Args:
        ranks: The number of ranks of the job.
        folder: The folder of the job's checkpoints, which need not exist.
    """
    return run_checks(
        {
            "processors": lambda: _check_processors(ranks),
            "bits": lambda: _check_bits(ranks),
            "shared memory": _check_shared_memory,
            "descriptors": lambda: _check_descriptors(ranks),
            "host name": _check_host_name,
            "ports": _check_ports,
            "checkpoints": lambda: _check_checkpoint_folder(folder),
        }
    )


def _check_processors(ranks: int) -> Finding:
    """Checks that this host has a processor for each rank."""
    count = systems.processors()
    memory = systems.memory_limit() / (1 << 30)
    python = f"{sys.platform}, Python {sys.version.split()[0]}"
    text = f"{count} and {memory:.1f} GiB of memory for {ranks} ranks; {python}"
    if count >= ranks:
        return Finding("processors", OK, text)
    fix = "use fewer ranks on this host, unless they compute on GPUs"
    return Finding("processors", NOTE, text, fix)


def _check_bits(ranks: int) -> Finding:
    """Reports the number of threads and MKL's settings, which change the bits of a product."""
    numerics.prepare()
    settings = ", ".join(f"{k}={v or 'unset'}" for k, v in numerics.environment().items())
    if os.environ.get("OMP_NUM_THREADS"):
        return Finding("bits", OK, settings)
    threads = max(1, systems.processors() // ranks)
    fix = f"set OMP_NUM_THREADS={threads} for all ranks, and for what they are compared with"
    return Finding("bits", NOTE, settings, fix)


def _check_shared_memory() -> Finding:
    """Checks that the folder of shared memory has room for data loaders."""
    if not _SHARED.is_dir():
        return Finding("shared memory", OK, f"this system has no {_SHARED}")
    free = shutil.disk_usage(_SHARED).free
    text = f"{free / _MIB:,.0f} MiB free in {_SHARED}"
    if free >= _SHARED_BYTES:
        return Finding("shared memory", OK, text, figures={"shared_free_bytes": free})
    fix = "start the container with --shm-size 2g, or load data with num_workers=0"
    return Finding("shared memory", NOTE, text, fix)


def _check_descriptors(ranks: int) -> Finding:
    """Checks that a process may open a file descriptor for each rank's connections."""
    soft, hard = systems.descriptor_limits()
    if soft == float("inf"):
        return Finding("descriptors", OK, "no limit")
    most = max(0, int(soft - _DESCRIPTORS) // 2)
    text = f"{soft} for each process, enough for about {most} ranks"
    state = WRONG if most < ranks else NOTE if most < _MOST_RANKS else OK
    limit = "unlimited" if hard == float("inf") else hard
    fix = "" if state == OK else f"ulimit -n {limit}, in the shell that starts the ranks"
    return Finding("descriptors", state, text, fix, {"descriptors": soft})


def _check_host_name() -> Finding:
    """Checks that other hosts can reach this one by its name."""
    name, address = socket.gethostname(), hosts.named_address()
    if address and not address.startswith("127.") and address != "::1":
        return Finding("host name", OK, f"{name} leads to {address}")
    text = f"{name} leads to {address or 'no address'}, which other hosts cannot reach"
    fix = "on several hosts set FLEETPIPE_ADDRESS to this host's address; on one it is no matter"
    return Finding("host name", NOTE, text, fix)


def _check_ports() -> Finding:
    """Checks the loopback, and that outgoing connections leave the ports of jobs free."""
    with hosts.listen_tcp("127.0.0.1").sock as listener:
        socket.create_connection(listener.getsockname(), 5.0).close()
    local = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, local.read_text().split()) if local.exists() else (49152, 65535)
    text = f"loopback answers; outgoing connections take ports {first} to {last}"
    if first >= _PORTS.stop or last < _PORTS.start:
        return Finding("ports", OK, text)
    fix = f"sysctl net.ipv4.ip_local_port_range='{_PORTS.stop} 60999': jobs listen below"
    return Finding("ports", NOTE, text, fix)


def _check_checkpoint_folder(folder: Path) -> Finding:
    """Checks the folder of checkpoints by the operations of a save, on a file of some MiB.

    The operations are: write, sync, rename, sync the folder. For a folder that does not exist, the
    nearest existing folder above it is checked.
    """
    subject = "checkpoints"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    draft = existing / f".fleetpipe-doctor-{secrets.token_hex(4)}"
    complete = draft.with_suffix(".whole")
    fix = f"give --checkpoint-dir a folder that can be written, on a disk with room: not {existing}"
    try:
        begin = time.perf_counter()
        with draft.open("wb") as file:
            file.write(secrets.token_bytes(_MIB) * (_WRITTEN_BYTES // _MIB))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(complete)
        systems.sync_folder(existing)
        seconds = time.perf_counter() - begin
        skew = abs(complete.stat().st_mtime - time.time()) - seconds
    except OSError as error:
        return Finding(subject, WRONG, f"{existing}: {error.strerror or error}", fix)
    finally:
        for path in (draft, complete):
            path.unlink(missing_ok=True)
    free, rate = shutil.disk_usage(existing).free, _WRITTEN_BYTES / seconds
    text = f"{existing}: {rate / 1e6:,.0f} MB/s with fsync, {free / (1 << 30):.1f} GiB free"
    figures = {"disk_bytes_per_second": rate, "disk_free_bytes": free}
    if free < _DISK_BYTES:
        return Finding(subject, NOTE, text, fix, figures)
    if skew > CLOCK_SECONDS:
        text += f"; its clock differs by {skew:.0f} s"
        return Finding(subject, NOTE, text, "have both hosts' clocks set by NTP", figures)
    return Finding(subject, OK, text, figures=figures)


def check_clock(address: str, behind: float, ahead: float) -> Finding:
    """Checks another host's clock, which was read once between two readings of this host's.

    Args:
        address: The address of the other host.
        behind: Seconds by which the other clock is before this host's first reading.
        ahead: Seconds by which the other clock is after this host's second reading.
    """
    difference = max(behind, ahead, 0.0)
    if difference <= CLOCK_SECONDS:
        return Finding(f"{address} clock", OK, f"within {CLOCK_SECONDS:g} s of this host's")
    text = f"{difference:.0f} s from this host's"
    return Finding(f"{address} clock", NOTE, text, "have all hosts' clocks set by NTP")
