"""Clips by the norm of the gradients of all ranks: ``ClipGradByGlobalNorm`` in a job.

Each rank holds a part of the gradients: its stages, its slices of tensor-parallel layers, its share
of a sharded optimizer. The squared norm of every gradient goes to all ranks, where it is summed in
the order and with the arithmetic of the single model. So the norm and the factor are the same on
all ranks, and without tensor parallelism and replicas they have the single model's bits. Fleet adds
sums of stages, divides by the norm + 1e-6, and counts tied weights on every stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Clip, DType, Optimizer, Tensor
from fleetpipe.dygraph._paddle import clip_places, squared_norm
from fleetpipe.dygraph.optimizer.clip_sliced import Pairs, SlicedNormClip
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job, current_job
from fleetpipe.transport import Group

_HALVES = ("float16", "bfloat16")
#: The order of what another rank counts: a copy of a tied weight.
COPY = -1


class _Square(NamedTuple):
    """The squared norm of one gradient.

    Attributes:
        order: Where the single model has the parameter.
        dtype: Of the value in the single model.
        sliced: Whether other ranks hold the rest of the parameter.
        value: A Tensor with one element.
    """

    order: int
    dtype: str
    sliced: bool
    value: Tensor


class GlobalNormClip(paddle.nn.ClipGradByGlobalNorm):
    """Takes the place of the ``ClipGradByGlobalNorm`` of an optimizer; collective when called.

    Attributes:
        orders: The place of each parameter in the single model, or :data:`COPY`, by ``id``.
        sharded: Whether each sharding rank is given the gradients of its own share alone.
        norms: The norms before clipping since the last :meth:`begin`, one for each call.
    """

    def __init__(self, clip: Clip) -> None:
        """Clips to the norm that ``clip``, a ``ClipGradByGlobalNorm``, clips to."""
        super().__init__(clip.clip_norm, clip.group_name, clip.auto_skip_clip)
        self.orders: dict[int, int] = {}
        self.sharded = False
        self.norms: list[Tensor] = []

    def begin(self) -> None:
        """Forgets the norms of the step before."""
        self.norms = []

    @paddle.no_grad()
    def __call__(self, params_grads: Pairs) -> Pairs:
        """Returns the pairs with clipped gradients. Collective over all ranks with other parts.

        Args:
            params_grads: Parameters of this rank and their gradients, which are changed in place.

        Raises:
            PipelineTimeout: Some rank did not come within the limit.
        """
        squares = self._of_all_ranks([*self._own_squares(params_grads)])
        if not squares:
            return params_grads
        norm = _norm(sorted(squares, key=lambda square: square.order))
        self.norms.append(norm)
        self._global_norm(paddle.zeros_like(norm), norm * norm)
        most = paddle.full([], self.clip_norm, norm.dtype)
        if self.auto_skip_clip and not norm > most:
            return [pair for pair in params_grads if pair[1] is not None]
        factor = most / norm.maximum(most)
        return [(p, _times(p, g, factor)) for p, g in params_grads if g is not None]

    def _global_norm(self, distributed: Tensor, whole: Tensor) -> None:
        """Is told the squared norm that has been found. Fleet's name for what adds it up.

        PaddleFormers' Trainer puts a function in its place, which logs the root of the sum.

        Args:
            distributed: Zero. In Fleet the part of parameters that are cut in slices.
            whole: The squared norm of all gradients of all ranks.
        """

    def __deepcopy__(self, memo: dict[int, object]) -> GlobalNormClip:
        """Returns a clip for the optimizer of a twin, which is never sharded."""
        copied = GlobalNormClip(self)
        copied.orders = {
            id(memo[number]): order for number, order in self.orders.items() if number in memo
        }
        memo[id(self)] = copied
        return copied

    def _own_squares(self, params_grads: Pairs) -> Iterator[_Square]:
        for parameter, gradient in params_grads:
            if gradient is None or not _clipped(parameter):
                continue
            order = self.orders.get(id(parameter), 0)
            if order != COPY and getattr(parameter, "is_firstly_shared", True):
                value = squared_norm(gradient)
                sliced = bool(getattr(parameter, "is_distributed", False))
                yield _Square(order, str(value.dtype).rpartition(".")[2], sliced, value)

    def _of_all_ranks(self, squares: list[_Square]) -> list[_Square]:
        """Adds the squares that other ranks have. Collective."""
        job = current_job()
        if job is None or job.local:
            return squares
        if job.degrees.mp > 1:
            squares = _with_slices(squares, job.model_parallel())
        for group in self._other_parts(job):
            parts = group.all_gather(_packed(squares))
            squares = [square for part in parts for square in _unpacked(*part)]
        return squares

    def _other_parts(self, job: Job) -> Iterator[Group]:
        if self.sharded and job.degrees.sharding > 1:
            yield job.sharding()
        if job.degrees.pp > 1:
            yield job.group()


def replace_clips(optimizer: Optimizer) -> list[GlobalNormClip]:
    """Puts a :class:`GlobalNormClip` wherever an optimizer has a ``ClipGradByGlobalNorm``.

    And a ``SlicedNormClip`` for a ``ClipGradByNorm``, where layers are cut.

    That is in the optimizer that others wrap, and in each of its parameter groups; so it works
    whichever of them is told to step. What has one already keeps it.
    """
    clips: dict[int, GlobalNormClip] = {}
    job = current_job()
    for place in clip_places(optimizer):
        stock = place.clip
        if isinstance(stock, paddle.nn.ClipGradByGlobalNorm):
            if isinstance(stock, GlobalNormClip):
                clips.setdefault(id(stock), stock)
            elif id(stock) not in clips:
                clips[id(stock)] = GlobalNormClip(stock)
            place.put(clips[id(stock)])
        elif type(stock) is paddle.nn.ClipGradByNorm and job is not None and job.degrees.mp > 1:
            place.put(SlicedNormClip(stock))
    return list(dict.fromkeys(clips.values()))


def total_norm(clips: Sequence[GlobalNormClip]) -> float | None:
    """Returns the norm before clipping over all groups of parameters; None where none clips."""
    norms = [float(norm) for clip in clips for norm in clip.norms]
    if len(norms) < 2:
        return norms[0] if norms else None
    return float(sum(norm**2 for norm in norms) ** 0.5)


def _clipped(parameter: Tensor) -> bool:
    return getattr(parameter, "need_clip", True) is not False


def _times(parameter: Tensor, gradient: Tensor, factor: Tensor) -> Tensor:
    if not _clipped(parameter):
        return gradient
    factor = factor.astype(gradient.dtype)
    if gradient.is_selected_rows():
        return gradient.multiply(factor)
    return gradient.multiply_(factor)


def _norm(squares: Sequence[_Square]) -> Tensor:
    """Returns the norm with the single model's bits: sums by dtype, then their sum, then the root.

    Paddle's own clip adds the squares of half precision, float32 and float64 in that order, in
    float32 if there is no float64.
    """
    halves = [square.value for square in squares if square.dtype in _HALVES]
    singles = [square.value for square in squares if square.dtype == "float32"]
    doubles = [s.value for s in squares if s.dtype != "float32" and s.dtype not in _HALVES]
    dtype: DType = "float64" if doubles else "float32"
    sums = [
        paddle.stack([value.reshape([]) for value in values]).sum().astype(dtype)
        for values in (halves, singles, doubles)
        if values
    ]
    return paddle.sqrt(paddle.stack(sums).sum())


Packed = tuple[str, Tensor]


def _packed(squares: Sequence[_Square]) -> Packed:
    """Returns squares as one message: what they are, and a float64 Tensor with their values."""
    fields = " ".join(f"{square.order}:{square.dtype}:{square.sliced:d}" for square in squares)
    values = [square.value.astype("float64").reshape([1]) for square in squares]
    return fields, paddle.concat(values) if values else None


def _unpacked(fields: str, values: Tensor) -> list[_Square]:
    parts = [one.split(":") for one in fields.split()]
    return [
        _Square(int(order), dtype, sliced == "1", values[index].astype(dtype))
        for index, (order, dtype, sliced) in enumerate(parts)
    ]


def _with_slices(squares: Sequence[_Square], members: Group) -> list[_Square]:
    """Returns each square with those of the other slices. Collective over the members.

    What is no slice every member has computed for itself; all take the first one's.

    Raises:
        ConfigError: The members have not the same parameters with gradients.
    """
    packed = members.all_gather(_packed(squares))
    if any(fields != packed[0][0] for fields, _ in packed):
        raise ConfigError(
            "the tensor-parallel members do not clip the same gradients",
            expected=f"as on the first: {packed[0][0]} (place:dtype:sliced)",
            got="; ".join(fields for fields, _ in packed[1:]),
            fix="freeze, use and give need_clip to the same parameters on every member",
        )
    parts = [_unpacked(*part) for part in packed]
    return [
        one._replace(value=paddle.add_n([o.value for o in others])) if one.sliced else one
        for one, *others in ((first, first, *rest) for first, *rest in zip(*parts))
    ]
