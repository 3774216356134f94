"""Paddle's own classes for the signatures that users see; each is ``Any`` at run time.

A type checker sees Paddle's annotations, or ``Any`` if there are none: without Paddle, and on
2.6.2. Functions that no user calls take ``fleetpipe.aliases``, whose names are always ``Any``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paddle import Tensor as Tensor
    from paddle.amp import GradScaler as GradScaler
    from paddle.callbacks import Callback
    from paddle.distributed.fleet import CommunicateTopology as CommunicateTopology
    from paddle.distributed.fleet import DistributedStrategy as DistributedStrategy
    from paddle.distributed.fleet import Fleet as Fleet
    from paddle.distributed.fleet import HybridCommunicateGroup as HybridCommunicateGroup
    from paddle.distributed.fleet.base.role_maker import RoleMakerBase as RoleMakerBase
    from paddle.io import Dataset
    from paddle.nn import Layer as Layer
    from paddle.optimizer.lr import LRScheduler as LRScheduler
    from paddle.static import InputSpec
    from paddle.static import Program as Program

    class Optimizer(Protocol):
        """A ``paddle.optimizer.Optimizer``, or an object with its methods.

        It is a protocol: mypy ignores the file of that class, whose first line is ``# type:
        ignore``, and would accept any object.
        """

        def step(self) -> Any:
            """Updates the parameters by their gradients."""

        def clear_grad(self) -> Any:
            """Removes the gradients."""

        def state_dict(self) -> Any:
            """Returns the state of the optimizer, by parameter."""

    #: The callbacks of :class:`fleetpipe.Model`'s methods.
    FitCallbacks = Callback | str | Sequence[Callback | str] | None
    #: A dataset or loader, from which batches are read.
    Data = Dataset[Any] | Iterable[Any] | None
    #: The arguments of a model's forward: one, several, or by name.
    Inputs = Tensor | InputSpec | tuple[Any, ...] | list[Any] | dict[str, Any]
else:
    CommunicateTopology = DistributedStrategy = Fleet = GradScaler = HybridCommunicateGroup = Any
    Data = FitCallbacks = Inputs = Layer = LRScheduler = Optimizer = Program = Any
    RoleMakerBase = Tensor = Any

#: ``[inputs, labels]`` or an iterator of ``(inputs, labels)``; None on a rank that needs no data.
Batch = list[Any] | tuple[Any, ...] | Iterator[Any] | None
