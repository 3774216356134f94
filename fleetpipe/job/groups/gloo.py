"""Gives each of Paddle's Gloo groups a key-value store of its own, and all of them an interface.

All Gloo groups of a job write their addresses under the same keys of the job's store (2.6.2 and
3.3.1). A rank that makes its second group a moment before another does reads the address of that
one's first group, which no longer listens: "Connection refused", about once in five starts of
three ranks. With a store of its own no group sees the addresses of another. The ranks also meet,
so that none enters Gloo, which gives up after 30 s, before the others have come.

Gloo listens at the address that the host's name has, which on many hosts is a loopback one, unless
it is told an interface.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
from collections.abc import Mapping
from typing import Any

from fleetpipe import log
from fleetpipe.errors import PipelineTimeout, TransportError
from fleetpipe.job.groups import exchanges
from fleetpipe.job.groups.own_group import OwnGroup
from fleetpipe.paddle_api import topology
from fleetpipe.transport import Store
from fleetpipe.transport.joining import hosts
from fleetpipe.transport.limit import Limit, await_keys

_log = log.logger(__name__)

#: Below the ports that the system gives to outgoing connections: none of those is in the way.
_PORTS = range(20000, 32000)


def separate_stores(store: Store, timeout: float) -> None:
    """Makes every Gloo group in a store of its own, until :func:`share_store_again`.

    Where the user chose no interface for Gloo, it is the one that leads to the other ranks.

    Args:
        store: The job's store, where a group's ranks find its own.
        timeout: Seconds that the ranks of a group may take to arrive.
    """
    _choose_interface()

    def own_store(rank: int, ranks: int, group: int) -> Any:
        opened = _open(store, rank, group, timeout)
        # They meet at the job's store, whose waits end when a rank fails.
        keys = {member: f"fleetpipe/gloo/{group}/here/{member}" for member in range(ranks)}
        store.add(keys[rank], 1)
        _await(store, group, keys, timeout)
        return opened

    topology.replace_gloo_stores(own_store)
    topology.complete_gloo(exchanges.methods())
    topology.make_without_gloo(functools.partial(OwnGroup, timeout=timeout))


def share_store_again() -> None:
    """Gives the Gloo groups that are made from now on the store that Paddle gives them."""
    topology.restore_gloo_stores()


def _open(store: Store, rank: int, group: int, timeout: float) -> Any:
    """Opens a group's store: its first rank serves it, the others find it in the job's store."""
    key = f"fleetpipe/gloo/{group}"
    if rank == 0:
        host = hosts.gloo_interface()[1] or hosts.own_address()
        port = _free_port(host)
    else:
        _await(store, group, {0: f"{key}/published"}, timeout)
        host, _, text = store.get(f"{key}/address").decode().rpartition(":")
        port = int(text)
    opened = topology.open_tcp_store(host, port, rank == 0, timeout)
    if rank == 0:
        store.set(f"{key}/address", f"{host}:{port}")
        store.add(f"{key}/published", 1)
    return opened


def _choose_interface() -> None:
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name, address = hosts.gloo_interface()
    if not name:
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    named = hosts.named_address()
    if address not in ("127.0.0.1", named):
        log.once(
            _log.info,
            f"Gloo uses the interface {name} ({address}), which leads to the other hosts; "
            f"this host's name leads to {named or 'no address'}",
            any_rank=True,
        )


def _await(store: Store, group: int, keys: Mapping[int, str], timeout: float) -> None:
    """Waits until the members of a group have come to their keys."""

    def failure(missing: list[int], _: object) -> PipelineTimeout:
        who = f"members {missing}" if missing[1:] else f"member {missing[0]}"
        return PipelineTimeout(
            f"{who} of Paddle's group {group} did not make it within {timeout:g} s",
            fix="see their logs; raise fleetpipe_configs['timeout'] if they are only slow",
        )

    for _ in await_keys(store, keys, Limit(timeout), failure):
        pass


def _free_port(host: str) -> int:
    for port in random.Random().sample(_PORTS, 100):
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise TransportError(
        f"no port between {_PORTS.start} and {_PORTS.stop} is free on {host}",
        fix="end left-over programs that hold these ports, and launch again",
    )
