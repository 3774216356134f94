"""Random streams of places that are no call of a layer.

They are the losses, hooks on gradients, the backward of a ``PyLayer``, the optimizer's step and
``apply``.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fleetpipe.aliases import Layer, Optimizer, Tensor
from fleetpipe.dygraph.code_names import is_of_library
from fleetpipe.dygraph.random_keys import APPLY, BACKWARD, LOSS, STEP, Keys, current
from fleetpipe.paddle_api import replaced
from fleetpipe.paddle_api.random import drawn_on_host
from fleetpipe.paddle_api.tensor import is_parameter, watch_pylayers
from fleetpipe.schedules.action import GlobalMicroBatch


def enter_loss(functions: Sequence[Callable[..., Any]]) -> None:
    """Seeds the generators for the loss functions, after the last layer of a micro-batch."""
    if (keys := current()) is not None:
        keys.enter(LOSS, *functions)


def enter_backward(micro_batch: GlobalMicroBatch) -> None:
    """Says whose gradients the hooks of parameters are called with from now on."""
    if (keys := current()) is not None:
        keys.micro_batch = micro_batch


def in_earlier_backward(micro_batches: int) -> AbstractContextManager[None]:
    """Returns a context: gradients are those of so many micro-batches before the present one."""
    if (keys := current()) is None:
        return nullcontext()
    return replaced((keys, "micro_batch", GlobalMicroBatch(keys.micro_batch - micro_batches)))


def in_step(optimizer: Optimizer, stage: int, shard: int) -> AbstractContextManager[None]:
    """Returns the context of an optimizer's step.

    Args:
        optimizer: The user's.
        stage: The first stage of this process: ranks of other parameters draw other numbers.
        shard: The number of this rank's shard of the optimizer's state.
    """
    keys = current()
    return nullcontext() if keys is None else keys.within((STEP, stage, shard), optimizer)


def in_apply(
    names: Callable[[Layer], str], function: Callable[[Layer], object]
) -> Callable[[Layer], None]:
    """Returns a function for ``Layer.apply`` that draws the same of a layer on whichever rank.

    One number is drawn from Paddle's CPU generator.

    Args:
        names: Returns the name of a layer in the whole model.
        function: The user's function.
    """
    keys = Keys(drawn_on_host(2**31 - 1))

    def apply(layer: Layer) -> None:
        with keys.within((APPLY, zlib.crc32(names(layer).encode())), function):
            function(layer)

    return apply


def keyed_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Returns a hook on a gradient that draws by seeds of its own in a batch.

    That of a parameter has them by the parameter's name, that of another tensor by the call of the
    layer in whose forward it is put there.
    """
    if is_of_library(getattr(hook, "func", hook)):
        return hook
    if is_parameter(tensor):
        tensor.keyed_hooks = number = getattr(tensor, "keyed_hooks", 0) + 1
        made, parameter = None, id(tensor)
    else:
        made = None if (keys := current()) is None else keys.place_in_backward()
        if made is None:
            return hook

    @functools.wraps(hook)
    def keyed(grad: Tensor) -> Any:
        if (keys := current()) is None:
            return hook(grad)
        place = made
        if place is None:
            name = keys.numbers_of_parameters.get(parameter, 0)
            place = name, keys.micro_batch, BACKWARD, number
        with keys.within(place, hook):
            return hook(grad)

    return keyed


def _place_of_pylayer(kind: type) -> tuple[int, ...] | None:
    """Returns the place of a call's backward; None outside of a batch, and of fleetpipe's own."""
    keys = None if kind.__module__.startswith("fleetpipe.") else current()
    return None if keys is None else keys.place_in_backward()


def _in_pylayer(
    place: tuple[int, ...] | None, backward: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Returns a context in which a ``PyLayer``'s backward has the random stream of ``place``."""
    keys = None if place is None else current()
    return nullcontext() if keys is None or place is None else keys.within(place, backward)


watch_pylayers(_place_of_pylayer, _in_pylayer)
