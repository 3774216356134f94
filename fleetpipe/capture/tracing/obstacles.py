"""Things in a forward that cannot be captured: what, why, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.capture.tracing.place import forward_place
from fleetpipe.dygraph.batch.kept_for_loss import kept_for
from fleetpipe.errors import CaptureError

IN_A_SUBLAYER = "put that code into a sublayer: what is within one may do anything"


class Obstacle(NamedTuple):
    """Something in a forward that cannot be captured.

    Attributes:
        what: The action of the forward.
        cause: Why it cannot be captured.
        fix: What to write instead, if it is in the model's own forward.
    """

    what: str
    cause: str
    fix: str = IN_A_SUBLAYER


READS = Obstacle(
    "reads the numbers in a tensor",
    "which nodes run would depend on the numbers in a batch",
    f"{IN_A_SUBLAYER}; or, for the sizes of images in a small input of whole numbers, name that "
    "input in shape_inputs",
)
SIZE = Obstacle(
    "reads a size that depends on the numbers in a tensor",
    "how many a mask or nonzero() selects differs from batch to batch",
    "compute with paddle.shape(x) and paddle.numel(x), which are operations, or with a mask that "
    f"keeps the size; or {IN_A_SUBLAYER}",
)
DRAWS = Obstacle(
    "draws from a generator of Python's or NumPy's",
    "what it drew at the capture would stay, batch after batch",
    "draw by paddle.rand, paddle.randint or paddle.bernoulli and compute with the tensor; or "
    f"{IN_A_SUBLAYER}, and draws anew in each call",
)
BACKWARD = Obstacle(
    "computes gradients", "a stage's backward is its own: a node is no place for another"
)
MEMORY = Obstacle(
    "reaches for the memory of a tensor",
    "a stage repeats operations: it would not see what is read or written there",
    "write into a parameter or buffer by set_value or paddle.assign",
)
FOREIGN = Obstacle(
    "writes into a tensor that came from no operation of Paddle's",
    "each micro-batch would find there what the one before has left",
    "register_buffer what is kept from call to call; make what is not by paddle.zeros, full or "
    "assign",
)
UNKNOWN = Obstacle(
    "uses a tensor that came from no operation of Paddle's",
    "it is a parameter of a layer that is no sublayer, or something else than Paddle made it",
    f"make layers and parameters in __init__; or {IN_A_SUBLAYER}",
)


def keeps_tensor(name: str) -> Obstacle:
    """A tensor becomes an attribute."""
    return Obstacle(
        f"keeps a tensor as {name!r}",
        "a stage repeats operations, and sets no attributes",
        f"return it, or write into a buffer by paddle.assign; or {IN_A_SUBLAYER}",
    )


def uses_attribute(path: str, name: str) -> Obstacle:
    """Code uses a tensor that the sublayer at ``path`` has as an attribute."""
    return Obstacle(
        f"uses a tensor that {path} keeps as {name!r}",
        f"{path} is one node, and a stage hands on what it returns",
        f"return it from {path} too, beside its output",
    )


def returns_number(name: str) -> Obstacle:
    """A sublayer returns a number that depends on the batch."""
    return Obstacle(
        f"uses a number of Python's that {name} makes of those in a tensor, or of chance",
        "which nodes run, and with what, would depend on the numbers in a batch",
        f"return a tensor from {name}; or {IN_A_SUBLAYER}",
    )


def reads_state(name: str) -> Obstacle:
    """Python computes with the numbers of a parameter or buffer."""
    return Obstacle(
        f"reads the numbers in {name!r}, which changes while the model trains",
        "what is computed from them in Python stays as it was at the capture",
        f"compute it by operations of Paddle's; or {IN_A_SUBLAYER}",
    )


def has_graph(name: str) -> Obstacle:
    """A parameter is replaced by a tensor that needs a gradient."""
    return Obstacle(
        f"writes into the parameter {name!r} what needs a gradient",
        "the parameter would be trained no more: its gradient goes to what was written",
        "write under paddle.no_grad(), or what detach() returns",
    )


def outside_no_grad(name: str) -> Obstacle:
    """A trained parameter is written into while gradients are on."""
    return Obstacle(
        f"writes in place into the trained parameter {name!r}",
        "Paddle lets nobody do so while gradients are on",
        "write under paddle.no_grad(), or by set_value",
    )


def unseen(name: str) -> Obstacle:
    """A parameter or buffer changes although no operation wrote into it."""
    return Obstacle(
        f"changes {name!r} in a way that is no operation",
        "a stage repeats operations",
        f"write into it by set_value or paddle.assign; or {IN_A_SUBLAYER}",
    )


def require_nothing_kept(model: Layer, losses: Sequence[Any], before: Mapping[int, Tensor]) -> None:
    """Refuses tensors that a forward stores for a loss, as auxiliary losses in a list."""
    kept = (path for loss in losses for path, tensor in kept_for(loss) if id(tensor) not in before)
    path = next(kept, None)
    if path is not None:
        raise CaptureError(
            f"the loss function reads a tensor that the forward of {type(model).__name__} keeps",
            where=forward_place(model),
            got=path,
            cause="it appends an auxiliary loss to a list, or keeps it in an attribute: stages "
            "repeat operations, and keep nothing",
            fix="return it from the forward, (output, kept), of which loss_fn gets both",
        )


def require_no_new_parameters(model: Layer, is_known: Callable[[Tensor], object]) -> None:
    """Refuses parameters that a forward creates, as those of a layer built in its first call."""
    name = next((name for name, p in model.named_parameters() if not is_known(p)), None)
    if name is not None:
        raise CaptureError(
            f"the forward of {type(model).__name__} makes the parameter {name!r}",
            where=forward_place(model),
            cause="the stages and the optimizer have the parameters that there are before it runs",
            fix="make layers and parameters in __init__; or call the model with such inputs once, "
            "before fleetpipe.pipeline",
        )
