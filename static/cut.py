"""Assigns the operations of a user's program to stages, and finds the values that cross.

An operation is its index in ``Graph.operations``, a value its number in the graph; Paddle's own
objects are not needed. The *cut* is the stage of each operation: start with :func:`split`.
:class:`GraphReader` and :class:`StageProgram` are the interface between ``ir``, which builds
programs, and ``run``, which runs them; both name the variables of a scope by :class:`Names`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from fleetpipe.aliases import Optimizer, Program, Variable
from fleetpipe.errors import BoundaryError, ConfigError, PartitionError
from fleetpipe.schedules import Edge
from fleetpipe.static.graph import EVERYWHERE, Declared, Graph, Operation, dependencies

#: The beginning of the names of all variables that fleetpipe adds to a scope or a program.
PREFIX = "fleetpipe@"
#: Numbers the pipelines of this process, so that the names of two never coincide.
_pipeline_numbers = itertools.count()

#: Advice of error messages: how a script puts layers into stages.
GUARD = 'with paddle.static.device_guard("gpu:0"): .. with paddle.static.device_guard("gpu:1"): ..'


class Names:
    """The names of a pipeline's variables in a scope, unique in the process.

    A new executor creates some variables again: with the same names, another pipeline would use
    freed memory.
    """

    def __init__(self) -> None:
        self._prefix = f"{PREFIX}{next(_pipeline_numbers)}."
        #: The variable of the factor of all gradients, if the norm of all stages is clipped.
        self.clip_factor = f"{self._prefix}clip"

    def fed(self, name: str) -> str:
        """Returns the name of the variable from which stages read the feed ``name``."""
        return f"{self._prefix}fed.{name}"

    def incoming(self, stage: int, value: int) -> str:
        """Returns the name of the variable from which ``stage`` reads value number ``value``."""
        return f"{self._prefix}{stage}.in.{value}"

    def outgoing(self, stage: int, value: int) -> str:
        """Returns the name of the variable in which ``stage`` puts value number ``value``."""
        return f"{self._prefix}{stage}.out.{value}"

    def gradient(self, stage: int, value: int, target: int) -> str:
        """Returns the name of the variable with the gradient that stage ``target`` sends back."""
        return f"{self._prefix}{stage}.grad.{value}.{target}"

    def incoming_gradient(self, stage: int, value: int) -> str:
        """Returns the name of the variable in which ``stage`` puts an incoming value's gradient."""
        return f"{self._prefix}{stage}.in.{value}.grad"

    def accumulator(self, parameter: str) -> str:
        """Returns the name of the variable in which a parameter's gradients are summed."""
        return f"{self._prefix}{parameter}.sum"

    def waiting(self, stage: int, number: int) -> str:
        """Returns the name of the variable of result ``number`` that W of ``stage`` takes from I.

        A split backward has two actions: I for input gradients, W for gradients of parameters.
        """
        return f"{self._prefix}{stage}.waiting.{number}"


@dataclass(frozen=True)
class Split:
    """The cut of a program: the stage of each operation, and the values that cross between stages.

    Attributes:
        graph: The description of the program.
        stages: The number of stages, S.
        stage_of: The stage of each operation by number; None if every stage has its own copy.
        crossing: For each edge the values that travel along it, in the order of computation.
        checkpoints: The values from which the backward recomputes all others; None if the user does
            not ask for recompute.
        names: The names of the pipeline's variables.
        trained: The names of the parameters that the optimizer trains; None if it trains all.
    """

    graph: Graph
    stages: int
    stage_of: Sequence[int | None]
    crossing: Mapping[Edge, tuple[int, ...]]
    checkpoints: frozenset[int] | None = None
    names: Names = field(default_factory=Names)
    trained: frozenset[str] | None = None

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges between stages, sorted."""
        return tuple(sorted(self.crossing))

    def operations_of(self, stage: int) -> list[int]:
        """Returns the operations that a stage computes: those in it, and its copies of others."""
        placed = [number for number, owner in enumerate(self.stage_of) if owner == stage]
        replicated = {number for number, owner in enumerate(self.stage_of) if owner is None}
        return sorted({*placed, *dependencies(self.graph, placed, replicated)})

    @cached_property
    def stage_of_value(self) -> dict[int, int | None]:
        """The stage that computes each value; None if each stage has its own copy."""
        return {
            value: self.stage_of[number]
            for number, op in enumerate(self.graph.operations)
            for value in op.writes
        }

    def first_operation_of(self, stage: int) -> str:
        """Returns the text of the first operation of a stage, for error messages."""
        return str(self.graph.operations[self.stage_of.index(stage)])

    def readers(self, stage: int) -> dict[int, list[int]]:
        """Returns the stages that take each value which leaves ``stage``, by value."""
        stages_by_value: dict[int, list[int]] = {}
        for edge, values in self.crossing.items():
            if edge.source == stage:
                for value in values:
                    stages_by_value.setdefault(value, []).append(edge.target)
        return stages_by_value

    @property
    def persistable(self) -> set[str]:
        """The names of the parameters and running statistics of all stages."""
        return {self.graph.names[value] for value in self.graph.persistable}

    def persistable_of(self, stage: int) -> list[str]:
        """Returns the names of the parameters and running statistics that a stage uses, sorted."""
        graph = self.graph
        return sorted(
            {
                graph.names[value]
                for number in self.operations_of(stage)
                for value in graph.operations[number].writes
                if value in graph.persistable
            }
        )


def split(graph: Graph) -> Split:
    """Returns the cut of a program along the ``device_guard`` of its operations.

    An operation without a guard, or under ``device_guard("cpu")``, belongs to the latest stage from
    which it takes a value, else to stage 0.

    Raises:
        PartitionError: No operation has a guard, a stage has none, or a value would have to travel
            to an earlier stage.
        BoundaryError: Control flow reaches over several stages, or two stages change one
            persistable value.
    """
    if all(op.tag is None or op.tag < 0 for op in graph.operations):
        raise PartitionError(
            "no operation of the program has a stage",
            where=next((f"{op} is the first" for op in graph.operations if not op.floating), None),
            cause="the layers were built outside of device_guard, in one without a number ('gpu', "
            "'cpu'), before fleetpipe.fleet was imported, or between fleet.shutdown and the next "
            "fleet.init",
            fix=f"build each part of the network in a guard: {GUARD}",
        )
    stage_of: list[int | None] = []
    stage_of_value: dict[int, int | None] = {}
    producers = graph.producers()
    for number, op in enumerate(graph.operations):
        sources = [stage_of_value[value] for value in op.reads if value in stage_of_value]
        stage = _stage_of_operation(graph, number, sources)
        for value in op.reads:
            source = stage_of_value.get(value)
            if source is not None and (stage is None or source > stage):
                raise _backwards_error(graph, producers[value], number, source, stage)
        stage_of.append(stage)
        stage_of_value.update(dict.fromkeys(op.writes, stage))
    stages = _count_stages(graph, stage_of)
    _refuse_changed_elsewhere(graph, stage_of)
    _refuse_branches_in_several_stages(graph, stage_of)
    return Split(graph, stages, tuple(stage_of), _values_by_edge(graph, stage_of, stage_of_value))


def _stage_of_operation(graph: Graph, number: int, sources: list[int | None]) -> int | None:
    """Returns the stage of an operation; None if each stage has its own copy.

    Args:
        graph: The program.
        number: The number of the operation.
        sources: The stages of the values that it takes.
    """
    op = graph.operations[number]
    inner = {tag for tag in op.inner if tag >= 0}
    if len(inner | ({op.tag} if op.tag is not None and op.tag >= 0 else set())) > 1:
        itself = f", itself in stage {op.tag}" if op.tag is not None and op.tag >= 0 else ""
        raise _control_flow_error(op, f"operations of stages {sorted(inner)} in it{itself}")
    if op.floating:
        return None
    if op.tag is not None and op.tag >= 0:
        return op.tag
    if inner:
        return inner.pop()
    if op.tag == EVERYWHERE:
        _refuse_random_or_changing(graph, number)
        return None
    return max((source for source in sources if source is not None), default=0)


def _control_flow_error(op: Operation, got: str) -> BoundaryError:
    """Returns the error of a cond or while_loop in several stages; ``got`` tells which stages."""
    return BoundaryError(
        "control flow reaches over several stages",
        where=str(op),
        expected="a cond or while_loop, all of it within one device_guard",
        got=got,
        fix="put the guard around the whole of it, and none inside, and keep gradients out of it "
        "with stop_gradient; or write it without (paddle.where chooses by value)",
    )


def _refuse_branches_in_several_stages(graph: Graph, stage_of: Sequence[int | None]) -> None:
    """Refuses a ``cond`` whose branches are in several stages.

    In an older Program each branch is an operation, and ``select_input`` chooses their results.
    """
    producers = graph.producers()
    for number, op in enumerate(graph.operations):
        if op.name == "select_input":
            inputs = [producers[value] for value in op.reads]
            branches = [n for n in inputs if graph.operations[n].name == "conditional_block"]
            stages = {stage_of[n] for n in (*branches, number)}
            if len(stages) > 1:
                listed = ", ".join(sorted(map(str, stages)))
                raise _control_flow_error(
                    graph.operations[branches[0]], f"branches of stages {listed}"
                )


def _refuse_random_or_changing(graph: Graph, number: int) -> None:
    """Refuses an operation of all stages that draws random numbers or changes a variable."""
    op = graph.operations[number]
    if op.is_random or number in graph.written:
        raise PartitionError(
            "an operation under device_guard('gpu:all') would not be the same in every stage",
            where=str(op),
            expected="operations that give the same wherever they are computed",
            got="random numbers, which each stage draws from a stream of its own"
            if op.is_random
            else f"a change of {_value_name(graph, graph.written[number][0])} by every stage",
            fix="put it under the guard of the first stage that uses it: values travel from there",
        )


def _backwards_error(
    graph: Graph, producer: int, reader: int, source: int, target: int | None
) -> PartitionError:
    """Returns the error of an operation that takes a value of a later stage.

    Args:
        graph: The program.
        producer: The operation that computes the value.
        reader: The operation that takes the value.
        source: The stage of the producer.
        target: The stage of the reader; None if every stage computes the reader.
    """
    producing, reading = graph.operations[producer], graph.operations[reader]
    if target is None:
        return PartitionError(
            "an operation under device_guard('gpu:all') takes a value that one stage makes",
            where=str(reading),
            expected="inputs that every stage has: parameters, fed data, constants",
            got=f"the result of {producing} of stage {source}",
            fix="put it under the guard of the stage that uses its result",
        )
    return PartitionError(
        "a value would have to travel backwards in the forward computation",
        where=f"{reading} of stage {target}",
        expected=f"inputs from stage {target} or earlier",
        got=f"the result of {producing} of stage {source}",
        fix="stages follow the order of the network: give the later operation the later guard",
    )


def _count_stages(graph: Graph, stage_of: Sequence[int | None]) -> int:
    """Returns the number of stages; refuses a stage without operations."""
    used = {stage for stage in stage_of if stage is not None}
    stages = max(used) + 1
    missing = sorted(set(range(stages)) - used)
    if missing:
        last = max(n for n, stage in enumerate(stage_of) if stage == stages - 1)
        raise PartitionError(
            f"stage {missing[0]} has no operation",
            expected=f"every stage from 0 to {stages - 1} to be used: the largest is that of "
            f"{graph.operations[last]}",
            got=f"operations of stages {', '.join(map(str, sorted(used)))}",
            fix="number the guards 0, 1, 2, .. without a gap",
        )
    return stages


def _refuse_changed_elsewhere(graph: Graph, stage_of: Sequence[int | None]) -> None:
    """Refuses a value that one stage changes in place and another uses: its copy would be old.

    That is allowed if the stage computes the value itself and other stages take the final value.
    """
    producers = graph.producers()
    changes = [(writer, value) for writer, values in graph.written.items() for value in values]
    for writer, value in changes:
        users = [number for number, op in enumerate(graph.operations) if value in op.reads]
        if value not in graph.persistable:
            users = [producers[value], *(number for number in users if number < writer)]
        for number in users:
            if stage_of[number] != stage_of[writer]:
                raise BoundaryError(
                    f"{_value_name(graph, value)} is changed by one stage and used by another",
                    where=f"{graph.operations[number]} of stage {stage_of[number]}",
                    expected="values that only the stage that uses them changes in place",
                    got=f"{graph.operations[writer]} of stage {stage_of[writer]} changes it",
                    fix="put both under one guard, or let one have a copy: paddle.assign(value)",
                )


def _value_name(graph: Graph, value: int) -> str:
    """Returns a value's name for error messages; under PIR few values have names."""
    return repr(graph.names[value]) if value in graph.names else "a value"


def _values_by_edge(
    graph: Graph, stage_of: Sequence[int | None], stage_of_value: Mapping[int, int | None]
) -> dict[Edge, tuple[int, ...]]:
    """Returns the values that travel along each edge, from the stages of operations and values."""
    values_by_edge: dict[Edge, set[int]] = {}
    for number, op in enumerate(graph.operations):
        target = stage_of[number]
        for value in op.reads:
            source = stage_of_value.get(value)
            if source is not None and target is not None and source != target:
                values_by_edge.setdefault(Edge(source, target), set()).add(value)
    return {edge: tuple(sorted(values)) for edge, values in values_by_edge.items()}


def ranks_for(cut: Split, ranks: int | None, world_size: int, interleaved: int) -> tuple[int, int]:
    """Returns the number of ranks of a pipeline, and the number of stages on each rank.

    ``minimize`` calls it: without ``pp_degree`` the program's guards determine the ranks.

    Args:
        cut: The cut of the program, into S stages.
        ranks: ``pp_degree``; None if the user gave none.
        world_size: The number of processes of the job; 1 if one process plays all ranks.
        interleaved: The schedule's default number of chunks on a rank.

    Raises:
        ConfigError: The stages cannot be placed.
    """
    stages = cut.stages
    if ranks is None:
        ranks = stages // interleaved if stages % interleaved == 0 else stages
        if interleaved > 1 and 1 < world_size < ranks and stages % world_size == 0:
            ranks = world_size
    if stages % ranks:
        raise ConfigError(
            f"the {stages} stages of the program cannot be placed on {ranks} ranks alike",
            where=f"stage {stages - 1}, the last, begins with {cut.first_operation_of(stages - 1)}",
            expected=f"a multiple of {ranks} stages (stage s is on rank s % {ranks})",
            got=f"{stages} stages",
            fix="use as many guards, or another pp_degree in strategy.hybrid_configs",
        )
    if world_size > 1 and (ranks > world_size or world_size % ranks):
        beyond = min(world_size, stages - 1)
        raise ConfigError(
            f"the program has {stages} stages for {ranks} ranks, the job has {world_size}",
            where=f"stage {beyond} begins with {cut.first_operation_of(beyond)}",
            expected=f"a multiple of {ranks} processes",
            fix=f"launch with --nproc_per_node {ranks}, use fewer guards, or a schedule with "
            "several stages on a rank: schedule_mode 'Interleaved1F1B'",
        )
    return ranks, stages // ranks


class BackwardProgram(NamedTuple):
    """Paddle's program of one backward action of a stage.

    It is the full backward (B), or one half of a split backward: I for the gradients of inputs, W
    for those of parameters.

    Attributes:
        program: The program; None if there is nothing to compute.
        saved: Names of the variables that it takes from the forward or from the forward's inputs.
        waiting: Names of the variables that a W takes from its I, or from the inputs of I.
        shape_only: The names in ``saved`` of variables of which it needs only the shape.
    """

    program: Program | None = None
    saved: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    shape_only: frozenset[str] = frozenset()


class NativePrograms(NamedTuple):
    """Paddle's programs of a stage, one for each kind of action.

    Attributes:
        forward: Computes the values that leave the stage, and those stored for its backward.
        backward: Adds to the accumulators and computes the gradients that leave the stage.
        input_grad: I, if the schedule splits the backward: computes the gradients that leave the
            stage, and the values that W takes from it.
        weight_grad: W: adds to the accumulators.
    """

    forward: Program
    backward: BackwardProgram = BackwardProgram()
    input_grad: BackwardProgram = BackwardProgram()
    weight_grad: BackwardProgram = BackwardProgram()

    @property
    def saved(self) -> dict[str, bool]:
        """The variables to save for the backward, each with whether only its shape is needed."""
        shape_only: dict[str, bool] = {}
        for backward in (self.backward, self.input_grad, self.weight_grad):
            for name in backward.saved:
                shape_only[name] = shape_only.get(name, True) and name in backward.shape_only
        return shape_only


class StageProgram(Protocol):
    """A stage with its own backward, from which :meth:`cut` makes a program for each action.

    Attributes:
        feeds: The variable of each data input of the stage, by name.
        input_gradients: The variable of the gradient of each incoming value that gets one; two
            values may share theirs.
        accumulators: The variable of each parameter's gradient.
    """

    @property
    def feeds(self) -> Mapping[str, str]: ...  # noqa: D102

    @property
    def input_gradients(self) -> Mapping[int, str]: ...  # noqa: D102

    @property
    def accumulators(self) -> Mapping[str, str]: ...  # noqa: D102

    def incoming(self, value: int) -> str:
        """Returns the name of the variable from which this stage reads an earlier stage's value."""

    def outgoing(self, value: int) -> str:
        """Returns the name of the variable in which this stage puts a value that it computes."""

    def cut(self, exports: Iterable[int], kinds: Collection[str]) -> NativePrograms:
        """Returns the programs of the stage's actions.

        Args:
            exports: Values of the stage that its forward puts into their :meth:`outgoing`
                variables.
            kinds: The kinds of backward actions in the schedule: ``"B"``, or ``"I"`` and ``"W"``.
        """


class OptimizerVariables(NamedTuple):
    """The variables of the optimizer's state for a parameter.

    Attributes:
        kinds: The variables by kind, such as ``moment1``.
        master: The variable of the parameter's float32 copy; None without a copy.
    """

    kinds: Mapping[str, str]
    master: str | None


class Update(NamedTuple):
    """The optimizer step of a process.

    Attributes:
        step: The native program that updates the parameters from the accumulators, and sets these
            to 0.
        startup: The native program that creates the optimizer's own variables.
        rate_name: The variable of the learning rate.
        variables: Names of the optimizer's own variables.
        state: The optimizer's variables of each parameter, by the parameter's name.
    """

    step: Program
    startup: Program
    rate_name: str
    variables: tuple[str, ...]
    state: Mapping[str, OptimizerVariables]


class GraphReader(Protocol):
    """Reads a forward program of one of Paddle's two IRs.

    Attributes:
        graph: The description of the program.
        data: The declaration of each ``paddle.static.data``, by name.
        declared: The shape of each parameter and statistic by name, in the order of creation.
        unclipped: The parameters whose ``need_clip`` is False.
    """

    @property
    def graph(self) -> Graph: ...  # noqa: D102

    @property
    def data(self) -> Mapping[str, Declared]: ...  # noqa: D102

    @property
    def declared(self) -> Mapping[str, Sequence[int]]: ...  # noqa: D102

    @property
    def unclipped(self) -> frozenset[str]: ...  # noqa: D102

    def number(self, target: Variable | str) -> int | None:
        """Returns the number of a value to fetch; None if it is not in this program."""

    def stage(self, split: Split, stage: int, loss: int, weight: float) -> StageProgram:
        """Builds a stage with its backward.

        Args:
            split: The cut.
            stage: The stage to build.
            loss: The number of the loss among the program's values.
            weight: The gradient of the loss in each micro-batch.
        """

    def update(
        self,
        names: Names,
        optimizer: Optimizer,
        parameters: Sequence[str],
        clipped: Collection[str],
    ) -> Update:
        """Builds the optimizer step of a process.

        Args:
            names: The names of the pipeline's variables.
            optimizer: The user's optimizer.
            parameters: The names of the parameters to update.
            clipped: The names of those whose gradient ``names.clip_factor`` multiplies before it.
        """

    def startup(self, program: Program, names: Iterable[str]) -> Program:
        """Returns a program that initializes the variables ``names`` as ``program`` does."""
