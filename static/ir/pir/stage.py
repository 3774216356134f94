"""A stage of a PIR program: its own operations, its backward, and the cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.errors import BoundaryError, ConfigError
from fleetpipe.static._paddle import static
from fleetpipe.static.cut.contract import (
    PREFIX,
    Pieces,
    accumulator_name,
    gradient_name,
    incoming_gradient_name,
    incoming_name,
    outgoing_name,
)
from fleetpipe.static.cut.split import Split
from fleetpipe.static.ir.pir.operations import (
    DATA,
    IN_PLACE,
    PARAMETER,
    by_shape,
    changes,
    draws_of,
    export,
    inside,
    is_free,
    is_source,
    line_of,
    name_of,
    place,
    place_repeated,
    placeholder,
    taken,
    to_end,
)

_operations: Any = paddle._C_ops


class PirStage:
    """One stage with its own backward; see :class:`sections.StageProgram`."""

    def __init__(
        self,
        program: Any,
        places: Sequence[tuple[int, int]],
        split: Split,
        stage: int,
        loss: tuple[int, float],
    ) -> None:
        """Builds the stage from the whole forward program, which stays as it is.

        Args:
            program: The forward program.
            places: Operation and result of each value number.
            split: The cut.
            stage: The stage to build.
            loss: The loss, and what its gradient is.
        """
        self._stage = stage
        self._split = split
        self._program = program.clone()
        self._values: dict[int, Any] = {}
        self.accumulators: dict[str, str] = {}
        self.input_gradients: dict[int, str] = {}
        with static.program_guard(self._program, static.Program()):
            self._isolate(places)
            self._forward = {op.id() for op in self._ops()}
            self._numbers = {place(value): n for n, value in self._values.items()}
            self._differentiate(*loss)
        self._kept, self._repeated, self._read = self._crossing()

    def incoming(self, value: int) -> str:
        """Returns the variable in which the stage finds a value of an earlier one."""
        return incoming_name(self._stage, value)

    def outgoing(self, value: int) -> str:
        """Returns the variable in which the stage leaves a value that it makes."""
        return outgoing_name(self._stage, value)

    def cut(self, exports: Iterable[int]) -> Pieces:
        """Cuts the stage; its forward leaves the values ``exports`` in their variables."""
        forward = self._forward_piece({*self._kept, *exports})
        if self._forward.issuperset(op.id() for op in self._ops()):
            return Pieces(forward, None, (), frozenset())
        backward, kept = self._backward_piece()
        read = {outgoing_name(self._stage, number) for number in self._read}
        for number in self._read:
            op = self._values[number].get_defining_op()
            read |= {name_of(op)} if op.name() == DATA else set()
        return Pieces(forward, backward, kept, frozenset(kept) - read)

    def _isolate(self, places: Sequence[tuple[int, int]]) -> None:
        """Removes what other stages compute, and takes in what they hand over."""
        ops = list(self._program.global_block().ops)
        mine = set(self._split.operations_of(self._stage))
        for number, (index, result) in enumerate(places):
            if index in mine:
                self._values[number] = ops[index].result(result)
        for edge, numbers in self._split.crossing.items():
            for number in numbers if edge.target == self._stage else ():
                index, result = places[number]
                value = ops[index].result(result)
                if not value.is_dense_tensor_type():
                    raise BoundaryError(
                        "a list of tensors cannot cross from one stage to another",
                        where=str(self._split.graph.operations[index]),
                        fix="build the operation that takes the list under the same guard",
                    )
                name = incoming_name(self._stage, number)
                self._values[number] = placeholder(name, value)
                value.replace_all_uses_with(self._values[number])
        for index in reversed(range(len(ops))):
            if index not in mine:
                ops[index].erase()
        fed = [op for op in self._ops() if op.name() == DATA]
        for op in fed:
            op.result(0).persistable = True  # else it is freed after the forward
        names = [name_of(op) for op in fed]
        self.feeds = [name for name in names if not name.startswith(PREFIX)]

    def _differentiate(self, loss: int, weight: float) -> None:
        """Appends the backward of the stage: from its outputs or the loss to what it was given."""
        targets, grads = self._targets(loss, weight)
        if not targets:
            return
        ops = self._program.global_block().ops
        parameters = [op for op in ops if op.name() == PARAMETER and not op.result(0).stop_gradient]
        incoming = self._differentiable_inputs()
        inputs = [op.result(0) for op in parameters] + [self._values[n] for n in incoming]
        if not inputs:
            return
        found = static.gradients(targets, inputs, grads)
        self._refuse_control_flow()
        for op, grad in zip(parameters, found):
            if grad is not None:
                self._accumulate(op, grad)
        names: dict[Any, str] = {}
        for number, grad in zip(incoming, found[len(parameters) :]):
            if grad is not None:
                # One value has one name: two inputs may share their gradient.
                if grad.id not in names:
                    names[grad.id] = incoming_gradient_name(self._stage, number)
                    export(grad, names[grad.id])
                self.input_gradients[number] = names[grad.id]

    def _targets(self, loss: int, weight: float) -> tuple[list[Any], list[Any]]:
        graph, targets, grads = self._split.graph, [], []
        for number, readers in sorted(self._split.readers(self._stage).items()):
            value = self._values[number]
            if number not in graph.differentiable:
                continue
            # The latest reader first, as the unsplit program adds gradients up.
            parts = [
                placeholder(gradient_name(self._stage, number, target), value)
                for target in sorted(readers, reverse=True)
            ]
            total = parts[0]
            for part in parts[1:]:
                total = _operations.add(total, part)
            targets.append(value)
            grads.append(total)
        if self._split.stage_of_value.get(loss) == self._stage:
            value = self._values[loss]
            targets.append(value)
            grads.append(paddle.full(value.shape, weight, value.dtype))
        return targets, grads

    def _differentiable_inputs(self) -> list[int]:
        return [
            number
            for edge, numbers in sorted(self._split.crossing.items())
            for number in numbers
            if edge.target == self._stage and number in self._split.graph.differentiable
        ]

    def _accumulate(self, parameter: Any, grad: Any) -> None:
        name = name_of(parameter)
        if not grad.is_dense_tensor_type():
            raise ConfigError(
                f"the gradient of {name!r} is sparse, which a static pipeline does not add up",
                fix="build the embedding with sparse=False",
            )
        self.accumulators[name] = accumulator_name(name)
        total = placeholder(self.accumulators[name], grad)
        _operations.add_(total, grad)

    def _refuse_control_flow(self) -> None:
        for op in self._program.global_block().ops:
            # What backward takes from inside of a block is pushed there onto a stack.
            if op.id() in self._forward and any("push" in one.name() for one in inside(op)):
                raise BoundaryError(
                    "a gradient passes through control flow, which a pipeline cannot cut",
                    where=f"operation {op.name()!r} ({line_of(op)})",
                    fix="write it without cond and while_loop (paddle.where chooses by value), or "
                    "keep gradients out of it with stop_gradient",
                )

    def _crossing(self) -> tuple[list[int], set[int], set[int]]:
        """Finds what backward takes from forward or is given again.

        Returns:
            The values that it takes from forward; the operations of forward that it repeats; the
            values that it takes for their data, not for their shape alone.
        """
        crossing: set[int] = set()
        repeated: set[int] = set()
        read: set[int] = set()
        waiting = [op for op in self._ops() if op.id() not in self._forward]
        while waiting:
            user = waiting.pop()
            for value in taken(user):
                op = value.get_defining_op()
                if op is None or op.id() not in self._forward or op.name() == PARAMETER:
                    continue
                if value.index() in IN_PLACE.get(op.name(), {}):
                    continue
                number, unread = self._numbers[place(value)], by_shape(user, value)
                if not unread:
                    read.add(number)
                if op.name() == DATA:
                    continue
                if is_free(op) or (not unread and self._computed_again(op, value)):
                    if op.id() not in repeated:
                        repeated.add(op.id())
                        waiting.append(op)
                else:
                    crossing.add(number)
        made = {n for n in crossing if self._values[n].get_defining_op().id() in repeated}
        return sorted(crossing - made), repeated, read

    def _computed_again(self, op: Any, value: Any) -> bool:
        """Whether backward computes a value again because the user's script has it cost no memory.

        What was drawn is not drawn again, and what an operation changes in place is kept as that
        left it.
        """
        kept = self._split.checkpoints
        if kept is None or self._numbers[place(value)] in kept:
            return False
        if draws_of(op) or op.num_regions():
            return False
        return not any(map(changes, (op, *value.all_used_ops())))

    def _copy(self) -> tuple[Any, list[Any], list[Any], dict[int, Any]]:
        """Returns a copy, its operations, those of them of the forward, and its values."""
        copy = self._program.clone()
        mine, ops = self._ops(), list(copy.global_block().ops)
        index = {op.id(): i for i, op in enumerate(mine)}
        values = {
            number: ops[index[value.get_defining_op().id()]].result(value.index())
            for number, value in self._values.items()
        }
        return copy, ops, [ops[index[number]] for number in sorted(self._forward)], values

    def _forward_piece(self, numbers: Iterable[int]) -> Any:
        piece, ops, forward, values = self._copy()
        ids = {op.id() for op in forward}
        with static.program_guard(piece, static.Program()):
            for op in reversed(ops):
                if op.id() not in ids:
                    op.erase()
            to_end(piece.global_block())
            for number in sorted(numbers):
                export(values[number], outgoing_name(self._stage, number))
        return piece

    def _backward_piece(self) -> tuple[Any, tuple[str, ...]]:
        """Returns the backward, and the names of what it takes from the forward or its inputs."""
        piece, ops, forward, values = self._copy()
        ids = {op.id() for op in forward}
        repeated = {op.id() for mine, op in zip(self._ops(), ops) if mine.id() in self._repeated}
        own: list[str] = []
        with static.program_guard(piece, static.Program()):
            for number in self._kept:
                name = outgoing_name(self._stage, number)
                values[number].replace_all_uses_with(placeholder(name, values[number]))
            for op in forward:
                for result, operand in IN_PLACE.get(op.name(), {}).items():
                    op.result(result).replace_all_uses_with(op.operand_source(operand))
            # From the last to the first: those that use an operation are gone before it is, and
            # none is looked at after it is gone, which would read memory that is free.
            for op in reversed(ops):
                if op.id() not in ids:
                    continue
                needed = any(not value.use_empty() for value in op.results())
                if needed and (is_source(op) or op.id() in repeated):
                    own += [name_of(op)] if op.name() == DATA else []
                else:
                    op.erase()
            place_repeated(piece, repeated)
        kept = [outgoing_name(self._stage, number) for number in self._kept]
        return piece, (*sorted(own), *kept)

    def _ops(self) -> list[Any]:
        return list(self._program.global_block().ops)
