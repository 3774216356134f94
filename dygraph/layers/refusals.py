"""Names the layer that refused a value, and the value; Paddle's errors name only an operation."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fleetpipe.aliases import Layer, Nest
from fleetpipe.dygraph import gradients
from fleetpipe.dygraph.nest import outline
from fleetpipe.errors import BoundaryError, FleetPipeError, StateError, reason
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.partition import Partition


def require_dynamic_graph(what: str) -> None:
    """Refuses what needs dynamic graph, where static graph is on."""
    if not paddle.in_dynamic_mode():
        raise StateError(
            f"static graph is on, and {what} needs dynamic graph",
            cause="paddle.enable_static() was called, by the script or by a library",
            fix="call paddle.disable_static() before; in static graph use device_guard and "
            "fleet.distributed_optimizer(..).minimize(loss)",
        )


def is_refusal(error: Exception, value: Nest, caller: str) -> bool:
    """Tells whether a layer failed because of the value that it got.

    It did if Paddle or the call itself refused the value, or if the layer's code could not unpack
    the value or expected another type.
    """
    text = str(error)
    # Of all else that Paddle raises, a kernel that is not there for the value's dtype.
    if isinstance(error, FleetPipeError) or not (
        isinstance(error, _OF_VALUES) or "(NotFound)" in text
    ):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_in = Path(frame.f_code.co_filename)
    inside_paddle = Path(paddle.__file__).parent in raised_in.parents
    # An operator such as + has no Python frame of Paddle's.
    if inside_paddle or raised_in == Path(caller) or "(InvalidArgument)" in text:
        return True
    kind = rf"\b{type(value).__name__}\b"
    another_kind = isinstance(error, (TypeError, AttributeError)) and re.search(kind, text)
    return bool(another_kind) or (isinstance(error, (TypeError, ValueError)) and "unpack" in text)


#: What Paddle says where a device has no kernel, of whatever dtype.
_NO_KERNEL = re.compile(r"The kernel `\w+` is not registered|of kernel `\w+`.*wrong Backend `\w+`")

#: What an operation raises that refuses a value; Gloo and the system raise others.
_OF_VALUES = (
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    AssertionError,
    NotImplementedError,
)


def refusal(
    error: Exception, partition: Partition, index: int, layer: Callable[[Nest], Nest], value: Nest
) -> BoundaryError:
    """Returns the error to raise instead of ``error``."""
    if gradients.is_refusal(error):
        return gradients.refusal(error, _title(partition, index), value)
    if "one pair of hooks" in str(error):
        return BoundaryError(
            f"{_title(partition, index)} is recomputed, and opens saved_tensors_hooks itself",
            expected="one pair of hooks at a time, as Paddle has it",
            cause="recompute(use_reentrant=False) in the layer, or saved_tensors_hooks of its own",
            fix="set recompute_interval=0, or call recompute with use_reentrant=True",
        )
    no_kernel = _NO_KERNEL.search(str(error))
    if no_kernel is not None:
        return BoundaryError(
            f"{_title(partition, index)} cannot run on this device, a {device_kind()}",
            cause=f"Paddle has no kernel there: {no_kernel[0]}",
            fix="run on a GPU, or use another layer: BatchNorm1D or 2D for SyncBatchNorm, whose "
            "statistics are then of each replica's rows",
        )
    part = _part(error, layer, value)
    if part is not None:
        return _refusal_inside(error, part, partition, index, value)
    before = f"what layer {index - 1} returned" if index else "the inputs of the batch"
    stage = partition.stage_of(index)
    first = index == partition.boundaries[stage]
    return BoundaryError(
        f"{_title(partition, index)} cannot take {before}",
        where=f"first layer of stage {stage}" if first else None,
        expected=_sizes(layer),
        got=_arguments_named(partition, index, value),
        cause=reason(error),
        fix=_advice(error, index, value),
    )


class _Part(NamedTuple):
    """A sublayer that refused a value: its path in the layer of the list, and the value."""

    path: str
    layer: Layer
    value: Nest


def _part(error: Exception, layer: Callable[[Nest], Nest], value: Nest) -> _Part | None:
    """Returns the innermost sublayer that raised ``error``, unless it got ``value`` itself.

    If it did, the error names that value and the layer before.
    """
    if not isinstance(layer, paddle.nn.Layer):
        return None
    paths = {id(part): path for path, part in layer.named_sublayers()}
    whole = value if isinstance(value, (tuple, list)) else (value,)
    inner = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, names = frame.f_code, frame.f_locals
        part = names.get("self")
        if code.co_name != "forward" or id(part) not in paths:
            continue
        arguments = [names.get(name) for name in code.co_varnames[1 : code.co_argcount]]
        tensors = tuple(one for one in arguments if isinstance(one, paddle.Tensor))
        if tensors and not any(tensors[0] is one for one in whole):
            only = tensors[0] if len(tensors) == 1 else tensors
            inner = _Part(paths[id(part)], part, only)
    return inner


def _refusal_inside(
    error: Exception, part: _Part, partition: Partition, index: int, value: Nest
) -> BoundaryError:
    """Returns the error of a composite layer whose sublayer got a value that does not fit."""
    return BoundaryError(
        f"{_title(partition, index)}: its {part.path} cannot take what the layer gives it",
        expected=_sizes(part.layer),
        got=f"{outline(part.value)}; the layer itself was given "
        f"{_arguments_named(partition, index, value)}",
        cause=reason(error),
        fix=f"change {part.path} of layer {index}, or what stands before it there, so that they "
        "fit",
    )


def _arguments_named(partition: Partition, index: int, value: Nest) -> str:
    """Returns a description of a layer's argument, and of the layer that made it."""
    giver = f", from {_title(partition, index - 1)}" if index else ""
    return f"{outline(value)}{giver}"


def _title(partition: Partition, index: int) -> str:
    name = partition.layers[index].name
    return f"layer {index} ({name})" if name else f"layer {index}"


def _sizes(layer: Layer) -> str | None:
    """Returns the sizes with which a layer of Paddle's was built, as text."""
    sizes = layer.extra_repr() if isinstance(layer, paddle.nn.Layer) else ""
    return f"what {type(layer).__name__}({sizes}) takes" if sizes else None


def _advice(error: Exception, index: int, value: Nest) -> str:
    giver = f"layer {index - 1} return" if index else "the batch give"
    several = isinstance(error, TypeError) and "positional argument" in str(error)
    if isinstance(value, (tuple, list)):
        kind = type(value).__name__
        if several:
            return f"a layer takes one argument, here a {kind}: write forward(self, args)"
        return f"have {giver} one Tensor, or take the {kind} apart in a function before the layer"
    if several or "unpack" in str(error):
        return f"have {giver} a tuple, which a layer takes as one argument: forward(self, args)"
    return (
        f"change layer {index - 1} or {index} so that they fit"
        if index
        else ("change layer 0, or the inputs, so that they fit")
    )
