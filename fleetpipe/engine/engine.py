"""Walks a plan: collects the inputs of each action, asks the stage to run it, sends the results on.

One engine serves training, evaluation and prediction, a process that is one rank and a process
that plays all of them. It knows neither the names of schedules nor anything of models.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from fleetpipe import log
from fleetpipe.engine.observer import Blocked, Instruction, Observer, Observers, message_of
from fleetpipe.engine.stage import Stage, Values
from fleetpipe.errors import BoundaryError, PeerFailed, PipelineTimeout, ScheduleError
from fleetpipe.mesh.turns import SideState, Turns
from fleetpipe.schedules import Action, Edge, Free, Fused, Op, Plan, Recv, Send
from fleetpipe.schedules.action import GlobalMicroBatch, MicroBatch, parts, ranks_of
from fleetpipe.transport import MessageKey, Transport, Value, describe

_log = log.logger(__name__)

Compute = Callable[[int, GlobalMicroBatch, Values], Values]


class Walker:
    """One rank's way through a plan, resumable at every message it has to wait for."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stage: Stage,
        transport: Transport,
        arrive: Callable[[str], None],
        observers: Sequence[Observer] = (),
        turns: Turns | None = None,
    ) -> None:
        """Compiles the operations of ``rank`` once, so that a step only calls them.

        Args:
            plan: The lowered schedule of all ranks.
            rank: The rank of the pipeline to play.
            stage: What runs the compute actions.
            transport: This rank's connections.
            arrive: Called with the name of each collective operation that the rank reaches.
            observers: The observers of the operations; the first one is innermost.
            turns: Runs a fused forward and backward; None: one runs after the other.
        """
        self.rank = rank
        self.transport = transport
        self.values: dict[MessageKey, Value] = {}
        self.held = 0
        self.peak_held = 0
        self._plan = plan
        self._stage = stage
        self._arrive = arrive
        self._watched = functools.partial(Observers(*observers).wrap, self)
        self._turns = turns
        self._failed: Action | None = None
        #: The messages that each action waits for.
        self._messages: defaultdict[Action, list[Blocked]] = defaultdict(list)
        #: The global number of each micro-batch of the batch.
        self._global = list(map(GlobalMicroBatch, range(plan.units)))
        self._ops = plan.ops[rank]
        self._program = [tuple(self._compile(op)) for op in self._ops]
        #: The operations in the order in which they run, and the index in it of the next one.
        self._sequence: Sequence[int] = range(len(self._ops))
        self._next = 0
        self._part = 0

    @property
    def finished(self) -> bool:
        """Whether every operation of the rank has run."""
        return self._next == len(self._program)

    def restart(self, first_micro_batch: int) -> None:
        """Goes back to the first operation.

        Args:
            first_micro_batch: Global number of the batch's micro-batch 0, dp_rank * m.
        """
        self._next = self._part = 0
        numbers = range(first_micro_batch, first_micro_batch + self._plan.units)
        self._global = list(map(GlobalMicroBatch, numbers))
        self._failed = None
        self.values.clear()
        self.held = self.peak_held = 0

    def advance(self, until: int = 0) -> Blocked | None:
        """Runs the next operation, or returns the message that the rank has to wait for first.

        Args:
            until: Runs operations until so many of the batch have run, but at least one.
        """
        until = max(until, self._next + 1)
        while self._next < until:
            instructions = self._program[self._sequence[self._next]]
            while self._part < len(instructions):
                _, instruction = instructions[self._part]
                blocked = instruction()
                if blocked is not None:
                    return blocked
                self._part += 1
            self._next += 1
            self._part = 0
        return None

    def wait(self, blocked: Blocked, timeout: float) -> None:
        """Waits for the message that :meth:`advance` was blocked on.

        Raises:
            PeerFailed: A peer is gone, or another one died during the wait.
            PipelineTimeout: The message did not arrive within ``timeout`` seconds.
        """
        self.values[blocked.key] = self.transport.receive(*blocked, timeout)

    def discard(self) -> None:
        """Drops what an unfinished run left: values of this rank, and messages to it.

        Call it only if one process plays all ranks, so that none can still send a message.
        """
        self.values.clear()
        for op in self._ops:
            if isinstance(op, Recv):
                source, _ = ranks_of(op, self._plan.placement)
                self.transport.try_receive(source, message_of(op))

    def where(self) -> str:
        """Says which operation the rank is at and which it finished last, for messages."""
        ran = [self._ops[index] for index in self._sequence[: self._next]]
        finished = [op for op in ran if isinstance(op, (Action, Fused))]
        done = f", last finished {finished[-1]}" if finished else ""
        if self.finished:
            return f"rank {self.rank}, between batches{done}"
        at = self._at()
        op, instructions = self._ops[at], self._program[at]
        text = f"rank {self.rank}, operation {op}"
        action, _ = instructions[min(self._part, len(instructions) - 1)]
        action = self._failed or action
        if isinstance(action, Action):
            text += f" (stage {action.stage}, micro-batch {action.micro_batch})"
        return text + done

    def _at(self) -> int:
        """Returns the index of the next operation; there must be one."""
        return self._sequence[self._next]

    def _compile(self, op: Op) -> Iterator[tuple[Op, Instruction]]:
        """Yields the calls that an operation consists of, each with its action or operation.

        The actions of a fused unit run one after another, each after the receives it waits for.
        """
        if isinstance(op, Fused) and self._turns is not None and _takes_turns(op):
            yield from self._compile_pair(op, self._turns)
        elif isinstance(op, (Action, Fused)):
            for action in parts(op):
                yield from self._compile_action(action)
        elif isinstance(op, Recv):
            source, _ = ranks_of(op, self._plan.placement)
            if self.transport.posts:
                yield op, functools.partial(self.transport.post, source, message_of(op))
        elif isinstance(op, Send):
            _, target = ranks_of(op, self._plan.placement)
            yield op, self._watched(op, functools.partial(self._send, target, message_of(op)))
        elif isinstance(op, Free):
            free = functools.partial(self._free, op.stage, MicroBatch(op.micro_batch))
            yield op, self._watched(op, free)
        else:
            yield op, self._watched(op, functools.partial(self._arrive, str(op)))

    def _compile_pair(self, op: Fused, turns: Turns) -> Iterator[tuple[Op, Instruction]]:
        """Yields the calls of a fused forward and backward that take turns.

        They begin when the messages of both are there.
        """
        halves = []
        for action in parts(op):
            *receives, (_, compute) = self._compile_action(action)
            yield from receives
            halves.append(functools.partial(self._half, action, compute))
        yield op, functools.partial(turns.run, *halves)

    def _half(self, action: Action, compute: Instruction) -> None:
        try:
            compute()
        except BaseException:
            self._failed = self._failed or action
            raise

    def _compile_action(self, action: Action) -> Iterator[tuple[Op, Instruction]]:
        kind, stage, micro_batch = action
        into = [edge for edge in self._plan.edges if edge.target == stage]
        out = [edge for edge in self._plan.edges if edge.source == stage]
        takes, gives = {"F": (into, out), "W": ([], [])}.get(kind, (out, into))
        way = "F" if kind == "F" else "B"
        incoming = [Recv(way, edge, micro_batch) for edge in takes]
        for receive in incoming:
            source, _ = ranks_of(receive, self._plan.placement)
            if source != self.rank:
                message = Blocked(source, message_of(receive))
                self._messages[action].append(message)
                yield action, self._watched(receive, functools.partial(self._take, *message))
        compute = functools.partial(
            self._compute,
            action,
            tuple((receive.edge, message_of(receive)) for receive in incoming),
            tuple((edge, message_of(Send(way, edge, micro_batch))) for edge in gives),
            {
                "F": self._stage.forward,
                "B": self._stage.backward,
                "I": self._stage.input_grad,
                "W": self._weight_grad,
            }[kind],
        )
        yield action, self._watched(action, compute)

    def _take(self, source: int, key: MessageKey) -> Blocked | None:
        if key not in self.values:
            arrived, value = self.transport.try_receive(source, key)
            if not arrived:
                return Blocked(source, key)
            self.values[key] = value
        return None

    def _compute(
        self,
        action: Action,
        incoming: tuple[tuple[Edge, MessageKey], ...],
        outgoing: tuple[tuple[Edge, MessageKey], ...],
        run: Compute,
    ) -> None:
        if action.kind == "F":
            self.held += 1
            self.peak_held = max(self.peak_held, self.held)
        values = self.values
        inputs = {}
        for edge, key in incoming:
            inputs[edge] = values.pop(key)
        outputs = run(action.stage, self._global[action.micro_batch], inputs)
        for edge, key in outgoing:
            values[key] = outputs[edge]

    def _weight_grad(self, stage: int, micro_batch: GlobalMicroBatch, _: Values) -> Values:
        self._stage.weight_grad(stage, micro_batch)
        return {}

    def _send(self, peer: int, key: MessageKey) -> None:
        self.transport.send(peer, key, self.values.pop(key))

    def _free(self, stage: int, micro_batch: MicroBatch) -> None:
        self._stage.release(stage, self._global[micro_batch])
        self.held -= 1


class Engine:
    """Runs one plan, batch after batch, for the ranks that this process plays."""

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        transports: Mapping[int, Transport],
        timeout: float,
        observers: Sequence[Observer] = (),
        overlapping: SideState | None = None,
        walker: Callable[..., Walker] = Walker,
    ) -> None:
        """Compiles the plan for every rank in ``transports``.

        Args:
            plan: The lowered schedule, verified.
            stage: What runs the compute actions.
            transports: The connections of each rank that this process plays: its own one, or all.
            timeout: Seconds that a wait for one message may last.
            observers: The observers of the operations; the first one is innermost.
            overlapping: The state that a fused forward and backward each have for themselves, if
                they take turns. None: one runs after the other.
            walker: Makes the walker of a rank, from the arguments of :class:`Walker`.
        """
        turns = None if overlapping is None else Turns(overlapping, timeout)
        self._plan = plan
        self._timeout = timeout
        self._walkers = {
            rank: walker(plan, rank, stage, transport, self._arrive, observers, turns)
            for rank, transport in transports.items()
        }
        self._collectives: Mapping[str, Callable[[], None]] = {}
        self._arrived: dict[str, int] = {}

    @property
    def peak_held(self) -> dict[int, int]:
        """Most forwards each rank held unreleased at once in the last run, in chunk units."""
        return {rank: walker.peak_held for rank, walker in self._walkers.items()}

    def where(self) -> str:
        """Says at which operation each rank that this process plays is, for messages."""
        return "; ".join(walker.where() for walker in self._walkers.values())

    def run(
        self, collectives: Mapping[str, Callable[[], None]], first_micro_batch: int = 0
    ) -> None:
        """Runs every operation of this process's ranks once. Collective over the pipeline.

        Args:
            collectives: The function to call at each collective operation of the plan, by its text
                (``"REDUCE"``, ``"STEP"``); called once, when all ranks that this process plays have
                reached it.
            first_micro_batch: Global number of the batch's micro-batch 0.

        Raises:
            PeerFailed: Another rank left before the plan was done.
            PipelineTimeout: A message did not come within the limit.
        """
        self._collectives = collectives
        self._arrived = dict.fromkeys(collectives, 0)
        for walker in self._walkers.values():
            walker.restart(first_micro_batch)
        walker = next(iter(self._walkers.values()))
        try:
            for rank, until in self._runs:
                walker = self._walkers[rank]
                while (blocked := walker.advance(until)) is not None:
                    self._wait(walker, blocked)
        except BaseException as error:
            if self._plays_all:
                # The next batch would take messages of this one for its own.
                for each in self._walkers.values():
                    each.discard()
            if isinstance(error, Exception):
                raise _add_location(error, walker) from error.__cause__
            raise
        finally:
            # These functions refer to the losses and to the optimizer.
            self._collectives = {}

    @property
    def _plays_all(self) -> bool:
        return len(self._walkers) == self._plan.placement.ranks

    @functools.cached_property
    def _runs(self) -> list[tuple[int, int]]:
        """Pairs of a rank that runs next, and how many operations it will have run by then.

        A process that plays all ranks follows the one linear order of the plan.
        """
        if not self._plays_all:
            return [(rank, len(self._plan.ops[rank])) for rank in self._walkers]
        until, runs = dict.fromkeys(self._walkers, 0), []
        for rank, operations in itertools.groupby(self._plan.order):
            until[rank] += len(list(operations))
            runs.append((rank, until[rank]))
        return runs

    def _wait(self, walker: Walker, blocked: Blocked) -> None:
        """Waits for the message that a blocked rank needs."""
        if self._plays_all:
            raise ScheduleError(
                "the plan's linear order runs an operation too early",
                expected=f"{describe(blocked.key)} to have been sent by rank {blocked.peer}",
            )
        walker.wait(blocked, self._timeout)

    def _arrive(self, collective: str) -> None:
        self._arrived[collective] += 1
        if self._arrived[collective] == len(self._walkers):
            self._collectives[collective]()


def _takes_turns(unit: Fused) -> bool:
    """Whether a unit is a forward fused with a backward of another stage."""
    kinds = [action.kind for action in unit.actions]
    return kinds == ["F", "B"] and unit.actions[0].stage != unit.actions[1].stage


def _add_location(error: Exception, walker: Walker) -> Exception:
    """Adds to ``error`` the operation of the plan at which the rank was, and returns it."""
    if isinstance(error, (PipelineTimeout, PeerFailed)):
        return type(error)(f"{walker.where()}: {error}").with_traceback(error.__traceback__)
    if isinstance(error, BoundaryError):
        error.add_place(walker.where())
        return error
    note = f"raised at {walker.where()}"
    if sys.version_info >= (3, 11):
        error.add_note(f"fleetpipe: {note}")
    else:
        _log.error(note)
    return error
