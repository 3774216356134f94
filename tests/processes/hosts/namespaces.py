"""Several hosts on one: network namespaces on a switch, each with a name and names of the others.

They are removed at the end, with all that runs in them. A job's processes carry the mark of
:mod:`tests.launching`. Run as a script, this file enters a namespace and becomes another script:
so ranks are forked as elsewhere (:mod:`tests.forking`).
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests import launching
from tests.byhand import Process, Ranks
from tests.forking import Forked

#: What a shell in a namespace does before the command: it gives the host its name there.
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
_NEW_UTS, _NEW_NET, _NEW_NS = 0x04000000, 0x40000000, 0x00020000
_MS_BIND, _MS_PRIVATE_ALL = 0x1000, 0x44000


class Host(NamedTuple):
    """A namespace.

    Attributes:
        name: Of the namespace, and of the host within it.
        address: At which the others reach it.
        address6: The same of IPv6.
        interface: That has these addresses.
        names: The file that it sees as /etc/hosts.
        switch: The namespace that all cables lead to.
        port: Where its cable is plugged in there.
    """

    name: str
    address: str
    address6: str
    interface: str
    names: Path
    switch: str
    port: str

    def command(self, *words: str) -> list[str]:
        """Returns the command that runs ``words`` in the namespace."""
        inside = ["unshare", "--uts", "sh", "-c", _ENTER, "sh", str(self.names), self.name, *words]
        return ["ip", "netns", "exec", self.name, *inside]


def why_not() -> str:
    """Returns why there can be no namespaces here; "" where there can."""
    missing = [tool for tool in ("ip", "unshare", "mount", "hostname") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} is not installed"
    name = f"fleetpipe-{os.getpid()}-try"
    add = ["ip", "netns", "add", name]
    tried = subprocess.run(add, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces are not allowed: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def cut(host: Host) -> None:
    """Pulls the cable of a host: what is sent is lost, and nobody is told."""
    _ip("-n", host.switch, "link", "set", host.port, "down")


def mend(host: Host) -> None:
    """Plugs the cable of a host in again."""
    _ip("-n", host.switch, "link", "set", host.port, "up")


@contextmanager
def joined(
    folder: Path, count: int, own_names_lead_home: bool = True, service: str = ""
) -> Iterator[tuple[Host, ...]]:
    """Makes namespaces that reach each other, by address and by name.

    Args:
        folder: For their files.
        count: How many.
        own_names_lead_home: Whether a host's own name leads to 127.0.1.1 there, as Debian's
            installer has it; else to its address, as in the pods of Kubernetes.
        service: One more name of the first of them.
    """
    switch = f"fleetpipe-{os.getpid()}-switch"
    hosts = tuple(_host(folder, number, switch) for number in range(1, count + 1))
    for host in hosts:
        others = [(one.address, one.name) for one in hosts if one is not host]
        home = "127.0.1.1" if own_names_lead_home else host.address
        lines = [("127.0.0.1", "localhost"), (home, host.name), *others]
        lines += [(hosts[0].address, service)] if service else []
        host.names.write_text("".join(f"{address} {name}\n" for address, name in lines))
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in hosts:
            _plug_in(host)
        yield hosts
    finally:
        for name in (switch, *[host.name for host in hosts]):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def started(
    hosts: Sequence[Host],
    script: Path,
    *args: str,
    folder: Path,
    env: Mapping[str, str],
    told: Callable[[int], Mapping[str, str]] | None = None,
) -> Iterator[Ranks]:
    """Starts a script on one rank of each host, without a launcher; see tests.byhand.started.

    Args:
        hosts: The hosts, by rank.
        script: What each rank runs.
        args: Arguments of the script.
        folder: The ranks' working directory.
        env: Additions to the environment.
        told: What a rank is told of the job; by default what Paddle's launcher would tell it.
    """
    mark = uuid.uuid4().hex
    told = told or launched([host.address for host in hosts])
    processes: dict[int, Process] = {}
    try:
        for rank, host in enumerate(hosts):
            log = folder / f"rank{rank}.log"
            words = [host.name, str(host.names), str(script), *args]
            own = {**told(rank), **env}
            processes[rank] = Forked(Path(__file__), words, mark=mark, env=own, cwd=folder, log=log)
        yield Ranks(processes, folder)
    finally:
        launching._kill(mark)
        for process in processes.values():
            process.wait()


def launched(addresses: Sequence[str]) -> Callable[[int], Mapping[str, str]]:
    """Returns what Paddle's launcher tells each rank, of which every host has one."""
    endpoints = [f"{address}:29500" for address in addresses]
    return lambda rank: {
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_RANK_IN_NODE": "0",
    }


def launch(
    hosts: Sequence[Host],
    script: Path,
    home: Path,
    env: Mapping[str, str],
    timeout: float = 90.0,
    told: Callable[[int], Mapping[str, str]] | None = None,
) -> list[str]:
    """Runs a script on one rank of each host under Paddle's launcher; returns the ranks' logs.

    Args:
        hosts: The hosts; the first one is the master.
        script: What each rank runs.
        home: For logs, and the ranks' working directory.
        env: Additions to the environment.
        timeout: Limit in seconds.
        told: Variables for the launcher of each host, instead of options for the same.

    Raises:
        JobFailed: An exit code is not 0; the message holds the logs.
        JobHung: The limit was reached, likewise.
    """
    mark = uuid.uuid4().hex
    deadline = time.monotonic() + timeout
    launchers = []
    for number, host in enumerate(hosts):
        options = ["--nproc_per_node", "1", "--log_dir", str(home / host.name), str(script)]
        if told is None:
            master = f"{hosts[0].address}:29500"
            options = ["--nnodes", str(len(hosts)), "--master", master, *options]
            options = [*(["--host", host.address] if number == 0 else []), *options]
        command = host.command(sys.executable, "-m", "paddle.distributed.launch", *options)
        own = {**env, **(told(number) if told else {})}
        log = home / f"{host.name}.log"
        launchers.append(_popen(command, launching._environment(mark, own), home, log))
    try:
        for launcher in launchers:
            launcher.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        logs = launching._show(_logs(hosts, home))
        raise launching.JobHung(f"still running after {timeout:g} s\n{logs}") from None
    finally:
        launching._kill(mark)
        for launcher in launchers:
            launcher.wait()
    if any(launcher.returncode for launcher in launchers):
        raise launching.JobFailed(launching._show(_logs(hosts, home)))
    return _logs(hosts, home)


def _host(folder: Path, number: int, switch: str) -> Host:
    return Host(
        name=f"fleetpipe-{os.getpid()}-{number}",
        address=f"10.77.0.{number}",
        address6=f"fd77::{number}",
        interface=f"cable{number}",
        names=folder / f"hosts{number}",
        switch=switch,
        port=f"port{number}",
    )


def _plug_in(host: Host) -> None:
    _ip("netns", "add", host.name)
    ends = ["name", host.interface, "netns", host.name], ["name", host.port, "netns", host.switch]
    _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    _ip("-n", host.switch, "link", "set", host.port, "master", "bridge", "up")
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
    # Without nodad it could not be used for the first second.
    _ip("-n", host.name, "addr", "add", f"{host.address6}/64", "dev", host.interface, "nodad")
    for interface in ("lo", host.interface):
        _ip("-n", host.name, "link", "set", interface, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _popen(
    command: Sequence[str], env: Mapping[str, str], home: Path, log: Path
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=env,
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _logs(hosts: Sequence[Host], home: Path) -> list[str]:
    return [
        launching._read(home / host.name / "workerlog.0")
        or launching._read(home / f"{host.name}.log")
        for host in hosts
    ]


def _enter(name: str, names: str) -> None:
    """Moves this process into a namespace, with its name and its file of names."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as space:
        calls: list[Callable[[], int]] = [
            lambda: libc.setns(space.fileno(), _NEW_NET),
            lambda: libc.unshare(_NEW_NS | _NEW_UTS),
            lambda: libc.mount(b"none", b"/", None, _MS_PRIVATE_ALL, None),
            lambda: libc.mount(names.encode(), b"/etc/hosts", None, _MS_BIND, None),
        ]
        for call in calls:
            if call():
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(name)


if __name__ == "__main__":
    _enter(sys.argv[1], sys.argv[2])
    del sys.argv[:3]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
