"""Replaces the ``forward`` of leaf layers by faster ones that have the same bits.

They are replaced while a stage runs forward, and while a piece of it is recomputed; at other times
nothing is changed.

The gradients of Embeddings with large tables are added row by row after a stage's backward;
``lookup`` explains why. During the stage's own backward, the graph of a look-up keeps the gradient
that comes and gives the table none; in any other backward it gives the table its gradient. A table
that is used outside of its layer too, as in a product with its weights, is left to autograd, which
adds up all uses before it changes the sum. The first backward detects this, and loses no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from fleetpipe.aliases import Context, Layer, Nest, Tensor
from fleetpipe.contrib.fast_leaves import fast_linear
from fleetpipe.dygraph.backward import recompute
from fleetpipe.dygraph.backward.adding import Sums, count_own_hook, is_watched
from fleetpipe.dygraph.backward.forwards import Forward, with_forwards
from fleetpipe.dygraph.backward.lookup import add_gradient, has_large_table, look_up, sum_rows
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.kernels import reshape
from fleetpipe.paddle_api.tensor import CAN_RUN_REDUCE_HOOKS

plain_forward: Callable[[Layer, Tensor], Tensor] = paddle.nn.Embedding.forward


class LookupTable:
    """The table of one Embedding, and the gradients of its look-ups in a backward."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        #: Whether no backward had a gradient of another use; None before the first.
        self._alone: bool | None = None
        #: The ids of each look-up and the gradient of what it returned; None while nobody keeps it.
        self.calls: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Computes what ``paddle.nn.Embedding.forward`` does."""
        layer, weight = self._layer, self._layer.weight
        if weight.stop_gradient or not paddle.is_grad_enabled() or recompute.in_piece():
            return plain_forward(layer, x)
        if not has_large_table(layer) or not x.size:
            return plain_forward(layer, x)
        apply: Callable[..., Tensor] = _LookUp.apply
        # The reshape stands outside: Paddle ignores hooks on what a PyLayer returns.
        output = apply(weight, x.detach().clone(), self)
        return reshape(output, output.shape)

    @contextmanager
    def adding(self, sums: Sums) -> Iterator[None]:
        """While it is open, a backward of the stage runs; look-ups are added at its end."""
        weight = self._layer.weight
        if self._alone is False or weight.stop_gradient or is_watched(weight):
            yield
            return
        if self._alone is None and weight.grad is not None:
            yield
            return
        beside: list[bool] = []
        hook = weight.register_hook(lambda grad: None if grad is None else beside.append(True))
        calls: list[tuple[Tensor, Tensor]] = []
        self.calls = calls
        try:
            yield
        finally:
            self.calls = None
            hook.remove()
            count_own_hook(weight)
        if calls:
            self._alone = not beside
            _add(weight, calls, sums)


class _LookUp(paddle.autograd.PyLayer):
    """Looks up the rows of some ids in a table."""

    @staticmethod
    def forward(ctx: Context, weight: Tensor, ids: Tensor, table: LookupTable) -> Tensor:
        ctx.weight, ctx.ids, ctx.table = weight, ids, table
        return look_up(ids, weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        if ctx.table.calls is None:
            return sum_rows(ctx.ids, grad, ctx.weight.detach())
        ctx.table.calls.append((ctx.ids, grad))
        return None


def _add(weight: Tensor, calls: list[tuple[Tensor, Tensor]], sums: Sums) -> None:
    """Adds the gradients of look-ups, in the order in which they came."""
    with paddle.no_grad():
        if len(calls) == 1:
            add_gradient(sums, weight, *calls[0])
            return
        whole, *rest = (sum_rows(ids, grad, weight) for ids, grad in calls)
        for one in rest:
            whole = whole + one
        sums.add([(weight, whole)])


def tables_of(layers: Iterable[Layer]) -> list[tuple[Layer, LookupTable]]:
    """Returns the Embeddings with large tables, each with its :class:`LookupTable`."""
    if not CAN_RUN_REDUCE_HOOKS:
        return []
    return [
        (layer, LookupTable(layer))
        for layer in layers
        if type(layer).forward is plain_forward and has_large_table(layer)
    ]


#: What takes less time, by the forward of a layer's class.
_FORWARDS: dict[object, Callable[..., Nest]] = {fast_linear.plain_forward: fast_linear.forward}


class FastForwards:
    """The leaf layers of a stage that have a faster forward."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        layers = list(layers)
        ways = ((layer, type(layer).forward) for layer in layers)
        self._ways: list[tuple[Layer, object, Forward]] = [
            (layer, plain, functools.partial(_FORWARDS[plain], layer))
            for layer, plain in ways
            if plain in _FORWARDS and fast_linear.may_gain(layer)
        ]
        tables = tables_of(layers)
        self._ways += [(layer, plain_forward, one.forward) for layer, one in tables]
        self._tables = [table for _, table in tables]

    def running(self) -> AbstractContextManager[None]:
        """While it is open, the layers use the fast forward, unless a user replaced theirs."""
        fast_linear.try_waiting()
        return with_forwards(
            [
                (layer, forward)
                for layer, plain, forward in self._ways
                if type(layer).forward is plain and "forward" not in vars(layer)
            ]
        )

    @contextmanager
    def in_backward(self, sums: Sums) -> Iterator[None]:
        """While it is open, the stage's backward runs with the fast forwards.

        Args:
            sums: The sums to which the gradients of look-ups are added.
        """
        with self.running(), ExitStack() as stack:
            for table in self._tables:
                stack.enter_context(table.adding(sums))
            yield


def fast_forwards_of(layers: Iterable[Layer]) -> FastForwards | None:
    """Returns the leaf layers of a stage that have a faster forward; None if there are none."""
    fast = FastForwards(layers)
    return fast if fast._ways else None
