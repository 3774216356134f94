"""Creates Paddle's groups within the user's time limit and reuses them in later jobs.

No group can be closed: its descriptors and threads stay until its process ends. So a job reuses the
groups with its members that earlier jobs created. All ranks create the same groups in the same
order, so a group that one rank has, all its members have; the groups of a failed job are not used
again. A group keeps the options that it was first created with, those of NCCL for example.

Each Gloo group gets a key-value store of its own. In the job's store all groups would write their
addresses under the same keys (2.6.2 and 3.3.1): a rank that creates its second group a moment
before another rank reads the address of that rank's first group, which no longer listens:
"Connection refused", about once in five starts of three ranks. The ranks also meet, so that none
enters Gloo, which gives up after 30 s, before the others have come. Gloo listens at the address
that the host's name has, which on many hosts is a loopback one, unless it is told an interface.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fleetpipe import log
from fleetpipe.errors import FleetPipeError, PeerFailed, PipelineTimeout, TransportError
from fleetpipe.job import meeting
from fleetpipe.job.groups import exchanges
from fleetpipe.job.groups.exchanges import OwnGroup
from fleetpipe.job.store import JobStore
from fleetpipe.job.watching.watch import Watch
from fleetpipe.paddle_api.gloo import process_groups
from fleetpipe.paddle_api.gloo.stores import open_tcp_store
from fleetpipe.paddle_api.topology import beginning
from fleetpipe.transport import Store
from fleetpipe.transport.joining import hosts
from fleetpipe.transport.limit import Limit, await_keys

#: The groups of these members, in the order in which one job made them.
_kept: dict[tuple[int, ...], list[Any]] = {}
#: Whether a rank may be within a collective operation of some group, or never have made it.
_in_doubt = False


@contextmanager
def made_for(number: int, store: JobStore, watch: Watch, timeout: float) -> Iterator[None]:
    """While this context is open, Paddle's ``fleet.init`` creates the groups of a job. Collective.

    Raises:
        PeerFailed: Paddle could not create them.
        PipelineTimeout: Some rank did not come to a group that it is a member of.
    """
    made: Counter[tuple[int, ...]] = Counter()
    world = range(meeting.world_size())
    separate_stores(store, timeout)
    limited = watch.limit(timeout, "making Paddle's groups", world)
    open_store = functools.partial(meeting.paddles_client, timeout)

    def new_group(make: Callable[..., Any], ranks: list[int], **options: Any) -> Any:
        members = tuple(sorted(ranks))
        made[members] += 1
        groups = _kept.setdefault(members, [])
        if made[members] > len(groups):
            meets = meeting.own_rank() in members and len(members) > 1
            what = f"making Paddle's group of ranks {list(members)}"
            if meets:
                key = f"fleetpipe/{number}/group/{members}/{made[members]}"
                # Whoever waits there says itself who is missing, before the watch would.
                with watch.limit(2 * timeout, what, members):
                    meeting.meet(store, key, timeout, what, watch.gone, members)
            with watch.limit(timeout, what, members if meets else world):
                groups.append(make(ranks, **options))
        return groups[made[members] - 1]

    with limited, translating_errors(), beginning(open_store, new_group):
        yield
    # The first rank of a group serves its store: it must not leave while others make it.
    meeting.meet(store, f"fleetpipe/{number}/groups", timeout)
    meeting.let_others_go(store, f"fleetpipe/{number}/groups/going")


def forget_where_in_doubt(number: int, store: JobStore, meet: Callable[[], None]) -> None:
    """Drops the groups of earlier jobs if any rank doubts them. Collective over the job.

    From now on the groups are in doubt until the job has ended well, see :func:`trust`.
    """
    global _in_doubt
    key = f"fleetpipe/{number}/groups/in_doubt"
    if _in_doubt:
        store.add(key, 1)
    meet()
    if store.add(key, 0):
        _kept.clear()
    _in_doubt = True


def trust(ended_well: bool) -> None:
    """Records at the end of a job whether a later one may use its groups."""
    global _in_doubt
    _in_doubt = not ended_well


#: Where the files of Paddle's and Gloo's C++ are, which their errors name.
_SOURCES = "/paddle/"
#: What Paddle says of a library of NVIDIA's that it opens when it is first needed, and why.
_LIBRARY = re.compile(r"dynamic library \((\S+)\).*\(error code is [^:]*: (.*)\)")


@contextmanager
def translating_errors() -> Iterator[None]:
    """Turns failures of Gloo and of Paddle's store into errors that say what happened."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        if _SOURCES not in str(error) or isinstance(error, FleetPipeError):
            raise
        if missing := _LIBRARY.search(str(error)):
            raise TransportError(
                f"Paddle cannot load {missing[1]}, by which GPUs send: {missing[2]}",
                fix="install it for the CUDA that this wheel is built for, under this very name, "
                "in a folder of LD_LIBRARY_PATH; or have all ranks meet through the host's memory: "
                "PADDLE_DISTRI_BACKEND=gloo",
            ) from error
        raise PeerFailed(
            "Paddle could not make its groups",
            got=str(error).strip().splitlines()[-1],
            cause="another rank died meanwhile, the ranks cannot reach each other, or two of them "
            "use one GPU, which NCCL refuses",
            fix="read the logs of the other ranks; with one GPU, run one process, or set "
            "PADDLE_DISTRI_BACKEND=gloo",
        ) from error


_log = log.logger(__name__)

#: Below the ports that the system gives to outgoing connections: none of those is in the way.
_PORTS = range(20000, 32000)


def separate_stores(store: Store, timeout: float) -> None:
    """Gives every Gloo group a store of its own, until :func:`share_store_again`.

    If the user chose no interface for Gloo, it sets the one that leads to the other ranks.

    Args:
        store: The job's store, through which a group's ranks find the group's store.
        timeout: Seconds that the ranks of a group may take to arrive.
    """
    process_groups.replace_gloo_stores(_opener(store, "fleetpipe/gloo", timeout))
    _complete_gloo(timeout)


def make_unconnected(timeout: float) -> None:
    """Leaves Paddle's groups without connections until :func:`connect`, as long as a job lasts."""
    process_groups.replace_gloo_stores(None)
    _complete_gloo(timeout)


def connect(store: Store, prefix: str, time: int, timeout: float) -> None:
    """Connects the groups that this process has made anew. Collective over the job.

    Args:
        store: The job's store.
        prefix: That of the keys there, which were not used before.
        time: How often groups were connected anew, this time included.
        timeout: Seconds that the ranks of a group may take to arrive.
    """
    global _in_doubt
    # A later job's ranks differ in what they have made.
    _in_doubt = True
    with translating_errors():
        process_groups.connect_groups(_opener(store, f"{prefix}/gloo", timeout), time)
    process_groups.replace_gloo_stores(_opener(store, f"{prefix}/later", timeout))


def _opener(store: Store, prefix: str, timeout: float) -> Callable[[int, int, int], Any]:
    """Returns a function that opens the store of a group; its members call it together."""
    _choose_interface()

    def own_store(rank: int, ranks: int, group: int) -> Any:
        key = f"{prefix}/{group}"
        opened = _open(store, key, rank, group, timeout)
        # They meet at the job's store, whose waits end when a rank fails.
        keys = {member: f"{key}/here/{member}" for member in range(ranks)}
        store.add(keys[rank], 1)
        _await(store, group, keys, timeout)
        return opened

    return own_store


def _complete_gloo(timeout: float) -> None:
    process_groups.complete_gloo(exchanges.methods())
    process_groups.make_without_gloo(functools.partial(OwnGroup, timeout=timeout))


def share_store_again() -> None:
    """Lets later Gloo groups use the store that Paddle gives them."""
    process_groups.restore_gloo_stores()


def _open(store: Store, key: str, rank: int, group: int, timeout: float) -> Any:
    """Opens a group's store: its first rank serves it, the others find it in the job's store."""
    if rank == 0:
        host = hosts.gloo_interface()[1] or hosts.own_address()
        port = _free_port(host)
    else:
        _await(store, group, {0: f"{key}/published"}, timeout)
        host, _, text = store.get(f"{key}/address").decode().rpartition(":")
        port = int(text)
    opened = open_tcp_store(host, port, rank == 0, timeout)
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
    """Waits until all members of a group have added to their keys."""

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
