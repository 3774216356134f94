"""A stage of a PIR program: isolates its operations, appends its backward, cuts it into pieces."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from fleetpipe.aliases import Op, Program, Variable
from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.static import pir_operations, static
from fleetpipe.static.cut import Pieces, ProgramPiece, Split
from fleetpipe.static.ir import backward, pir_values


class _Copy(NamedTuple):
    """A copy of a stage's program.

    Attributes:
        program: The copy.
        ops: Its operations.
        values: Its values by number.
        forward: The indices of the forward's operations.
        repeated: The indices of the operations that backward computes again.
    """

    program: Program
    ops: list[Op]
    values: dict[int, Variable]
    forward: frozenset[int]
    repeated: frozenset[int]


class PirStage:
    """One stage with its own backward; see ``cut.StageProgram``."""

    def __init__(
        self,
        program: Program,
        places: Sequence[tuple[int, int]],
        split: Split,
        stage: int,
        loss: tuple[int, float],
    ) -> None:
        """Builds the stage from the whole forward program, which does not change.

        Args:
            program: The forward program.
            places: The index of the operation and of the result, for each value by number.
            split: The cut.
            stage: The number of the stage.
            loss: The number of the loss as a value, and the gradient of the loss.
        """
        self._stage = stage
        self._split = split
        self._program = program.clone()
        self._values: dict[int, Variable] = {}
        self._left: dict[int, str] = {}
        with static.program_guard(self._program, static.Program()):
            self._isolate(places)
            self._forward = {op.id() for op in self._ops()}
            self._versions = pir_values.Versions()
            changed = [value for op in self._ops() for value in self._versions.add(op)]
            self._changed = {pir_values.place(value) for value in changed}
            self._numbers = {pir_values.place(value): n for n, value in self._values.items()}
            self.accumulators, self.input_gradients = backward.append(self, split, stage, loss)
            pir_values.take_operands(self._ops())
        self._refuse_control_flow()
        self._kept, self._repeated = self._crossing()

    def incoming(self, value: int) -> str:
        """Returns the variable from which the stage reads a value of an earlier stage."""
        return self._split.names.incoming(self._stage, value)

    def outgoing(self, value: int) -> str:
        """Returns the variable in which the stage puts a value that it computes."""
        return self._split.names.outgoing(self._stage, value)

    def cut(self, exports: Iterable[int], kinds: Collection[str] = ("B",)) -> Pieces:
        """Cuts the stage; its forward puts the values ``exports`` into their variables."""
        pieces = Pieces(self._forward_piece({*self._kept, *exports}))
        if self._forward.issuperset(op.id() for op in self._ops()):
            return pieces
        if "B" in kinds:
            pieces = pieces._replace(backward=self._backward_piece())
        if "I" not in kinds:
            return pieces
        if self._split.checkpoints is not None or self._narrow():
            # Everything runs in I, and W is empty: recomputed operations would run twice, and the
            # operations of oneDNN cannot be divided.
            return pieces._replace(input_grad=self._backward_piece())
        first, second = self._halves()
        return pieces._replace(input_grad=first, weight_grad=second)

    def _narrow(self) -> bool:
        """Whether backward takes bfloat16 values, for which a CPU uses oneDNN's kernels.

        These kernels crash, or compute other numbers, if only some of their gradients are computed,
        and cannot put a gradient into a variable.
        """
        backwards = (op for op in self._ops() if op.id() not in self._forward)
        values = (value for op in backwards for value in pir_values.operands(op))
        return any(v.is_dense_tensor_type() and v.dtype == paddle.bfloat16 for v in values)

    def _isolate(self, places: Sequence[tuple[int, int]]) -> None:
        """Removes the operations of other stages, and adds the incoming values."""
        self.feeds: dict[str, str] = {}
        ops = list(self._program.global_block().ops)
        mine = set(self._split.operations_of(self._stage))
        self._take_changed(ops, mine)
        for number, (index, result) in enumerate(places):
            if index not in mine:
                continue
            self._values[number] = ops[index].result(result)
            if ops[index].name() == pir_values.DATA:
                name = pir_values.name_of(ops[index])
                self.feeds[name] = self._split.names.fed(name)
                self._values[number] = self._replace(self.feeds[name], self._values[number])
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
                self._values[number] = self._replace(self.incoming(number), value)
        for index in reversed(range(len(ops))):
            if index not in mine or ops[index].name() == pir_values.DATA:
                ops[index].erase()

    def _take_changed(self, ops: Sequence[Op], mine: Collection[int]) -> None:
        """Makes the stage's operations take a value after another stage has changed it in place."""
        versions = pir_values.Versions()
        here = {ops[index].id() for index in mine}
        elsewhere: set[tuple[int, int]] = set()
        for index, op in enumerate(ops):
            for one in (op, *pir_values.inside(op)) if index in mine else ():
                for operand in one.operands():
                    value = operand.source()
                    if not value.initialized():
                        continue
                    now = versions.now(value)
                    if now.get_defining_op() is None or now.is_same(value):
                        continue
                    first = pir_values.place(versions.first(now))
                    if now.get_defining_op().id() not in here:
                        elsewhere.add(first)
                    if first in elsewhere:
                        operand.set_source(now)
            versions.add(op)

    def _replace(self, variable: str, value: Variable) -> Variable:
        """Replaces a value by a variable of the scope, and returns that."""
        replacement = pir_values.placeholder(variable, value)
        value.replace_all_uses_with(replacement)
        return replacement

    def parameters(self) -> dict[str, Variable]:
        """Returns the trainable parameters that the stage uses, by name."""
        used = [op for op in self._ops() if op.name() == pir_values.PARAMETER]
        return {
            pir_values.name_of(op): op.result(0) for op in used if not op.result(0).stop_gradient
        }

    def variable(self, value: int) -> Variable:
        """Returns a value of the stage, computed or incoming."""
        return self._values[value]

    def target(self, value: int) -> Variable:
        """Returns the value to differentiate for a value that leaves the stage."""
        return self._values[value]

    def fed(self, name: str, like: Variable) -> Variable:
        """Returns a variable of the scope, with the shape of a value."""
        return pir_values.placeholder(name, like)

    def add(self, parts: Sequence[Variable]) -> Variable:
        """Returns the sum of the parts, added in their order."""
        return functools.reduce(pir_operations.add, parts)

    def add_to(self, total: Variable, grad: Variable) -> None:
        """Adds a gradient to an accumulator."""
        pir_operations.add_(total, grad)

    def is_sparse(self, grad: Variable) -> bool:
        """Whether a gradient has only some of the rows."""
        return not grad.is_dense_tensor_type()

    def leave(self, grad: Variable, name: str) -> str:
        """Puts a gradient into a variable; a gradient of two inputs has one variable."""
        if grad.id not in self._left:
            self._left[grad.id] = name
            pir_values.export(grad, name)
        return self._left[grad.id]

    def _refuse_control_flow(self) -> None:
        """Refuses a backward that takes values from inside of control flow."""
        for op in self._ops():
            # An inner block pushes the values that backward takes onto a stack.
            if op.id() in self._forward and any(
                "push" in one.name() for one in pir_values.inside(op)
            ):
                raise backward.through_control_flow(
                    f"operation {op.name()!r} ({pir_values.line_of(op)})"
                )

    def _crossing(self) -> tuple[list[int], set[int]]:
        """Finds the values that backward takes from forward.

        Returns:
            The numbers of these values, and the ids of the operations that backward computes again.
        """
        crossing: set[int] = set()
        repeated: set[int] = set()
        waiting = [op for op in self._ops() if op.id() not in self._forward]
        while waiting:
            user = waiting.pop()
            for taken in pir_values.operands(user):
                value = self._versions.first(taken)
                op = value.get_defining_op()
                if op is None or op.id() not in self._forward or op.name() == pir_values.DATA:
                    continue
                changed = pir_values.place(value) in self._changed
                if op.name() == pir_values.PARAMETER:
                    if changed and not user.name().startswith(pir_values.NORMS):
                        crossing.add(self._numbers[pir_values.place(value)])
                    continue
                if changed and not value.is_dense_tensor_type():
                    raise self._changed_list(op)
                unread = pir_values.by_shape(user, taken)
                if (pir_values.is_free(op) and not changed) or (
                    not unread and self._computed_again(op, value)
                ):
                    if op.id() not in repeated:
                        repeated.add(op.id())
                        waiting.append(op)
                else:
                    crossing.add(self._numbers[pir_values.place(value)])
        made = {n for n in crossing if self._values[n].get_defining_op().id() in repeated}
        return sorted(crossing - made), repeated

    def _changed_list(self, op: Op) -> BoundaryError:
        """Returns the error of a backward that takes a TensorArray from forward."""
        return BoundaryError(
            "a gradient passes through a list of tensors that is written to",
            where=f"operation {op.name()!r} ({pir_values.line_of(op)}) of stage {self._stage}",
            cause="backward would take a TensorArray from forward, which no variable can hold",
            fix="use a Python list and paddle.stack or paddle.concat, or keep gradients out of it "
            "with stop_gradient",
        )

    def _computed_again(self, op: Op, value: Variable) -> bool:
        """Whether backward recomputes a value, because the user's script asks for recompute.

        Random values are not drawn again, and values that are changed in place are stored.
        """
        kept = self._split.checkpoints
        if kept is None or self._numbers[pir_values.place(value)] in kept:
            return False
        if pir_values.draws_of(op) or op.num_regions():
            return False
        if any(map(pir_values.changes, (op, *value.all_used_ops()))):
            return False
        inputs = (pir_values.place(self._versions.first(v)) for v in pir_values.operands(op))
        return op.name().startswith(pir_values.NORMS) or self._changed.isdisjoint(inputs)

    def _copy(self, program: Program | None = None) -> _Copy:
        """Returns a copy of the stage's program, or of another copy."""
        mine, copy = self._ops(), (program or self._program).clone()
        ops = list(copy.global_block().ops)
        index = {op.id(): i for i, op in enumerate(mine)}
        values = {
            number: ops[index[value.get_defining_op().id()]].result(value.index())
            for number, value in self._values.items()
        }
        forward = frozenset(i for i, op in enumerate(mine) if op.id() in self._forward)
        repeated = frozenset(i for i, op in enumerate(mine) if op.id() in self._repeated)
        return _Copy(copy, ops, values, forward, repeated)

    def _forward_piece(self, numbers: Iterable[int]) -> Program:
        """Returns the forward, which puts the values ``numbers`` into their variables."""
        copy = self._copy()
        with static.program_guard(copy.program, static.Program()):
            for index in reversed(range(len(copy.ops))):
                if index not in copy.forward:
                    copy.ops[index].erase()
            pir_values.to_end(copy.program.global_block())
            for number in sorted(numbers):
                pir_values.export(copy.values[number], self.outgoing(number))
        return copy.program

    def _backward_piece(self) -> ProgramPiece:
        """Returns the full backward, B."""
        copy = self._copy()
        with static.program_guard(copy.program, static.Program()):
            self._leave(copy, frozenset(range(len(copy.ops))))
            return self._piece(copy.program)._replace(waiting=())

    def _halves(self) -> tuple[ProgramPiece, ProgramPiece]:
        """Returns the two halves of the backward, I and W."""
        whole = self._copy()
        pir_values.pass_through(whole.ops, whole.forward)
        division = pir_values.divide(whole.ops, whole.forward)
        crossing = {
            self._split.names.waiting(self._stage, number): crossed
            for number, crossed in enumerate(division.crossing)
        }
        first, second = (self._copy(whole.program) for _ in range(2))
        with static.program_guard(first.program, static.Program()):
            pir_values.to_end(first.program.global_block())
            for name, (index, result) in crossing.items():
                pir_values.export(first.ops[index].result(result), name)
            self._leave(first, division.inputs)
            pir_values.ask_for_less(first.ops[index] for index in division.inputs)
            input_grad = self._piece(first.program)._replace(waiting=())
        if not division.weights:
            return input_grad, ProgramPiece()
        with static.program_guard(second.program, static.Program()):
            for name, (index, result) in crossing.items():
                value = second.ops[index].result(result)
                value.replace_all_uses_with(pir_values.placeholder(name, value))
            self._leave(second, division.weights)
            pir_values.ask_for_less(second.ops[index] for index in division.weights)
            return input_grad, self._piece(second.program)

    def _leave(self, copy: _Copy, mine: Collection[int]) -> None:
        """Reduces a copy to the operations ``mine`` of its backward, and what they need of forward.

        Values of the forward become variables, or are computed again.
        """
        for number in self._kept:
            value = copy.values[number]
            value.replace_all_uses_with(pir_values.placeholder(self.outgoing(number), value))
        for index in copy.forward:
            op = copy.ops[index]
            for result, operand in pir_values.in_place(op).items():
                op.result(result).replace_all_uses_with(op.operand_source(operand))
        repeated = {copy.ops[index].id() for index in copy.repeated}
        # From the last to the first, so that the users of an operation are erased before it. An
        # erased operation must not be read: its memory is free.
        for index in reversed(range(len(copy.ops))):
            op = copy.ops[index]
            stays = index in mine
            if index in copy.forward:
                stays = pir_values.is_source(op) or index in copy.repeated
            if index in copy.forward or pir_values.is_source(op) or pir_values.is_constant(op):
                stays = any(not value.use_empty() for value in op.results()) and (
                    stays or index not in copy.forward
                )
            if not stays:
                op.erase()
        pir_values.place_repeated(copy.program, repeated)

    def _piece(self, program: Program) -> ProgramPiece:
        """Removes unused data from a program of the backward, and describes it."""
        forward_values = {
            pir_values.name_of(op)
            for op in self._ops()
            if op.id() in self._forward and op.name() == pir_values.DATA
        }
        forward_values |= {self.outgoing(number) for number in self._kept}
        kept, waiting, shapes = [], [], []
        for op in list(program.global_block().ops):
            if op.name() != pir_values.DATA:
                continue
            value, name = op.result(0), pir_values.name_of(op)
            if value.use_empty():
                op.erase()
            elif name in forward_values:
                kept.append(name)
                users = value.all_used_ops_in_same_block()
                shapes += [name] if all(pir_values.by_shape(user, value) for user in users) else []
            elif name not in self.accumulators.values():
                waiting.append(name)
        return ProgramPiece(program, tuple(sorted(kept)), tuple(sorted(waiting)), frozenset(shapes))

    def _ops(self) -> list[Op]:
        return list(self._program.global_block().ops)
