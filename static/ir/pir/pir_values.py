"""Inspects, moves and creates single operations and values of PIR."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from fleetpipe.aliases import Block, Op, Program, Variable
from fleetpipe.paddle_api.static import no_place, pir, pir_creation, pir_operations
from fleetpipe.static.graph import DROPOUTS, draws, user_line

PARAMETER, DATA, COMBINE = "builtin.parameter", "pd_op.data", "builtin.combine"
SET_PARAMETER = "builtin.set_parameter"
_ASSIGN_VALUE, _DETACH, _EINSUM = "pd_op.assign_value_", "pd_op.share_data_", "pd_op.einsum"
#: Operations whose backward takes none of the running statistics that they change.
NORMS = ("pd_op.batch_norm", "pd_op.sync_batch_norm")
#: Operations that take lists of tensors apart.
_VIEWS = ("builtin.split", "builtin.slice")


def placeholder(name: str, like: Variable) -> Variable:
    """Adds a variable of the scope, with the shape of a value, at the start of the program."""
    pir.reset_insertion_point_to_start()
    value = pir_creation.data(name, like.shape, like.dtype, no_place())
    value.stop_gradient = like.stop_gradient
    value.persistable = True
    to_end(value.get_defining_op().get_parent_block())
    return value


def to_end(block: Block) -> None:
    """Makes new operations go to the end of a block from now on.

    At any other place, memory would be overwritten once the operation at that place is erased.
    """
    pir.set_insertion_point_to_block_end(block)


def export(value: Variable, name: str) -> None:
    """Puts a value into a variable of the scope."""
    maker = value.get_defining_op()
    if maker.name() == PARAMETER or value.index() in in_place(maker):
        # It shares the variable of what is changed in place, which goes on to change.
        value = pir_operations.assign(value)
    elif maker.name() in _VIEWS:
        # Such a value is an entry of a list and has no variable that could be given a name.
        value = pir_operations.share_data_(value)
    elif maker.num_regions():
        # Nor has a result of control flow, which is a variable of the block inside.
        value = pir_operations.assign(value)
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
    """Returns the operation that computes a value, and the number of the result."""
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
    """Whether an operation always has the same result: a parameter, fed data, or given numbers."""
    if op.name() == _ASSIGN_VALUE:
        # paddle.assign and to_tensor of numbers: written over zeros that were made for them.
        makers = [value.get_defining_op() for value in operands(op)]
        return all(maker is not None and is_made_up(maker) for maker in makers)
    return not op.operands() and not op.num_regions() and not draws_of(op)


def is_made_up(op: Op) -> bool:
    """Whether an operation is a constant other than a parameter or data."""
    return is_constant(op) and not is_source(op)


def in_place(op: Op) -> dict[int, int]:
    """Returns the results that are an operand changed in place: ``{result: operand}``."""
    if op.name() == _ASSIGN_VALUE and is_constant(op) and op.operand_source(0).has_one_use():
        return {}
    if op.name() == _DETACH:
        return {}  # another value in the same memory
    return dict(pir.get_op_inplace_info(op))


class Versions:
    """Tracks values that share memory because operations change it in place.

    The first value represents all that share its memory. Every stage has its own copy of floating
    values, except parameters: for these, each change gives another value.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, int], Variable] = {}
        self._floating: dict[tuple[int, int], Variable] = {}

    def first(self, value: Variable) -> Variable:
        """Returns the first value in the memory of a value."""
        if value.get_defining_op() is None:
            return value  # what a block of control flow is given
        return self._first.get(place(value), value)

    def now(self, value: Variable) -> Variable:
        """Returns the present value for an operation that takes ``value``."""
        first = self.first(value)
        if first.get_defining_op() is None:
            return first
        return self._floating.get(place(first), first)

    def add(self, op: Op) -> list[Variable]:
        """Processes an operation; returns the first values of those that it changes."""
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
    """Makes the backward of an einsum take its operands if it needs only their shapes.

    It would take other results of the einsum, which have no memory and cannot be put into a
    variable.
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

    The forward has updated running statistics already, so that they only change copies here.
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
