"""Inspects, moves and creates operations and values of PIR, and splits a backward into I and W.

PIR is Paddle's newer representation of programs. I computes the gradients that leave the stage, and
the gradients of values that are computed from data; W computes the gradients of parameters. Some
operations run in both: see :class:`BackwardGraph`. A *result* of an operation is the operation's
index in the program, and the position of the value among the operation's results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from fleetpipe.aliases import Block, Op, Program, Variable
from fleetpipe.paddle_api.static import no_place, pir, pir_creation, pir_operations
from fleetpipe.static.graph import DROPOUTS, has_random_name, user_line

# Paddle's names of operations.
PARAMETER, DATA, COMBINE = "builtin.parameter", "pd_op.data", "builtin.combine"
SET_PARAMETER = "builtin.set_parameter"
# ``assign_value_`` writes numbers over a tensor of zeros: paddle.assign and to_tensor make both.
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
#: The operation that adds a parameter's gradient to its accumulator, in which the micro-batches of
#: a batch add up.
_ACCUMULATE = "pd_op.add_"


def placeholder(name: str, like: Variable) -> Variable:
    """Adds a read of the scope's variable ``name`` at the start of the current program.

    Returns:
        The value that is read, of the shape and dtype of ``like``.
    """
    pir.reset_insertion_point_to_start()
    value = pir_creation.data(name, like.shape, like.dtype, no_place())
    value.stop_gradient = like.stop_gradient
    value.persistable = True
    append_at_end(value.get_defining_op().get_parent_block())
    return value


def append_at_end(block: Block) -> None:
    """Puts operations that are created from now on at the end of a block.

    At any other place, memory would be overwritten when the operation at that place is erased.
    """
    pir.set_insertion_point_to_block_end(block)


def export(value: Variable, name: str) -> None:
    """Makes the current program put a value into the scope's variable ``name``."""
    op = value.get_defining_op()
    if op.name() == PARAMETER or value.index() in in_place_operands(op) or op.num_regions():
        # A copy: a parameter or a value changed in place shares its variable with later changes,
        # and the variable of a result of control flow belongs to the inner block.
        value = pir_operations.assign(value)
    elif op.name() in _VIEWS:
        # An entry of a list has no variable of its own.
        value = pir_operations.share_data_(value)
    value.persistable = True
    pir_operations.set_persistable_value(value, name)


def name_of(op: Op) -> str:
    """Returns the name of the variable of a parameter, data or set_parameter operation."""
    attributes = op.attrs()
    return str(attributes.get("parameter_name", attributes.get("name", "")))


def is_random(op: Op) -> bool:
    """Returns whether an operation draws random numbers, also by a built-in dropout."""
    dropout = next((op.attrs()[name] for name in DROPOUTS if op.has_attr(name)), 0.0)
    return has_random_name(op.name()) or dropout > 0.0


def location(value: Variable) -> tuple[int, int]:
    """Returns where a value is from: the id of its operation, and its position in the results."""
    return value.get_defining_op().id(), value.index()


def inner_operations(op: Op) -> Iterator[Op]:
    """Yields the operations inside the blocks of an operation, at any depth."""
    for block in op.blocks():
        for inner in block.ops:
            yield inner
            yield from inner_operations(inner)


def operands(op: Op) -> Iterator[Variable]:
    """Yields the values that an operation and the operations in its blocks take."""
    for reader in (op, *inner_operations(op)):
        for operand in reader.operands():
            value = operand.source()
            if value.initialized():
                yield value


def line_of(op: Op) -> str:
    """Returns ``"FILE, line N"`` of the user's script, where an operation was created.

    If that is unknown, the line of the first operation in its blocks with a known one; else "".
    """
    lines = (user_line(created.callstack) for created in (op, *inner_operations(op)))
    return next((line for line in lines if line), "")


def is_source(op: Op) -> bool:
    """Returns whether an operation only reads: a parameter, or data that are fed."""
    return op.name() in (PARAMETER, DATA)


def is_constant(op: Op) -> bool:
    """Returns whether an operation computes nothing from other values: parameter, data, constant.

    :class:`fleetpipe.static.graph.Operation` has the same as ``floating``.
    """
    if op.name() == _ASSIGN_VALUE:
        # A constant if the tensor that it writes over is one, which nobody feeds or trains.
        producers = [value.get_defining_op() for value in operands(op)]
        return all(
            producer is not None and is_constant(producer) and not is_source(producer)
            for producer in producers
        )
    return not op.operands() and not op.num_regions() and not is_random(op)


def in_place_operands(op: Op) -> dict[int, int]:
    """Returns which operands an operation changes in place, by position.

    Returns:
        By the position of a result that reuses an operand's memory, the position of that operand;
        {} if the operation changes no operand that anybody else reads.
    """
    if op.name() == _ASSIGN_VALUE and is_constant(op) and op.operand_source(0).has_one_use():
        # It writes numbers over zeros that nothing else reads: together they are a constant.
        return {}
    if op.name() == _DETACH:
        return {}  # its result shares the memory, but does not change it
    return dict(pir.get_op_inplace_info(op))


class Versions:
    """Tracks values that share memory because operations change it in place.

    The first value represents all values in its memory. The exception are constants, of which each
    stage has its own copy: for these, each change makes another value. :meth:`record` is called for
    each operation in program order.
    """

    def __init__(self) -> None:
        #: The first value in the memory of each changed value, by :func:`location`.
        self._first: dict[tuple[int, int], Variable] = {}
        #: The last change of each constant, by the location of its first value.
        self._changed_constants: dict[tuple[int, int], Variable] = {}

    def first(self, value: Variable) -> Variable:
        """Returns the first value in the memory of ``value``."""
        if value.get_defining_op() is None:
            return value  # an argument of a block of control flow
        return self._first.get(location(value), value)

    def current(self, value: Variable) -> Variable:
        """Returns the value that an operation gets now if its operand is ``value``."""
        first = self.first(value)
        if first.get_defining_op() is None:
            return first
        return self._changed_constants.get(location(first), first)

    def record(self, op: Op) -> list[Variable]:
        """Records the changes of an operation; returns the first value in each changed memory."""
        changed = []
        for writer in (op, *inner_operations(op)):
            for result, operand in in_place_operands(writer).items():
                first = self.first(writer.operand_source(operand))
                self._first[location(writer.result(result))] = first
                producer = first.get_defining_op()
                if producer is None:
                    continue
                changed.append(first)
                if is_constant(producer) and producer.name() != PARAMETER:
                    self._changed_constants[location(first)] = writer.result(result)
        return changed


def is_free(op: Op) -> bool:
    """Returns whether an operation costs almost nothing: a constant, or a list of tensors.

    The backward computes it again instead of saving its result.
    """
    return is_constant(op) or op.name() == COMBINE


def needs_only_shape(user: Op, value: Variable) -> bool:
    """Returns whether operation ``user`` needs only the shape of ``value``."""
    if user.num_regions() or user.name() == COMBINE or not value.is_dense_tensor_type():
        return False
    uses = sum(1 for operand in user.operands_source() if operand.is_same(value))
    return uses == 1 and bool(user.is_no_need_buffer(value))


def read_einsum_operands(ops: Iterable[Op]) -> None:
    """Makes the backward of an einsum take the einsum's operands for their shapes.

    Otherwise it takes other results of the einsum, which have no memory and cannot be put into
    variables.
    """
    for op in ops:
        if op.name() == _EINSUM:
            operands = op.operand_source(0).get_defining_op().operands_source()
            # The result with the shapes of the operands: a list, split where they are used.
            shapes = op.result(2)
            for split_list in shapes.all_used_ops_in_same_block():
                for shape, operand in zip(split_list.results(), operands):
                    shape.replace_all_uses_with(operand)


def changes_operand(op: Op) -> bool:
    """Returns whether an operation changes an operand, other than running statistics."""
    return bool(in_place_operands(op)) and not op.name().startswith(NORMS)


def move_recomputed_operations(program: Program, recomputed: Collection[int]) -> None:
    """Moves recomputed operations right before the operations that need them.

    Those that change running statistics, which the forward has already updated, get copies.

    Args:
        program: The program of a backward.
        recomputed: The ids of the operations.
    """
    ops = list(program.global_block().ops)
    order = {op.id(): number for number, op in enumerate(ops)}
    unplaced = {op.id() for op in ops if op.id() in recomputed}
    for op in ops:
        if op.id() in recomputed:
            continue
        # The recomputed operations on which ``op`` depends, as far as none before needed them.
        needed, unvisited = [], [op]
        while unvisited:
            for value in operands(unvisited.pop()):
                source = value.get_defining_op()
                if source is not None and source.id() in unplaced:
                    unplaced.discard(source.id())
                    needed.append(source)
                    unvisited.append(source)
        for source in sorted(needed, key=lambda source: order[source.id()]):
            source.move_before(op)
    # The copies: a recomputed operation changes a copy of what it would change in place.
    for op in ops:
        if op.id() not in recomputed:
            continue
        for operand in in_place_operands(op).values():
            copy = pir_operations.assign(op.operand_source(operand))
            copy.get_defining_op().move_before(op)
            op.operand(operand).set_source(copy)


class DividedBackward(NamedTuple):
    """A backward in two halves; an operation is its index in the stage's program.

    Attributes:
        input_grad: The operations of I, the half that computes the gradients of inputs.
        weight_grad: The operations of W, the half that computes those of parameters.
        crossing: The results of I that W takes.
    """

    input_grad: frozenset[int]
    weight_grad: frozenset[int]
    crossing: tuple[tuple[int, int], ...]


def skip_unused_results(ops: Iterable[Op]) -> None:
    """Makes operations compute only those of their results that are used; changes them in place.

    Only operations in :data:`DIVISIBLE` can do that: an unused result gets the type of no
    value, and Paddle does not compute it.
    """
    nothing = pir.fake_value().type()
    for op in ops:
        if op.name() in DIVISIBLE:
            for value in op.results():
                if value.use_empty():
                    value.set_type(nothing)


def reuse_gradient_of_sum(ops: Sequence[Op], forward: Collection[int]) -> None:
    """Replaces the gradient of ``x`` in ``x + bias`` by the gradient of the sum, its equal.

    The two gradients are equal if the bias is broadcast and ``x`` is not. Without this, both would
    be stored from I to W.

    Args:
        ops: The operations of the stage's program.
        forward: The indices of the forward's operations, which do not change.
    """
    for index, op in enumerate(ops):
        if index in forward or op.name() != "pd_op.add_grad":
            continue
        x, bias, grad = op.operands_source()
        # The last dimensions of ``x``, to which those of the bias are broadcast.
        last = x.shape[len(x.shape) - len(bias.shape) :]
        fits = len(last) == len(bias.shape) and all(b in (1, a) for a, b in zip(last, bias.shape))
        if fits and min(bias.shape, default=1) > 0 and op.result(0).initialized():
            op.result(0).replace_all_uses_with(grad)


class BackwardGraph:
    """Divides a stage's backward into the gradients of its inputs and those of its parameters.

    An operation is its index in the stage's program.
    """

    def __init__(self, ops: Sequence[Op], forward: Collection[int]) -> None:
        """Stores the operations of the backward, and for each result those that take it.

        Args:
            ops: The operations of the stage's program.
            forward: The indices of the forward's operations.
        """
        self._ops = ops
        self._index_by_id = {op.id(): index for index, op in enumerate(ops)}
        self._backward = [
            index
            for index, op in enumerate(ops)
            if index not in forward and not is_source(op) and not is_constant(op)
        ]
        self._backward_set = frozenset(self._backward)
        #: By result of the backward, the operations of the backward that take it.
        self._users: dict[tuple[int, int], list[int]] = {}
        for index in self._backward:
            for result in self._operand_results(index):
                self._users.setdefault(result, []).append(index)

    def divide(self) -> DividedBackward:
        """Returns the operations of I and of W.

        In this class ``inputs`` are the operations of I, ``weights`` those of W, ``ends`` the last
        operations of I, and ``for_weights`` the results that I must compute for W.
        """
        ends, for_weights = self._last_operations_of_input_grad()
        inputs = self._dependencies(ends)
        # A list of gradients, as rnn_grad returns, cannot be saved for W, but its tensors can.
        inputs |= {index for index in self._backward if self._splits_list_of(index, inputs)}
        weights = {index for index in self._backward if index not in inputs}
        # An operation with results for both runs in both.
        in_both = {index for index in inputs if self._can_skip_results(index, inputs, for_weights)}
        weights |= in_both
        weights |= self._lists_for(weights)
        crossing = set()
        for index in weights:
            for result in self._operand_results(index):
                producer, _ = result
                if producer in in_both:
                    if not self._only_weights_use(result, inputs, for_weights):
                        crossing.add(result)
                elif producer in inputs and producer not in weights:
                    crossing.add(result)
        return DividedBackward(frozenset(inputs), frozenset(weights), tuple(sorted(crossing)))

    def _splits_list_of(self, index: int, producers: Collection[int]) -> bool:
        """Returns whether operation ``index`` splits a list of tensors of one of ``producers``."""
        splits = self._ops[index].name() == "builtin.split"
        return splits and any(op in producers for op, _ in self._operand_results(index))

    def _operand_results(self, index: int) -> Iterator[tuple[int, int]]:
        """Yields the results of backward operations that operation ``index`` takes."""
        for value in operands(self._ops[index]):
            producer = value.get_defining_op()
            if producer is not None and self._index_by_id.get(producer.id()) in self._backward_set:
                yield self._index_by_id[producer.id()], value.index()

    def _dependencies(self, ends: Collection[int]) -> set[int]:
        """Returns ``ends`` and the operations of the backward on which they depend."""
        needed: set[int] = set()
        unvisited = list(ends)
        while unvisited:
            index = unvisited.pop()
            if index not in needed:
                needed.add(index)
                unvisited += [producer for producer, _ in self._operand_results(index)]
        return needed

    def _last_operations_of_input_grad(self) -> tuple[set[int], set[tuple[int, int]]]:
        """Returns the operations at which I, the half for input gradients, ends.

        They export gradients to other stages, or compute gradients from which W computes gradients
        of parameters. The second set has the latter gradients: (operation, number of its result).
        """
        ends: set[int] = set()
        for_weights: set[tuple[int, int]] = set()
        for index in self._backward:
            if self._accumulates(index):
                for_weights |= self._data_gradients(index)
            elif not self._ops[index].num_results():
                ends.add(index)
        return ends | {producer for producer, _ in for_weights}, for_weights

    def _accumulates(self, index: int) -> bool:
        """Returns whether an operation adds to the accumulator of a parameter."""
        op = self._ops[index]
        if op.name() != _ACCUMULATE:
            return False
        return bool(op.operand_source(0).get_defining_op().name() == DATA)

    def _data_gradients(self, end: int) -> set[tuple[int, int]]:
        """Returns the gradients of activations from which one parameter's gradient is computed.

        Args:
            end: The operation that adds the parameter's gradient to its accumulator.

        Returns:
            For each gradient, the index of the operation that computes it and its result's number.
        """
        gradients: set[tuple[int, int]] = set()
        unvisited, seen = [end], set()
        while unvisited:
            index = unvisited.pop()
            if index in seen:
                continue
            seen.add(index)
            if index != end and any(map(self._is_from_data, operands(self._ops[index]))):
                gradients.update(self._operand_results(index))
            else:
                unvisited += [producer for producer, _ in self._operand_results(index)]
        return gradients

    def _is_from_data(self, value: Variable) -> bool:
        """Returns whether a value of the forward depends on data, not on parameters only.

        It is False for any value of the backward.
        """
        op = value.get_defining_op()
        if op is None or self._index_by_id.get(op.id()) in self._backward_set:
            return False
        return not (op.name() == PARAMETER or is_free(op))

    def _can_skip_results(
        self, index: int, inputs: Collection[int], for_weights: Collection[tuple[int, int]]
    ) -> bool:
        """Returns whether each half of a backward can run an operation for different results.

        ``inputs`` are the operations that compute input gradients, ``for_weights`` their results
        that gradients of parameters are computed from.
        """
        op = self._ops[index]
        used = [(index, n) for n in range(op.num_results()) if (index, n) in self._users]
        skipped = [self._only_weights_use(result, inputs, for_weights) for result in used]
        return op.name() in DIVISIBLE and any(skipped) and not all(skipped)

    def _only_weights_use(
        self,
        result: tuple[int, int],
        inputs: Collection[int],
        for_weights: Collection[tuple[int, int]],
    ) -> bool:
        """Returns whether only gradients of parameters, no input gradients, need a result.

        ``inputs`` are the operations that compute input gradients, ``for_weights`` their results
        that gradients of parameters are computed from.
        """
        taken = any(user in inputs for user in self._users[result])
        return not taken and result not in for_weights

    def _lists_for(self, weights: Collection[int]) -> set[int]:
        """Returns the operations of I that make lists of tensors for ``weights``, those of W.

        They run again in W, the half for parameters, because no variable can save a list.
        """
        lists: set[int] = set()
        unvisited = list(weights)
        while unvisited:
            for producer, _ in self._operand_results(unvisited.pop()):
                is_new = producer not in weights and producer not in lists
                if is_new and self._ops[producer].name() == COMBINE:
                    lists.add(producer)
                    unvisited.append(producer)
        return lists
