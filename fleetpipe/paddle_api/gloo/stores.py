"""Paddle's ``TCPStore``, the same in 2.6.2 and 3.3.x."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct

from paddle.base import core

from fleetpipe.aliases import PaddleStore


def open_tcp_store(host: str, port: int, serve: bool, timeout: float) -> PaddleStore:
    """Opens a TCPStore: serves it, or connects to a served one."""
    # With a world of 0 its constructor does not wait for anybody: it could not be interrupted.
    store = core.TCPStore(host, port, serve, 0, int(timeout) + 1)
    _send_at_once(port)
    if serve:
        _show_clients_that_leave(host, port, timeout)
    return store


def _send_at_once(port: int) -> None:
    """Makes this process's clients of the store at ``port`` send each part of a request at once.

    A request is three writes. The system would hold the second until the server has acknowledged
    the first, which takes 40 ms, and meanwhile the server waits for it and answers nobody else.
    """
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        # The listing has a descriptor of its own, which is closed by now.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as client:
                    if client.family == socket.AF_INET and client.getpeername()[1] == port:
                        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _show_clients_that_leave(host: str, port: int, timeout: float) -> None:
    """Shows the server one client that closes its connection, and one that resets it.

    At the first of each kind its thread asks glog whether to log that, under a lock that is
    destroyed while the process exits: the last rank to leave would abort the one that serves, after
    all its work.
    """
    for linger in (struct.pack("ii", 0, 0), struct.pack("ii", 1, 0)):
        with socket.create_connection((host, port), timeout) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
