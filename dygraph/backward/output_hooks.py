"""Hooks on the gradients of what a ``PyLayer`` returned: Paddle runs them and drops their results.

On 3.x a tensor takes attributes of its own, so that its ``register_hook`` can be another; on 2.6.2
what such a hook returns is lost.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Tensor

Hook = Callable[[Tensor], Any]

#: Whether tensors take attributes (3.x).
CAN_BE_KEPT = hasattr(paddle.zeros([1]), "__dict__")


class OutputHooks:
    """The hooks on the outputs of one call, by the output's number."""

    def __init__(self) -> None:
        """Begins with none."""
        self._hooks: dict[int, list[Hook]] = {}

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Has hooks that are put on ``outputs`` from now on be kept here."""
        if not CAN_BE_KEPT:
            return
        for number, output in enumerate(outputs):
            # No reference to the output: it would live until the garbage collector finds it.
            output.register_hook = functools.partial(
                self._register, number, weakref.ref(output), output.inplace_version
            )

    def _register(
        self, number: int, output: Callable[[], Tensor | None], version: int, hook: Hook
    ) -> Any:
        tensor = output()
        if tensor is not None and tensor.inplace_version != version:
            # It stands for what an operation in place made of it, whose hooks Paddle heeds.
            return paddle.Tensor.register_hook(tensor, hook)
        hooks = self._hooks.setdefault(number, [])
        hooks.append(hook)
        return _Handle(hooks, hook)

    def changed(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns what the hooks make of the gradients of all outputs.

        Args:
            grads: One for each output; None where nobody used it.
        """
        if not self._hooks:
            return grads
        found = list(grads)
        for number, hooks in self._hooks.items():
            for hook in hooks:
                if found[number] is not None:
                    given = hook(found[number])
                    found[number] = found[number] if given is None else given
        return found


class _Handle:
    """What ``register_hook`` returns."""

    def __init__(self, hooks: list[Hook], hook: Hook) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> bool:
        """Takes the hook away; returns whether it was there."""
        if self._hook not in self._hooks:
            return False
        self._hooks.remove(self._hook)
        return True
