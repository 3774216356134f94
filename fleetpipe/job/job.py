"""What this process takes part in between ``fleet.init`` and ``fleet.shutdown``.

A launched job has Paddle's own ``HybridCommunicateGroup``, connections to the other ranks and a
watch over them; a process that plays all ranks itself has a ``LocalTopology`` and needs neither.

All ranks are connected when the job begins, and every group is a view of these connections: it
costs nothing, and making it is not collective. So a rank of a job of n has 2 (n - 1) sockets, half
of them the watch's, which joins all pairs anyhow, and a buffer of 16 KiB for each of the others.
Connections of each group alone would be fewer in a large job, and would take as many meetings in
the store as there are groups.
"""

from __future__ import annotations

import functools
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from fleetpipe.job.agreement import require_agreement
from fleetpipe.job.records import Heard
from fleetpipe.job.run_progress import RunProgress
from fleetpipe.job.watching.watch import Watch
from fleetpipe.mesh.axes import COPIES, REPLICA, SHARDS, Coordinate, Degrees, Mesh
from fleetpipe.mesh.groups import DirectGroup, GlooGroup, Group, SoleGroup
from fleetpipe.paddle_api.device import device_kind, memory_limit, process_bytes, synchronize
from fleetpipe.transport import (
    MemoryHub,
    SocketTransport,
    Store,
    Transport,
    View,
)

#: Methods of Paddle's topology that return the group, which adds large tensors, along an axis.
_PADDLE_GROUPS: Mapping[tuple[str, ...], str] = {
    ("dp",): "get_data_parallel_group",
    ("sharding",): "get_sharding_parallel_group",
    ("sep",): "get_sep_parallel_group",
    ("cp",): "get_context_parallel_group",
    ("mp",): "get_model_parallel_group",
    ("moe_sharding",): "get_moe_sharding_parallel_group",
    ("ep",): "get_expert_parallel_group",
}


if TYPE_CHECKING:  # few jobs load it
    from fleetpipe.transport import ProcessGroupTransport


class Job:
    """A job, as one of its processes sees it.

    Attributes:
        degrees: How the ranks are split.
        mesh: The places of all ranks.
        hcg: Paddle's ``HybridCommunicateGroup``, or a ``LocalTopology``.
        timeout: Seconds that any wait for another rank may last.
        local: Whether this one process plays all ranks.
        run: A name that no other job has, the same on all ranks.
        endings: Called when the job ends, before its connections are closed.
        pipelines: The models that were wrapped for training, as weak references.
        progress: How far this process is, and what its steps take.
        keeps_board: Whether this process keeps the job's board.
        scatters_gradients: Whether those who share the optimizer's state keep the gradients of
            their own share alone.
    """

    def __init__(
        self,
        degrees: Degrees,
        hcg: Any,
        timeout: float,
        number: int = 0,
        store: Store | None = None,
        watch: Watch | None = None,
        connections: SocketTransport | None = None,
        fused_copies: Any = None,
        run: str = "",
        mesh: Mesh | None = None,
        pipeline: ProcessGroupTransport | None = None,
    ) -> None:
        """Describes a job.

        Args:
            degrees: How the ranks are split.
            hcg: The topology that the user sees.
            timeout: Seconds that any wait for another rank may last.
            number: How many jobs the processes began before, so that no key is used twice.
            store: The job's key-value store; None where one process plays all ranks.
            watch: The connections over which its ranks watch each other; None likewise.
            connections: Those for everything else, to all ranks of the job; None likewise.
            fused_copies: Paddle's group of :meth:`copies`, where several axes span them.
            run: A name that no other job has, the same on all ranks; by default a new one.
            mesh: The places of all ranks; by default in Paddle's order.
            pipeline: What tensors of its pipeline go over; by default the connections.
        """
        self.mesh = Mesh(degrees) if mesh is None else mesh
        self.degrees = degrees
        self.hcg = hcg
        self.timeout = timeout
        self.local = store is None
        self.run = run or uuid.uuid4().hex
        self._store = store
        self._prefix = f"fleetpipe/{number}"
        self._pipeline = pipeline
        self._transports: dict[int, Transport] = {}
        if pipeline is not None:
            self._transports[pipeline.rank] = pipeline
        self._groups: dict[str, Group] = {}
        self._fused_copies = fused_copies
        self.endings: list[Callable[[], None]] = []
        self.pipelines: list[weakref.ref[Any]] = []
        self._watch = watch
        self._connections = connections
        self._agreements = 0
        #: Held by the thread that runs a batch.
        self.turn = threading.RLock()
        self.keeps_board = self.scatters_gradients = False
        self.progress: RunProgress = RunProgress() if watch is None else watch.progress
        self.progress.memory, self.progress.memory_limit = process_bytes, memory_limit()
        self.progress.synchronize = self._synchronize
        if connections is not None:
            self.progress.awaited = self._awaited
            self.progress.queues = connections.queues
            self.progress.flights = connections.flights

    def __deepcopy__(self, memo: dict[int, object]) -> Job:
        """Returns itself: a copy of a model is one of the same job."""
        return self

    def heard(self) -> Mapping[int, Heard]:
        """Returns what is known of every process of the job, for its board."""
        if self._watch is not None:
            return self._watch.heard()
        return {0: Heard(self.progress.record(0, self.progress.action(), with_rows=True))}

    def describe_steps(self, stages: Iterable[int], samples: int, held_cap: int | None) -> None:
        """Says what this process runs in each step, for the job's board.

        Args:
            stages: Its stages.
            samples: Rows of a step of one replica.
            held_cap: Most forwards that it may hold; None: no cap.
        """
        progress = self.progress
        progress.stages, progress.shard = tuple(stages), self.shard[0]
        progress.held_cap = held_cap
        progress.replica, progress.samples = self.replica, samples * self.degrees.replicas

    def pipeline_ranks(self) -> list[int]:
        """Returns the ranks of the job that are those of this process's pipeline, in order."""
        return [0] * self.degrees.pp if self.local else self._along(["pp"])

    def connect(self) -> dict[int, Transport]:
        """Returns the transport of each rank of the pipeline that this process plays.

        In a launched job that is a view of the connections to all ranks, or goes over Paddle's
        groups; only the engine sends what is of kind F and B over it.
        """
        if not self._transports:
            if self._connections is None:
                ranks = range(self.degrees.pp)
                hub = MemoryHub(len(ranks))
                self._transports = {rank: hub.endpoint(rank) for rank in ranks}
            else:
                view = View(self._connections, self._along(["pp"]))
                self._transports = {view.rank: view}
        return self._transports

    def connect_among(self, ranks: Sequence[int]) -> dict[int, Transport]:
        """Returns the transport of this process in a pipeline that no axis of the job says.

        Args:
            ranks: The pipeline's, by their numbers in the job; one is this process.
        """
        if self._connections is None:
            return {0: MemoryHub(1).endpoint(0)}
        view = View(self._connections, ranks)
        return {view.rank: view}

    def limit_waits(self, timeout: float) -> None:
        """Sets the seconds that any wait for another rank may last from now on."""
        self.timeout = timeout
        self._groups = {}
        if self._connections is not None:
            self._connections.timeout = timeout
        if self._pipeline is not None:
            self._pipeline.timeout = timeout

    def group(self) -> Group:
        """Returns the ranks of this process's pipeline as a group for collective operations."""
        return self.along("pp")

    def holders(self, ranks: Sequence[int]) -> Group:
        """Returns some ranks of this process's pipeline, those that hold a tied weight.

        Args:
            ranks: Their numbers in the pipeline, in the same order on all of them.
        """
        return self._group(
            f"holders {list(ranks)}", lambda: [self._along(["pp"])[rank] for rank in ranks]
        )

    def members(self, ranks: Sequence[int], purpose: str = "ranks") -> Group:
        """Returns some ranks of the job, of which this process is one.

        Args:
            ranks: Their numbers in the job, in the same order on all of them.
            purpose: What for: no group takes the messages of one with another purpose.
        """
        return self._group(f"{purpose} {list(ranks)}", lambda: list(ranks))

    @functools.cached_property
    def coordinate(self) -> Coordinate:
        """This process's place on each axis; the first rank's where it plays all."""
        if self.local:
            return Coordinate()
        return self.mesh.coordinate(self.hcg.get_global_rank())

    def leads(self, *but: str) -> bool:
        """Whether this process is the one of many that writes: see :meth:`Coordinate.leads`."""
        return self.coordinate.leads(*but)

    @functools.cached_property
    def replica(self) -> int:
        """The number of this process's replica of the model: its dp and sharding coordinates."""
        return self.mesh.replica(self.coordinate)

    @functools.cached_property
    def copy(self) -> int:
        """The number of this process in :meth:`copies`."""
        return self.mesh.number(self.coordinate, COPIES)

    @functools.cached_property
    def shard(self) -> tuple[int, int]:
        """Which shard of tensor-parallel layers this process holds, and of how many."""
        return self.mesh.number(self.coordinate, SHARDS), self.degrees.split(*SHARDS)

    def replicas(self) -> Group:
        """Returns the ranks that do this one's part of the model for other samples, by replica.

        These are all dp x sharding ranks with this rank's place on every other axis.
        """
        return self.along(*REPLICA)

    def copies(self) -> Group:
        """Returns the ranks that hold the same parameters of the same stages.

        These are the replicas, and with sep or cp those that have other parts of their sequences:
        gradients are averaged over all of them.
        """
        return self.along(*COPIES)

    def expert_parallel(self) -> Group:
        """Returns the ranks among which experts are spread: along ep, or without it along dp."""
        return self.along(self._expert_axis)

    def expert_copies(self) -> Group:
        """Returns the ranks that hold the same experts of the same stages."""
        return self.along(*self.copy_axes(spread=True))

    def copy_axes(self, spread: bool, cut: Collection[str] = SHARDS) -> tuple[str, ...]:
        """Returns the axes along which ranks hold the same of a parameter.

        Args:
            spread: Whether it is an expert's.
            cut: Those of ``SHARDS`` along which ranks hold parts of it, or experts of their own.
        """
        if spread and self.degrees.ep > 1:
            return ("moe_sharding",)
        axes = [axis for axis in COPIES if not spread or axis != self._expert_axis]
        return (*axes, *(axis for axis in SHARDS if axis not in cut))

    def beside_sharding(self, spread: bool) -> Group:
        """Returns the ranks with copies of the same parameters that own the same of them."""
        axes = [axis for axis in COPIES if axis not in self.degrees.state_axes]
        if spread:  # along ep all copies of an expert share its state
            axes = [axis for axis in axes if axis != "dp" and self.degrees.ep == 1]
        return self.along(*axes)

    def expert_sharding(self) -> Group:
        """Returns those of :meth:`expert_copies` that share the optimizer's state."""
        return self.along("moe_sharding") if self.degrees.ep > 1 else self.sharding()

    def all_experts(self, sharded: bool) -> Group:
        """Returns the ranks that hold all experts of a stage, each once.

        Args:
            sharded: Whether a rank has those alone whose optimizer state it keeps.
        """
        copies = ("moe_sharding",) if self.degrees.ep > 1 else self.degrees.state_axes
        return self.along(*(copies if sharded else ()), self._expert_axis)

    def whole_model(self) -> Group:
        """Returns the ranks that hold all stages and experts between them."""
        return self.along("pp", self._expert_axis)

    @property
    def _expert_axis(self) -> str:
        return "ep" if self.degrees.ep > 1 else "dp"

    def model_parallel(self) -> Group:
        """Returns the ranks that hold the shards of this replica's stages, by shard."""
        return self.along(*SHARDS)

    def sharding(self) -> Group:
        """Returns the ranks that share the optimizer's state of their stages, by shard."""
        return self.along(*self.degrees.state_axes)

    def along(self, *axes: str) -> Group:
        """Returns the ranks whose places differ from this process's on these axes only."""
        return self._group("+".join(axes), lambda: self._along(axes), self._paddle_group(axes))

    def _along(self, axes: Sequence[str]) -> list[int]:
        return self.mesh.along(self.coordinate, axes)

    def _paddle_group(self, axes: Sequence[str]) -> Callable[[], Any] | None:
        """Returns what returns Paddle's group along some axes; None where sums go without it."""
        split = tuple(axis for axis in axes if getattr(self.degrees, axis) > 1)
        name = _PADDLE_GROUPS.get(split)
        if name is not None:
            method: Callable[[], Any] = getattr(self.hcg, name)
            return method
        copies = tuple(axis for axis in COPIES if getattr(self.degrees, axis) > 1)
        return (lambda: self._fused_copies) if split == copies else None

    def everyone(self) -> Group:
        """Returns all ranks of the job by rank, for small values only."""
        return self._group("everyone", lambda: list(range(self.hcg.nranks)))

    def _group(
        self,
        name: str,
        ranks: Callable[[], list[int]],
        paddle_group: Callable[[], Any] | None = None,
    ) -> Group:
        """Returns a group of the job, made at its first use.

        Args:
            name: Which of the groups that this process is in.
            ranks: Returns its members' ranks in the job, in their order.
            paddle_group: Returns Paddle's group of the same members, which adds large tensors.
        """
        if name not in self._groups:
            self._groups[name] = self._make(name, ranks, paddle_group)
        return self._groups[name]

    def _make(
        self, name: str, ranks: Callable[[], list[int]], paddle_group: Callable[[], Any] | None
    ) -> Group:
        if self._connections is None or len(members := ranks()) == 1:
            return SoleGroup()
        view = View(self._connections, members)
        if paddle_group is None:
            return DirectGroup(view, self.timeout, name)
        return GlooGroup(view, self.timeout, paddle_group(), self._limit_for(members), name)

    def _limit_for(self, ranks: list[int]) -> Callable[[], AbstractContextManager[None]]:
        """Returns what ends this process where some of ``ranks`` stops within Paddle's C++."""
        if self._watch is None:
            return nullcontext
        what = f"within a collective operation of ranks {ranks}"
        return functools.partial(self._watch.limit, self.timeout, what, ranks)

    def trains(self, parameters: Sequence[Any]) -> bool:
        """Whether a pipeline of this job reduces the gradients of any of these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        models = [model for reference in self.pipelines if (model := reference()) is not None]
        return any(id(parameter) in wanted for m in models for parameter in m.trained_parameters())

    def guarded(self, where: Callable[[], str]) -> AbstractContextManager[None]:
        """Within it, a failure elsewhere ends this rank's waits, and one here reaches all others.

        Args:
            where: Says what this rank is doing, for the messages of all.

        Raises:
            PeerFailed: Another rank failed; the message has its error and traceback.
            PipelineTimeout: A wait reached its limit; the message says where every rank is.
        """
        if self._watch is None:
            self.progress.action = where
            return nullcontext()
        return self._watch.guarding(lambda: self._describe(where()))

    def _synchronize(self) -> None:
        with self.limited_by_card():
            synchronize()

    def limited_by_card(self) -> AbstractContextManager[None]:
        """Within it, a process that stays at one operation for too long is ended, and says where.

        A wait for a card has no limit of its own. A read of a tensor waits for what is sent, too:
        where two ranks read before they take what the other one sends, neither goes on.
        """
        if self._watch is None or device_kind() == "cpu":
            return nullcontext()
        # Waits for messages end before, with their own words.
        return self._watch.limit(2 * self.timeout, "", self.pipeline_ranks())

    def require_agreement(self, facts: Mapping[str, str]) -> None:
        """Makes sure that all ranks say the same of themselves. Collective over the job.

        Args:
            facts: What must be the same on all ranks, by subject.

        Raises:
            ConfigError: Some rank says otherwise; the message shows both sides. Every rank raises.
            PeerFailed: Some rank failed, or ended before it arrived.
            PipelineTimeout: Some rank did not arrive within the limit.
        """
        if self._store is not None:
            self._agreements += 1
            key = f"{self._prefix}/agreement/{self._agreements}"
            gone = tuple if self._watch is None else self._watch.gone
            require_agreement(self._store, key, facts, self.timeout, gone)

    def close(self, error: BaseException | None = None) -> None:
        """Closes this process's connections; what was sent before is still delivered.

        Args:
            error: Why the process ends, if it ends before its work is done.

        Raises:
            PeerFailed: Another rank has failed, and this one was not told of it before.
            PipelineTimeout: Another rank did not take what was sent to it within the limit.
        """
        try:
            if error is None and self._watch is not None and not self._watch.noticed:
                with self.guarded(lambda: "ending the job"):
                    for transport in (self._pipeline, self._connections):
                        if transport is not None:
                            transport.flush(self.timeout)
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        watch, self._watch = self._watch, None
        if watch is not None and error is not None:
            watch.give_up(error)
        with ExitStack() as ends:  # the last one first, and all, whichever of them fails
            if watch is not None:
                ends.callback(watch.close)
            if self._connections is not None:
                ends.callback(self._connections.close)
            for connection in self._transports.values():
                ends.callback(connection.close)
            for ending in self.endings:
                ends.callback(ending)
            self._transports, self._groups, self.endings = {}, {}, []

    def _awaited(self) -> int | None:
        """Returns the rank of the job that this process waits for at this moment, or None."""
        if self._pipeline is not None and (peer := self._pipeline.awaited) is not None:
            return self.pipeline_ranks()[peer]
        return None if self._connections is None else self._connections.awaited

    def _describe(self, text: str) -> str:
        """Adds to what this rank is doing which replica it is, and for which rank it waits."""
        if self.degrees.size == self.degrees.pp:
            text = text.removeprefix(f"rank {self.coordinate.pp}, ")
        for axis, name in (("mp", "shard"), ("cp", "cp rank"), ("sep", "sep rank")):
            if getattr(self.degrees, axis) > 1:
                text = f"{name} {getattr(self.coordinate, axis)}, {text}"
        if self.degrees.replicas > 1:
            text = f"replica {self.replica}, {text}"
        awaited = self._awaited()
        return text if awaited is None else f"{text}, waiting for rank {awaited}"


_job: Job | None = None


def current_job() -> Job | None:
    """Returns the job between ``fleet.init`` and ``fleet.shutdown``, else None."""
    return _job


def pipeline_group() -> Group:
    """Returns the ranks of the current job's pipeline as a group; one process outside of a job."""
    return SoleGroup() if _job is None else _job.group()


def mp_shard() -> tuple[int, int]:
    """Returns this process's place along mp, and the number of ranks there."""
    return (0, 1) if _job is None else (_job.coordinate.mp, _job.degrees.mp)


def all_ranks() -> Group:
    """Returns all ranks of the current job as a group, for small values; see ``Job.everyone``."""
    return SoleGroup() if _job is None else _job.everyone()


def begin(job: Job) -> None:
    """Makes ``job`` the current one."""
    global _job
    _job = job


def end(error: BaseException | None = None) -> None:
    """Closes the current job, if there is one; ``error`` says why it ends before its time."""
    global _job
    ended, _job = _job, None
    if ended is not None:
        ended.close(error)
