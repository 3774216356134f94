"""Inspects, moves and creates operations and values of PIR, and splits a backward into I and W.

PIR is Paddle's newer representation. I computes the gradients that leave the stage, and the
gradients of values that are computed from data; W computes the gradients of parameters. An
operation may run in one of them or in both: see :func:`divide`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from fleetpipe.aliases import Block, Op, Program, Variable
from fleetpipe.paddle_api.static import no_place, pir, pir_creation, pir_operations
from fleetpipe.static.graph import DROPOUTS, draws, user_line

PARAMETER, DATA, COMBINE = "builtin.parameter", "pd_op.data", "builtin.combine"
SET_PARAMETER = "builtin.set_parameter"
_ASSIGN_VALUE, _DETACH, _EINSUM = "pd_op.assign_value_", "pd_op.share_data_", "pd_op.einsum"
#: Operations that change running statistics, which their backward does not take.
NORMS = ("pd_op.batch_norm", "pd_op.sync_batch_norm")
#: Operations whose results are entries of a list of tensors.
_VIEWS = ("builtin.split", "builtin.slice")

#: Operations whose gradients have the same bits if only some of them are computed. Not among them:
#: layer_norm ignores its weight, batch_norm computes something else, prelu crashes.
DIVISIBLE = frozenset(
    f"pd_op.{name}_grad"
    for name in (
        *("matmul", "add", "subtract", "multiply"),
        *("conv2d", "depthwise_conv2d", "conv3d", "conv2d_transpose", "bilinear"),
    )
)
_ACCUMULATE = "pd_op.add_"


def placeholder(name: str, like: Variable) -> Variable:
    """Adds a variable of the scope, with the shape of ``like``, at the start of the program."""
    pir.reset_insertion_point_to_start()
    value = pir_creation.data(name, like.shape, like.dtype, no_place())
    value.stop_gradient = like.stop_gradient
    value.persistable = True
    to_end(value.get_defining_op().get_parent_block())
    return value


def to_end(block: Block) -> None:
    """Puts operations that are created from now on at the end of a block.

    At any other place, memory would be overwritten when the operation at that place is erased.
    """
    pir.set_insertion_point_to_block_end(block)


def export(value: Variable, name: str) -> None:
    """Puts a value into a variable of the scope."""
    maker = value.get_defining_op()
    if maker.name() == PARAMETER or value.index() in in_place(maker) or maker.num_regions():
        # A copy: a parameter or a value changed in place shares its variable with later changes,
        # and the variable of a result of control flow belongs to the inner block.
        value = pir_operations.assign(value)
    elif maker.name() in _VIEWS:
        # An entry of a list has no variable of its own.
        value = pir_operations.share_data_(value)
    value.persistable = True
    pir_operations.set_persistable_value(value, name)


def name_of(op: Op) -> str:
    """Returns the name of the variable of a parameter, data or set_parameter operation."""
    attributes = op.attrs()
    return str(attributes.get("parameter_name", attributes.get("name", "")))


def draws_of(op: Op) -> bool:
    """Whether an operation draws random numbers, also by a built-in dropout."""
    inner = next((op.attrs()[name] for name in DROPOUTS if op.has_attr(name)), 0.0)
    return draws(op.name()) or inner > 0.0


def place(value: Variable) -> tuple[int, int]:
    """Returns the id of the operation that computes a value, and the index of the result."""
    return value.get_defining_op().id(), value.index()


def inside(op: Op) -> Iterator[Op]:
    """Yields the operations inside the blocks of an operation, at any depth."""
    for block in op.blocks():
        for one in block.ops:
            yield one
            yield from inside(one)


def operands(op: Op) -> Iterator[Variable]:
    """Yields the values that an operation and the operations in its blocks take."""
    for one in (op, *inside(op)):
        for operand in one.operands():
            value = operand.source()
            if value.initialized():
                yield value


def line_of(op: Op) -> str:
    """Returns the line of the user's script that created an operation, or one inside it."""
    lines = (user_line(one.callstack) for one in (op, *inside(op)))
    return next((line for line in lines if line), "")


def is_source(op: Op) -> bool:
    """Whether an operation computes nothing, as data and parameters do."""
    return op.name() in (PARAMETER, DATA)


def is_constant(op: Op) -> bool:
    """Whether an operation always has the same result: a parameter, fed data, or constants."""
    if op.name() == _ASSIGN_VALUE:
        # paddle.assign and to_tensor of numbers write these over new zeros.
        makers = [value.get_defining_op() for value in operands(op)]
        return all(
            maker is not None and is_constant(maker) and not is_source(maker) for maker in makers
        )
    return not op.operands() and not op.num_regions() and not draws_of(op)


def in_place(op: Op) -> dict[int, int]:
    """Returns the results that are operands changed in place: ``{result: operand}``, by index."""
    if op.name() == _ASSIGN_VALUE and is_constant(op) and op.operand_source(0).has_one_use():
        return {}
    if op.name() == _DETACH:
        return {}  # its result shares the memory, but does not change it
    return dict(pir.get_op_inplace_info(op))


class Versions:
    """Tracks values that share memory because operations change it in place.

    The first value represents all values in its memory. The exception are constants, of which each
    stage has its own copy: for these, each change makes another value.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, int], Variable] = {}
        self._floating: dict[tuple[int, int], Variable] = {}

    def first(self, value: Variable) -> Variable:
        """Returns the first value in the memory of a value."""
        if value.get_defining_op() is None:
            return value  # an argument of a block of control flow
        return self._first.get(place(value), value)

    def now(self, value: Variable) -> Variable:
        """Returns the present value for an operation that takes ``value``."""
        first = self.first(value)
        if first.get_defining_op() is None:
            return first
        return self._floating.get(place(first), first)

    def add(self, op: Op) -> list[Variable]:
        """Records the changes of an operation; returns the first value in each changed memory."""
        changed = []
        for one in (op, *inside(op)):
            for result, operand in in_place(one).items():
                first = self.first(one.operand_source(operand))
                self._first[place(one.result(result))] = first
                maker = first.get_defining_op()
                if maker is None:
                    continue
                changed.append(first)
                if is_constant(maker) and maker.name() != PARAMETER:
                    self._floating[place(first)] = one.result(result)
        return changed


def is_free(op: Op) -> bool:
    """Whether an operation costs almost nothing: a constant, or a list of tensors."""
    return is_constant(op) or op.name() == COMBINE


def by_shape(user: Op, value: Variable) -> bool:
    """Whether an operation needs only the shape of a value."""
    if user.num_regions() or user.name() == COMBINE or not value.is_dense_tensor_type():
        return False
    times = sum(1 for one in user.operands_source() if one.is_same(value))
    return times == 1 and bool(user.is_no_need_buffer(value))


def take_operands(ops: Iterable[Op]) -> None:
    """Makes the backward of an einsum take the einsum's operands for their shapes.

    Otherwise it takes other results of the einsum, which have no memory and cannot be put into
    variables.
    """
    for op in ops:
        if op.name() == _EINSUM:
            operands = op.operand_source(0).get_defining_op().operands_source()
            shapes = op.result(2)
            for parted in shapes.all_used_ops_in_same_block():
                for shape, operand in zip(parted.results(), operands):
                    shape.replace_all_uses_with(operand)


def changes(op: Op) -> bool:
    """Whether an operation changes an operand, other than running statistics."""
    return bool(in_place(op)) and not op.name().startswith(NORMS)


def place_repeated(piece: Program, repeated: Collection[int]) -> None:
    """Places recomputed operations right before the operations that need them.

    They change copies of running statistics, which the forward has already updated.
    """
    ops = list(piece.global_block().ops)
    order = {op.id(): number for number, op in enumerate(ops)}
    waiting = {op.id() for op in ops if op.id() in repeated}
    for op in ops:
        if op.id() in repeated:
            continue
        needed, following = [], [op]
        while following:
            for value in operands(following.pop()):
                source = value.get_defining_op()
                if source is not None and source.id() in waiting:
                    waiting.discard(source.id())
                    needed.append(source)
                    following.append(source)
        for source in sorted(needed, key=lambda one: order[one.id()]):
            source.move_before(op)
    for op in ops:
        for operand in in_place(op).values() if op.id() in repeated else ():
            copy = pir_operations.assign(op.operand_source(operand))
            copy.get_defining_op().move_before(op)
            op.operand(operand).set_source(copy)


class Halves(NamedTuple):
    """A backward in two halves; operations are indices in the stage's program.

    Attributes:
        inputs: The operations of I.
        weights: The operations of W.
        crossing: The results of I that W takes: the operation and the index of the result.
    """

    inputs: frozenset[int]
    weights: frozenset[int]
    crossing: tuple[tuple[int, int], ...]


def ask_for_less(ops: Iterable[Op]) -> None:
    """Makes divisible operations compute only the results that are used."""
    nothing = pir.fake_value().type()
    for op in ops:
        if op.name() in DIVISIBLE:
            for value in op.results():
                if value.use_empty():
                    value.set_type(nothing)


def pass_through(ops: Sequence[Op], forward: Collection[int]) -> None:
    """Replaces the gradient of ``x`` in ``x + bias`` by the gradient of the sum, its equal.

    They are equal if the bias is broadcast and ``x`` is not. Otherwise both would be stored from I
    to W.
    """
    for index, op in enumerate(ops):
        if index in forward or op.name() != "pd_op.add_grad":
            continue
        x, bias, grad = op.operands_source()
        last = x.shape[len(x.shape) - len(bias.shape) :]
        fits = len(last) == len(bias.shape) and all(b in (1, a) for a, b in zip(last, bias.shape))
        if fits and min(bias.shape, default=1) > 0 and op.result(0).initialized():
            op.result(0).replace_all_uses_with(grad)


def divide(ops: Sequence[Op], forward: Collection[int]) -> Halves:
    """Divides the backward of a stage into I and W.

    Args:
        ops: The operations of the stage's program.
        forward: The indices of the forward's operations.
    """
    return _Division(ops, forward).halves()


class _Division:
    """The graph of a stage's backward; operations are indices."""

    def __init__(self, ops: Sequence[Op], forward: Collection[int]) -> None:
        self._ops = ops
        self._index = {op.id(): index for index, op in enumerate(ops)}
        self._backward = [
            index
            for index, op in enumerate(ops)
            if index not in forward and not is_source(op) and not is_constant(op)
        ]
        self._within = frozenset(self._backward)
        self._users: dict[tuple[int, int], list[int]] = {}
        for index in self._backward:
            for maker, number in self._operands(index):
                self._users.setdefault((maker, number), []).append(index)

    def halves(self) -> Halves:
        """Returns the operations of I and of W; see :func:`divide`."""
        ends, wanted = self._ends()
        inputs = self._dependencies(ends)
        # A list of gradients, as rnn_grad returns, cannot wait for W, but its parts can.
        inputs |= {index for index in self._backward if self._parts_one_of(index, inputs)}
        weights = {index for index in self._backward if index not in inputs}
        # An operation with results for both runs in both.
        divided = {index for index in inputs if self._is_divided(index, inputs, wanted)}
        weights |= divided
        weights |= self._lists_of(weights)
        crossing = {
            (maker, number)
            for index in weights
            for maker, number in self._operands(index)
            if maker in inputs and not (maker in weights and maker not in divided)
            if not (maker in divided and self._is_for_weights(maker, number, inputs, wanted))
        }
        return Halves(frozenset(inputs), frozenset(weights), tuple(sorted(crossing)))

    def _parts_one_of(self, index: int, makers: Collection[int]) -> bool:
        """Whether an operation splits a list that one of ``makers`` created."""
        parts = self._ops[index].name() == "builtin.split"
        return parts and any(maker in makers for maker, _ in self._operands(index))

    def _operands(self, index: int) -> Iterator[tuple[int, int]]:
        """Yields the results of the backward that an operation takes."""
        for value in operands(self._ops[index]):
            maker = value.get_defining_op()
            if maker is not None and self._index.get(maker.id()) in self._within:
                yield self._index[maker.id()], value.index()

    def _dependencies(self, ends: Collection[int]) -> set[int]:
        """Returns the operations of the backward on which ``ends`` depend, and these."""
        needed: set[int] = set()
        waiting = list(ends)
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                waiting += [maker for maker, _ in self._operands(index)]
        return needed

    def _ends(self) -> tuple[set[int], set[tuple[int, int]]]:
        """Returns the last operations of I, and their results that W takes.

        These operations export a gradient for another stage, or compute the gradient of a value of
        data, from which a parameter's gradient is computed.
        """
        ends: set[int] = set()
        wanted: set[tuple[int, int]] = set()
        for index in self._backward:
            if self._accumulates(index):
                wanted |= self._sources(index)
            elif not self._ops[index].num_results():
                ends.add(index)
        return ends | {maker for maker, _ in wanted}, wanted

    def _accumulates(self, index: int) -> bool:
        """Whether an operation adds to the accumulator of a parameter."""
        op = self._ops[index]
        if op.name() != _ACCUMULATE:
            return False
        return bool(op.operand_source(0).get_defining_op().name() == DATA)

    def _sources(self, end: int) -> set[tuple[int, int]]:
        """Returns the gradients of data from which ``end`` gets a parameter's gradient."""
        sources: set[tuple[int, int]] = set()
        waiting, seen = [end], set()
        while waiting:
            index = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            if index != end and any(map(self._is_from_data, operands(self._ops[index]))):
                sources.update(self._operands(index))
            else:
                waiting += [maker for maker, _ in self._operands(index)]
        return sources

    def _is_from_data(self, value: Variable) -> bool:
        """Whether a value of the forward is computed from data, not from parameters only."""
        op = value.get_defining_op()
        if op is None or self._index.get(op.id()) in self._within:
            return False
        return not (op.name() == PARAMETER or is_free(op))

    def _is_divided(
        self, index: int, inputs: Collection[int], wanted: Collection[tuple[int, int]]
    ) -> bool:
        """Whether an operation of I can leave out some results, which only W takes."""
        op = self._ops[index]
        results = [n for n in range(op.num_results()) if (index, n) in self._users]
        late = [self._is_for_weights(index, number, inputs, wanted) for number in results]
        return op.name() in DIVISIBLE and any(late) and not all(late)

    def _is_for_weights(
        self, index: int, number: int, inputs: Collection[int], wanted: Collection[tuple[int, int]]
    ) -> bool:
        """Whether only W takes a used result of an operation."""
        used = any(user in inputs for user in self._users[index, number])
        return not used and (index, number) not in wanted

    def _lists_of(self, weights: Collection[int]) -> set[int]:
        """Returns the operations that make lists of tensors for W: it takes no lists from I."""
        lists: set[int] = set()
        waiting = list(weights)
        while waiting:
            for maker, _ in self._operands(waiting.pop()):
                if maker not in weights and maker not in lists and is_free(self._ops[maker]):
                    lists.add(maker)
                    waiting.append(maker)
        return lists
