"""Runs the forward of a leaf layer where backward is split: cuts the call out, if it can wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.backward import recompute
from fleetpipe.dygraph.backward.graph_call import GraphCall
from fleetpipe.dygraph.backward.leaf import CannotWait, Leaf, Nature, examine, tensors_in
from fleetpipe.dygraph.backward.leaf_call import Tape, bordered
from fleetpipe.dygraph.backward.lookup import LookupCall, looks_up
from fleetpipe.dygraph.backward.output_hooks import stand_in_for
from fleetpipe.dygraph.backward.product import ProductCall, product_of
from fleetpipe.dygraph.nest import leaves_like, replace
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import allocated_bytes


def run(
    leaf: Leaf, forward: Callable[..., Nest], tape: Tape, /, *args: Nest, **named: Nest
) -> Nest:
    """Calls a leaf layer's forward so that its weight gradients can wait, if they can.

    Args:
        leaf: The layer.
        forward: Its forward.
        tape: Takes the call when its input gradients have been computed.
        args: Positional arguments.
        named: Keyword arguments.

    Returns:
        What ``forward`` returned, connected to the graph around it.

    Raises:
        ConfigError: The layer's earlier calls gave tensors that could be seen; this one has an
            object of another class among them.
    """
    trained = any(not parameter.stop_gradient for parameter in leaf.parameters)
    if not trained or not paddle.is_grad_enabled():
        return forward(*args, **named)
    if recompute.in_piece():
        # What is cut out would keep the layer's inputs and outputs, which recompute lets go.
        leaf.uncut = "its layer is recomputed"
        return forward(*args, **named)
    try:
        if len(args) == 1 and not named and isinstance(args[0], paddle.Tensor):
            taken = [args[0]]
        else:
            taken = tensors_in((args, named), "was called with")
    except CannotWait as cause:
        leaf.uncut = str(cause)
        return forward(*args, **named)
    situation = leaf.situation(taken)
    nature = leaf.natures.get(situation) or examine(leaf, forward, args, named)
    # All calls or none: autograd adds up all uses before it touches a parameter's gradient.
    waits = leaf.waits and not nature.reason and nature.divisible
    if not waits:
        output = forward(*args, **named)
    elif (product := product_of(leaf, forward, taken)) is not None:
        entries = [tensor for tensor in taken if not tensor.stop_gradient]
        (output,) = bordered(ProductCall(leaf, product, taken[0]), tape, nature.depth, entries)
    elif looks_up(leaf, forward, taken):
        (output,) = bordered(LookupCall(leaf, taken[0]), tape, nature.depth, [])
    else:
        output = _cut_out(leaf, nature, forward, tape, taken, args, named)
    # An error of the user's own comes again above, and says nothing of the layer.
    leaf.natures[situation], leaf.waits = nature, waits
    return output


def _cut_out(
    leaf: Leaf,
    nature: Nature,
    forward: Callable[..., Nest],
    tape: Tape,
    taken: Sequence[Tensor],
    args: tuple[Nest, ...],
    named: dict[str, Nest],
) -> Nest:
    """Runs ``forward`` on stand-ins and puts a border in the place of its graph."""
    tensors = [tensor for tensor in taken if not tensor.stop_gradient]
    stand_ins = leaves_like(tensors)
    for tensor in tensors:
        stand_in_for(tensor, stand_ins[id(tensor)])
    versions = [tensor.inplace_version for tensor in taken]
    before = allocated_bytes()
    output = forward(*replace(args, stand_ins), **replace(named, stand_ins))
    allocated = allocated_bytes() - before
    if [tensor.inplace_version for tensor in taken] != versions:
        raise _cannot_wait_now(leaf, "its layer writes into its argument")
    originals = {id(stand_ins[id(tensor)]): tensor for tensor in tensors}
    returned = [t for t in _returned(leaf, output) if not t.stop_gradient]
    outputs = [tensor for tensor in returned if id(tensor) not in originals]
    if outputs:
        entries = [tensor for tensor, reached in zip(tensors, nature.reached) if reached]
        inputs = [stand_ins[id(tensor)] for tensor in entries]
        parameters = [p for p in leaf.parameters if not p.stop_gradient]
        call = GraphCall(leaf, parameters, inputs, outputs)
        call.measure(taken, outputs, allocated)
        borders = bordered(call, tape, nature.depth, entries)
        originals.update((id(output), border) for output, border in zip(outputs, borders))
    return replace(output, originals)


def _returned(leaf: Leaf, output: Nest) -> list[Tensor]:
    try:
        return tensors_in(output, "returned")
    except CannotWait as cause:
        raise _cannot_wait_now(leaf, str(cause)) from None


def _cannot_wait_now(leaf: Leaf, cause: str) -> ConfigError:
    return ConfigError(
        f"the gradients of layer {leaf.name!r} could wait for W, and now cannot",
        cause=cause,
        fix="call the layer the same way each time, or choose a schedule without W",
    )
