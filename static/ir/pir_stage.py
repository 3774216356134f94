"""A stage of a PIR program: isolates its operations, appends its backward, makes its programs."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from fleetpipe.aliases import Op, Program, Variable
from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.static import pir_operations, static
from fleetpipe.static.cut import BackwardProgram, NativePrograms, Split
from fleetpipe.static.ir import backward, pir_values


class _Copy(NamedTuple):
    """A copy of a stage's program, with what the stage knows of the program's parts.

    Attributes:
        program: The copied program.
        ops: The operations of the copy, in order.
        values: The stage's values in the copy, by their numbers in the whole program.
        forward: The indices in ``ops`` of the forward's operations; the others are backward's.
        recomputed: The indices in ``ops`` of the operations of the forward that backward runs
            again.
    """

    program: Program
    ops: list[Op]
    values: dict[int, Variable]
    forward: frozenset[int]
    recomputed: frozenset[int]


class PirStage:
    """One stage with its own backward; see ``cut.StageProgram``."""

    def __init__(
        self,
        program: Program,
        results: Sequence[tuple[int, int]],
        split: Split,
        stage: int,
        loss: tuple[int, float],
    ) -> None:
        """Builds the stage from the whole forward program, which does not change.

        Args:
            program: The forward program.
            results: For each value by number, the index of its operation in the program, and the
                position of the value in the operation's results.
            split: The cut.
            stage: The number of the stage.
            loss: The number of the loss as a value, and the gradient of the loss.
        """
        self._stage = stage
        self._split = split
        self._program = program.clone()
        #: The stage's values, by number.
        self._values: dict[int, Variable] = {}
        #: The scope's variable of each gradient that leaves the stage, by Paddle's id of the value.
        self._exported_as: dict[int, str] = {}
        with static.program_guard(self._program, static.Program()):
            self._keep_own_operations(results)
            #: Paddle's ids of the forward's operations; all later ones are backward's.
            self._forward = {op.id() for op in self._ops()}
            #: Which values share memory, since operations of the forward change them in place.
            self._versions = pir_values.Versions()
            changed = [value for op in self._ops() for value in self._versions.record(op)]
            #: The locations of the values that are changed in place, and the number at a location.
            self._changed = {pir_values.location(value) for value in changed}
            self._numbers = {pir_values.location(value): n for n, value in self._values.items()}
            gradients = backward.append_backward(self, split, stage, loss)
            self.accumulators, self.input_gradients = gradients
            pir_values.read_einsum_operands(self._ops())
        self._refuse_control_flow()
        #: The numbers of the values that backward takes from forward, and the ids of the forward's
        #: operations that backward runs again.
        self._saved, self._recomputed = self._values_from_forward()

    def incoming(self, value: int) -> str:
        """Returns the name of the variable from which this stage reads an earlier stage's value."""
        return self._split.names.incoming(self._stage, value)

    def outgoing(self, value: int) -> str:
        """Returns the name of the variable in which this stage puts a value that it computes."""
        return self._split.names.outgoing(self._stage, value)

    def cut(self, exports: Iterable[int], kinds: Collection[str] = ("B",)) -> NativePrograms:
        """Returns the programs of the stage's actions; see ``cut.StageProgram.cut``."""
        programs = NativePrograms(self._forward_program({*self._saved, *exports}))
        if self._forward.issuperset(op.id() for op in self._ops()):
            return programs
        if "B" in kinds:
            programs = programs._replace(backward=self._full_backward())
        if "I" not in kinds:
            return programs
        if self._split.checkpoints is not None or self._backward_takes_bfloat16():
            # Everything runs in I, and W is empty: recomputed operations would run twice, and the
            # operations of oneDNN cannot be divided.
            return programs._replace(input_grad=self._full_backward())
        input_grad, weight_grad = self._split_backward()
        return programs._replace(input_grad=input_grad, weight_grad=weight_grad)

    def _backward_takes_bfloat16(self) -> bool:
        """Returns whether backward takes bfloat16 values, for which a CPU uses oneDNN's kernels.

        These kernels crash, or compute other numbers, if only some of their gradients are computed,
        and cannot put a gradient into a variable.
        """
        backward_ops = (op for op in self._ops() if op.id() not in self._forward)
        values = (value for op in backward_ops for value in pir_values.operands(op))
        return any(v.is_dense_tensor_type() and v.dtype == paddle.bfloat16 for v in values)

    def _keep_own_operations(self, results: Sequence[tuple[int, int]]) -> None:
        """Removes the operations of other stages; reads incoming values and feeds from variables.

        Args:
            results: For each value by number, the index of its operation in the program, and the
                position of the value in the operation's results.
        """
        self.feeds: dict[str, str] = {}
        ops = list(self._program.global_block().ops)
        in_stage = set(self._split.operations_of(self._stage))
        self._read_changed_values(ops, in_stage)
        for number, (index, position) in enumerate(results):
            if index not in in_stage:
                continue
            self._values[number] = ops[index].result(position)
            if ops[index].name() == pir_values.DATA:
                name = pir_values.name_of(ops[index])
                self.feeds[name] = self._split.names.fed(name)
                self._values[number] = self._replace(self._values[number], self.feeds[name])
        for number in backward.incoming(self._split, self._stage):
            index, position = results[number]
            value = ops[index].result(position)
            if not value.is_dense_tensor_type():
                raise BoundaryError(
                    "a list of tensors cannot cross from one stage to another",
                    where=str(self._split.graph.operations[index]),
                    fix="build the operation that takes the list under the same guard",
                )
            self._values[number] = self._replace(value, self.incoming(number))
        for index in reversed(range(len(ops))):
            if index not in in_stage or ops[index].name() == pir_values.DATA:
                ops[index].erase()

    def _read_changed_values(self, ops: Sequence[Op], in_stage: Collection[int]) -> None:
        """Makes the stage's operations take a value after another stage has changed it in place.

        Args:
            ops: The operations of the whole program.
            in_stage: The indices of the stage's operations.
        """
        versions = pir_values.Versions()
        ids_in_stage = {ops[index].id() for index in in_stage}
        changed_elsewhere: set[tuple[int, int]] = set()
        for index, op in enumerate(ops):
            for reader in (op, *pir_values.inner_operations(op)) if index in in_stage else ():
                for operand in reader.operands():
                    value = operand.source()
                    if not value.initialized():
                        continue
                    current = versions.current(value)
                    if current.get_defining_op() is None or current.is_same(value):
                        continue
                    first = pir_values.location(versions.first(current))
                    if current.get_defining_op().id() not in ids_in_stage:
                        changed_elsewhere.add(first)
                    if first in changed_elsewhere:
                        operand.set_source(current)
            versions.record(op)

    def _replace(self, value: Variable, variable: str) -> Variable:
        """Makes all users of a value read the scope's variable ``variable``; returns what is read.

        Call it before the operation that computes the value is removed.
        """
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
        """Returns the value that the backward differentiates for a value that leaves the stage."""
        return self._values[value]

    def scope_variable(self, name: str, like: Variable) -> Variable:
        """Returns the scope's variable ``name``, of the shape and dtype of ``like``."""
        return pir_values.placeholder(name, like)

    def add(self, parts: Sequence[Variable]) -> Variable:
        """Returns the sum of the gradients ``parts``, added in their order."""
        return functools.reduce(pir_operations.add, parts)

    def add_to(self, total: Variable, grad: Variable) -> None:
        """Adds the gradient ``grad`` to the accumulator ``total`` in place."""
        pir_operations.add_(total, grad)

    def is_sparse(self, grad: Variable) -> bool:
        """Returns whether a gradient has only some of the rows."""
        return not grad.is_dense_tensor_type()

    def export_gradient(self, grad: Variable, name: str) -> str:
        """Puts a gradient into the variable ``name``, unless another variable has it already.

        Two inputs may share a gradient. Returns the name of the variable that has it.
        """
        if grad.id not in self._exported_as:
            self._exported_as[grad.id] = name
            pir_values.export(grad, name)
        return self._exported_as[grad.id]

    def _refuse_control_flow(self) -> None:
        """Refuses a backward that takes values from inside of control flow."""
        for op in self._ops():
            # An inner block pushes the values that backward takes onto a stack.
            if op.id() in self._forward and any(
                "push" in inner.name() for inner in pir_values.inner_operations(op)
            ):
                raise backward.control_flow_error(
                    f"operation {op.name()!r} ({pir_values.line_of(op)})"
                )

    def _values_from_forward(self) -> tuple[list[int], set[int]]:
        """Returns the values that backward takes from forward, and what it computes again.

        Returns:
            The numbers of these values, and the ids of the operations that backward computes again.
        """
        # The numbers of values that cross from forward to backward, and the ids of operations.
        crossing: set[int] = set()
        recomputed: set[int] = set()
        unvisited = [op for op in self._ops() if op.id() not in self._forward]
        while unvisited:
            user = unvisited.pop()
            for operand in pir_values.operands(user):
                value = self._versions.first(operand)
                op = value.get_defining_op()
                if op is None or op.id() not in self._forward or op.name() == pir_values.DATA:
                    continue
                changed = pir_values.location(value) in self._changed
                if op.name() == pir_values.PARAMETER:
                    if changed and not user.name().startswith(pir_values.NORMS):
                        crossing.add(self._numbers[pir_values.location(value)])
                    continue
                if changed and not value.is_dense_tensor_type():
                    raise self._list_error(op)
                if pir_values.is_free(op) and not changed:
                    computed_again = True
                elif pir_values.needs_only_shape(user, operand):
                    computed_again = False
                else:
                    computed_again = self._is_recomputed(op, value)
                if not computed_again:
                    crossing.add(self._numbers[pir_values.location(value)])
                elif op.id() not in recomputed:
                    recomputed.add(op.id())
                    unvisited.append(op)
        in_both = {n for n in crossing if self._values[n].get_defining_op().id() in recomputed}
        return sorted(crossing - in_both), recomputed

    def _list_error(self, op: Op) -> BoundaryError:
        """Returns the error of a backward that takes a TensorArray, computed by ``op``."""
        return BoundaryError(
            "a gradient passes through a list of tensors that is written to",
            where=f"operation {op.name()!r} ({pir_values.line_of(op)}) of stage {self._stage}",
            cause="backward would take a TensorArray from forward, which no variable can hold",
            fix="use a Python list and paddle.stack or paddle.concat, or keep gradients out of it "
            "with stop_gradient",
        )

    def _is_recomputed(self, op: Op, value: Variable) -> bool:
        """Returns whether backward recomputes ``value``, a result of ``op``, as the script asks.

        It does not recompute random values, and values that are changed in place.
        """
        checkpoints = self._split.checkpoints
        if checkpoints is None or self._numbers[pir_values.location(value)] in checkpoints:
            return False
        if pir_values.is_random(op) or op.num_regions():
            return False
        if any(map(pir_values.changes_operand, (op, *value.all_used_ops()))):
            return False
        inputs = (pir_values.location(self._versions.first(v)) for v in pir_values.operands(op))
        return op.name().startswith(pir_values.NORMS) or self._changed.isdisjoint(inputs)

    def _copy(self, program: Program | None = None) -> _Copy:
        """Copies a program, and finds the stage's operations and values in the copy by position.

        Args:
            program: The program to copy: a copy of the stage's program, with the same operations in
                the same order; None for the stage's program itself.
        """
        originals, copy = self._ops(), (program or self._program).clone()
        ops = list(copy.global_block().ops)
        index_by_id = {op.id(): index for index, op in enumerate(originals)}
        values = {
            number: ops[index_by_id[value.get_defining_op().id()]].result(value.index())
            for number, value in self._values.items()
        }
        forward = frozenset(index_by_id[op] for op in self._forward if op in index_by_id)
        recomputed = frozenset(index_by_id[op] for op in self._recomputed if op in index_by_id)
        return _Copy(copy, ops, values, forward, recomputed)

    def _forward_program(self, numbers: Iterable[int]) -> Program:
        """Returns the forward's program, which puts the values ``numbers`` into their variables."""
        copy = self._copy()
        with static.program_guard(copy.program, static.Program()):
            for index in reversed(range(len(copy.ops))):
                if index not in copy.forward:
                    copy.ops[index].erase()
            pir_values.append_at_end(copy.program.global_block())
            for number in sorted(numbers):
                pir_values.export(copy.values[number], self.outgoing(number))
        return copy.program

    def _full_backward(self) -> BackwardProgram:
        """Returns the program of the full backward."""
        copy = self._copy()
        with static.program_guard(copy.program, static.Program()):
            self._keep_only(copy, frozenset(range(len(copy.ops))))
            return self._describe_backward(copy.program)._replace(waiting=())

    def _split_backward(self) -> tuple[BackwardProgram, BackwardProgram]:
        """Returns the programs of a split backward: for the inputs, and for the parameters."""
        full = self._copy()
        pir_values.reuse_gradient_of_sum(full.ops, full.forward)
        divided = pir_values.BackwardGraph(full.ops, full.forward).divide()
        crossing = {
            self._split.names.waiting(self._stage, number): result
            for number, result in enumerate(divided.crossing)
        }
        # Of these copies the first one becomes I, the second one W.
        first, second = (self._copy(full.program) for _ in range(2))
        with static.program_guard(first.program, static.Program()):
            pir_values.append_at_end(first.program.global_block())
            for name, (index, position) in crossing.items():
                pir_values.export(first.ops[index].result(position), name)
            self._keep_only(first, divided.input_grad)
            pir_values.skip_unused_results(first.ops[index] for index in divided.input_grad)
            input_grad = self._describe_backward(first.program)._replace(waiting=())
        if not divided.weight_grad:
            return input_grad, BackwardProgram()
        with static.program_guard(second.program, static.Program()):
            for name, (index, position) in crossing.items():
                value = second.ops[index].result(position)
                value.replace_all_uses_with(pir_values.placeholder(name, value))
            self._keep_only(second, divided.weight_grad)
            pir_values.skip_unused_results(second.ops[index] for index in divided.weight_grad)
            return input_grad, self._describe_backward(second.program)

    def _keep_only(self, copy: _Copy, indices: Collection[int]) -> None:
        """Reduces a copy to some operations of its backward, and what they need of the forward.

        Values of the forward are read from variables of the scope, or computed again.

        Args:
            copy: The copy, which changes.
            indices: The indices of the backward's operations that stay.
        """
        for number in self._saved:
            value = copy.values[number]
            value.replace_all_uses_with(pir_values.placeholder(self.outgoing(number), value))
        for index in copy.forward:
            op = copy.ops[index]
            for result, operand in pir_values.in_place_operands(op).items():
                op.result(result).replace_all_uses_with(op.operand_source(operand))
        recomputed = {copy.ops[index].id() for index in copy.recomputed}
        # From the last to the first, so that the users of an operation are erased before it. An
        # erased operation must not be read: its memory is free.
        for index in reversed(range(len(copy.ops))):
            op = copy.ops[index]
            if index in copy.forward:
                needed = pir_values.is_source(op) or index in copy.recomputed
                stays = needed and _is_used(op)
            elif pir_values.is_source(op) or pir_values.is_constant(op):
                stays = _is_used(op)
            else:
                stays = index in indices
            if not stays:
                op.erase()
        pir_values.move_recomputed_operations(copy.program, recomputed)

    def _describe_backward(self, program: Program) -> BackwardProgram:
        """Removes the variables that a program of the backward does not use, and lists the others.

        Returns:
            The program, with the variables that it takes from the forward, and from the program of
            the input gradients if the backward is split.
        """
        forward_values = {
            pir_values.name_of(op)
            for op in self._ops()
            if op.id() in self._forward and op.name() == pir_values.DATA
        }
        forward_values |= {self.outgoing(number) for number in self._saved}
        saved, waiting, shape_only = [], [], []
        for op in list(program.global_block().ops):
            if op.name() != pir_values.DATA:
                continue
            value, name = op.result(0), pir_values.name_of(op)
            if value.use_empty():
                op.erase()
            elif name in forward_values:
                saved.append(name)
                users = value.all_used_ops_in_same_block()
                if all(pir_values.needs_only_shape(user, value) for user in users):
                    shape_only.append(name)
            elif name not in self.accumulators.values():
                waiting.append(name)
        return BackwardProgram(
            program, tuple(sorted(saved)), tuple(sorted(waiting)), frozenset(shape_only)
        )

    def _ops(self) -> list[Op]:
        """Returns the operations of the stage's program, in order."""
        return list(self._program.global_block().ops)


def _is_used(op: Op) -> bool:
    """Returns whether some operation takes a result of ``op``."""
    return any(not value.use_empty() for value in op.results())
