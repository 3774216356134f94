"""Walks a plan: collects the inputs of each action, asks the stage to run it, sends the results on.

A plan is a schedule with its sends, receives, releases and collective operations. One engine serves
training, evaluation and prediction, a process that is one rank and a process that plays all of
them. It knows neither the names of schedules nor anything of models.
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

#: A method of a stage that runs one action, such as :meth:`Stage.forward`.
Compute = Callable[[int, GlobalMicroBatch, Values], Values]


class Walker:
    """Runs one rank's operations of a plan, and can stop and resume at each message it waits for.

    Attributes:
        rank: The rank of the pipeline that it plays.
        transport: This rank's connections.
        values: The values that the rank has computed or received and not passed on, by message.
        held: Number of forwards, each of one chunk, whose activations are not released yet.
        peak_held: The largest ``held`` of the batch.
    """

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
        """Compiles the operations of ``rank`` once, so that a batch only calls them.

        Args:
            plan: The lowered schedule of all ranks.
            rank: The rank of the pipeline to play.
            stage: What runs the compute actions.
            transport: This rank's connections.
            arrive: Called with the text of each collective operation that the rank reaches.
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
        self._wrap = functools.partial(Observers(*observers).wrap, self)
        self._turns = turns
        self._failed_action: Action | None = None
        #: By action, the messages that it waits for.
        self._messages_of: defaultdict[Action, list[Blocked]] = defaultdict(list)
        #: By micro-batch of the batch, its global number.
        self._global_numbers = list(map(GlobalMicroBatch, range(plan.units)))
        self._ops = plan.ops[rank]
        self._program = [tuple(self._compile(op)) for op in self._ops]
        #: The indices of the operations in the order in which they run, and the position in that
        #: order of the next one, with the first of its instructions that has not run.
        self._sequence: Sequence[int] = range(len(self._ops))
        self._position = 0
        self._next_instruction = 0

    @property
    def finished(self) -> bool:
        """Whether every operation of the rank has run in this batch."""
        return self._position == len(self._program)

    def restart(self, first_micro_batch: int) -> None:
        """Goes back to the first operation, for the next batch.

        Args:
            first_micro_batch: Global number of the batch's micro-batch 0, dp_rank * m.
        """
        self._position = self._next_instruction = 0
        numbers = range(first_micro_batch, first_micro_batch + self._plan.units)
        self._global_numbers = list(map(GlobalMicroBatch, numbers))
        self._failed_action = None
        self.values.clear()
        self.held = self.peak_held = 0

    def advance(self, until: int = 0) -> Blocked | None:
        """Runs operations until a message is missing.

        Args:
            until: Stops once so many of the batch's operations have run, but runs at least one.

        Returns:
            The missing message, without which the rank cannot go on; None if there is none.
        """
        until = max(until, self._position + 1)
        while self._position < until:
            instructions = self._program[self._sequence[self._position]]
            while self._next_instruction < len(instructions):
                _, instruction = instructions[self._next_instruction]
                blocked = instruction()
                if blocked is not None:
                    return blocked
                self._next_instruction += 1
            self._position += 1
            self._next_instruction = 0
        return None

    def wait(self, blocked: Blocked, timeout: float) -> None:
        """Waits for the message that :meth:`advance` was blocked on.

        Raises:
            PeerFailed: A peer is gone, or another one died during the wait.
            PipelineTimeout: The message did not arrive within ``timeout`` seconds.
        """
        self.values[blocked.key] = self.transport.receive(*blocked, timeout)

    def discard(self) -> None:
        """Drops the values and the messages that a batch left that did not end.

        Call it only if one process plays all ranks, so that none can still send a message.
        """
        self.values.clear()
        for op in self._ops:
            if isinstance(op, Recv):
                source, _ = ranks_of(op, self._plan.placement)
                self.transport.try_receive(source, message_of(op))

    def where(self) -> str:
        """Returns in words the rank's present operation and its last finished one, for errors."""
        # Another thread may ask, for a board, while the rank goes on.
        position, next_instruction = self._position, self._next_instruction
        operations = [self._ops[index] for index in self._sequence[:position]]
        finished = [op for op in operations if isinstance(op, (Action, Fused))]
        suffix = f", last finished {finished[-1]}" if finished else ""
        if position == len(self._program):
            return f"rank {self.rank}, between batches{suffix}"
        index = self._index_at(position)
        op, instructions = self._ops[index], self._program[index]
        text = f"rank {self.rank}, operation {op}"
        # A receive of messages that are not posted before has no instruction of its own.
        actions = [self._failed_action or action for action, _ in instructions] or [op]
        action = actions[min(next_instruction, len(actions) - 1)]
        if isinstance(action, Action):
            text += f" (stage {action.stage}, micro-batch {action.micro_batch})"
        return text + suffix

    def _index_at(self, position: int) -> int:
        """Returns the index in the rank's row of the operation that runs as number ``position``."""
        return self._sequence[position]

    def _compile(self, op: Op) -> Iterator[tuple[Op, Instruction]]:
        """Yields an operation's instructions, each with the action or operation that it belongs to.

        The actions of a fused pair run one after another, each after the receives it waits for.
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
            yield op, self._wrap(op, functools.partial(self._send, target, message_of(op)))
        elif isinstance(op, Free):
            free = functools.partial(self._free, op.stage, MicroBatch(op.micro_batch))
            yield op, self._wrap(op, free)
        else:
            yield op, self._wrap(op, functools.partial(self._arrive, str(op)))

    def _compile_pair(self, op: Fused, turns: Turns) -> Iterator[tuple[Op, Instruction]]:
        """Yields the instructions of a fused forward and backward that take turns.

        The two begin when the messages of both are there.
        """
        halves = []
        for action in parts(op):
            *receives, (_, compute) = self._compile_action(action)
            yield from receives
            halves.append(functools.partial(self._run_half, action, compute))
        yield op, functools.partial(turns.run, *halves)

    def _run_half(self, action: Action, compute: Instruction) -> None:
        """Runs one action of a pair that takes turns; notes the action if it fails."""
        try:
            compute()
        except BaseException:
            self._failed_action = self._failed_action or action
            raise

    def _compile_action(self, action: Action) -> Iterator[tuple[Op, Instruction]]:
        """Yields the instructions of an action: a receive of each awaited message, then itself."""
        kind, stage, micro_batch = action
        into = [edge for edge in self._plan.edges if edge.target == stage]
        out = [edge for edge in self._plan.edges if edge.source == stage]
        # Gradients go from a stage's outgoing edges to its incoming ones.
        inputs, outputs = {"F": (into, out), "W": ([], [])}.get(kind, (out, into))
        message_kind = "F" if kind == "F" else "B"
        incoming = [Recv(message_kind, edge, micro_batch) for edge in inputs]
        for receive in incoming:
            source, _ = ranks_of(receive, self._plan.placement)
            if source != self.rank:
                message = Blocked(source, message_of(receive))
                self._messages_of[action].append(message)
                yield action, self._wrap(receive, functools.partial(self._receive, *message))
        compute = functools.partial(
            self._compute,
            action,
            tuple((receive.edge, message_of(receive)) for receive in incoming),
            tuple((edge, message_of(Send(message_kind, edge, micro_batch))) for edge in outputs),
            {
                "F": self._stage.forward,
                "B": self._stage.backward,
                "I": self._stage.input_grad,
                "W": self._run_weight_grad,
            }[kind],
        )
        yield action, self._wrap(action, compute)

    def _receive(self, source: int, key: MessageKey) -> Blocked | None:
        """Takes a message into ``values``; returns it, to wait for, if it has not arrived."""
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
        """Runs an action by a method of the stage: hands it the inputs, and stores the outputs.

        The edges are those whose values it takes and yields, with the keys of their messages.
        """
        if action.kind == "F":
            self.held += 1
            self.peak_held = max(self.peak_held, self.held)
        values = self.values
        inputs = {}
        for edge, key in incoming:
            inputs[edge] = values.pop(key)
        outputs = run(action.stage, self._global_numbers[action.micro_batch], inputs)
        for edge, key in outgoing:
            values[key] = outputs[edge]

    def _run_weight_grad(self, stage: int, micro_batch: GlobalMicroBatch, _: Values) -> Values:
        """Runs a weight-gradient action, which has neither inputs nor outputs."""
        self._stage.weight_grad(stage, micro_batch)
        return {}

    def _send(self, peer: int, key: MessageKey) -> None:
        """Sends the value of ``key``, and drops it here."""
        self.transport.send(peer, key, self.values.pop(key))

    def _free(self, stage: int, micro_batch: MicroBatch) -> None:
        """Releases the activations of a stage and micro-batch."""
        self._stage.release(stage, self._global_numbers[micro_batch])
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
        """By rank, the most forwards of one chunk that were unreleased at once in the last run."""
        return {rank: walker.peak_held for rank, walker in self._walkers.items()}

    def where(self) -> str:
        """Returns in words at which operation each rank of this process is, for errors."""
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
            for rank, until in self._rank_turns:
                walker = self._walkers[rank]
                while (blocked := walker.advance(until)) is not None:
                    self._wait(walker, blocked)
        except BaseException as error:
            if self._plays_all:
                # The next batch would take messages of this one for its own.
                for unfinished in self._walkers.values():
                    unfinished.discard()
            if isinstance(error, Exception):
                raise _add_location(error, walker) from error.__cause__
            raise
        finally:
            # These functions refer to the losses and to the optimizer.
            self._collectives = {}

    @property
    def _plays_all(self) -> bool:
        """Whether this process plays all ranks of the pipeline."""
        return len(self._walkers) == self._plan.placement.ranks

    @functools.cached_property
    def _rank_turns(self) -> list[tuple[int, int]]:
        """For each turn in a batch, the rank that runs, and the operations it has run at its end.

        A process that plays one rank has one turn; one that plays all follows the plan's order.
        """
        if not self._plays_all:
            return [(rank, len(self._plan.ops[rank])) for rank in self._walkers]
        until, turns = dict.fromkeys(self._walkers, 0), []
        for rank, operations in itertools.groupby(self._plan.order):
            until[rank] += len(list(operations))
            turns.append((rank, until[rank]))
        return turns

    def _wait(self, walker: Walker, blocked: Blocked) -> None:
        """Waits for the message without which a rank cannot go on.

        Raises:
            ScheduleError: This process plays all ranks, so that no message can still come.
        """
        if self._plays_all:
            raise ScheduleError(
                "the plan's linear order runs an operation too early",
                expected=f"{describe(blocked.key)} to have been sent by rank {blocked.peer}",
            )
        walker.wait(blocked, self._timeout)

    def _arrive(self, collective: str) -> None:
        """Runs a collective operation once all ranks of this process have reached it."""
        self._arrived[collective] += 1
        if self._arrived[collective] == len(self._walkers):
            self._collectives[collective]()


def _takes_turns(pair: Fused) -> bool:
    """Returns whether a fused pair is a forward and a backward of different stages."""
    kinds = [action.kind for action in pair.actions]
    return kinds == ["F", "B"] and pair.actions[0].stage != pair.actions[1].stage


def _add_location(error: Exception, walker: Walker) -> Exception:
    """Adds to an error the operation at which a rank was; returns the error to raise."""
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
