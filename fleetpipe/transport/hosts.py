"""Finds out which ranks share a host, and at which addresses ranks reach each other."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence
from typing import NamedTuple

from fleetpipe import systems
from fleetpipe.errors import TransportError

#: Bytes of the kernel's buffer that each direction of a socket asks for.
_BUFFER_BYTES = 4 << 20


class Listener(NamedTuple):
    """A listening socket, and its address in the form that :func:`dial` takes."""

    sock: socket.socket
    address: str


def rank_variables(
    rank: int, local: int, endpoints: Sequence[str], nodes: Sequence[object]
) -> dict[str, str]:
    """Returns the environment variables by which Paddle's launcher describes a job to a rank.

    Args:
        rank: The rank.
        local: The rank's number among the ranks of its node.
        endpoints: The endpoint, HOST:PORT, of each rank of the job.
        nodes: A value for each rank, equal for the ranks of one node.
    """
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_GLOBAL_SIZE": str(len(endpoints)),
        "PADDLE_LOCAL_RANK": str(local),
        "PADDLE_LOCAL_SIZE": str(nodes.count(nodes[rank])),
        "PADDLE_RANK_IN_NODE": str(local),
        "PADDLE_NNODES": str(len({*nodes})),
    }


def host_identity() -> str:
    """Returns a text that is equal in two processes that a unix-domain socket can connect.

    It names the running kernel, its network namespace and the user, since other users are refused.
    Containers of one host therefore use TCP unless they share their network. It is empty if the
    system has no such names: two empty texts do not mean one host.
    """
    return systems.unix_domain()


def host_name() -> str:
    """Returns a text that is equal on all ranks of one host, in whichever containers they are.

    It is empty if the host has no address; then the job has only one rank.
    """
    with contextlib.suppress(TransportError):
        return host_identity() or own_address()
    return ""


def own_address() -> str:
    """Returns the address at which other hosts are to reach this one.

    The address is the first of these that is there: ``FLEETPIPE_ADDRESS``; the one that the
    launcher
    gave to this rank, unless it is a loopback address and the job has several hosts; the address
    from which this host reaches the others; the address of this host's name.

    Raises:
        TransportError: None of them gives an address.
    """
    address = os.environ.get("FLEETPIPE_ADDRESS")
    launched = _host_of_endpoint(os.environ.get("PADDLE_CURRENT_ENDPOINT", ""))
    hosts = _launched_hosts()
    if address or (launched and len(hosts) == 1):
        return address or launched
    for candidate in (launched, *map(route_to, hosts), named_address()):
        if candidate and not _is_loopback(candidate):
            return candidate
    raise TransportError(
        "cannot tell at which address the other hosts reach this one",
        got=f"{socket.gethostname()!r}, which is not a name that leads to this host from outside",
        fix="set FLEETPIPE_ADDRESS on each host, or pass address= to connect()",
    )


def gloo_interface() -> tuple[str, str]:
    """Returns the network interface that Gloo is to use, and its address; both "" if none is found.

    Within one host it is the loopback; between hosts the one with this rank's own address, or if
    that is not IPv4, the one from which this host reaches the others.
    """
    launched = _launched_hosts()
    if len(launched) == 1:
        addresses = ["127.0.0.1"]
    else:
        addresses = [address for address in map(route_to, launched) if not _is_loopback(address)]
        with contextlib.suppress(TransportError):
            addresses.insert(0, own_address())
    names = {address: name for name, address in systems.interfaces()}
    for address in map(_resolve, addresses):
        if address in names:
            return names[address], address
    return "", ""


def route_to(host: str) -> str:
    """Returns the address from which this host would reach ``host``; "" if there is no way."""
    with contextlib.suppress(OSError):
        family, kind, _, _, socket_address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # Chooses the route; a datagram socket sends nothing by it.
            probe.connect(socket_address)
            return str(probe.getsockname()[0])
    return ""


def named_address() -> str:
    """Returns the address that this host's own name resolves to; "" if it resolves to none."""
    return _resolve(socket.gethostname())


def _launched_hosts() -> list[str]:
    """Returns the hosts of all ranks, each once, in the order of the launcher's endpoints."""
    endpoints = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    return list(dict.fromkeys(filter(None, map(_host_of_endpoint, endpoints))))


def _host_of_endpoint(endpoint: str) -> str:
    """Returns the host of an endpoint HOST:PORT, without the brackets of IPv6."""
    return endpoint.rpartition(":")[0].strip("[]")


def _resolve(name: str) -> str:
    """Returns the first address of a host's name; "" if it has none."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(name, None)[0][4][0])
    return ""


def _is_loopback(name: str) -> bool:
    """Returns whether a host's name leads to this host only, or to no address."""
    address = _resolve(name)
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen_unix() -> Listener:
    """Opens a listening socket at a new abstract unix-domain address."""
    sock = socket.socket(systems.AF_UNIX, socket.SOCK_STREAM)
    name = f"fleetpipe-{secrets.token_hex(8)}"
    sock.bind(f"\0{name}")
    sock.listen(128)
    return Listener(sock, f"unix {name}")


def listen_tcp(address: str) -> Listener:
    """Opens a listening socket on a free port of ``address``, a name or number of this host.

    Raises:
        TransportError: The address is not one of this host, or stands for all of its addresses.
    """
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        set_socket_options(sock)
        sock.bind(socket_address)
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
    """Starts a connection to a listener without waiting for it.

    Args:
        address: The listener's address, as in :class:`Listener`.

    Returns:
        The non-blocking socket; it can be written to once it is connected.

    Raises:
        OSError: Nothing listens there, or another user does.
    """
    kind, _, rest = address.partition(" ")
    if kind == "unix":
        sock = socket.socket(systems.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = f"\0{rest}"
    else:
        host, _, port = rest.rpartition(" ")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        target = (host, int(port))
    sock.setblocking(False)
    set_socket_options(sock)
    try:
        with contextlib.suppress(BlockingIOError):
            sock.connect(target)
        if systems.is_other_user(sock):
            raise PermissionError("it belongs to another user, or does not answer yet")
    except OSError:
        sock.close()
        raise
    return sock


def set_socket_options(sock: socket.socket) -> None:
    """Asks for large kernel buffers; over TCP also for no delay, and a check for dead hosts."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    if sock.family != systems.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        systems.send_again_soon(sock)
