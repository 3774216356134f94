"""Paddle's own classes, for the signatures that users meet; each is ``Any`` to a run.

To a checker they are what Paddle's annotations say, and ``Any`` where it has none: without Paddle,
and on 2.6.2. What a user never calls takes ``fleetpipe.aliases``, whose names are always ``Any``.
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
        """A ``paddle.optimizer.Optimizer``, or what stands for one.

        By methods, for mypy sees nothing in the file of that class (``# type: ignore`` stands in
        its first line), and would take anything for one.
        """

        def step(self) -> Any:
            """Changes the parameters by their gradients."""

        def clear_grad(self) -> Any:
            """Drops the gradients."""

        def state_dict(self) -> Any:
            """Returns what the optimizer keeps, by parameter."""

    #: Of :class:`fleetpipe.Model`'s methods.
    FitCallbacks = Callback | str | Sequence[Callback | str] | None
    #: What yields batches, or is made into them.
    Data = Dataset[Any] | Iterable[Any] | None
    #: The arguments of a model's forward: one, several, or by name.
    Inputs = Tensor | InputSpec | tuple[Any, ...] | list[Any] | dict[str, Any]
else:
    CommunicateTopology = DistributedStrategy = Fleet = GradScaler = HybridCommunicateGroup = Any
    Data = FitCallbacks = Inputs = Layer = LRScheduler = Optimizer = Program = Any
    RoleMakerBase = Tensor = Any

#: Of ``[inputs, labels]`` or an iterator of ``(inputs, labels)``; None on a rank that needs none.
Batch = list[Any] | tuple[Any, ...] | Iterator[Any] | None
