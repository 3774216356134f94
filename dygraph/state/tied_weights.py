"""Keeps the copies of a shared weight on several ranks equal: at the start, and at every step.

Each rank with stages that use the weight holds one copy. All these ranks add up the gradients of
all copies in the same order. So the sums have the same bits, and so have the copies after any
optimizer's step. Start with :class:`SharedWeights`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.gradients import gradient_of, set_gradient
from fleetpipe.dygraph.layers.tied import SharedLayer
from fleetpipe.dygraph.sums import Use, sum_in_order
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import option_of
from fleetpipe.paddle_api.tensor import is_parameter


class SharedWeight(NamedTuple):
    """A parameter or buffer of a shared layer, of which ranks hold copies.

    Attributes:
        name: The fully qualified name.
        holders: The ranks of the pipeline that hold a copy, in the order in which their layers
            stand in the list.
    """

    name: str
    holders: tuple[int, ...]


def holders(
    layers: Sequence[SharedLayer], rank_of_layer: Callable[[int], int]
) -> list[SharedWeight]:
    """Returns each parameter and buffer of the shared layers, with the ranks that hold copies.

    Args:
        layers: The shared layers.
        rank_of_layer: Returns the rank that owns a layer, from its number in the whole list.
    """
    users: dict[str, set[int]] = {}
    for layer in layers:
        for name in layer.names.values():
            users.setdefault(name, set()).update(layer.indices)
    return [
        SharedWeight(name, tuple(dict.fromkeys(rank_of_layer(index) for index in sorted(indices))))
        for name, indices in users.items()
    ]


def refuse_sparse(
    weights: Sequence[SharedWeight], layers: Sequence[SharedLayer], blueprints: Sequence[Layer]
) -> None:
    """Refuses an embedding table with sparse gradients of which several ranks hold copies.

    Args:
        weights: The shared weights of the model.
        layers: The shared layers of the list.
        blueprints: For each layer of the list, one with the same class and options.
    """
    on_several_ranks = {weight.name for weight in weights if len(weight.holders) > 1}
    for layer in layers:
        for path, sublayer in blueprints[layer.indices[0]].named_sublayers(include_self=True):
            name = layer.names.get(f"{path}.weight" if path else "weight")
            if name not in on_several_ranks or not isinstance(sublayer, paddle.nn.Embedding):
                continue
            if option_of(sublayer, "sparse", False):
                raise _sparse_gradient_error(f"layer {layer.indices[0]} of the list")


def sharing_group(job: Job | None, members: Sequence[int]) -> Group:
    """Returns ``members``, ranks of this pipeline, as a group; without a job that of one rank."""
    return SoleGroup() if job is None else job.holders(tuple(members))


class SharedWeights:
    """This rank's copies of the weights of which other ranks hold copies, too."""

    def __init__(
        self,
        weights: Sequence[SharedWeight],
        tensors: Mapping[str, Tensor],
        rank: int,
        group_of: Callable[[tuple[int, ...]], Group],
    ) -> None:
        """Stores the copies, and marks the one copy that counts in the global norm.

        Args:
            weights: All shared weights of the model, the same on every rank.
            tensors: This rank's parameters and buffers, by fully qualified name.
            rank: This rank in the pipeline.
            group_of: Returns the group of some ranks of the pipeline.
        """
        self._group_of = group_of
        self._tensors = tensors
        self.weights = [w for w in weights if len(w.holders) > 1 and rank in w.holders]
        for weight in self.weights:
            if is_parameter(tensors[weight.name]):
                tensors[weight.name].is_firstly_shared = rank == weight.holders[0]

    def parameters(self) -> list[Tensor]:
        """Returns this rank's copies of shared weights that are parameters, not buffers."""
        tensors = (self._tensors[weight.name] for weight in self.weights)
        return [tensor for tensor in tensors if is_parameter(tensor)]

    def equalize(self, sources: Mapping[str, int] | None = None) -> None:
        """Broadcasts one rank's values to all copies. Collective over the ranks that hold copies.

        Args:
            sources: The rank whose values are sent, by fully qualified name; by default the first
                of the weight's holders.

        Raises:
            PipelineTimeout: Some rank did not come within the limit.
        """
        sources = {} if sources is None else sources
        for group, weights in self._iterate_groups():
            group.broadcast_each(
                [
                    (self._tensors[name], members.index(sources.get(name, members[0])))
                    for name, members in weights
                ]
            )

    def sum_gradients(self, uses: Mapping[int, Sequence[Use]] | None = None) -> None:
        """Replaces gradients by their sum over all copies. Collective over the holders.

        A copy without a gradient counts as zeros; if no copy has a gradient, none gets one. The sum
        begins with the last holder, as backward does, and has the same bits on each rank.

        Args:
            uses: The uses of each copy, by its id, whose gradients are added in the order of their
                layers; None if each copy has one gradient.

        Raises:
            ConfigError: A gradient is sparse.
            PipelineTimeout: Some rank did not come within the limit.
        """
        for group, weights in self._iterate_groups():
            tensors = [self._tensors[weight.name] for weight in weights]
            parameters = [tensor for tensor in tensors if is_parameter(tensor)]
            # Gradients are added in the order of these numbers: those of the last rank first.
            sums = [[(-group.rank, parameter)] for parameter in parameters]
            if uses is not None:
                sums = [[(u.number, u.total) for u in uses[id(p)]] for p in parameters]
            gradients = [_copy_gradients(numbered) for numbered in sums]
            for parameter, *of_ranks in zip(parameters, *group.all_gather(gradients)):
                total = sum_in_order(itertools.chain.from_iterable(of_ranks))
                if total is not None and not parameter.stop_gradient:
                    set_gradient(parameter, total)

    def _iterate_groups(self) -> Iterator[tuple[Group, list[SharedWeight]]]:
        """Yields each group of ranks with copies of the same weights, and these weights.

        The order is the same on all ranks.
        """
        ordered = sorted(self.weights, key=lambda weight: weight.holders)
        for members, weights in groupby(ordered, key=lambda weight: weight.holders):
            yield self._group_of(members), list(weights)


def equal_copies(
    weights: Sequence[SharedWeight], tensors: Mapping[str, Tensor], rank: int, job: Job | None
) -> SharedWeights:
    """Makes the copies of shared weights equal, and returns them. Collective over the pipeline.

    Args:
        weights: The shared weights of the model, from :func:`holders`.
        tensors: This rank's parameters and buffers, by fully qualified name.
        rank: This rank in the pipeline.
        job: The job of the model; None if it was built outside of one.

    Raises:
        PipelineTimeout: Some rank did not come within the limit.
    """
    group_of = functools.partial(sharing_group, job)
    if job is None or job.local or all(len(weight.holders) == 1 for weight in weights):
        return SharedWeights([], {}, rank, group_of)
    copies = SharedWeights(weights, tensors, rank, group_of)
    with job.guarded(lambda: "making shared weights equal"):
        copies.equalize()
    return copies


def _copy_gradients(numbered: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Returns copies of the gradients of some tensors, each with the tensor's number.

    Copies, because the originals may change in place before all are sent. Tensors without a
    gradient are left out.

    Raises:
        ConfigError: A gradient is sparse.
    """
    copies = []
    for number, parameter in numbered:
        gradient = gradient_of(parameter)
        if gradient is not None and gradient.is_selected_rows():
            raise _sparse_gradient_error(f"parameter {parameter.name}")
        if gradient is not None:
            copies.append((number, gradient.clone()))
    return copies


def _sparse_gradient_error(where: str) -> ConfigError:
    """Returns the error of a shared weight with a sparse gradient; ``where`` names its layer."""
    return ConfigError(
        "the gradient of a shared weight is sparse",
        where=f"{where}, shared by several ranks",
        fix="nn.Embedding(.., sparse=False) in the SharedLayerDesc",
    )
