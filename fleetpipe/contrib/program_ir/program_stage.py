"""Builds a stage of an older Program with its backward, and cuts it into pieces.

``ProgramStage`` builds the stage, and ``ProgramStage.cut`` returns its forward and its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from fleetpipe.aliases import Program, Variable
from fleetpipe.contrib import program_ir
from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api.static import (
    leave_device,
    remove_operations,
    remove_variables,
    rename_input,
    static,
)
from fleetpipe.static.cut import BackwardProgram, NativePrograms, Split
from fleetpipe.static.ir import backward

#: Operations that update running statistics in place.
_NORMS = ("batch_norm", "sync_batch_norm")


class ProgramStage:
    """The programs of one stage: forward and backward, for the interface ``cut.StageProgram``.

    Values keep the names of their variables: stages that share a scope run one after another, and
    no value of a micro-batch is left in it.
    """

    def __init__(
        self,
        program: Program,
        names: Sequence[str],
        offset: int,
        split: Split,
        stage: int,
        loss: tuple[int, float],
    ) -> None:
        """Builds the stage from the whole forward program, which stays as it is.

        Args:
            program: The forward program.
            names: The name of the variable of each value, by the value's number.
            offset: The number of the program's first operation in the graph.
            split: The cut.
            stage: The stage to build.
            loss: The number of the loss's value, and the gradient of the loss.
        """
        self._names, self._split, self._stage = names, split, stage
        self._program = program.clone()
        self._block = self._program.global_block()
        numbers = split.operations_of(stage)
        kept = {number - offset for number in numbers}
        remove_operations(self._program, [i for i in range(len(self._block.ops)) if i not in kept])
        self._read = {
            name for op in self._block.ops for name in program_ir.variables_read(self._program, op)
        }
        fed = sorted(n for n in self._read if self._has_variable(n) and self._block.var(n).is_data)
        self.feeds = {name: name for name in fed}
        self._refuse_rewritten(numbers)
        self._constants = {
            index
            for index, number in enumerate(n for n in numbers if n >= offset)
            if split.graph.operations[number].floating
        }
        self._forward = len(self._block.ops)
        self._copies = 0
        with static.program_guard(self._program, static.Program()):
            gradients = backward.append_backward(self, split, stage, loss)
            self.accumulators, self.input_gradients = gradients
        # The copies served the differentiation only.
        remove_operations(self._program, range(self._forward, self._forward + self._copies))
        changed = {name for name in self._writers() if self._is_persistable(name)}
        backwards = self._block.ops[self._forward :]
        # Later micro-batches change these again before the backward reads them.
        self._changed = sorted(
            changed.intersection(
                name
                for op in backwards
                if not op.type.startswith(_NORMS)
                for name in program_ir.variables_read(self._program, op)
            )
        )
        self._saved, self._recomputed, self._shape_only = self._values_from_forward()
        for op in self._block.ops:
            leave_device(op)

    def incoming(self, value: int) -> str:
        """Returns the name of the variable for a value of an earlier stage, given by number."""
        return self._names[value]

    def outgoing(self, value: int) -> str:
        """Returns the name of the variable for a value of this stage, given by number."""
        return self._names[value]

    def cut(self, exports: Iterable[int], kinds: Collection[str] = ("B",)) -> NativePrograms:
        """Builds the programs of forward and backward.

        Args:
            exports: The values that the forward leaves in the scope, by number.
            kinds: The kinds of backward actions; a Program has a full backward, B, only.
        """
        copies = {name: f"{name}.kept" for name in self._changed}
        in_scope = {
            *self._saved,
            *copies.values(),
            *self.feeds,
            *self.input_gradients.values(),
            *(self._names[value] for value in backward.incoming(self._split, self._stage)),
        }
        exported = {self._names[value] for value in exports}
        forward = self._build_program(range(self._forward), in_scope | exported)
        block = forward.global_block()
        for name, copy in copies.items():
            like = block.var(name)
            saved = program_ir.create_variable(block, copy, like.shape, like.dtype)
            block.append_op(type="assign", inputs={"X": [like]}, outputs={"Out": [saved]})
        if self._forward == len(self._block.ops):
            return NativePrograms(forward)
        order = self._backward_order()
        native_backward = self._build_program(order, in_scope, self._recomputed, copies)
        names = tuple(sorted({*self._saved, *copies.values()}))
        shape_only = frozenset(self._shape_only)
        return NativePrograms(
            forward, BackwardProgram(native_backward, names, shape_only=shape_only)
        )

    def _build_program(
        self,
        indices: Sequence[int],
        in_scope: Iterable[str],
        recomputed: Collection[int] = (),
        copies: Mapping[str, str] = MappingProxyType({}),
    ) -> Program:
        """Returns a program of some operations of the stage.

        Args:
            indices: The indices of the operations in the stage, in the order in which they run.
            in_scope: Variables that stay in the scope after a run.
            recomputed: The indices of operations that run a second time in a micro-batch.
            copies: By the name of a variable, the name of a copy that is read in its place.
        """
        program = self._program.clone()
        block = program.global_block()
        total = len(block.ops)
        for index in indices:
            block.desc.append_op().copy_from(block.ops[index].desc)
        remove_operations(program, range(total))
        for op in [op for op, index in zip(block.ops, indices) if index in recomputed]:
            program_ir.update_copies_of_statistics(block, op)
        for name, copy in copies.items():
            program_ir.create_variable(block, copy, block.var(name).shape, block.var(name).dtype)
            for op in block.ops:
                if name in op.input_arg_names and name not in op.output_arg_names:
                    rename_input(op, name, copy)
        used = {
            name
            for op in block.ops
            for name in (*program_ir.variables_read(program, op), *op.output_arg_names)
        }
        remove_variables(program, [name for name in block.vars if name not in used])
        for name in in_scope:
            if block.has_var(name):
                # Persistable variables are in the scope itself, others in a scope of the run.
                block.var(name).persistable = True
        return program

    def _values_from_forward(self) -> tuple[set[str], set[int], set[str]]:
        """Finds the variables that backward reads, and the operations that it recomputes.

        Returns:
            The variables that the forward saves for the backward; the indices of the operations
            that the backward recomputes; and the saved variables of which it reads only the shape.
        """
        written: set[str] = set()
        needed: list[tuple[str, bool]] = []
        for op in self._block.ops[self._forward :]:
            for name, shape_only in program_ir.reads_and_shapes(self._program, op):
                if name not in written:
                    needed.append((name, shape_only))
            written.update(op.output_arg_names)
        writers = self._writers()
        saved: dict[str, bool] = {}  # whether the shape alone is read
        recomputed: set[int] = set()
        while needed:
            name, shape_only = needed.pop()
            index = self._recomputing_operation(name, writers, shape_only)
            if index is None:
                saved[name] = shape_only and saved.get(name, True)
            elif index not in recomputed:
                recomputed.add(index)
                needed += program_ir.reads_and_shapes(self._program, self._block.ops[index])
        results = {n for index in recomputed for n in self._block.ops[index].output_arg_names}
        names = {name for name in saved if name not in results and self._is_saved(name)}
        return names, recomputed, {name for name in names if saved[name]}

    def _writers(self) -> dict[str, list[int]]:
        """Returns the indices of the operations of the forward that write each variable."""
        writers: dict[str, list[int]] = {}
        for index, op in enumerate(self._block.ops[: self._forward]):
            for name in op.output_arg_names:
                writers.setdefault(name, []).append(index)
        return writers

    def _recomputing_operation(
        self, name: str, writers: Mapping[str, Sequence[int]], shape_only: bool
    ) -> int | None:
        """Returns the index of the operation by which the backward recomputes a variable.

        The backward recomputes constants, and between checkpoints all that is not random.

        Args:
            name: The variable.
            writers: The indices of the operations that write each variable.
            shape_only: Whether only the shape of the variable is read.

        Returns:
            The index; None if the variable is saved by the forward.
        """
        if len(writers.get(name, ())) != 1:
            return None
        (index,) = writers[name]
        if index in self._constants:
            return index
        checkpoints, op = self._split.checkpoints, self._block.ops[index]
        if checkpoints is None or shape_only:
            return None
        if name in {self._names[value] for value in checkpoints}:
            return None
        if program_ir.draws_random_numbers(op) or op.has_attr("sub_block"):
            return None
        written = [n for n in op.output_arg_names if self._has_variable(n)]
        changed = [n for n in written if self._block.var(n).persistable]
        reads = program_ir.variables_read(self._program, op)
        if op.type not in _NORMS and (
            changed or any(n in writers and self._is_persistable(n) for n in reads)
        ):
            return None
        rewritten = any(len(writers.get(n, ())) > 1 for n in op.input_arg_names if n not in changed)
        return None if rewritten else index

    def _backward_order(self) -> list[int]:
        """Returns the indices of the backward's operations, each after those recomputed for it."""
        writers = self._writers()
        not_yet, order = set(self._recomputed), []
        for number in range(self._forward, len(self._block.ops)):
            needed, to_visit = [], [number]
            while to_visit:
                op = self._block.ops[to_visit.pop()]
                for name in program_ir.variables_read(self._program, op):
                    for index in not_yet.intersection(writers.get(name, ())):
                        not_yet.discard(index)
                        needed.append(index)
                        to_visit.append(index)
            order += [*sorted(needed), number]
        return order

    def _is_saved(self, name: str) -> bool:
        """Returns whether the forward must save a variable that the backward reads.

        Raises:
            BoundaryError: The variable holds something else than a tensor, which loops and branches
                make.
        """
        if not self._has_variable(name):
            return False
        variable = self._block.var(name)
        if not program_ir.is_tensor(variable):
            op = next(op for op in self._block.ops if name in op.output_arg_names)
            line = program_ir.user_line_of(op)
            where = f"operation {op.type!r} ({line}) of stage {self._stage}"
            raise backward.control_flow_error(where)
        return not variable.persistable

    def parameters(self) -> dict[str, Variable]:
        """Returns the trainable parameters that the stage uses, by name."""
        return {
            parameter.name: parameter
            for parameter in self._block.all_parameters()
            if parameter.name in self._read and parameter.trainable and not parameter.stop_gradient
        }

    def variable(self, value: int) -> Variable:
        """Returns the variable of a value that the stage computes or receives."""
        return self._block.var(self._names[value])

    def target(self, value: int) -> Variable:
        """Returns the variable of a value, or a copy of it if the stage reads it too.

        Without the copy, Paddle's ``gradients`` would ignore the path through the stage's use of
        it.
        """
        variable = self.variable(value)
        if variable.name not in self._read:
            return variable
        copy = program_ir.create_temporary(self._block, variable)
        self._block.append_op(type="assign", inputs={"X": [variable]}, outputs={"Out": [copy]})
        self._copies += 1
        return copy

    def scope_variable(self, name: str, like: Variable) -> Variable:
        """Creates the scope's variable ``name``, with the shape and dtype of ``like``."""
        return program_ir.create_variable(self._block, name, like.shape, like.dtype)

    def add(self, parts: Sequence[Variable]) -> Variable:
        """Adds variables in their order, and returns the sum."""
        total = program_ir.create_temporary(self._block, parts[0])
        self._block.append_op(type="sum", inputs={"X": parts}, outputs={"Out": [total]})
        return total

    def add_to(self, total: Variable, grad: Variable) -> None:
        """Adds a gradient to an accumulator."""
        self._block.append_op(type="sum", inputs={"X": [total, grad]}, outputs={"Out": [total]})

    def is_sparse(self, grad: Variable) -> bool:
        """Returns whether a gradient has only some of the rows."""
        return program_ir.is_sparse(grad)

    def export_gradient(self, grad: Variable, name: str) -> str:
        """Returns the name under which a gradient is in the scope: its own, not ``name``."""
        return str(grad.name)

    def _refuse_rewritten(self, numbers: Iterable[int]) -> None:
        """Raises BoundaryError if the stage overwrites a value which it sends or receives."""
        written: dict[str, list[int]] = {}
        graph = self._split.graph
        for number in numbers:
            for value in graph.operations[number].writes:
                written.setdefault(self._names[value], []).append(value)
        for value in self._split.readers(self._stage):
            versions = written[self._names[value]]
            # A while_loop overwrites its inputs; without gradients the last version is right.
            if len(versions) > 1 and (versions[-1] != value or value in graph.differentiable):
                raise self._rewritten_error(versions[-1])
        for value in backward.incoming(self._split, self._stage):
            if self._names[value] in written:
                raise self._rewritten_error(written[self._names[value]][-1])

    def _rewritten_error(self, value: int) -> BoundaryError:
        """Returns the error for a variable that crosses stages and is overwritten by ``value``."""
        op = self._split.graph.operations[self._split.graph.producers()[value]]
        return BoundaryError(
            f"{self._names[value]!r} crosses between stages and is written more than once",
            where=f"{op} of stage {self._stage} writes it again",
            fix="give each result a variable of its own; paddle.assign(value) makes one",
        )

    def _is_persistable(self, name: str) -> bool:
        """Returns whether a variable keeps its value from one run of the program to the next."""
        return self._has_variable(name) and bool(self._block.var(name).persistable)

    def _has_variable(self, name: str) -> bool:
        return bool(self._block.has_var(name))
