"""Walks a plan: takes what each action needs, asks the stage to run it, hands on what comes out.

One engine serves training, evaluation and prediction, a process that is one rank and a process
that plays all of them. It knows neither the names of schedules nor anything of models.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Callable, NamedTuple, Protocol, Union

from fleetpipe.errors import BoundaryError, PeerFailed, PipelineTimeout, ScheduleError
from fleetpipe.schedules import Action, Edge, Free, Fused, Op, Plan, Recv, Send
from fleetpipe.schedules.action import parts
from fleetpipe.schedules.operations import ranks_of
from fleetpipe.transport import MessageKey, Transport, Value, describe

Values = Mapping[Edge, Value]


class Stage(Protocol):
    """Runs the compute actions of the stages a process owns.

    Stages are global numbers along the model, micro-batches are global too: the data-parallel
    rank times m, plus the number within the batch. Dygraph and static implement this once each.
    """

    def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        """Computes the value of every edge out of ``stage`` and keeps what backward needs."""

    def backward(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """Adds to the parameters' gradients; returns the gradient of every edge into ``stage``."""

    def input_grad(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """As :meth:`backward`, but leaves the parameters' gradients to :meth:`weight_grad`."""

    def weight_grad(self, stage: int, micro_batch: int) -> None:
        """Adds to the parameters' gradients what :meth:`input_grad` left over."""

    def release(self, stage: int, micro_batch: int) -> None:
        """Drops everything kept for this stage and micro-batch."""


class Blocked(NamedTuple):
    """The message that a walker cannot go on without."""

    peer: int
    key: MessageKey


class Incoming(NamedTuple):
    """An edge whose value a compute action takes; ``peer`` is None for an edge within the rank."""

    edge: Edge
    key: MessageKey
    peer: int | None


Instruction = Callable[[], Union[Blocked, None]]
Compute = Callable[[int, int, Values], Values]


class Walker:
    """One rank's way through a plan, resumable at every message it has to wait for."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stage: Stage,
        transport: Transport,
        arrive: Callable[[str], None],
    ) -> None:
        """Compiles the operations of ``rank`` once, so that a step only calls them.

        Args:
            plan: The lowered schedule of all ranks.
            rank: The rank of the pipeline to play.
            stage: What runs the compute actions.
            transport: This rank's connections.
            arrive: Called with the name of each collective operation that the rank reaches.
        """
        self.rank = rank
        self.held = 0
        self.peak_held = 0
        self._plan = plan
        self._stage = stage
        self._transport = transport
        self._arrive = arrive
        self._first_micro_batch = 0
        self._values: dict[MessageKey, Value] = {}
        self._ops = plan.ops[rank]
        self._program = [self._compile(op) for op in self._ops]
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
        self._first_micro_batch = first_micro_batch
        self._values.clear()
        self.held = self.peak_held = 0

    def advance(self) -> Blocked | None:
        """Runs the next operation; returns the message it waits for if that is not there yet."""
        instructions = self._program[self._next]
        while self._part < len(instructions):
            blocked = instructions[self._part]()
            if blocked is not None:
                return blocked
            self._part += 1
        self._next += 1
        self._part = 0
        return None

    def supply(self, message: Blocked, value: Value) -> None:
        """Gives the walker the message it was blocked on."""
        self._values[message.key] = value

    def discard(self) -> None:
        """Drops what an unfinished run left: values of this rank, and messages on their way to it.

        Only where no rank can still send one: where one process plays all.
        """
        self._values.clear()
        for op in self._ops:
            if isinstance(op, Recv):
                source, _ = ranks_of(op, self._plan.placement)
                self._transport.try_receive(source, _key_of(op.kind, op.edge, op.micro_batch))

    def where(self) -> str:
        """Says which operation the rank is at and which it finished last, for messages."""
        finished = [op for op in self._ops[: self._next] if isinstance(op, (Action, Fused))]
        done = f", last finished {finished[-1]}" if finished else ""
        if self.finished:
            return f"rank {self.rank}, between batches{done}"
        op = self._ops[self._next]
        text = f"rank {self.rank}, operation {op}"
        if isinstance(op, (Action, Fused)):
            action = parts(op)[min(self._part, len(parts(op)) - 1)]
            text += f" (stage {action.stage}, micro-batch {action.micro_batch})"
        return text + done

    def _compile(self, op: Op) -> tuple[Instruction, ...]:
        """Returns what the op does; the actions of a fused unit run one after another."""
        if isinstance(op, (Action, Fused)):
            return tuple(self._compile_action(action) for action in parts(op))
        if isinstance(op, (Send, Recv)):
            source, target = ranks_of(op, self._plan.placement)
            key = _key_of(op.kind, op.edge, op.micro_batch)
            if isinstance(op, Send):
                return (functools.partial(self._send, target, key),)
            return (functools.partial(self._transport.post, source, key),)
        if isinstance(op, Free):
            return (functools.partial(self._free, op.stage, op.micro_batch),)
        return (functools.partial(self._arrive, str(op)),)

    def _compile_action(self, action: Action) -> Instruction:
        kind, stage, micro_batch = action
        into = [edge for edge in self._plan.edges if edge.target == stage]
        out = [edge for edge in self._plan.edges if edge.source == stage]
        takes, gives = {"F": (into, out), "W": ([], [])}.get(kind, (out, into))
        way = "F" if kind == "F" else "B"
        incoming = tuple(self._incoming(edge, way, micro_batch) for edge in takes)
        outgoing = tuple((edge, _key_of(way, edge, micro_batch)) for edge in gives)
        run: Compute = {
            "F": self._forward,
            "B": self._stage.backward,
            "I": self._stage.input_grad,
            "W": self._weight_grad,
        }[kind]
        return functools.partial(self._compute, run, stage, micro_batch, incoming, outgoing)

    def _incoming(self, edge: Edge, way: str, micro_batch: int) -> Incoming:
        rank = self._plan.placement.rank_of(edge.source if way == "F" else edge.target)
        peer = None if rank == self.rank else rank
        return Incoming(edge, _key_of(way, edge, micro_batch), peer)

    def _compute(
        self,
        run: Compute,
        stage: int,
        micro_batch: int,
        incoming: tuple[Incoming, ...],
        outgoing: tuple[tuple[Edge, MessageKey], ...],
    ) -> Blocked | None:
        values = self._values
        for _, key, peer in incoming:
            if peer is not None and key not in values:
                arrived, value = self._transport.try_receive(peer, key)
                if not arrived:
                    return Blocked(peer, key)
                values[key] = value
        inputs = {edge: values.pop(key) for edge, key, _ in incoming}
        outputs = run(stage, self._first_micro_batch + micro_batch, inputs)
        for edge, key in outgoing:
            values[key] = outputs[edge]
        return None

    def _forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        self.held += 1
        self.peak_held = max(self.peak_held, self.held)
        return self._stage.forward(stage, micro_batch, inputs)

    def _weight_grad(self, stage: int, micro_batch: int, _: Values) -> Values:
        self._stage.weight_grad(stage, micro_batch)
        return {}

    def _send(self, peer: int, key: MessageKey) -> None:
        self._transport.send(peer, key, self._values.pop(key))

    def _free(self, stage: int, micro_batch: int) -> None:
        self._stage.release(stage, self._first_micro_batch + micro_batch)
        self.held -= 1


class Engine:
    """Runs one plan, batch after batch, for the ranks that this process plays."""

    def __init__(
        self, plan: Plan, stage: Stage, transports: Mapping[int, Transport], timeout: float
    ) -> None:
        """Compiles the plan for every rank in ``transports``.

        Args:
            plan: The lowered schedule, verified.
            stage: What runs the compute actions.
            transports: The connections of each rank that this process plays: its own one, or all.
            timeout: Seconds that a wait for one message may last.
        """
        self._plan = plan
        self._timeout = timeout
        self._transports = transports
        self._walkers = {
            rank: Walker(plan, rank, stage, transport, self._arrive)
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
            collectives: What to do at each collective operation of the plan, by its text
                (``"REDUCE"``, ``"STEP"``); called once, when all ranks that this process plays
                have reached it.
            first_micro_batch: Global number of the batch's micro-batch 0.

        Raises:
            PeerFailed: Another rank left before the plan was done.
            PipelineTimeout: A message did not come within the limit.
        """
        self._collectives = collectives
        self._arrived = dict.fromkeys(collectives, 0)
        for walker in self._walkers.values():
            walker.restart(first_micro_batch)
        plays_all = len(self._walkers) == self._plan.placement.ranks
        try:
            if plays_all:
                self._play_all()
            else:
                for walker in self._walkers.values():
                    self._play_one(walker)
        except BaseException:
            if plays_all:
                # The next batch would take what is on its way for its own.
                for walker in self._walkers.values():
                    walker.discard()
            raise
        finally:
            # They hold on to the losses and to the optimizer.
            self._collectives = {}

    def _play_one(self, walker: Walker) -> None:
        """Walks one rank, waiting for each message that has not come."""
        transport = self._transports[walker.rank]
        try:
            while not walker.finished:
                blocked = walker.advance()
                if blocked is not None:
                    walker.supply(blocked, transport.receive(*blocked, self._timeout))
        except Exception as error:
            raise _located(error, walker) from error.__cause__

    def _play_all(self) -> None:
        """Walks all ranks on this thread, along the one linear order of the plan."""
        for rank in self._plan.order:
            walker = self._walkers[rank]
            try:
                blocked = walker.advance()
            except Exception as error:
                raise _located(error, walker) from error.__cause__
            if blocked is not None:
                raise ScheduleError(
                    f"the plan's linear order runs {walker.where()} too early",
                    expected=f"{describe(blocked.key)} to have been sent by rank {blocked.peer}",
                )

    def _arrive(self, collective: str) -> None:
        self._arrived[collective] += 1
        if self._arrived[collective] == len(self._walkers):
            self._collectives[collective]()


def _key_of(kind: str, edge: Edge, micro_batch: int) -> MessageKey:
    return MessageKey(kind, edge.source, edge.target, edge.name, micro_batch)


def _located(error: Exception, walker: Walker) -> Exception:
    """Returns ``error``, now saying at which operation of the plan the rank was."""
    if isinstance(error, (PipelineTimeout, PeerFailed)):
        return type(error)(f"{walker.where()}: {error}").with_traceback(error.__traceback__)
    if isinstance(error, BoundaryError):
        error.add_place(walker.where())
        return error
    note = f"fleetpipe: raised at {walker.where()}"
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        sys.stderr.write(note + "\n")
    return error
