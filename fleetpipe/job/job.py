"""What this process takes part in between ``fleet.init`` and ``fleet.shutdown``.

A launched job has Paddle's own ``HybridCommunicateGroup``, connections to the other ranks and a
watch over them; a process that plays all ranks itself has a ``LocalTopology`` and needs neither.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from fleetpipe import transport
from fleetpipe.job import meeting
from fleetpipe.job.agreement import require_agreement
from fleetpipe.job.degrees import Degrees
from fleetpipe.job.store import JobStore
from fleetpipe.job.watch import Watch
from fleetpipe.transport import (
    DirectGroup,
    GlooGroup,
    Group,
    MemoryHub,
    SocketTransport,
    SoleGroup,
    Store,
    Transport,
)
from fleetpipe.transport.joining.mesh import join


class Job:
    """A job, as one of its processes sees it.

    Attributes:
        degrees: How the ranks are split.
        hcg: Paddle's ``HybridCommunicateGroup``, or a ``LocalTopology``.
        timeout: Seconds that any wait for another rank may last.
        local: Whether this one process plays all ranks.
        endings: Called when the job ends, before its connections are closed.
        pipelines: The models that were wrapped for training, as weak references.
    """

    def __init__(
        self,
        degrees: Degrees,
        hcg: Any,
        timeout: float,
        number: int = 0,
        store: Store | None = None,
        watch: Watch | None = None,
        fused_replicas: Any = None,
    ) -> None:
        """Describes a job.

        Args:
            degrees: How the ranks are split.
            hcg: The topology that the user sees.
            timeout: Seconds that any wait for another rank may last.
            number: How many jobs the processes began before, so that no key is used twice.
            store: The job's key-value store; None where one process plays all ranks.
            watch: The connections over which its ranks watch each other; None likewise.
            fused_replicas: Paddle's group of all replicas, where both dp and sharding split them.
        """
        self.degrees = degrees
        self.hcg = hcg
        self.timeout = timeout
        self.local = store is None
        self._store = store
        self._prefix = f"fleetpipe/{number}"
        self._transports: dict[int, Transport] = {}
        self._groups: dict[str, Group] = {}
        self._fused_replicas = fused_replicas
        self.endings: list[Callable[[], None]] = []
        self.pipelines: list[weakref.ref[Any]] = []
        self._watch = watch
        self._agreements = 0
        self._sockets: list[tuple[SocketTransport, list[int]]] = []

    def connect(self) -> dict[int, Transport]:
        """Returns the transport of each rank of the pipeline that this process plays.

        Collective over the ranks of a pipeline the first time it is called in a job.

        Raises:
            PipelineTimeout: Some rank did not arrive; the message says which.
        """
        if not self._transports:
            pp = self.degrees.pp
            if self._store is None:
                hub = MemoryHub(pp)
                self._transports = {rank: hub.endpoint(rank) for rank in range(pp)}
            else:
                first = self.hcg.get_rank_from_stage(0)
                rank = self.hcg.get_stage_id()
                ranks = [self.hcg.get_rank_from_stage(stage) for stage in range(pp)]
                self._transports = {rank: self._join(self._store, f"pipeline/{first}", rank, ranks)}
        return self._transports

    def group(self) -> Group:
        """Returns the ranks of this process's pipeline as a group for collective operations."""
        if self.local:
            return SoleGroup()
        (connection,) = self.connect().values()
        return DirectGroup(connection, self.timeout)

    @property
    def replica(self) -> int:
        """The number of this process's replica of the model: its dp and sharding coordinates."""
        if self.degrees.replicas == 1:
            return 0
        shard: int = self.hcg.get_sharding_parallel_rank()
        replica: int = self.hcg.get_data_parallel_rank() * self.degrees.sharding + shard
        return replica

    def replicas(self) -> Group:
        """Returns the ranks that hold the same parameters of the same stages, by replica.

        These are all dp x sharding ranks with this rank's place in the pipeline and its slice of
        tensor-parallel layers; each sees other data. Collective over these the first time it is
        called in a job.
        """
        degrees, stage = self.degrees, self.hcg.get_stage_id()
        return self._group(
            "replicas",
            lambda: [
                self.hcg.get_rank_from_stage(stage, data=data, sharding=shard)
                for data in range(degrees.dp)
                for shard in range(degrees.sharding)
            ],
            self.replica,
            self._replicas_in_paddle,
        )

    def model_parallel(self) -> Group:
        """Returns the ranks that hold the slices of this replica's stages, by slice.

        Collective over these the first time it is called in a job.
        """
        group = self.hcg.get_model_parallel_group
        return self._group(
            "slices", lambda: group().ranks, self.hcg.get_model_parallel_rank(), group
        )

    def sharding(self) -> Group:
        """Returns the ranks that share the optimizer's state of their stages, by shard.

        Collective over these the first time it is called in a job.
        """
        group = self.hcg.get_sharding_parallel_group
        return self._group(
            "shards", lambda: group().ranks, self.hcg.get_sharding_parallel_rank(), group
        )

    def everyone(self) -> Group:
        """Returns all ranks of the job by rank, for small values only.

        Collective over the job the first time it is called.
        """
        return self._group("everyone", lambda: list(range(self.hcg.nranks)), self.hcg.global_rank)

    def _group(
        self,
        name: str,
        ranks: Callable[[], list[int]],
        rank: int,
        paddle_group: Callable[[], Any] | None = None,
    ) -> Group:
        """Returns a group of the job, made at its first use.

        Args:
            name: Which of the groups that this process is in.
            ranks: Returns its members' ranks in the job.
            rank: The place of this process among these.
            paddle_group: Returns Paddle's group of the same members, which adds large tensors.
        """
        if name not in self._groups:
            members = [0] if self._store is None else ranks()
            if self._store is None or len(members) == 1:
                self._groups[name] = SoleGroup()
            else:
                connection = self._join(self._store, f"{name}/{members[0]}", rank, members)
                self._groups[name] = (
                    DirectGroup(connection, self.timeout)
                    if paddle_group is None
                    else GlooGroup(
                        connection, self.timeout, paddle_group(), self._limit_for(members)
                    )
                )
        return self._groups[name]

    def _limit_for(self, ranks: list[int]) -> Callable[[], AbstractContextManager[None]]:
        """Returns what ends this process where some of ``ranks`` stops within Paddle's C++."""
        if self._watch is None:
            return nullcontext
        what = f"within a collective operation of ranks {ranks}"
        return functools.partial(self._watch.limit, self.timeout, what, ranks)

    def _replicas_in_paddle(self) -> Any:
        if self._fused_replicas is not None:
            return self._fused_replicas
        if self.degrees.sharding > 1:
            return self.hcg.get_sharding_parallel_group()
        return self.hcg.get_data_parallel_group()

    def trains(self, parameters: Sequence[Any]) -> bool:
        """Whether a pipeline of this job reduces the gradients of any of these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        models = [model for reference in self.pipelines if (model := reference()) is not None]
        return any(id(parameter) in wanted for m in models for parameter in m.parameters())

    def guarded(self, where: Callable[[], str]) -> AbstractContextManager[None]:
        """Within it, a failure elsewhere ends this rank's waits, and one here reaches all others.

        Args:
            where: Says what this rank is doing, for the messages of all.

        Raises:
            PeerFailed: Another rank failed; the message has its error and traceback.
            PipelineTimeout: A wait reached its limit; the message says where every rank is.
        """
        if self._watch is None:
            return nullcontext()
        return self._watch.guarding(lambda: self._describe(where()))

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
                    for connection, _ in self._sockets:
                        connection.flush(self.timeout)
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        watch, self._watch = self._watch, None
        if watch is not None and error is not None:
            watch.give_up(error)
        with ExitStack() as ends:  # the last one first, and all, whichever of them fails
            if watch is not None:
                ends.callback(watch.close)
            for connection in [*self._transports.values(), *(c for c, _ in self._sockets)]:
                ends.callback(connection.close)
            for ending in self.endings:
                ends.callback(ending)
            self._transports, self._groups, self.endings = {}, {}, []

    def _describe(self, text: str) -> str:
        """Adds to what this rank is doing which replica it is, and for which rank it waits."""
        if self.degrees.replicas * self.degrees.mp == 1:
            text = text.removeprefix(f"rank {self.hcg.get_stage_id()}, ")
        if self.degrees.mp > 1:
            text = f"slice {self.hcg.get_model_parallel_rank()}, {text}"
        if self.degrees.replicas > 1:
            text = f"replica {self.replica}, {text}"
        for connection, ranks in self._sockets:
            if connection.awaited is not None:
                text += f", waiting for rank {ranks[connection.awaited]}"
        return text

    def _join(self, store: Store, name: str, rank: int, ranks: list[int]) -> Transport:
        """Connects the ``ranks`` of the job, of which this process is number ``rank``."""
        connection = transport.connect(
            rank=rank,
            ranks=len(ranks),
            store=store,
            namespace=f"{self._prefix}/{name}",
            timeout=self.timeout,
        )
        self._sockets.append((connection, ranks))
        if self._watch is not None:
            self._watch.on_failure(connection.interrupt)
        return connection


def begin_to_watch(store: JobStore, number: int, timeout: float) -> Watch:
    """Waits for all ranks of a job and connects each to every other. Collective over the job.

    Args:
        store: The job's store, whose waits from now on end when a rank fails.
        number: How many jobs the processes began before.
        timeout: Seconds that the ranks may take to arrive.

    Raises:
        PipelineTimeout: Some rank did not arrive; the message says which.
    """
    store.check = lambda: None
    meeting.wait_for_all(store, number, timeout)
    rank = meeting.own_rank()
    ((sockets, seals),) = join(
        rank=rank,
        ranks=meeting.world_size(),
        store=store,
        namespace=f"fleetpipe/{number}/watch",
        timeout=timeout,
    )
    watch = Watch(rank, sockets, seals)
    store.check = watch.check
    return watch


_job: Job | None = None


def current_job() -> Job | None:
    """Returns the job between ``fleet.init`` and ``fleet.shutdown``, else None."""
    return _job


def pipeline_group() -> Group:
    """Returns the ranks of the current job's pipeline as a group; one process outside of a job."""
    return SoleGroup() if _job is None else _job.group()


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
