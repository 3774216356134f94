"""Which ranks share a host, and at which addresses ranks reach each other."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

from fleetpipe.errors import TransportError

_BUFFER_BYTES = 4 << 20
_PROC = Path("/proc")


class Listener(NamedTuple):
    """A listening socket and the text under which peers find it."""

    sock: socket.socket
    address: str


def host_identity() -> str:
    """Returns a text that two processes share when a unix-domain socket can join them.

    It is the running kernel and its network namespace: names of the abstract kind, which leave no
    file behind, are seen within one. Containers of one host therefore use TCP unless they share
    their network. Empty where the system has no such names.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/net')}"
    except OSError:
        return ""


def force_tcp_by_default() -> bool:
    """Returns whether the environment asks for TCP within a host."""
    return os.environ.get("FLEETPIPE_FORCE_TCP", "0") == "1"


def own_address() -> str:
    """Returns the address of this host under which other hosts are told to reach it.

    Raises:
        TransportError: Neither the environment nor the host's name tells it.
    """
    given = os.environ.get("FLEETPIPE_ADDRESS")
    endpoint = os.environ.get("PADDLE_CURRENT_ENDPOINT", "").rpartition(":")[0].strip("[]")
    if given or endpoint:
        return given or endpoint
    with contextlib.suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
        if not found.startswith("127."):
            return found
    raise TransportError(
        "cannot tell at which address the other hosts reach this one",
        got=f"{socket.gethostname()!r}, which is not a name that leads to this host from outside",
        fix="set FLEETPIPE_ADDRESS on each host, or pass address= to connect()",
    )


def listen_unix() -> Listener:
    """Listens under a new abstract name."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"fleetpipe-{secrets.token_hex(8)}"
    sock.bind(f"\0{name}")
    sock.listen(128)
    return Listener(sock, f"unix {name}")


def listen_tcp(address: str) -> Listener:
    """Listens on a free port of ``address``, a name or number of this host.

    Raises:
        TransportError: The address is not one of this host.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        enlarge(sock)
        sock.bind(where)
        sock.listen(128)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {address}: {error.strerror or error}",
            expected="an address of this host that the other hosts reach",
            fix="set FLEETPIPE_ADDRESS on each host, or pass address= to connect()",
        ) from error
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        sock.close()
        raise TransportError(
            f"peers cannot be told to connect to {host}",
            expected="one address of this host, since it is told to the other hosts",
            fix="give that address in FLEETPIPE_ADDRESS or address=",
        )
    return Listener(sock, f"tcp {host} {port}")


def dial(address: str) -> socket.socket:
    """Begins a connection to a listener's ``address`` without waiting for it.

    Raises:
        OSError: Nobody listens there.
    """
    kind, _, rest = address.partition(" ")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = f"\0{rest}"
    else:
        host, _, port = rest.rpartition(" ")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        target = (host, int(port))
    sock.setblocking(False)
    enlarge(sock)
    try:
        sock.connect(target)
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        raise
    return sock


def enlarge(sock: socket.socket) -> None:
    """Asks for large kernel buffers, no delay of small messages and a watch over dead hosts."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
