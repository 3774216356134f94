"""The job: everything that this process shares with others until ``fleet.shutdown``.

A launched job has Paddle's own ``HybridCommunicateGroup``, connections to the other ranks and a
watch, which tells every rank when another one fails. A process that plays all ranks itself has a
``LocalTopology``, and neither connections nor a watch.

All ranks are connected when the job begins, and every group is a view of these connections. So a
rank of a job of n has 2 (n - 1) sockets, half of them for the watch, which connects all pairs
anyhow, and a buffer of 16 KiB for each of the others. Separate connections for each group would be
fewer in a large job, but would take one meeting in the store for each group.

``Recovery`` is the interface of the extra that heals a job: replaces a process that died.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from fleetpipe import log
from fleetpipe.errors import PeerFailed, PipelineTimeout, StateError
from fleetpipe.job import attempt_files
from fleetpipe.job.allow import Allow
from fleetpipe.job.meeting import require_agreement
from fleetpipe.job.mesh_groups import MeshGroups
from fleetpipe.job.records import LastRecord, RunProgress
from fleetpipe.job.watch import Watch
from fleetpipe.mesh.axes import DENSE, REPLICA, Degrees, Mesh
from fleetpipe.mesh.groups import DirectGroup, GlooGroup, Group, SoleGroup
from fleetpipe.paddle_api.device import device_kind, memory_limit, process_bytes, synchronize
from fleetpipe.transport import Store, Transport, View

if TYPE_CHECKING:
    from fleetpipe.job.attempt_files import Failure
    from fleetpipe.transport import ProcessGroupTransport, SocketTransport
    from fleetpipe.transport.lanes import Lane
    from fleetpipe.transport.peer_connections import Joined

_log = log.logger(__name__)

#: Describes, in errors, a process that replaces a rank before its first batch.
ALONE = "this process replaces a rank that died, and meets the others at its first batch"

#: The job between ``fleet.init`` and ``fleet.shutdown``.
_job: Job | None = None


class Recovery(Protocol):
    """Lets a job go on after the death of another rank, whose process is replaced.

    Attributes:
        counts: Whether the script is within a step.
    """

    counts: bool

    def follow(self, model: Any, scaler: Any, guards: int, drawn: bool) -> None:
        """From now on, lets a death restart the whole job if a model's batches cannot be repeated.

        Args:
            model: The model that is trained.
            scaler: Its ``GradScaler``, or None.
            guards: Every how many steps guards compare the ranks; 0 for never.
            drawn: Whether the script passes a function that returns a batch, in place of a batch.
        """

    def refuse(self, why: str) -> None:
        """From now on, lets a death restart the whole job; ``why`` says why no rank is replaced."""

    def train(self, begin: Callable[[Any], Any], data: Any, optimizer: Any) -> Any:
        """Trains a batch, and again if another rank dies in it.

        Args:
            begin: Trains a batch of data; returns its result.
            data: The data.
            optimizer: The optimizer.

        Returns:
            The result of ``begin``.
        """

    def meet(self) -> object:
        """Connects all ranks again, after one was replaced. Collective over the job."""

    def forbid_healing(self, why: str, allowed_in_share: bool = True) -> None:
        """Marks the present step as one that a replacement process cannot repeat.

        If a rank dies in this step, the whole job starts again.

        Args:
            why: What cannot be repeated.
            allowed_in_share: Whether this call has no effect within ``act`` of :meth:`share`,
                which is repeated.
        """

    def share(
        self, what: str, act: Callable[[], Any], pass_over: Callable[[], object] | None
    ) -> Any:
        """Returns the result of ``act``, repeated after a rank's death.

        ``what`` is what ``act`` does, for messages; a replacement process that comes too late
        for the call runs ``pass_over`` in its place.
        """

    def heal(self, error: PeerFailed | PipelineTimeout) -> bool:
        """Connects to the process that replaces a rank whose death was noticed after a batch.

        Returns:
            Whether the new process has done that batch, too.

        Raises:
            FleetPipeError: ``error``, if the rank cannot be replaced.
        """


class Job(MeshGroups):
    """What one process knows of its job and shares with the job's other ranks.

    Attributes:
        timeout: Seconds that any wait for another rank may last.
        run: A unique name of the job, the same on all ranks.
        endings: Functions to call when the job ends, before its connections are closed.
        pipelines: The models that were wrapped for training, as weak references.
        progress: The steps that this process has done, and their times.
        neighbours: Paddle's groups by which the tensors of its pipeline are sent; empty if they go
            over sockets.
        keeps_board: Whether this process collects the records of all ranks.
        scatters_gradients: Whether the ranks that share the optimizer's state store the gradients
            of their own share only.
        healing: Lets the job go on after the death of another rank; None if a death ends the job.
        before_batches: By the ``id()`` of a model, a function that is called before each of the
            model's batches, with the model's optimizer.
        alone: Whether this process replaces a rank, and is not connected to the others yet.
        allow: What the script permits, by name, though fleetpipe does not know it to be right.
        has_pipeline: Whether a pipeline has connected its ranks.
        compares_calls: Whether the job ends if ranks begin different collective calls; not in a
            job that heals.
        sums_by_tree: Whether sums over micro-batches, ranks and shards are those of
            :mod:`fleetpipe.mesh.sums`' tree, whose bits depend on no degree.
    """

    sums_by_tree: bool

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
        neighbours: Mapping[Any, Any] | None = None,
    ) -> None:
        """Creates the description of a job; :mod:`start` connects its ranks before.

        Args:
            degrees: The number of ranks along each axis.
            hcg: The topology that the user sees.
            timeout: Seconds that any wait for another rank may last.
            number: Number of earlier jobs of these processes, so that no key is used twice.
            store: The job's key-value store; None if one process plays all ranks.
            watch: The connections over which its ranks watch each other; None for one process.
            connections: The connections for everything else, to all ranks; None for one process.
            fused_copies: Paddle's group of :meth:`MeshGroups.copies`, if they span several axes.
            run: A unique name of the job, the same on all ranks; by default a new one.
            mesh: The coordinates of all ranks; by default in Paddle's order.
            pipeline: The transport of its pipeline's tensors; by default the connections.
            neighbours: Paddle's groups by which ``pipeline`` sends.
        """
        super().__init__(mesh or Mesh(degrees), hcg, store is None, fused_copies)
        self.timeout = timeout
        self.run = run or uuid.uuid4().hex
        self._store = store
        self._prefix = f"fleetpipe/{number}"
        self._pipeline, self.neighbours = pipeline, neighbours or {}
        #: By rank of the pipeline, the transports of :meth:`connect`.
        self._transports: dict[int, Transport] = {}
        if pipeline is not None:
            self._transports[pipeline.rank] = pipeline
        self.endings: list[Callable[[], None]] = []
        self.pipelines: list[weakref.ref[Any]] = []
        self._watch = watch
        self._connections = connections
        #: The number of calls of :meth:`require_agreement`, for the keys in the store.
        self._agreements = 0
        #: The lock that a thread holds while it runs a batch.
        self.turn = threading.RLock()
        self.healing: Recovery | None = None
        self.before_batches: dict[int, Callable[[Any], None]] = {}
        self.allow = Allow()
        self.compares_calls = True
        self.has_pipeline = False
        self.alone = self.keeps_board = self.scatters_gradients = self.sums_by_tree = False
        self.progress: RunProgress = RunProgress() if watch is None else watch.progress
        self.progress.memory, self.progress.memory_limit = process_bytes, memory_limit()
        self.progress.synchronize = self._synchronize
        #: The transports of a launched job, that of its pipeline first.
        self._launched = [each for each in (pipeline, connections) if each is not None]
        if connections is not None:
            self.progress.awaited = self._awaited_rank
            self.progress.waited = lambda: sum(each.waited for each in self._launched)
            self.progress.queues = connections.queues
            self.progress.flights = connections.flights

    def __deepcopy__(self, memo: dict[int, object]) -> Job:
        """Returns the job itself: a copy of a model belongs to the same job."""
        return self

    def last_records(self) -> Mapping[int, LastRecord]:
        """Returns the last record of every process of the job, for its board."""
        if self._watch is not None:
            return self._watch.last_records()
        return {0: LastRecord(self.progress.record(0, self.progress.action(), with_rows=True))}

    def describe_steps(self, stages: Iterable[int], samples: int, held_cap: int | None) -> None:
        """Stores facts about the steps of this process, for the job's board.

        Args:
            stages: The stages of this process.
            samples: Rows of a step of one replica.
            held_cap: The most forwards whose activations this process may hold at once; None: no
                limit.
        """
        progress = self.progress
        progress.stages, progress.shard = tuple(stages), self.shard[0]
        progress.held_cap = held_cap
        progress.replica, progress.samples = self.replica, samples * self.degrees.replicas

    def connect(self) -> dict[int, Transport]:
        """Returns the transport of each rank of the pipeline that this process plays.

        In a launched job that is a view of the connections to all ranks, or goes over Paddle's
        groups; only the engine sends messages of kind F and B over it.
        """
        self.has_pipeline = True
        if not self._transports:
            self._transports = self.connect_among(self.pipeline_ranks())
        return self._transports

    def connect_among(self, ranks: Sequence[int]) -> dict[int, Transport]:
        """Returns the transport of each rank that this process plays in a pipeline.

        Args:
            ranks: The pipeline's ranks, by their numbers in the job.

        Returns:
            The transports by rank in the pipeline: one in a launched job, else those of all ranks.
        """
        if self._connections is None:
            from fleetpipe.transport import MemoryHub

            hub = MemoryHub(len(ranks))
            return {rank: hub.endpoint(rank) for rank in range(len(ranks))}
        view = View(self._connections, ranks)
        return {view.rank: view}

    def limit_waits(self, timeout: float) -> None:
        """Sets the seconds that any wait for another rank may last from now on."""
        self.timeout = timeout
        self._groups = {}
        for transport in self._launched:
            transport.timeout = timeout

    def _make_group(
        self, name: str, ranks: Callable[[], list[int]], paddle_group: Callable[[], Any] | None
    ) -> Group:
        """Returns a new group ``name`` of ranks of the job, or of this process if it plays all."""
        if self._connections is None:
            return SoleGroup()
        members = ranks()
        if len(members) == 1:
            return SoleGroup()
        view = View(self._connections, members)
        group = DirectGroup(view, self.timeout, name)
        if paddle_group is not None:
            limit = self._limit_for(members)
            group = GlooGroup(view, self.timeout, paddle_group(), limit, name)
        group.alone = self.alone
        return group

    def _limit_for(self, ranks: list[int]) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function that returns a context for a collective operation of Paddle's.

        The context ends this process if it is stuck in Paddle's C++ for longer than the limit.
        """
        what = f"within a collective operation of ranks {ranks}"

        def limit() -> AbstractContextManager[None]:
            """Returns the context, with the limit and the watch that the job has now."""
            watch = self._watch
            return nullcontext() if watch is None else watch.limit(self.timeout, what, ranks)

        return limit

    def trains(self, parameters: Sequence[Any]) -> bool:
        """Returns whether a pipeline of this job reduces gradients of these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        for reference in self.pipelines:
            model = reference()  # None if nobody uses the model any more
            if model is not None and any(id(each) in wanted for each in model.trained_parameters()):
                return True
        return False

    def call(self, words: str, kind: str = "", replicas: bool = True) -> None:
        """Begins a collective call: this rank takes messages only from ranks in the same call.

        If ranks begin different calls, the job ends with the lines of the script of both.

        Args:
            words: What this rank does, such as ``trains a batch``.
            kind: A text that is the same on all ranks; by default the words.
            replicas: Whether all replicas begin the call, not only the ranks of this one.
        """
        # In a job that heals, ranks repeat calls, and healing itself compares what they do.
        if self._connections is not None and self.compares_calls:
            calls = self.progress.calls
            self._connections.call = calls.begin(words, kind, replicas)
            if not calls.replica:
                axes = [axis for axis in DENSE if axis not in REPLICA]
                calls.replica = self._connections.in_step = frozenset(self._ranks_along(axes))

    def calling(self, words: str, replicas: bool = True) -> AbstractContextManager[None]:
        """Begins a collective call; returns a context that reports failures to all ranks."""
        self.call(words, replicas=replicas)
        return self.guarded(lambda: words)

    def guarded(self, where: Callable[[], str]) -> AbstractContextManager[None]:
        """Reports failures within the context to all ranks; ends its waits if another fails.

        Args:
            where: Returns in words what this rank is doing, for the messages of all ranks.

        Raises:
            PeerFailed: Another rank failed; the message has its error and traceback.
            PipelineTimeout: A wait reached its limit; the message says where every rank is.
        """
        if self._watch is None:
            self.progress.action = where
            return nullcontext()
        return self._watch.guarding(lambda: self._describe(where()))

    def _synchronize(self) -> None:
        """Waits until the device has computed all queued work, within a limit."""
        with self.limited_by_card():
            synchronize()

    def limited_by_card(self) -> AbstractContextManager[None]:
        """Returns a context that ends this process if it is stuck in an operation of a GPU.

        A wait for a GPU has no limit of its own. A read of a tensor also waits for transfers: if
        two ranks read before they receive, neither goes on. The error says where the process was
        stuck.
        """
        if self._watch is None or device_kind() == "cpu":
            return nullcontext()
        # Twice the limit: waits for messages end after one, by an error of their own.
        return self._watch.limit(2 * self.timeout, "", self.pipeline_ranks())

    def require_agreement(self, facts: Mapping[str, str]) -> None:
        """Checks that all ranks have equal facts. Collective over the job.

        Args:
            facts: The facts, by subject.

        Raises:
            ConfigError: Some rank has other facts; the message shows both sides.
        """
        if self._store is not None and not self.alone:
            self._agreements += 1
            key = f"{self._prefix}/agreement/{self._agreements}"
            # Returns the ranks that have ended: none without a watch.
            gone = tuple if self._watch is None else self._watch.gone
            require_agreement(self._store, key, facts, self.timeout, gone)

    def begin_alone(self) -> None:
        """Makes this process, which replaces a rank, wait for nobody until it is connected."""
        self.compares_calls = False
        self.local, self.alone = False, True

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context in which groups wait for nobody: every member's value is this process's."""
        before = self.alone
        try:
            self._set_alone(True)
            yield
        finally:
            self._set_alone(before)

    def _set_alone(self, alone: bool) -> None:
        """Sets whether this process, and each of its groups, waits for the other ranks."""
        self.alone = alone
        for group in self._groups.values():
            if isinstance(group, DirectGroup):
                group.alone = alone

    def share(
        self, what: str, act: Callable[[], Any], pass_over: Callable[[], object] | None = None
    ) -> Any:
        """Returns the result of ``act``, which is the same on all ranks. Collective.

        Args:
            what: What ``act`` does, for messages.
            act: Exchanges values with the other ranks; it can be repeated.
            pass_over: Called instead of ``act`` in a process that replaces a rank, if the other
                ranks have already called ``act``: makes the changes of ``act`` in this process,
                such as those of random streams. None if there are none.
        """
        return act() if self.healing is None else self.healing.share(what, act, pass_over)

    def exchange(self, what: str, act: Callable[[], Any]) -> Any:
        """Returns the result of ``act`` as :meth:`share` does, as a collective call of its own.

        Args:
            what: What ``act`` does, for messages, such as ``exchanging values``.
            act: Exchanges values with the other ranks; it can be repeated.
        """

        def guarded() -> Any:
            """Calls ``act`` in a context that reports its failure to all ranks."""
            self.call(f"is {what}", kind=what)
            with self.guarded(lambda: what):
                return act()

        return self.share(what, guarded)

    def connect_again(self, store: Store, watch: Watch, joined: Joined, prefix: str) -> None:
        """Replaces the connections of the job's ranks after healing has replaced a rank.

        Args:
            store: The job's store.
            watch: The watch over the job's ranks from now on.
            joined: The connections for everything but the watch.
            prefix: Prefix of the job's keys in the store from now on.
        """
        self._prefix, self._agreements = prefix, 0
        self._store, self._watch, self.alone = store, watch, False
        watch.progress = self.progress
        if self._connections is not None:
            self._connections.connect_again(joined.sockets, joined.seals)
            watch.on_failure(self._connections.interrupt)
        for group in self._groups.values():
            if isinstance(group, DirectGroup):
                group.begin_anew()

    def connect_neighbours(self, outgoing: dict[int, Lane], incoming: dict[int, Lane]) -> None:
        """Replaces the lanes over Paddle's groups after a rank was replaced.

        A lane sends or receives the tensors of one direction between two ranks. Healing calls this
        after :meth:`connect_again`. Nothing happens without a watch, or if tensors go over sockets.

        Args:
            outgoing: The lane to each neighbour, by the neighbour's rank in the pipeline.
            incoming: The lane from each neighbour.
        """
        if self._pipeline is not None and self._watch is not None:
            self._pipeline.connect_again(outgoing, incoming)
            self._watch.on_failure(self._pipeline.interrupt)

    def disconnect(self) -> None:
        """Closes the connections to the other ranks; messages under way are lost."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        for transport in self._launched:
            transport.interrupt()
            transport.close()

    def require_others(self) -> None:
        """Refuses a call that needs other ranks, in a replacement process before it is connected.

        Raises:
            StateError: This process replaces a rank, and has not reached its first batch.
        """
        if self.alone:
            attempt_files.tell_unhealed("the script meets the other ranks before its first batch")
            raise StateError(
                "a replacement process cannot talk to other ranks before its first training batch",
                cause=ALONE,
                fix="nothing to do: the whole job starts again, as it always does without --heal",
            )

    def be_patient(self) -> None:
        """Allows the main thread to notice another rank's failure late, since the job may heal.

        Otherwise the watch ends a process whose main thread does not notice a failure in time.
        """
        if self._watch is not None and self._connections is not None:
            self._watch.patient = True

    def silent_ranks(self) -> list[int]:
        """Returns the ranks that are stopped or cut off, as far as this process knows."""
        return [] if self._watch is None else self._watch.silent()

    @property
    def failure(self) -> Failure | None:
        """The failure of another rank that this process knows of, or None."""
        return None if self._watch is None else self._watch.failure

    def close(self, error: BaseException | None = None) -> None:
        """Closes this process's connections; earlier messages are still delivered.

        Args:
            error: Why the process ends, if it ends before its work is done.

        Raises:
            PeerFailed: Another rank has failed, and this one has not raised that yet.
            PipelineTimeout: Another rank did not take its messages within the limit.
        """
        if error is None and self.degrees.pp > 1 and not self.has_pipeline:
            _log.warning(
                f"pp_degree is {self.degrees.pp}, and no pipeline ran in this job: what the script "
                "has trained, each rank has trained whole, by itself; fleet.distributed_model and "
                "fleetpipe.Model make pipelines, paddle.Model does not"
            )
        try:
            if error is None and self._watch is not None and not self._watch.noticed:
                with self.guarded(lambda: "ending the job"):
                    for transport in self._launched:
                        transport.flush(self.timeout)
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """Calls the functions of ``endings`` and closes all connections.

        Args:
            error: Why the process ends, if it ends before its work is done.
        """
        watch, self._watch = self._watch, None
        if watch is not None and error is not None:
            watch.give_up(error)
        # Called from the last to the first, and all of them, whichever fails.
        with ExitStack() as ends:
            if watch is not None:
                ends.callback(watch.close)
            if self._connections is not None:
                ends.callback(self._connections.close)
            for connection in self._transports.values():
                ends.callback(connection.close)
            for ending in self.endings:
                ends.callback(ending)
            self._transports, self._groups, self.endings = {}, {}, []

    def _awaited_rank(self) -> int | None:
        """Returns the rank of the job that this process waits for now, or None."""
        if self._pipeline is not None and (peer := self._pipeline.awaited) is not None:
            return self.pipeline_ranks()[peer]
        return None if self._connections is None else self._connections.awaited

    def _describe(self, text: str) -> str:
        """Adds the replica, the shard and the awaited rank to a text about this rank's work.

        Args:
            text: What the rank does; it may begin with "rank 1, ".
        """
        # If the job is one pipeline, messages name the rank by its number in the job already.
        if self.degrees.size == self.degrees.pp:
            text = text.removeprefix(f"rank {self.coordinate.pp}, ")
        for axis, name in (("mp", "shard"), ("cp", "cp rank"), ("sep", "sep rank")):
            if getattr(self.degrees, axis) > 1:
                text = f"{name} {getattr(self.coordinate, axis)}, {text}"
        if self.degrees.replicas > 1:
            text = f"replica {self.replica}, {text}"
        awaited = self._awaited_rank()
        return text if awaited is None else f"{text}, waiting for rank {awaited}"


def current_job() -> Job | None:
    """Returns the job between ``fleet.init`` and ``fleet.shutdown``, else None."""
    return _job


def required_job(summary: str, **facts: Any) -> Job:
    """Returns the current job.

    Args:
        summary: The error's first line if there is no job.
        facts: Further lines of the error.

    Raises:
        StateError: There is no job.
    """
    if _job is None:
        facts.setdefault("fix", "call fleet.init(is_collective=True, strategy=strategy) first")
        raise StateError(summary, **facts)
    return _job


def pipeline_group() -> Group:
    """Returns the group of the current job's pipeline; without a job that of this process alone."""
    return SoleGroup() if _job is None else _job.group()


def mp_shard() -> tuple[int, int]:
    """Returns this process's coordinate along mp, and the number of ranks along mp."""
    return (0, 1) if _job is None else (_job.coordinate.mp, _job.degrees.mp)


def all_ranks() -> Group:
    """Returns the group of all ranks of the job, for small values.

    Without a job it is the group of this process alone.
    """
    return SoleGroup() if _job is None else _job.everyone()


def begin(job: Job) -> None:
    """Makes ``job`` the current one."""
    global _job
    _job = job


def end(error: BaseException | None = None) -> None:
    """Closes the current job, if there is one.

    Args:
        error: Why the job ends, if it ends before its work is done.
    """
    global _job
    ended, _job = _job, None
    if ended is not None:
        ended.close(error)
