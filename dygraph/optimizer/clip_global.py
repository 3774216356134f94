"""Clips by the norm of the gradients of all ranks: ``ClipGradByGlobalNorm`` in a job.

A clip is called as Paddle's are: with pairs of parameter and gradient, and returns such pairs.
Each rank has some of the gradients: of its stages, of its shards of tensor-parallel layers, of its
share of a sharded optimizer. The squared norm of each gradient goes to all ranks, which add the
squares up in the order and with the arithmetic of the single-device model. So the norm and the
factor are equal on all ranks. They have the single-device model's bits without tensor parallelism
and replicas, and always with sums by a tree, where squares are added up over blocks. (Fleet adds up
the sums of stages, divides by the norm + 1e-6, and counts tied weights on every stage.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from fleetpipe.aliases import Clip, DType, Optimizer, Tensor
from fleetpipe.dygraph.layer_kinds import is_spread
from fleetpipe.dygraph.tensor_parallel.groups import along, sums_by_tree, total
from fleetpipe.dygraph.tensor_parallel.layer import shard_in
from fleetpipe.dygraph.tensor_parallel.operations import blocks_of, sum_over_blocks
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import current_job
from fleetpipe.job.optimizer_table import require_clip
from fleetpipe.mesh.axes import SHARDS
from fleetpipe.mesh.groups import Group
from fleetpipe.mesh.parts import shard_axis
from fleetpipe.mesh.sums import add, tree
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import GLOBAL_NORM_CLIPS, clip_places, squared_norm

_HALF_DTYPES = ("float16", "bfloat16")
#: The order of a copy of a tied weight whose gradient another rank counts.
COPY = -1

#: Squares as one message; see :func:`_pack_squares`.
PackedSquares = tuple[str, Tensor]

#: Parameters, each with its gradient; None for a parameter without one.
Pairs = list[tuple[Tensor, Tensor]]


class _Square(NamedTuple):
    """The squared norm of one gradient, or of this rank's shard of it.

    Attributes:
        order: The parameter's number in the single-device model.
        dtype: The dtype of the value in the single-device model.
        axis: The axis along which other ranks hold the other shards; empty if there are none.
        spread: Whether the parameter is an expert's, and other ranks hold other experts.
        value: The squared norm, a Tensor with one element.
    """

    order: int
    dtype: str
    axis: str
    spread: bool
    value: Tensor


class GlobalNormClip(paddle.nn.ClipGradByGlobalNorm):
    """Replaces the ``ClipGradByGlobalNorm`` of an optimizer; calling it is collective.

    Attributes:
        stock: Paddle's clip that this clip replaces.
        orders: The number of each parameter in the single-device model, or :data:`COPY`, by ``id``.
        sharded: Whether each sharding rank clips only the gradients of the parameters that it owns.
        spread: Whether some parameters of this rank are experts that others do not hold.
        norms: The norms before clipping since the last :meth:`begin`, one for each call.
    """

    def __init__(self, clip: Clip) -> None:
        """Clips to the same norm as ``clip``, a ``ClipGradByGlobalNorm``."""
        self.stock = clip
        skip = getattr(clip, "auto_skip_clip", False)  # Paddle's clip for mixtures has no option
        super().__init__(clip.clip_norm, clip.group_name, skip)
        self.orders: dict[int, int] = {}
        self.sharded = self.spread = False
        self.norms: list[Tensor] = []
        #: The norms that :meth:`measure` has stored for copies of this clip; None for no gradients.
        self._norms_for_copies: list[Tensor | None] = []
        #: The norms that the next calls of this clip, a copy, use; see ``__deepcopy__``.
        self._next_norms: list[Tensor | None] = []

    @property
    def clip_norm(self) -> float:
        """The largest norm, to which larger ones are clipped.

        It is read from the replaced clip, because a script may set it there.
        """
        norm: float = self.stock.clip_norm
        return norm

    @clip_norm.setter
    def clip_norm(self, norm: float) -> None:
        self.stock.clip_norm = norm

    def begin(self) -> None:
        """Called before each step: forgets the norms of the step before."""
        self.norms, self._norms_for_copies = [], []

    @paddle.no_grad()
    def measure(self, params_grads: Pairs) -> None:
        """Stores the norm of some gradients, which copies of this clip use instead of their own.

        Collective over the ranks with other stages, mp shards, experts or optimizer shards.

        Args:
            params_grads: Parameters of this rank and their gradients, which do not change.
        """
        self._norms_for_copies = [self._global_norm_of(params_grads)]

    @paddle.no_grad()
    def __call__(self, params_grads: Pairs) -> Pairs:
        """Returns the same parameters with clipped gradients, without parameters that have none.

        If no rank has a gradient to clip, the pairs are returned as they are.
        Collective over the ranks with other stages, mp shards, experts or optimizer shards.

        Args:
            params_grads: Parameters of this rank and their gradients; dense gradients are changed
                in place.

        Raises:
            PipelineTimeout: Some rank did not come within the limit.
        """
        # A copy of this clip uses the norm that was measured for it.
        if self._next_norms:
            norm = self._next_norms.pop()
        else:
            norm = self._global_norm_of(params_grads)
            if norm is not None:
                self._global_norm(paddle.zeros_like(norm), norm * norm)
        if norm is None:
            return params_grads
        self.norms.append(norm)
        most = paddle.full([], self.clip_norm, norm.dtype)
        if self.auto_skip_clip and not norm > most:
            return [pair for pair in params_grads if pair[1] is not None]
        factor = most / norm.maximum(most)
        return [(p, _multiply_gradient(p, g, factor)) for p, g in params_grads if g is not None]

    def _global_norm(self, distributed: Tensor, whole: Tensor) -> None:
        """Does nothing; trainers, such as PaddleFormers', override it as Fleet's to log the norm.

        Args:
            distributed: Zero. In Fleet this is the squared norm of shards' gradients.
            whole: The squared norm of all gradients of all ranks.
        """

    def __deepcopy__(self, memo: dict[int, object]) -> GlobalNormClip:
        """Returns a clip for the optimizer of a copied model, which is never sharded."""
        copied = GlobalNormClip(self)
        copied.spread, copied._next_norms = self.spread, [*self._norms_for_copies]
        copied.orders = {
            id(memo[parameter_id]): order
            for parameter_id, order in self.orders.items()
            if parameter_id in memo
        }
        memo[id(self)] = copied
        return copied

    def _squares_here(self, params_grads: Pairs) -> Iterator[_Square]:
        """Yields the squared norms of the gradients that this rank counts in the norm of all.

        A gradient that is left out is not clipped, or is that of a tied weight of which another
        rank counts the gradient.
        """
        for parameter, gradient in params_grads:
            if gradient is None or not _needs_clip(parameter):
                continue
            order = self.orders.get(id(parameter), 0)
            if order != COPY:
                value = sum_over_blocks(squared_norm, gradient, parameter)
                axis, dtype = shard_axis(parameter), str(value.dtype).rpartition(".")[2]
                yield _Square(order, dtype, axis, is_spread(parameter), value)

    def _global_norm_of(self, params_grads: Pairs) -> Tensor | None:
        """Returns the norm of all ranks' gradients; None if no rank has one to clip. Collective."""
        squares = self._all_squares([*self._squares_here(params_grads)])
        return (
            _norm_of_squares(sorted(squares, key=lambda square: square.order)) if squares else None
        )

    def _all_squares(self, squares: list[_Square]) -> list[_Square]:
        """Returns the squared norms of all ranks' gradients, each once, from this rank's.

        Collective.
        """
        job = current_job()
        if job is None or job.local:
            return squares
        of_experts = [square for square in squares if square.spread]
        squares = [square for square in squares if not square.spread]
        for axis in SHARDS:
            if job.along(axis).ranks > 1:
                squares = _add_up_shards(squares, axis, job.along(axis))
        if self.sharded and job.sharding().ranks > 1:
            squares = _gather_squares(squares, job.sharding())
        if self.spread:
            squares += _gather_squares(of_experts, job.all_experts(self.sharded))
        return squares if job.degrees.pp == 1 else _gather_squares(squares, job.group())


def replace_clips(optimizer: Optimizer) -> list[GlobalNormClip]:
    """Replaces each ``ClipGradByGlobalNorm`` of an optimizer by a :class:`GlobalNormClip`.

    If layers are cut into shards, a ``SlicedNormClip`` replaces a ``ClipGradByNorm``. Clips are
    replaced in the innermost optimizer and in each of its parameter groups, so any optimizer around
    it may step. Clips of the script's own classes are not replaced.

    Raises:
        ConfigError: Ranks hold parts of the model, and a clip is not known to be right there.
    """
    clips: dict[int, GlobalNormClip] = {}
    job = current_job()
    for location in clip_places(optimizer):
        stock = location.clip
        if not require_clip(stock, job):
            continue
        if isinstance(stock, GLOBAL_NORM_CLIPS):
            if isinstance(stock, GlobalNormClip):
                clips.setdefault(id(stock), stock)
            elif id(stock) not in clips:
                clips[id(stock)] = GlobalNormClip(stock)
            location.put(clips[id(stock)])
        elif (
            type(stock) is paddle.nn.ClipGradByNorm
            and job is not None
            and (job.shard[1] > 1 or job.sums_by_tree)
        ):
            location.put(SlicedNormClip(stock))
    return list(dict.fromkeys(clips.values()))


def norms_of(clips: Sequence[GlobalNormClip]) -> list[Tensor]:
    """Returns the norms before clipping in the last step, one for each parameter group."""
    return [norm for clip in clips for norm in clip.norms]


def total_norm(norms_of_groups: Sequence[Tensor]) -> float | None:
    """Returns the norm over all groups of parameters; None if nothing was clipped."""
    norms = [float(norm) for norm in norms_of_groups]
    if len(norms) < 2:
        return norms[0] if norms else None
    return float(sum(norm**2 for norm in norms) ** 0.5)


def _needs_clip(parameter: Tensor) -> bool:
    """Whether the script has not excluded a parameter from clipping by ``need_clip=False``."""
    return getattr(parameter, "need_clip", True) is not False


def _multiply_gradient(parameter: Tensor, gradient: Tensor, factor: Tensor) -> Tensor:
    """Returns a parameter's gradient times the factor of a clip; the same tensor, if it is dense.

    The gradient of a parameter that is not to be clipped is returned as it is.
    """
    if not _needs_clip(parameter):
        return gradient
    factor = factor.astype(gradient.dtype)
    if gradient.is_selected_rows():
        return gradient.multiply(factor)
    return gradient.multiply_(factor)


def _norm_of_squares(squares: Sequence[_Square]) -> Tensor:
    """Returns the root of the sum of squares, with the bits of the single-device model's clip.

    Paddle's own clip adds the squares of half precision, float32 and float64 in that order, in
    float32 if there is no float64.
    """
    halves = [square.value for square in squares if square.dtype in _HALF_DTYPES]
    singles = [square.value for square in squares if square.dtype == "float32"]
    doubles = [s.value for s in squares if s.dtype != "float32" and s.dtype not in _HALF_DTYPES]
    dtype: DType = "float64" if doubles else "float32"
    sums = [
        paddle.stack([value.reshape([]) for value in values]).sum().astype(dtype)
        for values in (halves, singles, doubles)
        if values
    ]
    return paddle.sqrt(paddle.stack(sums).sum())


def _gather_squares(squares: Sequence[_Square], members: Group) -> list[_Square]:
    """Returns the squares of all members, which have different ones, in the order of the members.

    Collective.
    """
    messages = members.all_gather(_pack_squares(squares))
    return [square for message in messages for square in _unpack_squares(*message)]


def _pack_squares(squares: Sequence[_Square]) -> PackedSquares:
    """Returns squared norms as a message: a text with their fields, and a Tensor of the values."""
    fields = " ".join(
        f"{square.order}:{square.dtype}:{square.axis}:{square.spread:d}" for square in squares
    )
    values = [square.value.astype("float64").reshape([1]) for square in squares]
    return fields, paddle.concat(values) if values else None


def _unpack_squares(fields: str, values: Tensor) -> list[_Square]:
    """Returns the squares of which :func:`_pack_squares` has made ``fields`` and ``values``."""
    rows = [field.split(":") for field in fields.split()]
    return [
        _Square(int(order), dtype, axis, spread == "1", values[index].astype(dtype))
        for index, (order, dtype, axis, spread) in enumerate(rows)
    ]


def _add_up_shards(squares: Sequence[_Square], axis: str, members: Group) -> list[_Square]:
    """Returns the squares of full tensors, from those of their shards along an axis. Collective.

    Squares of parameters that are not cut along the axis are equal on the members: one is returned.

    Args:
        squares: The squares of this rank.
        axis: The axis.
        members: The ranks along it.
    """
    messages = members.all_gather(_pack_squares(squares))
    # The members list the same parameters, in one order.
    fields_of_first, _ = messages[0]
    if any(fields != fields_of_first for fields, _ in messages):
        raise ConfigError(
            "the tensor-parallel members do not clip the same gradients",
            expected=f"as on the first: {fields_of_first} (place:dtype:sharded)",
            got="; ".join(fields for fields, _ in messages[1:]),
            fix="freeze, use and give need_clip to the same parameters on every member",
        )
    by_member = [_unpack_squares(*message) for message in messages]
    add_all = partial(tree, add=add) if sums_by_tree() else paddle.add_n
    full: list[_Square] = []
    for shards in zip(*by_member):
        square = shards[0]
        if square.axis == axis:
            square = square._replace(value=add_all([shard.value for shard in shards]))
        full.append(square)
    return full


class SlicedNormClip(paddle.nn.ClipGradByNorm):
    """Replaces the ``ClipGradByNorm`` of an optimizer if layers are cut into shards or blocks.

    Fleet uses the norm of each shard instead of the norm of the whole gradient, and so clips less.
    """

    def __init__(self, clip: Clip) -> None:
        """Clips to the same norm as ``clip``, a ``ClipGradByNorm``."""
        super().__init__(clip.clip_norm)

    @paddle.no_grad()
    def __call__(self, params_grads: Pairs) -> Pairs:
        """Returns the same parameters with clipped gradients. Collective if some are shards.

        Args:
            params_grads: Parameters of this rank and their gradients, which do not change.

        Raises:
            PipelineTimeout: Some member did not come within the limit.
        """
        factors: dict[int, Tensor] = {}
        for axis in SHARDS:
            shards = [(p, g) for p, g in params_grads if g is not None and _is_cut_along(p, axis)]
            if shards:
                factors |= zip((id(p) for p, _ in shards), self._clip_factors(shards, axis))
        clipped: Pairs = []
        for parameter, grad in params_grads:
            if id(parameter) in factors:
                factor = factors[id(parameter)].astype(grad.dtype)
                clipped.append((parameter, grad * factor))
            else:
                clipped += super().__call__([(parameter, grad)])
        return clipped

    def _clip_factors(self, shards: Pairs, axis: str) -> Tensor:
        """Returns a factor for each gradient that is cut along an axis. Collective over the axis.

        The factors are a Tensor [shards]; gradients of larger norm than the clip's get one below 1.

        Args:
            shards: Parameters that are cut along the axis, with their gradients.
            axis: The axis.
        """
        squares = paddle.stack(
            [sum_over_blocks(_shard_square, shard, parameter) for parameter, shard in shards]
        )
        totals = total(squares, along(axis))
        most = paddle.full([], self.clip_norm, totals.dtype)
        return most / paddle.sqrt(totals).maximum(most)


def _shard_square(shard: Tensor) -> Tensor:
    """Returns the squared norm of a tensor, in float32."""
    return (shard.astype("float32") ** 2).sum()


def _is_cut_along(parameter: Tensor, axis: str) -> bool:
    """Whether a parameter to clip is cut along an axis into shards, or along mp into blocks."""
    part = shard_in(parameter)
    along_axis = part.axis == axis if part else axis == "mp" and blocks_of(parameter) is not None
    return along_axis and _needs_clip(parameter)
