"""Hooks on gradients of a ``PyLayer``'s outputs: Paddle runs them, but drops their results.

So every hook that is put on a tensor passes through here. A hook on the output of a leaf layer's
call is stored, and the call's border runs it; all others go to Paddle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.random_places import keyed_hook
from fleetpipe.paddle_api.tensor import (
    is_made_by_pylayer,
    put_grad_hook,
    remove_grad_hook,
    route_grad_hooks,
)

Hook = Callable[[Tensor], Any]


#: Tensors by id, with where their hooks go. No tensor is kept alive by it.
_routes: dict[int, tuple[weakref.ref[Tensor], _Output]] = {}


class OutputHooks:
    """The hooks on the outputs of one call."""

    def __init__(self) -> None:
        #: By the output's number, and then by the hook's.
        self._hooks: dict[int, dict[int, Hook]] = {}

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """From now on, stores hooks that are put on ``outputs``."""
        for number, output in enumerate(outputs):
            _route(output, _Output(self._hooks, number, output.inplace_version))

    def apply(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the gradients of all outputs after the hooks have changed them.

        Args:
            grads: One for each output; None for an unused one.
        """
        if not self._hooks:
            return grads
        changed = list(grads)
        for number, hooks in self._hooks.items():
            for hook in hooks.values():
                if changed[number] is not None:
                    result = hook(changed[number])
                    changed[number] = changed[number] if result is None else result
        return changed


class _Output:
    """Stores the hooks of one output of a call."""

    def __init__(self, hooks: dict[int, dict[int, Hook]], number: int, version: int) -> None:
        self._all, self._number, self._version = hooks, number, version
        self._put = 0

    def put(self, tensor: Tensor, hook: Hook) -> int:
        if self._is_another(tensor):
            return put_grad_hook(tensor, hook)
        self._all.setdefault(self._number, {})[self._put] = hook
        self._put += 1
        return self._put - 1

    def remove(self, tensor: Tensor, number: int) -> bool:
        if self._is_another(tensor):
            return remove_grad_hook(tensor, number)
        return self._all.get(self._number, {}).pop(number, None) is not None

    def _is_another(self, tensor: Tensor) -> bool:
        """Whether an operation in place has changed the tensor; then Paddle obeys its hooks."""
        return tensor.inplace_version != self._version and not is_made_by_pylayer(tensor)


def _route(tensor: Tensor, route: _Output) -> None:
    _routes[id(tensor)] = weakref.KeyedRef(tensor, _forget, id(tensor)), route


def _forget(reference: weakref.KeyedRef[int, Tensor]) -> None:
    del _routes[reference.key]


def _register_grad_hook(tensor: Tensor, hook: Hook) -> int:
    if tensor.stop_gradient:
        # Of a captured model, layers of which were frozen since: Paddle would crash.
        return 0
    hook = keyed_hook(tensor, hook)
    routed = _routes.get(id(tensor))
    return put_grad_hook(tensor, hook) if routed is None else routed[1].put(tensor, hook)


def _remove_grad_hook(tensor: Tensor, number: int) -> bool:
    if tensor.stop_gradient:
        return True
    routed = _routes.get(id(tensor))
    return remove_grad_hook(tensor, number) if routed is None else routed[1].remove(tensor, number)


route_grad_hooks(_register_grad_hook, _remove_grad_hook)
