"""Splits a PIR stage's backward into I and W: which operations run in one of them, or in both.

I computes the gradients that leave the stage and those of everything computed from data; W those of
parameters. A gradient operation with results for both runs twice, each time for one of them: a
result without a type is not computed. Some operations give other numbers when asked for a part:
they run in I, and W takes their results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from fleetpipe.aliases import Op, Variable
from fleetpipe.paddle_api.static import pir
from fleetpipe.static.ir.pir.pir_values import (
    DATA,
    PARAMETER,
    is_constant,
    is_free,
    is_source,
    operands,
)

#: Operations that, asked for some of their gradients, give these with the bits that all would have.
#: Not among them: layer_norm forgets its weight, batch_norm computes something else, prelu crashes.
DIVISIBLE = frozenset(
    f"pd_op.{name}_grad"
    for name in (
        *("matmul", "add", "subtract", "multiply"),
        *("conv2d", "depthwise_conv2d", "conv3d", "conv2d_transpose", "bilinear"),
    )
)
_ACCUMULATE = "pd_op.add_"


class Halves(NamedTuple):
    """A backward in two halves; operations are indices in the stage's program.

    Attributes:
        inputs: The operations of I.
        weights: The operations of W.
        crossing: The results of I that W takes: operation and number of the result.
    """

    inputs: frozenset[int]
    weights: frozenset[int]
    crossing: tuple[tuple[int, int], ...]


def ask_for_less(ops: Iterable[Op]) -> None:
    """Stops operations from computing unused results, if that changes no other result."""
    nothing = pir.fake_value().type()
    for op in ops:
        if op.name() in DIVISIBLE:
            for value in op.results():
                if value.use_empty():
                    value.set_type(nothing)


def pass_through(ops: Sequence[Op], forward: Collection[int]) -> None:
    """Replaces the gradient of ``x`` in ``x + bias`` by the gradient of the sum.

    If the bias is broadcast and ``x`` is not, these are the same numbers, and otherwise both would
    have to be stored from I to W.
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
    """Divides the backward of a stage into two halves."""
    return _Division(ops, forward).halves()


class _Division:
    """The graph of a stage's operations, by index."""

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
        ends, wanted = self._ends()
        inputs = self._dependencies(ends)
        # A list of gradients, such as rnn_grad gives, cannot wait: its parts can.
        inputs |= {index for index in self._backward if self._parts_one_of(index, inputs)}
        weights = {index for index in self._backward if index not in inputs}
        # What has results for both runs in both.
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
        """Returns the operations of the backward on which the given ones depend."""
        needed: set[int] = set()
        waiting = list(ends)
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                waiting += [maker for maker, _ in self._operands(index)]
        return needed

    def _ends(self) -> tuple[set[int], set[tuple[int, int]]]:
        """Returns the operations that are the purpose of I, and their results that W takes.

        They export a gradient for another stage, or compute the gradient of a value of data from
        which a parameter's gradient is computed.
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
        op = self._ops[index]
        if op.name() != _ACCUMULATE:
            return False
        return bool(op.operand_source(0).get_defining_op().name() == DATA)

    def _sources(self, end: int) -> set[tuple[int, int]]:
        """Returns the gradients of data from which a parameter's gradient is computed."""
        sources: set[tuple[int, int]] = set()
        waiting, seen = [end], set()
        while waiting:
            index = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            if index != end and self._reads_data(index):
                sources.update(self._operands(index))
            else:
                waiting += [maker for maker, _ in self._operands(index)]
        return sources

    def _reads_data(self, index: int) -> bool:
        """Whether an operation takes a value computed from data, and not only parameters."""
        return any(self._from_data(value) for value in operands(self._ops[index]))

    def _from_data(self, value: Variable) -> bool:
        op = value.get_defining_op()
        if op is None or self._index.get(op.id()) in self._within:
            return False
        return not (op.name() == PARAMETER or is_free(op))

    def _is_divided(
        self, index: int, inputs: Collection[int], wanted: Collection[tuple[int, int]]
    ) -> bool:
        """Whether an operation of I has results for W only that it can leave out."""
        op = self._ops[index]
        results = [n for n in range(op.num_results()) if (index, n) in self._users]
        late = [self._is_for_weights(index, number, inputs, wanted) for number in results]
        return op.name() in DIVISIBLE and any(late) and not all(late)

    def _is_for_weights(
        self, index: int, number: int, inputs: Collection[int], wanted: Collection[tuple[int, int]]
    ) -> bool:
        """Whether a used result of an operation is not one that I needs."""
        used = any(user in inputs for user in self._users[index, number])
        return not used and (index, number) not in wanted

    def _lists_of(self, weights: Collection[int]) -> set[int]:
        """Returns the lists of tensors that W needs, which it cannot take from I."""
        lists: set[int] = set()
        waiting = list(weights)
        while waiting:
            for maker, _ in self._operands(waiting.pop()):
                if maker not in weights and maker not in lists and is_free(self._ops[maker]):
                    lists.add(maker)
                    waiting.append(maker)
        return lists
