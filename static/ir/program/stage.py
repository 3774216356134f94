"""A stage of an older Program: its own operations, its backward, and the cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.errors import BoundaryError, ConfigError
from fleetpipe.static._paddle import core, static, user_line
from fleetpipe.static.cut.contract import Pieces, accumulator_name, gradient_name
from fleetpipe.static.cut.split import Split
from fleetpipe.static.graph import DROPOUTS, draws

_TYPES = core.VarDesc.VarType
#: Operations that update running statistics in place.
_NORMS = ("batch_norm", "sync_batch_norm")
#: The type of an ordinary variable: 2.6.2 calls it otherwise.
_DENSE = getattr(_TYPES, "DENSE_TENSOR", None) or _TYPES.LOD_TENSOR


class ProgramStage:
    """One stage with its own backward; see :class:`sections.StageProgram`.

    Values keep the names of their variables: stages that share a scope run one after another, and
    what belongs to a micro-batch is never left in it.
    """

    def __init__(
        self,
        program: Any,
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
            loss: The loss, and what its gradient is.
        """
        self._names, self._split, self._stage = names, split, stage
        self._program = program.clone()
        self._block = self._program.global_block()
        self.accumulators: dict[str, str] = {}
        self.input_gradients: dict[int, str] = {}
        own = split.operations_of(stage)
        mine = {number - offset for number in own}
        remove_operations(self._program, [i for i in range(len(self._block.ops)) if i not in mine])
        read = {name for op in self._block.ops for name in reads_of(self._program, op)}
        self.feeds = sorted(n for n in read if self._has(n) and self._block.var(n).is_data)
        self._refuse_rewritten(own)
        self._constants = {
            index
            for index, number in enumerate(n for n in own if n >= offset)
            if split.graph.operations[number].floating
        }
        self._forward = len(self._block.ops)
        with static.program_guard(self._program, static.Program()):
            self._differentiate(*loss)
        self._kept, self._repeated, self._shapes = self._crossing()
        for op in self._block.ops:
            op._set_attr("op_device", "")

    def incoming(self, value: int) -> str:
        """Returns the variable in which the stage finds a value of an earlier one."""
        return self._names[value]

    def outgoing(self, value: int) -> str:
        """Returns the variable in which the stage leaves a value that it makes."""
        return self._names[value]

    def cut(self, exports: Iterable[int]) -> Pieces:
        """Cuts the stage; its forward leaves the values ``exports`` in their variables."""
        lasting = {
            *self._kept,
            *self.feeds,
            *self.input_gradients.values(),
            *(self._names[value] for value in self._incoming()),
        }
        leaving = {self._names[value] for value in exports}
        forward = self._piece(range(self._forward), lasting | leaving)
        if self._forward == len(self._block.ops):
            return Pieces(forward, None, (), frozenset())
        backward = self._piece(self._backward_order(), lasting, self._repeated)
        return Pieces(forward, backward, tuple(sorted(self._kept)), frozenset(self._shapes))

    def _piece(
        self, indices: Sequence[int], lasting: Iterable[str], again: Collection[int] = ()
    ) -> Any:
        """Returns a program of the operations of these indices, in this order.

        Args:
            indices: The operations.
            lasting: Variables that live in the scope.
            again: Those of the operations that run for the second time in a micro-batch.
        """
        piece = self._program.clone()
        block = piece.global_block()
        total = len(block.ops)
        for index in indices:
            block.desc.append_op().copy_from(block.ops[index].desc)
        remove_operations(piece, range(total))
        for op in [op for op, index in zip(block.ops, indices) if index in again]:
            _spare_statistics(block, op)
        used = {name for op in block.ops for name in (*reads_of(piece, op), *op.output_arg_names)}
        for name in list(block.vars):
            if name not in used:
                block._remove_var(name, sync=False)
        piece._sync_with_cpp()
        for name in lasting:
            if block.has_var(name):
                # Lives in the scope itself: others would be in one that belongs to a run.
                block.var(name).persistable = True
        return piece

    def _crossing(self) -> tuple[set[str], set[int], set[str]]:
        """Finds what backward takes from forward or is given again.

        Returns:
            The variables that it takes; the operations of forward that it repeats; those of the
            variables that it takes for their shape alone.
        """
        made: set[str] = {*self.accumulators.values(), *self._fed_gradients}
        waiting: list[tuple[str, bool]] = []
        for op in self._block.ops[self._forward :]:
            waiting += [(n, s) for n, s in _takes(self._program, op) if n not in made]
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
                waiting += _takes(self._program, self._block.ops[index])
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
        """Returns what makes a variable again in backward, None where it or its shape is kept.

        That is what costs nothing, or is to cost no memory. What was drawn is not drawn again.
        """
        if len(makers.get(name, ())) != 1:
            return None
        (index,) = makers[name]
        if index in self._constants:
            return index
        checkpoints, op = self._split.checkpoints, self._block.ops[index]
        if checkpoints is None or by_shape or name in {self._names[value] for value in checkpoints}:
            return None
        if draws_of(op) or op.has_attr("sub_block"):
            return None
        written = [n for n in op.output_arg_names if self._has(n)]
        changed = [n for n in written if self._block.var(n).persistable]
        if changed and op.type not in _NORMS:
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
                for name in reads_of(self._program, self._block.ops[following.pop()]):
                    for index in waiting.intersection(makers.get(name, ())):
                        waiting.discard(index)
                        needed.append(index)
                        following.append(index)
            order += [*sorted(needed), number]
        return order

    def _crosses(self, name: str) -> bool:
        if not self._has(name):
            return False
        found = self._block.var(name)
        if not is_tensor(found):
            maker = next(op for op in self._block.ops if name in op.output_arg_names)
            raise BoundaryError(
                "a gradient passes through control flow, which a pipeline cannot cut",
                where=f"operation {maker.type!r} ({line_of(maker)}) of stage {self._stage}",
                fix="write it without cond and while_loop (paddle.where chooses by value), or "
                "keep gradients out of it with stop_gradient",
            )
        return not found.persistable

    def _differentiate(self, loss: int, weight: float) -> None:
        """Appends the backward of the stage: from its outputs or the loss to what it was given."""
        self._fed_gradients: list[str] = []
        targets, grads, copies = self._targets(loss, weight)
        used = {name for op in self._block.ops for name in reads_of(self._program, op)}
        parameters = [
            parameter
            for parameter in self._block.all_parameters()
            if parameter.name in used and parameter.trainable and not parameter.stop_gradient
        ]
        incoming = [n for n in self._incoming() if n in self._split.graph.differentiable]
        inputs = [*parameters, *(self._block.var(self._names[n]) for n in incoming)]
        if not targets or not inputs:
            remove_operations(self._program, range(self._forward, len(self._block.ops)))
            return
        found = static.gradients(targets, inputs, grads)
        # The copies were there to be differentiated; nothing takes their values.
        remove_operations(self._program, range(self._forward, self._forward + copies))
        for parameter, grad in zip(parameters, found):
            if grad is not None:
                self._accumulate(parameter, grad)
        for number, grad in zip(incoming, found[len(parameters) :]):
            if grad is not None:
                self.input_gradients[number] = grad.name

    def _targets(self, loss: int, weight: float) -> tuple[list[Any], list[Any], int]:
        """Returns what to differentiate, the gradients of it, and how many copies were made."""
        used = {name for op in self._block.ops for name in reads_of(self._program, op)}
        readers = sorted(self._split.readers(self._stage).items())
        leaving = [pair for pair in readers if pair[0] in self._split.graph.differentiable]
        targets, copies = [], 0
        for number, _ in leaving:
            value = self._block.var(self._names[number])
            if value.name in used:
                # gradients() would forget the way through the stage's own use of it.
                copy = temporary(self._block, value)
                self._block.append_op(type="assign", inputs={"X": [value]}, outputs={"Out": [copy]})
                value, copies = copy, copies + 1
            targets.append(value)
        grads = [self._sum_of_readers(number, readers) for number, readers in leaving]
        if self._split.stage_of_value.get(loss) == self._stage:
            value = self._block.var(self._names[loss])
            targets.append(value)
            dtype: Any = dtype_name(value)
            grads.append(paddle.full(value.shape, weight, dtype))
        return targets, grads, copies

    def _sum_of_readers(self, number: int, readers: Sequence[int]) -> Any:
        value = self._block.var(self._names[number])
        parts = []
        # The latest reader first, as the unsplit program adds gradients up.
        for target in sorted(readers, reverse=True):
            name = gradient_name(self._stage, number, target)
            self._fed_gradients.append(name)
            parts.append(create_variable(self._block, name, value.shape, value.dtype))
        if len(parts) == 1:
            return parts[0]
        total = temporary(self._block, value)
        self._block.append_op(type="sum", inputs={"X": parts}, outputs={"Out": [total]})
        return total

    def _accumulate(self, parameter: Any, grad: Any) -> None:
        if grad.type == _TYPES.SELECTED_ROWS:
            raise ConfigError(
                f"the gradient of {parameter.name!r} is sparse, which a static pipeline does not "
                "add up",
                fix="build the embedding with sparse=False",
            )
        name = self.accumulators[parameter.name] = accumulator_name(parameter.name)
        total = create_variable(self._block, name, parameter.shape, grad.dtype)
        self._block.append_op(type="sum", inputs={"X": [total, grad]}, outputs={"Out": [total]})

    def _incoming(self) -> list[int]:
        crossing = self._split.crossing
        return [n for e in sorted(crossing) if e.target == self._stage for n in crossing[e]]

    def _refuse_rewritten(self, own: Iterable[int]) -> None:
        """A value that leaves the stage or came to it must not be written over in it."""
        made: dict[str, list[int]] = {}
        graph = self._split.graph
        for number in own:
            for value in graph.operations[number].writes:
                made.setdefault(self._names[value], []).append(value)
        for value in self._split.readers(self._stage):
            versions = made[self._names[value]]
            # A while_loop writes over what it was given: without gradients, its end will do.
            if len(versions) > 1 and (versions[-1] != value or value in graph.differentiable):
                raise self._written_again(versions[-1])
        for value in self._incoming():
            if self._names[value] in made:
                raise self._written_again(made[self._names[value]][-1])

    def _written_again(self, value: int) -> BoundaryError:
        op = self._split.graph.operations[self._split.graph.producers()[value]]
        return BoundaryError(
            f"{self._names[value]!r} crosses between stages and is written more than once",
            where=f"{op} of stage {self._stage} writes it again",
            fix="give each result a variable of its own; paddle.assign(value) makes one",
        )

    def _has(self, name: str) -> bool:
        return bool(self._block.has_var(name))


def draws_of(op: Any) -> bool:
    """Whether an operation takes random numbers; one with a dropout of its own as well."""
    inner = next((op.attr(name) for name in DROPOUTS if op.has_attr(name)), 0.0)
    return draws(op.type) or inner > 0.0


def _takes(program: Any, op: Any) -> list[tuple[str, bool]]:
    """Returns what an operation takes, and whether that is for its shape alone."""
    slots = {name: op.input(name) for name in op.input_names}
    outputs = {name: op.output(name) for name in op.output_names}
    attributes = {name: op.attr(name) for name in op.attr_names}
    unread = core.infer_no_need_buffer_slots(op.type, slots, outputs, attributes)
    read = {name for slot, names in slots.items() if slot not in unread for name in names}
    shapes = {name for slot in unread for name in slots.get(slot, ())} - read
    return [(name, name in shapes) for name in reads_of(program, op)]


def line_of(op: Any) -> str:
    """Returns where in the user's script an operation was made."""
    return user_line(op.attr("op_callstack") or ())


def _spare_statistics(block: Any, op: Any) -> None:
    """Has an operation that is repeated update copies: the forward updated its statistics."""
    for name in set(op.input_arg_names).intersection(op.output_arg_names):
        like = block.var(name)
        copy = block.create_var(name=f"{name}.again", shape=like.shape, dtype=like.dtype)
        position = block.ops.index(op)
        block._insert_op(position, type="assign", inputs={"X": [like]}, outputs={"Out": [copy]})
        op._rename_input(name, copy.name)
        op._rename_output(name, copy.name)


def create_variable(block: Any, name: str, shape: Sequence[int], dtype: Any) -> Any:
    """Returns a variable that lives in the scope, made where the block has none of that name."""
    return block.create_var(
        name=name, shape=list(shape), dtype=dtype, persistable=True, stop_gradient=True
    )


def temporary(block: Any, like: Any) -> Any:
    """Returns a new variable of the shape and dtype of another.

    It has a name that is free: in a clone 2.6.2 counts unnamed variables from 0 again, and gives
    one that the program has.
    """
    names = (f"fleetpipe_temporary_{number}" for number in itertools.count())
    name = next(name for name in names if not block.has_var(name))
    return block.create_var(name=name, dtype=like.dtype, shape=like.shape)


def remove_operations(program: Any, indices: Iterable[int]) -> None:
    """Removes operations of the main block by index."""
    for index in sorted(indices, reverse=True):
        program.global_block()._remove_op(index, sync=False)
    program._sync_with_cpp()


def is_tensor(value: Any) -> bool:
    """Whether a variable holds one dense tensor."""
    return bool(value.type == _DENSE)


def dtype_name(value: Any) -> str:
    """Returns the name of a variable's dtype, as ``float32``."""
    name: str = paddle.base.data_feeder.convert_dtype(value.dtype)
    return "bfloat16" if name == "uint16" else name


def inside(program: Any, op: Any) -> Iterator[Any]:
    """Yields the operations in the block of an operation, at any depth."""
    if op.has_attr("sub_block"):
        for one in program.block(op._block_attr_id("sub_block")).ops:
            yield one
            yield from inside(program, one)


def reads_of(program: Any, op: Any) -> list[str]:
    """Returns the variables that an operation and those in its block take, each once."""
    taken = [*op.input_arg_names]
    for one in inside(program, op):
        taken += one.input_arg_names
    return list(dict.fromkeys(name for name in taken if name != "@EMPTY@"))
