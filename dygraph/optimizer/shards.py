"""Stage 1 of ZeRO: each sharding rank keeps the optimizer's state of its share of the parameters.

All ranks have the parameters and the reduced gradients. Each steps only those that it owns, so the
optimizer makes state for these alone, and then they are broadcast. Paddle's own
``DygraphShardingOptimizer`` does the same, but takes no parameter groups, empties the lists of the
optimizer that it wraps, and enters Gloo, which gives up after 30 s, before the others have come.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fleetpipe.aliases import Optimizer, Tensor
from fleetpipe.dygraph.broadcast import is_spread
from fleetpipe.dygraph.gradients import gradient_of
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import optimized_parameters, restricted

Result = TypeVar("Result")


class Shards:
    """Who owns which parameter of an optimizer, among the ranks that share its state."""

    def __init__(self, optimizer: Optimizer, group: Group, of_experts: Group | None = None) -> None:
        """Gives every parameter an owner; the same on all members, which have the same ones.

        Args:
            optimizer: A Paddle optimizer, or Paddle's ``MixPrecisionOptimizer`` around one.
            group: The sharding ranks.
            of_experts: Those of them that hold the same experts; None: all do.
        """
        self._optimizer = optimizer
        self._groups = (group, group if of_experts is None else of_experts)
        self._owners: dict[int, int] = {}
        for spread, members in enumerate(self._groups):
            shared = [p for p in optimized_parameters(optimizer) if is_spread(p) == bool(spread)]
            self._owners.update(owners(shared, members.ranks))

    def ranks_by_name(self) -> dict[str, int]:
        """Returns which rank of its group keeps the state of each parameter, by its name."""
        parameters = optimized_parameters(self._optimizer)
        return {parameter.name: self._owners[id(parameter)] for parameter in parameters}

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank keeps the state of ``parameter``."""
        return self._owners[id(parameter)] == self._groups[is_spread(parameter)].rank

    def step(self, step: Callable[[], Result], nothing: Callable[[], Result]) -> Result:
        """Steps what this rank owns, and gives all members what each has stepped. Collective.

        Args:
            step: Steps the optimizer.
            nothing: Takes its place where this rank owns no parameter.

        Raises:
            PipelineTimeout: Some member did not come within the limit.
        """
        with restricted(self._optimizer, self.owns) as any_owned:
            result = (step if any_owned else nothing)()
        self._publish()
        return result

    @paddle.no_grad()
    def _publish(self) -> None:
        """Broadcasts the parameters that have a gradient from their owners. Collective."""
        changed = [
            parameter
            for parameter in optimized_parameters(self._optimizer)
            if not parameter.stop_gradient and gradient_of(parameter) is not None
        ]
        for spread, members in enumerate(self._groups):
            part = [(p, self._owners[id(p)]) for p in changed if is_spread(p) == bool(spread)]
            if part:
                members.broadcast_each(part)


def owners(parameters: Sequence[Tensor], ranks: int) -> dict[int, int]:
    """Returns the owner of each parameter, by ``id``: the largest first, to who has least.

    Args:
        parameters: In an order that is the same on all ranks.
        ranks: Number of owners.
    """
    load = [0] * ranks
    owner_of = {}
    for parameter in sorted(parameters, key=lambda p: -int(p.size)):
        owner = load.index(min(load))
        load[owner] += int(parameter.size)
        owner_of[id(parameter)] = owner
    return owner_of
