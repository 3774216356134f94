"""Single operations and values of PIR: what they are, and how they are put elsewhere."""

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
    """Puts a variable of the scope, shaped as a value is, at the start of the program."""
    pir.reset_insertion_point_to_start()
    value = pir_creation.data(name, like.shape, like.dtype, no_place())
    value.stop_gradient = like.stop_gradient
    value.persistable = True
    to_end(value.get_defining_op().get_parent_block())
    return value


def to_end(block: Block) -> None:
    """Has operations made at the end of a block from now on.

    Anywhere else the place would be lost, and memory overwritten, when the operation there is
    erased.
    """
    pir.set_insertion_point_to_block_end(block)


def export(value: Variable, name: str) -> None:
    """Leaves a value in a variable of the scope. Without both it would not be seen there."""
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
    """Returns the name of the variable that a parameter, data or set_parameter is about."""
    attributes = op.attrs()
    return str(attributes.get("parameter_name", attributes.get("name", "")))


def draws_of(op: Op) -> bool:
    """Whether an operation takes random numbers; one with a dropout of its own as well."""
    inner = next((op.attrs()[name] for name in DROPOUTS if op.has_attr(name)), 0.0)
    return draws(op.name()) or inner > 0.0


def place(value: Variable) -> tuple[int, int]:
    """Returns the operation and the number of its result that a value is."""
    return value.get_defining_op().id(), value.index()


def inside(op: Op) -> Iterator[Op]:
    """Yields the operations in the blocks of an operation, at any depth."""
    for block in op.blocks():
        for one in block.ops:
            yield one
            yield from inside(one)


def taken(op: Op) -> Iterator[Variable]:
    """Yields the values that an operation and those in its blocks take."""
    for one in (op, *inside(op)):
        for operand in one.operands():
            value = operand.source()
            if value.initialized():
                yield value


def line_of(op: Op) -> str:
    """Returns where in the user's script an operation was made; control flow has no line itself."""
    lines = (user_line(one.callstack) for one in (op, *inside(op)))
    return next((line for line in lines if line), "")


def is_source(op: Op) -> bool:
    """Whether an operation computes nothing: data and parameters."""
    return op.name() in (PARAMETER, DATA)


def is_constant(op: Op) -> bool:
    """Whether an operation always gives the same: a parameter, fed data, or given numbers."""
    if op.name() == _ASSIGN_VALUE:
        # paddle.assign and to_tensor of numbers: written over zeros that were made for them.
        makers = [value.get_defining_op() for value in taken(op)]
        return all(maker is not None and is_made_up(maker) for maker in makers)
    return not op.operands() and not op.num_regions() and not draws_of(op)


def is_made_up(op: Op) -> bool:
    """Whether an operation is a constant that is neither a parameter nor data."""
    return is_constant(op) and not is_source(op)


def in_place(op: Op) -> dict[int, int]:
    """Returns which results are an operand itself, changed in place: ``{result: operand}``."""
    if op.name() == _ASSIGN_VALUE and is_constant(op) and op.operand_source(0).has_one_use():
        return {}
    if op.name() == _DETACH:
        return {}  # another value in the same memory
    return dict(pir.get_op_inplace_info(op))


class Versions:
    """What an operation finds in the memory of a value, where others changed it in place.

    The value that was there first stands for all that share its memory. Every stage has its own of
    what floats, parameters apart: there, what was changed is another value each time.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, int], Variable] = {}
        self._floating: dict[tuple[int, int], Variable] = {}

    def first(self, value: Variable) -> Variable:
        """Returns the value that was in the memory of another first."""
        if value.get_defining_op() is None:
            return value  # what a block of control flow is given
        return self._first.get(place(value), value)

    def now(self, value: Variable) -> Variable:
        """Returns the value that an operation takes now if it takes ``value``."""
        first = self.first(value)
        if first.get_defining_op() is None:
            return first
        return self._floating.get(place(first), first)

    def add(self, op: Op) -> list[Variable]:
        """Goes past an operation; returns the first values of what it changes."""
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
    """Whether an operation costs next to nothing: a constant, or a list of tensors."""
    return is_constant(op) or op.name() == COMBINE


def by_shape(user: Op, value: Variable) -> bool:
    """Whether an operation takes a value for its shape alone."""
    if user.num_regions() or user.name() == COMBINE or not value.is_dense_tensor_type():
        return False
    times = sum(1 for one in user.operands_source() if one.is_same(value))
    return times == 1 and bool(user.is_no_need_buffer(value))


def take_operands(ops: Iterable[Op]) -> None:
    """Has the backward of an einsum take its operands where it wants nothing but their shapes.

    These are results of an einsum that hold no memory, and cannot be left in a variable.
    """
    for op in ops:
        if op.name() == _EINSUM:
            operands = op.operand_source(0).get_defining_op().operands_source()
            shapes = op.result(2)
            for parted in shapes.all_used_ops_in_same_block():
                for shape, operand in zip(parted.results(), operands):
                    shape.replace_all_uses_with(operand)


def changes(op: Op) -> bool:
    """Whether an operation changes what it takes, other than running statistics."""
    return bool(in_place(op)) and not op.name().startswith(NORMS)


def place_repeated(piece: Program, repeated: Collection[int]) -> None:
    """Has a backward compute again what it needs right before that is needed.

    Running statistics were updated by the forward: only copies of them are, here.
    """
    ops = list(piece.global_block().ops)
    order = {op.id(): number for number, op in enumerate(ops)}
    waiting = {op.id() for op in ops if op.id() in repeated}
    for op in ops:
        if op.id() in repeated:
            continue
        needed, following = [], [op]
        while following:
            for value in taken(following.pop()):
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
