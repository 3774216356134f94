"""Sums gradients over the replicas of a pipeline, and shards the optimizer's state.

The losses of replicas are averaged. In stages 1 and 2 of ZeRO each sharding rank has the
optimizer's state of its share of the parameters, and steps this share. In stage 2 it also keeps the
gradients of this share only. A parameter is *spread* if it is one of an expert, and other ranks
hold other experts: then its copies are on other ranks than those of the other parameters.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

from fleetpipe.aliases import Optimizer, Tensor
from fleetpipe.dygraph.gradients import drop_gradients, gradient_of, set_gradient, zero_gradient
from fleetpipe.dygraph.layer_kinds import is_spread
from fleetpipe.dygraph.tensor_parallel import is_sequence_parallel_parameter
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import Group
from fleetpipe.mesh.parts import attached_part
from fleetpipe.mesh.sums import add, tree
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import optimized_parameters, stepping_only
from fleetpipe.paddle_api.tensor import tensor_bytes

Result = TypeVar("Result")

#: Gradients are summed in buckets of about so many bytes: few calls, and no second copy of all.
_BUCKET_BYTES = 128 * 1024 * 1024


class Shards:
    """The owner of each parameter of an optimizer: the sharding rank that keeps its state.

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
        """Assigns an owner to each parameter; all members assign the same owners.

        Args:
            optimizer: A Paddle optimizer, or Paddle's ``MixPrecisionOptimizer`` around one.
            group: The sharding ranks.
            of_experts: The sharding ranks that hold the same experts as this rank; None if all do.
            scatters: Whether only the owner of a parameter keeps its gradient.
        """
        self.scatters = scatters
        self._optimizer = optimizer
        #: The members, by whether a parameter is spread: the owner is a rank in its group.
        self._groups = (group, group if of_experts is None else of_experts)
        #: The owner of each parameter, by the parameter's id.
        self._owners: dict[int, int] = {}
        self.assign_new_parameters()

    def assign_new_parameters(self) -> None:
        """Assigns an owner to each parameter without one; all members assign the same owners."""
        new = [p for p in optimized_parameters(self._optimizer) if id(p) not in self._owners]
        for spread, members in enumerate(self._groups):
            shared = [parameter for parameter in new if is_spread(parameter) == bool(spread)]
            self._owners.update(assign_owners(shared, members.ranks))

    def ranks_by_name(self) -> dict[str, int]:
        """Returns each parameter's owner, a rank among the members, by the parameter's name."""
        parameters = optimized_parameters(self._optimizer)
        return {parameter.name: self._owners[id(parameter)] for parameter in parameters}

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank keeps the state of ``parameter``."""
        return self.owner(parameter) == self._groups[is_spread(parameter)].rank

    def members(self, spread: bool) -> Group:
        """Returns the ranks that share the optimizer's state of experts, or of all but experts."""
        return self._groups[spread]

    def owner(self, parameter: Tensor) -> int:
        """Returns the owner of ``parameter``, a rank among the :meth:`members`."""
        return self._owners[id(parameter)]

    def scattered_parameters(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns the parameters of which only the owner gets the summed gradient: stage 2 only.

        Parameters that no optimizer steps are left out, and so are tied weights, because the copies
        on different stages have different owners.
        """
        chosen = [p for p in parameters if id(p) in self._owners and self.scatters]
        return [p for p in chosen if not hasattr(p, "is_firstly_shared")]

    def drop_gradients_of_others(self, parameters: Sequence[Tensor]) -> None:
        """In stage 2, frees the gradients of parameters that other members own."""
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
        """Steps the parameters that this rank owns, then broadcasts them to all. Collective.

        Args:
            step: Steps the optimizer.
            nothing: Called in the place of ``step`` if this rank owns no parameter.

        Returns:
            The result of the function that was called.

        Raises:
            PipelineTimeout: Some member did not come within the limit.
        """
        with stepping_only(self._optimizer, self.owns) as any_owned:
            result = (step if any_owned else nothing)()
        self._broadcast_parameters()
        return result

    @paddle.no_grad()
    def _broadcast_parameters(self) -> None:
        """Broadcasts each parameter that has a gradient from its owner to all members. Collective.

        In stage 2 only the owner knows whether a parameter has a gradient, so all are sent.
        """
        changed = [
            parameter
            for parameter in optimized_parameters(self._optimizer)
            if not parameter.stop_gradient and (self.scatters or gradient_of(parameter) is not None)
        ]
        for spread, members in enumerate(self._groups):
            owned = [(p, self._owners[id(p)]) for p in changed if is_spread(p) == bool(spread)]
            if owned:
                members.broadcast_each(owned)


def assign_owners(parameters: Sequence[Tensor], ranks: int) -> dict[int, int]:
    """Returns the owner of each parameter, by ``id``: large ones first, to the least loaded rank.

    All parts of a vocabulary have one owner, as a whole embedding has, because a checkpoint joins
    their states.

    Args:
        parameters: The parameters, in the same order on all ranks.
        ranks: The number of owners.
    """
    load = [0] * ranks
    owner_of: dict[int, int] = {}
    # Parameters with the same key get one owner; None is the key of a vocabulary's parts.
    together: dict[int | None, list[Tensor]] = {}
    for parameter in parameters:
        part = attached_part(parameter)
        key = id(parameter) if part is None or part.is_shard else None
        together.setdefault(key, []).append(parameter)
    sizes = {key: sum(int(p.size) for p in group) for key, group in together.items()}
    for key in sorted(together, key=lambda key: -sizes[key]):
        owner = load.index(min(load))
        load[owner] += sizes[key]
        owner_of.update((id(parameter), owner) for parameter in together[key])
    return owner_of


def reduce_all(
    parameters: Sequence[Tensor], job: Job, factor: float, shards: Shards | None = None
) -> None:
    """Adds up gradients over all copies of a stage, those of experts over the experts' copies.

    The sum over an expert's copies counts each token once if the experts are spread along dp. With
    ``ep_degree`` they are spread along mp too, whose ranks see the same tokens, so that the sum is
    divided by ``mp_degree``; not that of a sequence-parallel expert, since ranks along mp have
    different parts of a sequence then. Collective over the copies.

    Args:
        parameters: This rank's parameters, the same on every copy.
        job: The job.
        factor: The number by which each gradient is multiplied.
        shards: The owners of parameters in a sharded optimizer; None if each rank steps all.

    Raises:
        ConfigError: A gradient is sparse.
        PipelineTimeout: Some copy did not come within the limit.
    """
    experts = [parameter for parameter in parameters if is_spread(parameter)]
    # How often the sum of an expert's gradients counts a token.
    ranks_with_same_tokens = job.degrees.mp if job.degrees.ep > 1 else 1
    of_split_sequences = [p for p in experts if is_sequence_parallel_parameter(p)]
    of_whole_sequences = [p for p in experts if not is_sequence_parallel_parameter(p)]
    _reduce_copies([p for p in parameters if not is_spread(p)], job.copies(), job, factor, shards)
    _reduce_copies(of_split_sequences, job.expert_copies(), job, factor, shards)
    expert_factor = factor / ranks_with_same_tokens
    _reduce_copies(of_whole_sequences, job.expert_copies(), job, expert_factor, shards)


def _reduce_copies(
    parameters: Sequence[Tensor], copies: Group, job: Job, factor: float, shards: Shards | None
) -> None:
    """Adds up gradients over ``copies``; in ZeRO stage 2 each sum goes to its owner alone.

    Args:
        parameters: Parameters of this rank: only experts', or none of experts'.
        copies: The ranks that hold the same parameters.
        job: The job.
        factor: The number by which each gradient is multiplied.
        shards: The owners of parameters in a sharded optimizer; None if each rank steps all.
    """
    scattered = [] if shards is None else shards.scattered_parameters(parameters)
    if shards is not None and scattered:
        spread = is_spread(scattered[0])
        by_tree = job.sums_by_tree
        # First over the ranks that share the optimizer's state; then over the ranks that own the
        # same optimizer shard.
        reduce_gradients(scattered, shards.members(spread), factor, shards.owner, by_tree)
        kept = [parameter for parameter in scattered if shards.owns(parameter)]
        reduce_gradients(kept, job.beside_sharding(spread), by_tree=by_tree)
    scattered_ids = {id(parameter) for parameter in scattered}
    rest = [parameter for parameter in parameters if id(parameter) not in scattered_ids]
    if rest:
        reduce_gradients(rest, copies, factor, by_tree=job.sums_by_tree)


def reduce_gradients(
    parameters: Sequence[Tensor],
    group: Group,
    factor: float = 1.0,
    owner_of: Callable[[Tensor], int] | None = None,
    by_tree: bool = False,
) -> None:
    """Adds up the gradients of ranks with the same parameters, bucket by bucket. Collective.

    A missing gradient counts as zero. The sum has the same bits on every rank that keeps it.

    Args:
        parameters: This rank's parameters, the same on every replica.
        group: The replicas: all ranks of dp and sharding that hold these parameters.
        factor: The number by which each gradient is multiplied.
        owner_of: Returns the member that keeps the gradient of a parameter; None if all do.
        by_tree: Whether to add up over the members by a tree.

    Raises:
        ConfigError: A gradient is sparse.
        PipelineTimeout: Some replica did not come within the limit.
    """
    if group.ranks == 1 and factor == 1.0:
        return
    present = [gradient_of(parameter) is not None for parameter in parameters]
    flags_of_members = group.all_gather("".join("01"[flag] for flag in present))
    used = []
    for index, parameter in enumerate(parameters):
        if not any(flags[index] == "1" for flags in flags_of_members):
            continue
        if not present[index]:
            set_gradient(parameter, zero_gradient(parameter))
        if gradient_of(parameter).is_selected_rows():
            raise ConfigError(
                f"the gradient of {parameter.name} is sparse, and replicas add up dense ones",
                cause="an Embedding(sparse=True)",
                fix="build it with sparse=False",
            )
        used.append(parameter)
    for bucket in _group_into_buckets(used):
        if owner_of is None:
            _all_reduce_bucket(bucket, group, factor, by_tree)
        else:
            owned = [[p for p in bucket if owner_of(p) == rank] for rank in range(group.ranks)]
            _reduce_scatter_bucket(owned, group, factor, by_tree)


def average_losses(
    losses: Sequence[Sequence[Tensor]], by_tree: bool = False, weighed: bool = False
) -> list[Tensor]:
    """Returns the mean of the replicas' losses for each loss function, with the same bits on each.

    Args:
        losses: The losses of each replica, by function.
        by_tree: Whether losses are added by a tree, not one after another.
        weighed: Whether each loss is already divided by the number of replicas.
    """
    if len(losses) == 1:
        return [*losses[0]]
    totals = [
        tree(of_function, add) if by_tree else functools.reduce(operator.add, of_function)
        for of_function in zip(*losses)
    ]
    return totals if weighed else [total / len(losses) for total in totals]


def share_in_mean(counted: int, group: Group) -> Fraction:
    """Returns the weight of this member's mean in that of the group. Collective.

    The weight is relative to an equal weight: 1 if all members average over as many values.

    Args:
        counted: The number of values over which this member averages, such as rows.
        group: The members.
    """
    counts = group.all_gather(counted)
    return Fraction(counted * group.ranks, sum(counts))


def _group_into_buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns parameters in buckets: lists with gradients of one dtype, summed in one call each."""
    buckets: list[list[Tensor]] = []
    # The bucket that is being filled, and its size in bytes, by dtype.
    open_buckets: dict[str, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        gradient = gradient_of(parameter)
        dtype = str(gradient.dtype)
        bucket, size = open_buckets.get(dtype, ([], _BUCKET_BYTES))
        nbytes = tensor_bytes(gradient)
        if size + nbytes > _BUCKET_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[dtype] = (bucket, size + nbytes)
    return buckets


@paddle.no_grad()
def _all_reduce_bucket(
    bucket: Sequence[Tensor], group: Group, factor: float, by_tree: bool
) -> None:
    """Replaces the gradients of parameters by ``factor`` times their sum over ``group``."""
    # Paddle's fused_allreduce_gradients_with_group works in its own groups alone, asserts where a
    # gradient is sparse, and does not meet the others before it enters Gloo.
    flat = _flatten_gradients(bucket, factor)
    if by_tree:
        flat = _total_by_tree(flat, group)
    else:
        group.all_reduce([flat])
    _set_from_flat(flat, bucket)


def _total_by_tree(flat: Tensor, group: Group) -> Tensor:
    """Returns the sum of a group's tensors by a tree: each member sums a range. Collective."""
    size, ranks = int(flat.size), group.ranks
    if size < ranks:
        return tree(group.all_gather(flat), add)
    ends = [size * member // ranks for member in range(ranks + 1)]
    ranges = [flat[start:end] for start, end in itertools.pairwise(ends)]
    sum_of_range = tree(group.all_to_all(ranges), add)
    return paddle.concat(group.all_gather(sum_of_range))


@paddle.no_grad()
def _reduce_scatter_bucket(
    owned: Sequence[Sequence[Tensor]], group: Group, factor: float, by_tree: bool
) -> None:
    """Replaces each gradient by its sum over ``group`` on its owner, and frees it elsewhere.

    Args:
        owned: The parameters of a bucket, by owner: for each member those that it owns.
        group: The members.
        factor: The number by which each gradient is multiplied.
        by_tree: Whether to add up over the members by a tree.
    """
    first = next(parameter for of_owner in owned for parameter in of_owner)
    nothing = paddle.zeros([0], gradient_of(first).dtype)
    flat = [_flatten_gradients(of_owner, factor) if of_owner else nothing for of_owner in owned]
    for rank, of_owner in enumerate(owned):
        if rank != group.rank:
            drop_gradients(of_owner)
    if by_tree:
        total = tree(group.all_to_all(flat), add)
    else:
        total = group.reduce_scatter(flat)
    _set_from_flat(total, owned[group.rank])


def _flatten_gradients(parameters: Sequence[Tensor], factor: float) -> Tensor:
    """Returns the gradients of parameters, times ``factor``, one after another in one tensor."""
    flat = paddle.concat([gradient_of(parameter).reshape([-1]) for parameter in parameters])
    return flat.scale_(factor)


def _set_from_flat(flat: Tensor, parameters: Sequence[Tensor]) -> None:
    """Sets the gradients of parameters from a tensor as :func:`_flatten_gradients` returns it."""
    if not parameters:
        return
    gradients = [gradient_of(parameter) for parameter in parameters]
    values = paddle.split(flat, [int(gradient.size) for gradient in gradients])
    for gradient, value in zip(gradients, values):
        paddle.assign(value.reshape(gradient.shape), gradient)
