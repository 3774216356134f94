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
    """One stage with its own backward; see ``cut.StageProgram``.

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
            names: The variable of each value number.
            offset: The number of the program's first operation in the graph.
            split: The cut.
            stage: The stage to build.
            loss: The value number of the loss, and its gradient.
        """
        self._names, self._split, self._stage = names, split, stage
        self._program = program.clone()
        self._block = self._program.global_block()
        numbers = split.operations_of(stage)
        mine = {number - offset for number in numbers}
        remove_operations(self._program, [i for i in range(len(self._block.ops)) if i not in mine])
        self._read = {
            name for op in self._block.ops for name in program_ir.reads_of(self._program, op)
        }
        fed = sorted(n for n in self._read if self._has(n) and self._block.var(n).is_data)
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
            self.accumulators, self.input_gradients = backward.append(self, split, stage, loss)
        # The copies served the differentiation only.
        remove_operations(self._program, range(self._forward, self._forward + self._copies))
        changed = {name for name in self._makers() if self._lasts(name)}
        backwards = self._block.ops[self._forward :]
        # Later micro-batches change these again before the backward reads them.
        self._changed = sorted(
            changed.intersection(
                name
                for op in backwards
                if not op.type.startswith(_NORMS)
                for name in program_ir.reads_of(self._program, op)
            )
        )
        self._kept, self._repeated, self._shapes = self._crossing()
        for op in self._block.ops:
            leave_device(op)

    def incoming(self, value: int) -> str:
        """Returns the name of the variable with a value of an earlier stage."""
        return self._names[value]

    def outgoing(self, value: int) -> str:
        """Returns the name of the variable with a value that the stage computes."""
        return self._names[value]

    def cut(self, exports: Iterable[int], kinds: Collection[str] = ("B",)) -> NativePrograms:
        """Cuts the stage into forward and backward; the forward leaves ``exports`` in the scope."""
        copies = {name: f"{name}.kept" for name in self._changed}
        lasting = {
            *self._kept,
            *copies.values(),
            *self.feeds,
            *self.input_gradients.values(),
            *(self._names[value] for value in backward.incoming(self._split, self._stage)),
        }
        leaving = {self._names[value] for value in exports}
        forward = self._piece(range(self._forward), lasting | leaving)
        for name, copy in copies.items():
            like = forward.global_block().var(name)
            kept = program_ir.create_variable(forward.global_block(), copy, like.shape, like.dtype)
            forward.global_block().append_op(
                type="assign", inputs={"X": [like]}, outputs={"Out": [kept]}
            )
        if self._forward == len(self._block.ops):
            return NativePrograms(forward)
        again = self._piece(self._backward_order(), lasting, self._repeated, copies)
        kept = tuple(sorted({*self._kept, *copies.values()}))
        shapes = frozenset(self._shapes)
        return NativePrograms(forward, BackwardProgram(again, kept, shape_only=shapes))

    def _piece(
        self,
        indices: Sequence[int],
        lasting: Iterable[str],
        again: Collection[int] = (),
        copies: Mapping[str, str] = MappingProxyType({}),
    ) -> Program:
        """Returns a program of the operations at ``indices``, in this order.

        Args:
            indices: The indices of the operations.
            lasting: Variables that live in the scope.
            again: The indices of operations that run for the second time in a micro-batch.
            copies: By name the variable that is read in place of another.
        """
        piece = self._program.clone()
        block = piece.global_block()
        total = len(block.ops)
        for index in indices:
            block.desc.append_op().copy_from(block.ops[index].desc)
        remove_operations(piece, range(total))
        for op in [op for op, index in zip(block.ops, indices) if index in again]:
            program_ir.spare_statistics(block, op)
        for name, copy in copies.items():
            program_ir.create_variable(block, copy, block.var(name).shape, block.var(name).dtype)
            for op in block.ops:
                if name in op.input_arg_names and name not in op.output_arg_names:
                    rename_input(op, name, copy)
        used = {
            name
            for op in block.ops
            for name in (*program_ir.reads_of(piece, op), *op.output_arg_names)
        }
        remove_variables(piece, [name for name in block.vars if name not in used])
        for name in lasting:
            if block.has_var(name):
                # Persistable variables are in the scope itself, others in a scope of the run.
                block.var(name).persistable = True
        return piece

    def _crossing(self) -> tuple[set[str], set[int], set[str]]:
        """Finds the variables that backward takes, and the operations that it repeats.

        Returns:
            The variables that backward takes from forward; the operations that it repeats; and the
            variables of which it reads the shape alone.
        """
        made: set[str] = set()
        waiting: list[tuple[str, bool]] = []
        for op in self._block.ops[self._forward :]:
            waiting += [(n, s) for n, s in program_ir.takes(self._program, op) if n not in made]
            made.update(op.output_arg_names)
        makers = self._makers()
        kept: dict[str, bool] = {}
        repeated: set[int] = set()
        while waiting:
            name, by_shape = waiting.pop()
            index = self._computed_again(name, makers, by_shape)
            if index is None:
                kept[name] = by_shape and kept.get(name, True)
            elif index not in repeated:
                repeated.add(index)
                waiting += program_ir.takes(self._program, self._block.ops[index])
        again = {n for index in repeated for n in self._block.ops[index].output_arg_names}
        crossing = {n for n in kept if n not in again and self._crosses(n)}
        return crossing, repeated, {name for name in crossing if kept[name]}

    def _makers(self) -> dict[str, list[int]]:
        """Returns the indices of the operations of the forward that write each variable."""
        makers: dict[str, list[int]] = {}
        for index, op in enumerate(self._block.ops[: self._forward]):
            for name in op.output_arg_names:
                makers.setdefault(name, []).append(index)
        return makers

    def _computed_again(
        self, name: str, makers: Mapping[str, Sequence[int]], by_shape: bool
    ) -> int | None:
        """Returns the operation that computes a variable again in backward; None if it is kept.

        Backward computes constants again, and between checkpoints all that is not random.
        """
        if len(makers.get(name, ())) != 1:
            return None
        (index,) = makers[name]
        if index in self._constants:
            return index
        checkpoints, op = self._split.checkpoints, self._block.ops[index]
        if checkpoints is None or by_shape or name in {self._names[value] for value in checkpoints}:
            return None
        if program_ir.draws_of(op) or op.has_attr("sub_block"):
            return None
        written = [n for n in op.output_arg_names if self._has(n)]
        changed = [n for n in written if self._block.var(n).persistable]
        reads = program_ir.reads_of(self._program, op)
        if op.type not in _NORMS and (
            changed or any(n in makers and self._lasts(n) for n in reads)
        ):
            return None
        rewritten = any(len(makers.get(n, ())) > 1 for n in op.input_arg_names if n not in changed)
        return None if rewritten else index

    def _backward_order(self) -> list[int]:
        """Returns the operations of backward, each after those that are repeated for it."""
        makers = self._makers()
        waiting, order = set(self._repeated), []
        for number in range(self._forward, len(self._block.ops)):
            needed, following = [], [number]
            while following:
                for name in program_ir.reads_of(self._program, self._block.ops[following.pop()]):
                    for index in waiting.intersection(makers.get(name, ())):
                        waiting.discard(index)
                        needed.append(index)
                        following.append(index)
            order += [*sorted(needed), number]
        return order

    def _crosses(self, name: str) -> bool:
        if not self._has(name):
            return False
        variable = self._block.var(name)
        if not program_ir.is_tensor(variable):
            maker = next(op for op in self._block.ops if name in op.output_arg_names)
            where = f"operation {maker.type!r} ({program_ir.line_of(maker)}) of stage {self._stage}"
            raise backward.through_control_flow(where)
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

        Without the copy, ``gradients`` would ignore the path through the stage's own use of it.
        """
        variable = self.variable(value)
        if variable.name not in self._read:
            return variable
        copy = program_ir.temporary(self._block, variable)
        self._block.append_op(type="assign", inputs={"X": [variable]}, outputs={"Out": [copy]})
        self._copies += 1
        return copy

    def fed(self, name: str, like: Variable) -> Variable:
        """Creates a variable that is fed, with the shape and dtype of another."""
        return program_ir.create_variable(self._block, name, like.shape, like.dtype)

    def add(self, parts: Sequence[Variable]) -> Variable:
        """Adds variables in their order, and returns the sum."""
        total = program_ir.temporary(self._block, parts[0])
        self._block.append_op(type="sum", inputs={"X": parts}, outputs={"Out": [total]})
        return total

    def add_to(self, total: Variable, grad: Variable) -> None:
        """Adds a gradient to an accumulator."""
        self._block.append_op(type="sum", inputs={"X": [total, grad]}, outputs={"Out": [total]})

    def is_sparse(self, grad: Variable) -> bool:
        """Whether a gradient has only some of the rows."""
        return program_ir.is_sparse(grad)

    def leave(self, grad: Variable, name: str) -> str:
        """Returns the gradient's own name, under which a piece leaves it in the scope."""
        return str(grad.name)

    def _refuse_rewritten(self, numbers: Iterable[int]) -> None:
        """Refuses a stage that overwrites a value which it sends or receives."""
        made: dict[str, list[int]] = {}
        graph = self._split.graph
        for number in numbers:
            for value in graph.operations[number].writes:
                made.setdefault(self._names[value], []).append(value)
        for value in self._split.readers(self._stage):
            versions = made[self._names[value]]
            # A while_loop overwrites its inputs; without gradients the last version is right.
            if len(versions) > 1 and (versions[-1] != value or value in graph.differentiable):
                raise self._written_again(versions[-1])
        for value in backward.incoming(self._split, self._stage):
            if self._names[value] in made:
                raise self._written_again(made[self._names[value]][-1])

    def _written_again(self, value: int) -> BoundaryError:
        op = self._split.graph.operations[self._split.graph.producers()[value]]
        return BoundaryError(
            f"{self._names[value]!r} crosses between stages and is written more than once",
            where=f"{op} of stage {self._stage} writes it again",
            fix="give each result a variable of its own; paddle.assign(value) makes one",
        )

    def _lasts(self, name: str) -> bool:
        """Whether a variable is persistable."""
        return self._has(name) and bool(self._block.var(name).persistable)

    def _has(self, name: str) -> bool:
        return bool(self._block.has_var(name))
