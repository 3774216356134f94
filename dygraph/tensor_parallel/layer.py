"""The base of tensor-parallel layers, and the shards of their parameters.

A member is a rank that holds a shard of a layer. Every member draws the whole parameter from
Paddle's default generator as the dense layer would, and cuts its shard from it. So the members'
shards together are the dense layer's parameter, if the generators of all members have the same
state, as under the seed that ``PipelineLayer`` gives each layer. (Paddle draws each shard by
itself, from a generator with another seed on each member, so its weights depend on the degree.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

from fleetpipe.aliases import Attribute, DType, Nest, PaddleGroup, Tensor
from fleetpipe.dygraph.layer_kinds import is_spread
from fleetpipe.dygraph.tensor_parallel import groups, operations
from fleetpipe.dygraph.tensor_parallel.operations import shard_of
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.mesh.parts import PartOfWhole, attached_part, part_of, split_axis
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import parameters_in
from fleetpipe.paddle_api.meta_parallel import (
    SEQUENCE_PARALLEL,
    Initializer,
    assigned_shape,
    shard_weights,
    weight_attribute,
)
from fleetpipe.paddle_api.tensor import give_memory

_ZEROS = paddle.nn.initializer.Constant(0.0)


class ParallelLayer(paddle.nn.Layer):
    """A layer whose parameters are shards of those of a dense layer.

    Attributes:
        model_parallel_group: Paddle's group of the ranks that hold the shards.
        world_size: The number of shards.
        rank: The number of the shard that this rank holds.
        is_mp: Whether there is more than one shard.
        blocks: With sums by a tree, the number of blocks into which the whole layer is cut at every
            model-parallel degree. It is a power of two, and at least the largest degree. If it does
            not divide the size, the largest power of two that divides the size replaces it.
    """

    blocks = 8

    def __init__(self, mp_group: PaddleGroup) -> None:
        """Creates a layer of ``mp_group``, or of the model-parallel group of the job.

        Not collective.

        Raises:
            StateError: There is no such group, or the graph is static.
            UsageError: This rank is no member.
        """
        super().__init__()
        self.model_parallel_group = groups.model_parallel_group(mp_group)
        self.world_size: int = self.model_parallel_group.nranks
        self.rank: int = self.model_parallel_group.rank
        self.is_mp = self.world_size > 1
        self._dtype: DType = paddle.get_default_dtype()
        if self.is_mp and not paddle.in_dynamic_mode():
            raise StateError(
                "on CPU tensor-parallel layers run in dynamic graph only",
                fix="call paddle.disable_static() before they are built",
            )

    def share_of(self, size: int, name: str, across: int = 1) -> int:
        """Returns the size of this member's shard of an axis; stores it for :meth:`count_blocks`.

        Args:
            size: The size of the axis to cut into equal shards.
            name: The name of the size in the error.
            across: The number of elements that the parameter has at one index of the axis.
        """
        share = _divide(size, name, self.world_size, type(self).__name__)
        self._cut = size, across
        self.count_blocks()
        return share

    def count_blocks(self) -> int:
        """Returns how many blocks of the weight this member computes; 0 without sums by a tree.

        Raises:
            ConfigError: The layer cannot compute in blocks, which sums by a tree need.
        """
        (size, across), class_name = self._cut, type(self).__name__
        shard_size = size // self.world_size * across
        return operations.count_blocks_here(
            self.blocks, size, self.world_size, shard_size, class_name
        )

    def create_shard(self, shape: Sequence[int], axis: int, attr: Attribute) -> Tensor:
        """Creates this member's shard of a parameter; not collective.

        Args:
            shape: The shape of the whole parameter.
            axis: The axis that is cut.
            attr: The attribute of the whole parameter; an ``Assign`` may also hold the shard
                itself.
        """
        shard_shape = list(shape)
        if self.is_mp:
            shard_shape[axis] //= self.world_size
            attr = weight_attribute(attr)
            if assigned_shape(attr.initializer) != shard_shape:
                whole = attr.initializer
                attr.initializer = ShardOf(whole, shape, axis, self.rank, self.world_size)
        parameter: Tensor = self.create_parameter(shape=shard_shape, attr=attr, dtype=self._dtype)
        _mark_split_axis(parameter, axis if self.is_mp else None)
        self._mark_blocks(parameter, axis, shape[axis])
        return parameter

    def create_bias(self, size: int, sharded: bool) -> Tensor:
        """Creates a bias of zeros.

        Args:
            size: The size on this member.
            sharded: Whether the bias is a shard; otherwise every member holds the whole bias.
        """
        bias: Tensor = self.create_parameter(
            shape=[size], attr=_ZEROS, dtype=self._dtype, is_bias=True
        )
        _mark_split_axis(bias, 0 if sharded and self.is_mp else None)
        if sharded:
            self._mark_blocks(bias, 0, size * self.world_size)
        return bias

    def _mark_blocks(self, parameter: Tensor, axis: int, size: int) -> None:
        """Sets a parameter's attribute ``blocks``, which says how sums by a tree cut it.

        Args:
            parameter: The parameter.
            axis: The axis that is cut into blocks.
            size: The size of the whole axis, over all members.
        """
        count = operations.share_of_blocks(self.blocks, size, self.world_size)
        parameter.blocks = operations.Blocks(axis, count)

    def __deepcopy__(self, memo: dict[int, object]) -> ParallelLayer:
        """Returns a copy that shares only the group with this layer."""
        memo[id(self.model_parallel_group)] = self.model_parallel_group
        copied_layer = type(self).__new__(type(self))
        memo[id(self)] = copied_layer
        copied_layer.__dict__.update(copy.deepcopy(self.__dict__, memo))
        # Paddle's copy of a parameter lacks fleetpipe's attributes.
        for name, parameter in parameters_in(self).items():
            if parameter is not None:
                copied: Tensor = parameters_in(copied_layer)[name]
                _mark_split_axis(copied, split_axis(parameter))
                copied.sequence_parallel = getattr(parameter, "sequence_parallel", False)
                copied.blocks = getattr(parameter, "blocks", None)
        return copied_layer

    if hasattr(paddle.nn.Layer, "sharded_state_dict"):  # not on 2.6.2

        def sharded_state_dict(self, structured_name_prefix: str = "") -> dict[str, Tensor]:
            """Returns the state in the form that ``paddle.distributed.save_state_dict`` takes."""
            state = self.state_dict(structured_name_prefix="")
            axes = {name: axis for name in state if (axis := split_axis(state[name])) is not None}
            return shard_weights(state, axes, self.model_parallel_group, structured_name_prefix)


class ShardOf(Initializer):  # type: ignore[misc]  # a class of Paddle's without types
    """Initializes a shard: another initializer fills the whole parameter, from which it is cut."""

    def __init__(
        self, whole: Attribute, shape: Sequence[int], axis: int, rank: int, ranks: int
    ) -> None:
        """Creates an initializer of shard ``rank`` of ``ranks`` along ``axis``.

        Args:
            whole: The initializer of the whole parameter.
            shape: The shape of the whole parameter.
            axis: The axis that is cut.
            rank: The number of the shard.
            ranks: The number of shards.
        """
        super().__init__()
        self._whole = whole
        self._shape = list(shape)
        self._cut = (axis, rank, ranks)

    def forward(self, param: Tensor, block: object = None) -> None:
        """Fills ``param``; meanwhile the whole parameter is in memory."""
        # Orthogonal, Dirac and a script's initializer may have only __call__, for a parameter only.
        if type(self._whole).__call__ is not Initializer.__call__:
            with paddle.utils.unique_name.guard():
                whole = paddle.create_parameter(
                    self._shape, param.dtype, default_initializer=_ZEROS
                )
            self._whole(whole, block)
        else:
            whole = paddle.zeros(self._shape, dtype=param.dtype)
            self._whole.forward(whole, block)
        give_memory(shard_of(whole, *self._cut), param)


def share_of(size: int, name: str, mp_group: PaddleGroup = None) -> int:
    """Returns ``size`` divided by the number of members of a model-parallel group.

    A model's own code uses it to cut its attention heads as its layers cut their weights.

    Args:
        size: The number to divide, such as a number of attention heads.
        name: The name of the number in the error, as in ``share_of(heads, "num_heads")``.
        mp_group: Paddle's group of the members; by default the group of ``fleet.init``.

    Raises:
        ConfigError: There is a remainder.
    """
    return _divide(size, name, int(groups.model_parallel_group(mp_group).nranks), "")


def _divide(size: int, name: str, members: int, where: str) -> int:
    """Returns ``size / members``; refuses a remainder.

    The error has ``name``, that of the size, and ``where``, the class of the layer, or "".
    """
    if size % members:
        raise ConfigError(
            f"`{name}` (={size}) must be divisible by the model-parallel degree (={members})",
            where=where or None,
            fix=f"round `{name}` up to {-(-size // members) * members}, "
            "or choose another mp_degree",
        )
    return size // members


def shard_in(parameter: Tensor, group: PaddleGroup = None) -> PartOfWhole | None:
    """Returns which shard of a full tensor a parameter is; None if this rank holds all of it.

    Args:
        parameter: A parameter of this member.
        group: The members along mp: Paddle's group or fleetpipe's; by default ``fleet.init``'s.
    """

    def mp_rank_and_size() -> tuple[int, int]:
        members = groups.along("mp", group)
        return members.rank, members.ranks

    part = part_of(parameter, mp_rank_and_size)
    return part if part is not None and part.is_shard else None


def whole_shape(parameter: Tensor, group: PaddleGroup = None) -> tuple[int, ...]:
    """Returns the shape of a parameter's full tensor; ``group`` has the members along mp."""
    shape, part = tuple(parameter.shape), shard_in(parameter, group)
    return shape if part is None else part.cut.whole(shape)


def whole_value(value: Tensor, parameter: Tensor | int | None, group: PaddleGroup = None) -> Tensor:
    """Returns a copy of the full tensor of which ``value`` is a shard. Collective for a shard.

    Args:
        value: A parameter, its gradient, or a moment of its optimizer.
        parameter: The parameter, or the axis along which it is cut; None if it is not cut.
        group: The members along mp: Paddle's group or fleetpipe's; by default ``fleet.init``'s.
    """
    axis, along = parameter, "mp"
    if isinstance(parameter, paddle.Tensor):
        part = shard_in(parameter, group)
        axis, along = (None, "") if part is None else (part.cut.axis, part.axis)
    if axis is None:
        return value.detach().clone()
    return paddle.concat(groups.gather(value, groups.along(along, group)), axis=axis)


def own_value(whole: Tensor, parameter: Tensor | int | None, group: PaddleGroup = None) -> Tensor:
    """Returns this member's shard of a full tensor: the inverse of :func:`whole_value`.

    ``parameter`` is the parameter, or the axis along which it is cut; None if it is not cut.
    """
    if isinstance(parameter, int):
        members = groups.along("mp", group)
        return shard_of(whole, parameter, members.rank, members.ranks)
    part = None if parameter is None else shard_in(parameter, group)
    return whole if part is None else part.cut.taken_from(whole)


def marked(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns the trained parameters that are marked as sequence-parallel, without experts.

    Each member has a part of the gradient of such a parameter.
    """
    trained = (p for p in parameters if not p.stop_gradient and not is_spread(p))
    return [p for p in trained if SEQUENCE_PARALLEL.is_sequence_parallel_parameter(p)]


def refuse_shards(built: Mapping[int, Callable[[Nest], Nest]]) -> None:
    """Refuses built layers that hold shards, where whole layers are needed.

    Args:
        built: Layers and functions by their number in the list of a pipeline.
    """
    for index, layer in built.items():
        parameters = layer.parameters() if isinstance(layer, paddle.nn.Layer) else []
        if any(split_axis(p) is not None or attached_part(p) or is_spread(p) for p in parameters):
            raise ConfigError(
                "a layer that was built as a shard, or with some of its experts, cannot be made "
                "whole",
                where=f"layer {index} of the list, a {type(layer).__name__}",
                fix="describe it with LayerDesc, so that it can be built again",
            )


def _mark_split_axis(parameter: Tensor, axis: int | None) -> None:
    """Marks a parameter as a shard along an axis, as Paddle does for clips and checkpoints.

    The axis is None for a parameter that is not cut.
    """
    parameter.is_distributed = axis is not None
    if axis is not None:
        parameter.split_axis = axis
