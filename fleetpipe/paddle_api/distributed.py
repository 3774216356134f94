"""Controls how Paddle begins a job: its stores, its process groups, and the topology of Fleet.

Some functions create Gloo's groups, connect them again, and add operations that Gloo lacks. All
names are the same in 2.6.2 and 3.3.x.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from paddle.base import core
from paddle.distributed import collective as _collective
from paddle.distributed import parallel as _parallel
from paddle.distributed.communication.group import Group as Group
from paddle.distributed.fleet.base import topology as _topology

from fleetpipe.aliases import PaddleGroup, PaddleStore, Strategy, Topology
from fleetpipe.errors import StateError
from fleetpipe.paddle_api import paddle, paddle_fleet, replaced
from fleetpipe.paddle_api.device import device_kind, device_setter

#: Paddle's modules with all their names: their stubs hide some that are used here.
_paddle_collective: Any = _collective
_paddle_parallel: Any = _parallel
_paddle_topology: Any = _topology

#: A number that no number of a group reaches.
_MOST_GROUPS = 1 << 16
#: This rank's index in each Gloo group and the group's size, by Paddle's number of the group.
_gloo_groups: dict[int, tuple[int, int]] = {}
#: The stores of all groups: a store must live as long as its group.
_group_stores: list[PaddleStore] = []

#: Fleet's topology where there are experts; 2.6.2 has none.
_EPTopology: Any = getattr(_topology, "EPHybridCommunicateGroup", _topology.HybridCommunicateGroup)

#: Paddle's attribute for a rank's coordinate on each axis.
_COORDINATES = {
    "dp": "_data_parallel_id",
    "mp": "_model_parallel_id",
    "sharding": "_sharding_parallel_id",
    "sep": "_sep_parallel_id",
    "cp": "_cp_parallel_id",
    "cp_sharding": "_cp_sharding_parallel_id",
    "ep": "_expert_parallel_id",
    "moe_sharding": "_moe_sharding_parallel_id",
    "pp": "stage_id",
}


def open_tcp_store(host: str, port: int, serve: bool, timeout: float) -> PaddleStore:
    """Returns a TCPStore that this process serves, or one that another process serves.

    Args:
        host: The host of the server.
        port: Its port.
        serve: Whether this process is the server.
        timeout: Seconds after which the store's own waits end.
    """
    # With a world of 0 the constructor waits for nobody; such a wait could not be interrupted.
    store = core.TCPStore(host, port, serve, 0, int(timeout) + 1)
    _send_at_once(port)
    if serve:
        _show_clients_that_leave(host, port, timeout)
    return store


def _send_at_once(port: int) -> None:
    """Makes this process's connections to the store at ``port`` send each write at once.

    A request is three writes. The system would delay the second until the server has acknowledged
    the first, which takes 40 ms; meanwhile the server waits for the second and answers nobody else.
    """
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as client:
                    if client.family == socket.AF_INET and client.getpeername()[1] == port:
                        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _show_clients_that_leave(host: str, port: int, timeout: float) -> None:
    """Connects one client that closes its connection to the server, and one that resets it.

    At the first client of each kind the server's thread asks glog whether to log that, under a lock
    that is destroyed while the process exits: without this, the last rank to leave would abort the
    process of the server, after all its work.
    """
    for linger in (struct.pack("ii", 0, 0), struct.pack("ii", 1, 0)):
        with socket.create_connection((host, port), timeout) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def replace_gloo_stores(own_store: Callable[[int, int, int], PaddleStore] | None) -> None:
    """Makes every Gloo group that is created from now on use another store.

    Args:
        own_store: ``own_store(rank_in_group, ranks, group_id)`` returns the store of a group; None
            to leave groups unconnected until :func:`connect_groups`.
    """
    restore_gloo_stores()
    original = _paddle_collective._new_process_group_impl

    @functools.wraps(original)
    def new_group(
        backend: str, store: PaddleStore, rank: int, ranks: int, *more: object, **named: Any
    ) -> PaddleGroup:
        """Creates a group as Paddle's function does; a group of Gloo's gets another store."""
        if backend == "gloo" and has_gloo():
            # The default group, which is number 0, gives no group_id.
            number = named.get("group_id", 0)
            _gloo_groups[number] = rank, ranks
            if own_store is None:
                return _Unconnected()
            store = own_store(rank, ranks, number)
            _group_stores.append(store)
        return original(backend, store, rank, ranks, *more, **named)

    _paddle_collective._new_process_group_impl = new_group
    if own_store is None:
        # This creates the default group, which otherwise uses the store that Paddle has opened.
        _paddle_parallel._new_process_group_impl = new_group


class _Unconnected:
    """Stands for the process group of a group that is not connected yet.

    Operations do nothing, as long as Paddle's topology tries each group once; later they raise.

    Attributes:
        refusal: The reason why operations raise an error; empty if they do nothing.
    """

    refusal = ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if self.refusal:
            raise StateError(
                f"{name} of one of Paddle's groups meets nobody",
                cause=self.refusal,
                fix="nothing to do: the whole job starts again, as it always does without --heal",
            )
        return lambda *_, **__: SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)


def refuse_unconnected(why: str) -> None:
    """Makes operations of unconnected groups raise an error from now on, with the cause ``why``."""
    _Unconnected.refusal = why


def connect_groups(own_store: Callable[[int, int, int], PaddleStore], time: int) -> None:
    """Connects every Gloo group of this process again. Collective over the job.

    Paddle's objects of the groups stay the same, so that code that has them goes on using them.

    Args:
        own_store: ``own_store(rank_in_group, ranks, group_id)`` returns the store of a group.
        time: The number of this call, from 1: Paddle accepts no number of a connection twice.
    """
    default = _paddle_collective._get_group_map()[0]
    groups = {0: (default.rank, default.nranks), **_gloo_groups}
    for number, (rank, ranks) in groups.items():
        store = own_store(rank, ranks, number)
        _group_stores.append(store)
        process_group = core.ProcessGroupGloo.create(
            store, rank, ranks, time * _MOST_GROUPS + number
        )
        _paddle_collective._get_group_map()[number]._pg = process_group


def has_gloo() -> bool:
    """Returns whether this Paddle has Gloo; the wheels for macOS and Windows lack it."""
    return isinstance(getattr(core, "ProcessGroupGloo", None), type)


def replace_missing_gloo(create: Callable[..., PaddleGroup]) -> None:
    """Makes ``create(store, rank, ranks, group_id)`` create groups where Gloo cannot.

    Gloo is missing in the wheels for macOS and Windows, and takes no tensors on a GPU. Where it
    works, this function does nothing.
    """
    if not has_gloo() or device_kind() != "cpu":
        vars(core)["ProcessGroupGloo"] = SimpleNamespace(create=create)


def replace_gloo_methods(methods: Mapping[str, Callable[..., Any]]) -> None:
    """Sets methods of Gloo's groups, by name, in place of those that raise "not implemented"."""
    if has_gloo():
        for name, method in methods.items():
            setattr(core.ProcessGroupGloo, name, method)


def ranks_of(process_group: PaddleGroup) -> list[int]:
    """Returns the members of one of Paddle's process groups, as ranks of the job."""
    groups = _paddle_collective._group_map.values()
    return next(list(group.ranks) for group in groups if group.process_group is process_group)


def isend_and_irecv(group: PaddleGroup, peer: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns functions that work like Paddle's ``isend`` and ``irecv`` with one peer.

    In static mode, Paddle's own would add an operation to the program.

    Args:
        group: A group of Paddle's.
        peer: The rank of the job to send to and receive from.
    """
    process_group, rank = group.process_group, group.get_group_rank(peer)

    def isend(tensor: Any) -> Any:
        return process_group.send(tensor, rank, False)

    def irecv(tensor: Any) -> Any:
        return process_group.recv(tensor, rank, False)

    return isend, irecv


def restore_gloo_stores() -> None:
    """Undoes :func:`replace_gloo_stores`, if it was called; existing groups keep their stores."""
    current = _paddle_collective._new_process_group_impl
    stock = getattr(current, "__wrapped__", current)
    _paddle_collective._new_process_group_impl = _paddle_parallel._new_process_group_impl = stock


def group_of_ring(ring_id: int) -> PaddleGroup:
    """Returns the group of a number (``ring_id``) of Paddle's; 0 is the default group."""
    return _paddle_collective._get_group_map()[ring_id]


def communicates_over_host() -> bool:
    """Returns whether groups communicate through the hosts' memory: on CPUs, and on a shared GPU.

    The launcher makes ranks that share a GPU use Gloo, since NCCL refuses them.
    """
    return device_kind() == "cpu" or os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo"


def choose_backend() -> None:
    """Makes a launched rank on a CPU use Gloo, whatever its environment says.

    With no backend set, or another one, Paddle starts an HTTP server at the endpoint of rank 0,
    where the job's store is, and waits for it without a limit; or it looks for NCCL.
    """
    if "PADDLE_TRAINER_ID" in os.environ and device_kind() == "cpu":
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"


def hide_own_flags() -> None:
    """Stops Paddle 3.3 from printing, at the begin of each job, a flag that Paddle has changed."""
    stock = getattr(_parallel, "_print_modified_flags", None)
    if stock is not None and not hasattr(stock, "__wrapped__"):

        @functools.wraps(stock)
        def print_others(flags: Sequence[Any]) -> None:
            stock([flag for flag in flags if "pir_in_executor" not in flag.name])

        _parallel._print_modified_flags = print_others


class LocalTopology(_topology.HybridCommunicateGroup):
    """Paddle's topology for one process that plays all ranks of a pipeline.

    The process is stage 0, first and last at once, in a pipe of ``ranks``; every other axis has
    size 1, and this process is the only member of every group.
    """

    def __init__(self, ranks: int) -> None:
        """Sets the attributes of Paddle's constructor, without the collectives that it runs."""
        names = _topology.CommunicateTopology().get_hybrid_group_names()
        dims = [ranks if name == "pipe" else 1 for name in names]
        self._topo = _topology.CommunicateTopology(names, dims)
        self.nranks = 1
        self.global_rank = self.stage_id = 0
        self.is_first_stage = self.is_last_stage = True
        self.next_rank = self.prev_rank = 0
        self._pp_degree = ranks
        self._dp_degree = self._mp_degree = self._sharding_degree = self._sep_degree = 1
        self._data_parallel_id = 0
        self._model_parallel_id: Any = 0  # Paddle's stub says str
        self._sharding_parallel_id = self._sep_parallel_id = 0
        alone = sole_group()
        self._pp_comm_group = self._dp_comm_group = self._mp_comm_group = alone
        self._sharding_comm_group = self._check_comm_group = alone

    def get_expert_parallel_rank(self) -> int:
        """Returns 0, the rank on every axis of size 1."""
        return 0

    def get_expert_parallel_world_size(self) -> int:
        """Returns 1, as experts are not spread here."""
        return 1

    def get_expert_parallel_group(self) -> PaddleGroup:
        """Returns the group whose only member is this process."""
        return self._dp_comm_group

    # Paddle has these only with experts, or with more than one rank.
    get_context_parallel_rank = get_expert_parallel_rank
    get_context_parallel_world_size = get_expert_parallel_world_size
    get_context_parallel_group = get_sep_parallel_group = get_expert_parallel_group


class MeshTopology(_EPTopology):  # type: ignore[misc]
    """Fleet's topology for axes or degrees that Paddle's constructors refuse.

    Paddle refuses cp without ep, and ep beside dp or sep. A topology that both can build has equal
    attributes; Paddle's methods use the attributes.
    """

    def __init__(
        self,
        rank: int,
        degrees: Mapping[str, int],
        coordinates: Mapping[str, int],
        numbering: Sequence[tuple[str, int]],
        groups: Mapping[str, Sequence[Sequence[int]]],
    ) -> None:
        """Creates Paddle's groups. Collective over the job.

        Args:
            rank: This process's rank.
            degrees: The degrees by axis, with sharding as Fleet counts it, and ``cp_sharding``.
            coordinates: This rank's coordinates, by the same axes.
            numbering: Fleet's names and sizes of the axes that number ranks, the outermost first.
            groups: The ranks of all groups of a kind, by Paddle's name of the kind.
        """
        self.nranks, self.global_rank = math.prod(size for _, size in numbering), rank
        names, sizes = [name for name, _ in numbering], [size for _, size in numbering]
        self._topo = self._dense_topo = _topology.CommunicateTopology(names, sizes)
        for axis, degree in degrees.items():
            setattr(self, f"_{axis}_degree", degree)
        for axis, name in _COORDINATES.items():
            setattr(self, name, coordinates[axis])
        for name, lists in groups.items():
            created = [(ranks, paddle.distributed.new_group(ranks=[*ranks])) for ranks in lists]
            ranks, group = next((ranks, group) for ranks, group in created if rank in ranks)
            setattr(self, f"{name}_group", [*ranks])
            setattr(self, f"{name}_comm_group", group)
        self._moe_pp_degree = self._pp_degree
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self._pp_degree - 1
        self._set_p2p_prev_next()
        if _paddle_topology._use_four_directions:
            self._set_four_directions_p2p_group()

    def get_parallel_mode(self) -> Any:
        """Returns Paddle's name for the job's parallelism; cp counts as a split of sequences."""
        mode, modes = super().get_parallel_mode(), paddle.distributed.ParallelMode
        if self._cp_degree > 1 and mode in (None, modes.DATA_PARALLEL):
            # paddle.distributed's own class lacks the newest of these names.
            return _paddle_topology.ParallelMode.SEGMENT_PARALLEL
        return mode


def replace_role_maker_gloo(workers: object) -> None:
    """Makes Fleet's role maker use ``workers``, an object with Gloo's methods, in place of Gloo."""
    paddle_fleet.fleet._role_maker._gloo = workers


@contextmanager
def replacing_store_and_groups(
    open_store: Callable[[], PaddleStore], new_group: Callable[..., PaddleGroup]
) -> Iterator[None]:
    """Opens a context in which Paddle's start of a job uses other functions for store and groups.

    Args:
        open_store: Returns the store to use as Paddle's own. Paddle's own waits for all ranks
            without a limit while it holds the interpreter's lock: no thread could end the wait.
        new_group: Called instead of Paddle's ``new_group``: with that function and its arguments.
    """
    # Paddle's start over Gloo would set the device to the CPU; over NCCL it chooses the GPU.
    by_host, return_to_device = communicates_over_host(), device_setter()
    names: list[tuple[object, str, object]] = [
        (core, "create_or_get_global_tcp_store", open_store),
        (
            paddle.distributed,
            "new_group",
            functools.partial(new_group, paddle.distributed.new_group),
        ),
    ]
    if by_host:
        # A Paddle that was built for GPUs looks for a library that these ranks do not need.
        names.append((_paddle_topology, "check_nccl_version_for_p2p", lambda: None))
    try:
        with replaced(*names):
            yield
    finally:
        if by_host:
            return_to_device()


@contextmanager
def replacing_topology(make: Callable[[], Topology]) -> Iterator[None]:
    """Opens a context in which Paddle's ``fleet.init`` gets its topology from ``make``."""

    def make_topology(*_: object) -> Topology:
        _paddle_topology._HYBRID_PARALLEL_GROUP = hcg = make()
        return hcg

    classes = ("HybridCommunicateGroup", "EPHybridCommunicateGroup")
    with replaced(*((_paddle_topology, name, make_topology) for name in classes)):
        yield


def began_without_groups() -> bool:
    """Returns whether Paddle's ``init_parallel_env`` was called and has created no group.

    That is how Paddle starts in its older mode.
    """
    is_begun = bool(_paddle_parallel.parallel_helper._is_parallel_ctx_initialized())
    return is_begun and not paddle.distributed.is_initialized()


def install_topology(hcg: Topology, strategy: Strategy) -> None:
    """Makes Paddle's own fleet functions use the topology ``hcg`` and ``strategy``."""
    paddle_fleet.fleet._hcg = hcg
    paddle_fleet.fleet._topology = None if hcg is None else hcg.topology()
    paddle_fleet.fleet._user_defined_strategy = strategy
    _paddle_topology._HYBRID_PARALLEL_GROUP = hcg


def fleet_has_begun() -> bool:
    """Returns whether Paddle's own ``fleet.init``, or fleetpipe's, has begun a job."""
    return getattr(paddle_fleet.fleet, "_hcg", None) is not None


def user_strategy() -> Strategy:
    """Returns the strategy that ``fleet.init`` or ``fleet.distributed_optimizer`` got last.

    It is None before the first ``fleet.init``, when Paddle's singleton has no such attribute.
    """
    return getattr(paddle_fleet.fleet, "_user_defined_strategy", None)


def forget_topology() -> None:
    """Lets Paddle's next ``fleet.init`` build a topology with other degrees."""
    _paddle_topology._HYBRID_PARALLEL_GROUP = None
    paddle_fleet.fleet._hcg = None
    paddle_fleet.fleet._topology = None


def hybrid_topology() -> Topology:
    """Returns the ``HybridCommunicateGroup`` of Paddle's last ``fleet.init``, else None."""
    return _paddle_topology._HYBRID_PARALLEL_GROUP


def sole_group() -> PaddleGroup:
    """Returns a group of Paddle's whose only member is this process."""
    return Group(0, 0, [0])


def in_data_parallel_mode(hcg: Topology) -> bool:
    """Returns whether only dp has a degree above 1, so that ``DataParallel`` averages gradients."""
    return bool(hcg.get_parallel_mode() == paddle.distributed.ParallelMode.DATA_PARALLEL)
