"""Stages 1 and 2 of ZeRO: each sharding rank has the optimizer's state of its share of a model.

All ranks have all parameters. A rank has all reduced gradients in stage 1, and those of its share
in stage 2. It steps only the parameters that it owns, so the optimizer makes state for these alone,
and then broadcasts them. Paddle's own ``DygraphShardingOptimizer`` does the same, but takes no
parameter groups, empties the lists of the optimizer that it wraps, and enters Gloo, which gives up
after 30 s, before the others have come.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fleetpipe.aliases import Optimizer, Tensor
from fleetpipe.dygraph.broadcast import is_spread
from fleetpipe.dygraph.gradients import drop_gradients, gradient_of
from fleetpipe.mesh.groups import Group
from fleetpipe.mesh.parts import attached_part
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import optimized_parameters, stepping_only

Result = TypeVar("Result")


class Shards:
    """The owner of each parameter of an optimizer, among the ranks that share its state.

    Attributes:
        scatters: Whether only the owner of a parameter keeps its gradient: stage 2.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: Group,
        of_experts: Group | None = None,
        scatters: bool = False,
    ) -> None:
        """Assigns an owner to every parameter; the same on all members, whose parameters are equal.

        Args:
            optimizer: A Paddle optimizer, or Paddle's ``MixPrecisionOptimizer`` around one.
            group: The sharding ranks.
            of_experts: The sharding ranks that hold the same experts; None if all do.
            scatters: Whether only the owner of a parameter keeps its gradient.
        """
        self.scatters = scatters
        self._optimizer = optimizer
        self._groups = (group, group if of_experts is None else of_experts)
        self._owners: dict[int, int] = {}
        self.take_new()

    def take_new(self) -> None:
        """Gives an owner to each parameter that has none; the same on all members."""
        new = [p for p in optimized_parameters(self._optimizer) if id(p) not in self._owners]
        for spread, members in enumerate(self._groups):
            shared = [parameter for parameter in new if is_spread(parameter) == bool(spread)]
            self._owners.update(owners(shared, members.ranks))

    def ranks_by_name(self) -> dict[str, int]:
        """Returns the rank, in its group, that keeps the state of each parameter, by name."""
        parameters = optimized_parameters(self._optimizer)
        return {parameter.name: self._owners[id(parameter)] for parameter in parameters}

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank keeps the state of ``parameter``."""
        return self.owner(parameter) == self._groups[is_spread(parameter)].rank

    def members(self, spread: bool) -> Group:
        """Returns the ranks that share the state of experts, or of all other parameters."""
        return self._groups[spread]

    def owner(self, parameter: Tensor) -> int:
        """Returns the rank, among the members, that keeps the state of ``parameter``."""
        return self._owners[id(parameter)]

    def scattered_parameters(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns the parameters whose summed gradient only the owner gets, in stage 2.

        Parameters that nobody steps are not among them, nor are tied weights, since their copies
        have different owners on different stages.
        """
        chosen = [p for p in parameters if id(p) in self._owners and self.scatters]
        return [p for p in chosen if not hasattr(p, "is_firstly_shared")]

    def drop_others(self, parameters: Sequence[Tensor]) -> None:
        """Frees the gradients of parameters that other members own, in stage 2."""
        if self.scatters:
            drop_gradients(p for p in parameters if id(p) in self._owners and not self.owns(p))

    def gradient(self, parameter: Tensor) -> Tensor:
        """Returns the gradient of a parameter from its owner. Collective in stage 2."""
        gradient = gradient_of(parameter)
        if not self.scatters or id(parameter) not in self._owners:
            return gradient
        copy = None if gradient is None else gradient.clone()
        return self.members(is_spread(parameter)).broadcast(copy, self.owner(parameter))

    def step(self, step: Callable[[], Result], nothing: Callable[[], Result]) -> Result:
        """Steps the parameters that this rank owns, and broadcasts them to all members. Collective.

        Args:
            step: Steps the optimizer.
            nothing: Called instead if this rank owns no parameter.

        Raises:
            PipelineTimeout: Some member did not come within the limit.
        """
        with stepping_only(self._optimizer, self.owns) as any_owned:
            result = (step if any_owned else nothing)()
        self._publish()
        return result

    @paddle.no_grad()
    def _publish(self) -> None:
        """Broadcasts each parameter with a gradient from the parameter's owner. Collective.

        In stage 2 only the owner knows which have one, so all are sent.
        """
        changed = [
            parameter
            for parameter in optimized_parameters(self._optimizer)
            if not parameter.stop_gradient and (self.scatters or gradient_of(parameter) is not None)
        ]
        for spread, members in enumerate(self._groups):
            part = [(p, self._owners[id(p)]) for p in changed if is_spread(p) == bool(spread)]
            if part:
                members.broadcast_each(part)


def owners(parameters: Sequence[Tensor], ranks: int) -> dict[int, int]:
    """Assigns an owner to each parameter, by ``id``: the largest goes first, to the least loaded.

    All parts of vocabularies have one owner, as a whole embedding has, since a checkpoint joins
    their states.

    Args:
        parameters: The parameters, in the same order on all ranks.
        ranks: The number of owners.
    """
    load = [0] * ranks
    owner_of: dict[int, int] = {}
    units: dict[int | None, list[Tensor]] = {}
    for parameter in parameters:
        part = attached_part(parameter)
        unit = id(parameter) if part is None or part.is_shard else None
        units.setdefault(unit, []).append(parameter)
    sizes = {unit: sum(int(parameter.size) for parameter in ones) for unit, ones in units.items()}
    for unit in sorted(units, key=lambda unit: -sizes[unit]):
        owner = load.index(min(load))
        load[owner] += sizes[unit]
        owner_of.update((id(parameter), owner) for parameter in units[unit])
    return owner_of
