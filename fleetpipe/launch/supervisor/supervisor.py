"""Starts the ranks of a job, and starts all of them again where one fails.

One supervisor on each host. That of the host with the address of ``--master`` leads: it decides
which hosts take part in a life, and whether there is another one. The others follow.
"""

from __future__ import annotations

import argparse
import errno
import socket
from contextlib import ExitStack

from fleetpipe.errors import ConfigError, TransportError
from fleetpipe.launch import quiet
from fleetpipe.launch.keeping.copies import Copies
from fleetpipe.launch.supervisor.follower import Follower
from fleetpipe.launch.supervisor.leader import Leader
from fleetpipe.launch.supervisor.local import Local
from fleetpipe.launch.supervisor.pods import Pods
from fleetpipe.launch.supervisor.room import room
from fleetpipe.launch.supervisor.saying import say
from fleetpipe.launch.supervisor.signals import caught
from fleetpipe.transport.joining.hosts import route_to

_MOST_WAITING = 64


def run(options: argparse.Namespace) -> int:
    """Runs a job to its end, however often it has to be started.

    Returns:
        0 where every rank did its work; 75 (``life.PREEMPTED``) where the job was asked to stop,
        saved and ended; 65 (``POISONED``) where one step failed twice in a row; 128 + n where
        signal n stopped it and nothing was saved; else the code of the rank that failed first in
        the last life. The same on every host.

    Raises:
        ConfigError: Several hosts, and no address where they meet; or options that contradict
            each other.
        TransportError: The address of ``--master`` cannot be used, or its supervisor is not there.
    """
    if options.master is None and options.nnodes[1] > 1:
        raise ConfigError(
            "several hosts meet at an address",
            got="--nnodes without --master",
            fix="give --master HOST:PORT, an address of the first host, the same on all of them",
        )
    if options.neighbour_every is not None and not (options.keep_state and options.master):
        raise ConfigError(
            "there is no state, or no other host, for --neighbour_every",
            got="--neighbour_every without "
            + ("--master" if options.keep_state else "--keep_state"),
            fix="give --keep_state, and --nnodes and --master of several hosts; or leave it out",
        )
    with ExitStack() as ends:
        folder = ends.enter_context(room())
        signals = ends.enter_context(caught())
        address, listener = "", None
        if options.master is not None:
            listener = _listen(*options.master)
            address = options.host or (route_to(options.master[0]) if listener is None else "")
            address = address or options.master[0]
        if listener is not None:
            ends.enter_context(listener)
        copies = None
        if options.neighbour_every is not None:
            copies = Copies(folder, address, say)
            ends.callback(copies.close)
        pods = Pods(quiet.environment(options.log_level))
        ends.callback(pods.close)
        local = Local(options, folder, pods, address, copies)
        if options.master is None or listener is not None:
            return Leader(options, local, signals, listener, copies).run()
        return Follower(options, local, signals, address, copies).run()


def _listen(host: str, port: int) -> socket.socket | None:
    """Listens as the leader; None where another host, or another supervisor of this one, does.

    Raises:
        TransportError: The address is none.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_MOST_WAITING)
        listener.setblocking(False)
        return listener
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise TransportError(
            f"--master {host}:{port} cannot be used",
            got=error.strerror or str(error),
            fix="give the address of the first host, as all others reach it, and a free port",
        ) from error
