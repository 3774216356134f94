"""Two hosts on one: network namespaces joined by a cable, each with a name that leads to 127.0.1.1.

They are removed at the end, with all that runs in them. A job's processes carry the mark of
:mod:`tests.launching`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests import launching
from tests.byhand import Ranks

#: What a shell in a namespace does before the command: it gives the host its name there.
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


class Host(NamedTuple):
    """A namespace.

    Attributes:
        name: Of the namespace, and of the host within it.
        address: At which the other one reaches it.
        interface: That has this address.
        names: The file that it sees as /etc/hosts.
    """

    name: str
    address: str
    interface: str
    names: Path

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
    """Pulls the cable out of a host: what is sent is lost, and nobody is told."""
    _ip("-n", host.name, "link", "set", host.interface, "down")


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Makes two namespaces that reach each other; ``folder`` is for their files."""
    hosts = tuple(_host(folder, number) for number in (1, 2))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        (first, second) = hosts
        ends = [["name", host.interface, "netns", host.name] for host in hosts]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.name, "link", "set", interface, "up")
        yield first, second
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


@contextmanager
def started(
    hosts: Sequence[Host], script: Path, *args: str, folder: Path, env: Mapping[str, str]
) -> Iterator[Ranks]:
    """Starts a script on one rank of each host, without a launcher; see tests.byhand.started."""
    mark = uuid.uuid4().hex
    endpoints = [f"{host.address}:29500" for host in hosts]
    python = [sys.executable, "-u", launching.__file__, str(script), *args]
    processes = {}
    for rank, host in enumerate(hosts):
        own = {
            **launching._environment(mark, env),
            "PADDLE_TRAINERS_NUM": str(len(hosts)),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_RANK_IN_NODE": "0",
        }
        processes[rank] = _popen(host.command(*python), own, folder, folder / f"rank{rank}.log")
    try:
        yield Ranks(processes, folder)
    finally:
        launching._kill(mark)
        for process in processes.values():
            process.wait()


def launch(
    hosts: Sequence[Host],
    script: Path,
    home: Path,
    env: Mapping[str, str],
    timeout: float = 90.0,
) -> list[str]:
    """Runs a script on one rank of each host under Paddle's launcher; returns the ranks' logs.

    Raises:
        JobFailed: An exit code is not 0; the message holds the logs.
        JobHung: The limit was reached, likewise.
    """
    mark = uuid.uuid4().hex
    deadline = time.monotonic() + timeout
    launchers = [_start(host, hosts[0], script, home, mark, env) for host in hosts]
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


def _host(folder: Path, number: int) -> Host:
    name = f"fleetpipe-{os.getpid()}-{number}"
    names = folder / f"hosts{number}"
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    return Host(name, f"10.77.0.{number}", f"cable{number}", names)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _start(
    host: Host, master: Host, script: Path, home: Path, mark: str, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    nodes = ["--nnodes", "2", "--nproc_per_node", "1", "--master", f"{master.address}:29500"]
    if host is master:
        nodes += ["--host", host.address]
    launcher = [sys.executable, "-m", "paddle.distributed.launch", *nodes]
    command = host.command(*launcher, "--log_dir", str(home / host.name), str(script))
    return _popen(command, launching._environment(mark, env), home, home / f"{host.name}.log")


def _popen(
    command: Sequence[str], env: Mapping[str, str], home: Path, log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
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
