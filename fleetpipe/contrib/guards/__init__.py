"""Verifies in every few steps that a training on several ranks keeps its invariants.

Ranks that hold the same parameters exchange a fingerprint of each parameter; equal bits have equal
fingerprints. A rank computes its fingerprints when it first waits for a message, in the bubble, and
compares them with those of other ranks after its batch has run. Unless an invariant is violated,
ranks exchange only fingerprints and a sum of squares, and no number of the training changes. Start
with ``Guards``.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Tensor
from fleetpipe.compare.differences import ROUNDING, largest_gap
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.batch.micro_batches import ObservedBatch
from fleetpipe.dygraph.gradients import gradient_of
from fleetpipe.dygraph.layer_kinds import is_spread
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.optimizer.optimizer import PipelineOptimizer
from fleetpipe.engine.observer import BatchObserver, Blocked, Instruction, Played
from fleetpipe.errors import InvariantError
from fleetpipe.job.job import Job
from fleetpipe.mesh import COPIES
from fleetpipe.mesh.axes import NORM, SHARDS, STREAMS, axis_between, of_unequal
from fleetpipe.mesh.groups import Gathering, Group
from fleetpipe.mesh.parts import shard_axis
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import optimized_parameters, squared_norm
from fleetpipe.paddle_api.random import DEFAULT, generator_states, stream_states
from fleetpipe.paddle_api.tensor import tensor_bytes
from fleetpipe.schedules import Op, Recv
from fleetpipe.transport.wire import bridge

#: The relative rounding of a norm of 16-bit gradients.
_ROUNDING_OF_HALVES = 0.02

#: Separates the messages of these groups from those of other groups with the same ranks.
PURPOSE = "guards"


class Guards(BatchObserver):
    """Verifies that the ranks agree, in the first batch of a model and in every few after it.

    Ranks with copies of a parameter compare fingerprints of its values.
    """

    def __init__(self, layers: PipelineLayer, job: Job, every: int) -> None:
        """Takes the layers of a model to verify in its first batch and every ``every`` batches."""
        self._layers, self._job, self._every = layers, job, every
        self._batches = 0
        #: Whether the batch that runs is verified.
        self._verifies = False
        #: Whether the fingerprints of this rank's parameters still have to be sent in the batch.
        self._must_publish = False
        #: Whether a GradScaler scales the batch.
        self._scaled = False
        #: The random streams of the batch.
        self._keys: random_keys.Keys | None = None
        #: For parameters with copies on other ranks, the exchange of fingerprints that has begun.
        self._gatherings: list[tuple[Holders, Gathering]] = []
        #: By name, the fingerprints of the random streams before the batch.
        self._streams: dict[str, str] = {}
        self._last_verified_step: int | None = None

    def begin(self, batch: ObservedBatch) -> None:
        """Decides whether to verify the batch, and stores the states of the random streams."""
        self._keys, self._scaled = batch.keys, batch.scaler is not None
        self._verifies = self._must_publish = self._batches % self._every == 0
        self._batches += 1
        if self._verifies:
            self._gatherings, self._streams = [], _stream_fingerprints()

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns an instruction that sends this rank's fingerprints at the first wait."""
        if not isinstance(op, Recv):
            return instruction

        def receive_or_publish() -> Blocked | None:
            blocked = instruction()
            if blocked is not None and self._must_publish:
                self._publish()
            return blocked

        return receive_or_publish

    def computed(self) -> None:
        """Verifies a batch that has run, before its gradients are added up over ranks. Collective.

        Raises:
            InvariantError: A gradient of this rank is not finite; a parameter differs between ranks
                that share it; or ranks with different values have drawn the same random numbers.
            PipelineTimeout: Some rank did not come within the limit.
        """
        if not self._verifies:
            return
        if self._must_publish:
            self._publish()
        if not self._scaled:  # a GradScaler looks for them itself
            self._require_finite()
        drawn = self._streams_drawn_from(self._keys)
        for holders, gathering in self._gatherings:
            values = gathering.values()
            self._require_equal(holders, [value["parameters"].split(",") for value in values])
            if not holders.tied:
                self._require_streams(holders.ranks, [v["streams"] for v in values], drawn)
        self._gatherings, self._last_verified_step = [], self._step

    def step(self, step: Callable[[], None], optimizer: PipelineOptimizer, scaled: bool) -> None:
        """Steps the optimizer, and verifies the norm by which it clips gradients. Collective.

        Raises:
            InvariantError: The norm is not that of all gradients of all ranks, each counted once.
        """
        # An optimizer that is not wrapped, or has all gradients, clips as Paddle does.
        if not self._verifies or scaled or not getattr(optimizer, "clips_all", False):
            step()
            return
        of_rank = norm_parameters(optimized_parameters(optimizer.wrapped), self._layers, self._job)
        squares = _sum_of_squares([g for p in of_rank if (g := gradient_of(p)) is not None])
        everyone = self._job.members(range(self._job.degrees.size), PURPOSE)
        gathering = everyone.begin_all_gather(squares)
        step()
        self._require_norm(math.sqrt(sum(gathering.values())), optimizer)

    def _require_norm(self, norm: float, optimizer: PipelineOptimizer) -> None:
        """Raises an error if the optimizer has clipped by another norm than ``norm``."""
        used = optimizer.gradient_norm or 0.0
        halves = any("float16" in str(p.dtype) for p in optimized_parameters(optimizer.wrapped))
        if abs(used - norm) > (_ROUNDING_OF_HALVES if halves else ROUNDING) * max(used, norm):
            raise InvariantError(
                "gradients are clipped by a norm that is not that of all of them, each once",
                where=self._location,
                expected=f"{norm:.7g}, over all ranks",
                got=f"{used:.7g}",
                cause=NORM,
                fix="leave is_firstly_shared, is_distributed and need_clip of parameters as their "
                "layers set them, alike on all ranks, and the optimizer's clip where it is",
            )

    def _publish(self) -> None:
        """Sends fingerprints of parameters to the ranks that share them, without waiting."""
        self._must_publish = False
        for holders in all_holders(self._layers, self._job):
            prints = ",".join(map(fingerprint, holders.parameters.values()))
            value = {"parameters": prints, "streams": {} if holders.tied else self._streams}
            self._gatherings.append((holders, holders.group.begin_all_gather(value)))

    def _require_finite(self) -> None:
        """Raises an error if a gradient of this rank has NaN or Inf."""
        parameters = named_parameters(self._layers).items()
        gradients = {n: g for n, p in parameters if (g := gradient_of(p)) is not None}
        if math.isfinite(_sum_of_squares([*gradients.values()])):
            return
        bad = [name for name, gradient in gradients.items() if not _is_finite(gradient)]
        if bad:
            raise InvariantError(
                f"the gradient of {bad[-1]} is not finite",
                where=f"{self._location}, before gradients are added up over ranks",
                got=f"NaN or Inf in {len(bad)} of {len(gradients)} gradients",
                cause="a too large learning rate, a product that passed the dtype's range, or such "
                "numbers in the data of this rank",
                fix="FLAGS_pp_check_naninf=1 names the stage that sends the first of them",
            )

    def _require_equal(self, holders: Holders, prints: Sequence[Sequence[str]]) -> None:
        """Raises an error, on all holders, if they have different values of a parameter.

        Args:
            holders: Parameters, and the ranks that hold equal copies of them.
            prints: By rank, the fingerprint of each parameter.
        """
        by_name = dict(zip(holders.parameters, zip(*prints)))
        unequal = [name for name, of_ranks in by_name.items() if len(set(of_ranks)) > 1]
        if not unequal:
            return
        name = unequal[0]
        usual, _ = Counter(by_name[name]).most_common(1)[0]
        pairs = zip(holders.ranks, by_name[name])
        differing = [rank for rank, value in pairs if value != usual]
        axis = _separating_axis(self._job, differing, holders.ranks)
        verified = self._last_verified_step
        since = "before the first step" if verified is None else f"in step {verified}"
        more = f", nor are {len(unequal) - 1} others" if len(unequal) > 1 else ""
        first, *rest = holders.group.all_gather(holders.parameters[name].detach().clone())
        raise InvariantError(
            f"the {'tied weight' if holders.tied else 'parameter'} {name} is not the same on the "
            f"ranks that hold it{more}",
            where=f"rank {_join_ranks(differing)} of {_join_ranks(holders.ranks)}, along {axis}, "
            f"at the begin of step {self._step}",
            expected=f"the same bits, as {since}",
            got=f"numbers up to {max(largest_gap(first, other) for other in rest):.3g} apart",
            cause="a missing all-reduce over mp of its gradient; or ranks hold parts of it, and it "
            "lacks is_distributed = True"
            if axis == "mp"
            else of_unequal(axis, 0 if verified is None else self._step),
            fix="fleetpipe_configs['guards'] = 1 names the step, fleetpipe locate the layer",
        )

    def _require_streams(
        self, ranks: Sequence[int], streams: Sequence[Mapping[str, str]], drawn: Sequence[str]
    ) -> None:
        """Raises an error if ranks of a stage draw from random streams in wrong states.

        Replicas and shards draw different numbers; ranks along mp equal ones for full tensors.

        Args:
            ranks: The ranks of the stage.
            streams: By rank, the fingerprint of the state of each stream.
            drawn: The names of the streams from which this batch has drawn.
        """
        own_states = streams[ranks.index(self._rank)]
        for stream in drawn:
            for rank, states in zip(ranks, streams):
                ends = [rank, self._rank]
                axis = "" if rank == self._rank else _separating_axis(self._job, [rank], ends)
                equal = states.get(stream) == own_states.get(stream)
                # Along mp ranks draw the same numbers for full tensors, and others for shards.
                if not axis or equal == (axis == "mp" and stream == DEFAULT):
                    continue
                raise InvariantError(
                    f"ranks {_join_ranks(sorted([rank, self._rank]))} draw "
                    f"{'the same' if equal else 'other'} random numbers along {axis}",
                    where=f"{self._location}, the {stream}",
                    cause=STREAMS.format(axis)
                    if equal
                    else "dropout draws other numbers for the same values on ranks along mp",
                    fix="give paddle.seed another number on each replica, the same along mp, and "
                    "the streams of shards one of their own (model_parallel_random_seed); or leave "
                    "fleetpipe_configs['rng'] at 'keyed'",
                )

    def _streams_drawn_from(self, keys: random_keys.Keys | None) -> list[str]:
        """Returns the names of the random streams that this batch has drawn from."""
        if keys is not None:
            return sorted(keys.common_streams & random_keys.OF_SHARDS)
        now = _stream_fingerprints()
        checked = {DEFAULT, *random_keys.OF_SHARDS}
        return sorted(n for n in checked & now.keys() if now[n] != self._streams.get(n))

    @property
    def _rank(self) -> int:
        return 0 if self._job.local else int(self._job.hcg.get_global_rank())

    @property
    def _step(self) -> int:
        return self._job.progress.step

    @property
    def _location(self) -> str:
        return f"rank {self._rank}, step {self._step}"


def fingerprint(tensor: Tensor) -> str:
    """Returns the sum and the xor of a tensor's 64-bit words, as a text to compare bits by."""
    # The first result keeps the bytes alive while they are read.
    size: Any = SimpleNamespace(nbytes=tensor_bytes(tensor))
    _kept, memories = bridge.readable([tensor], [size])
    if not memories:
        return ""
    whole = np.frombuffer(memories[0], "uint8")
    words = whole[: whole.size // 8 * 8].view("uint64")
    rest = zlib.crc32(whole[words.nbytes :].tobytes())
    return f"{int(words.sum(dtype='uint64')):x} {int(np.bitwise_xor.reduce(words)):x} {rest:x}"


def _stream_fingerprints() -> dict[str, str]:
    """Returns fingerprints of the states of Paddle's generator and of Fleet's streams."""
    states = {DEFAULT: generator_states()[0], **stream_states()}
    return {name: f"{zlib.crc32(str(state).encode()):x}" for name, state in states.items()}


def _sum_of_squares(gradients: Sequence[Tensor]) -> float:
    """Returns the sum of the squares of all gradients."""
    if not gradients:
        return 0.0
    squares = [squared_norm(g).astype("float64").reshape([]) for g in gradients]
    return float(paddle.stack(squares).sum())


def _is_finite(gradient: Tensor) -> bool:
    """Whether all numbers of a gradient are finite."""
    if gradient.is_selected_rows():
        return bool(paddle.isfinite(squared_norm(gradient)).all())
    return bool(paddle.isfinite(gradient.astype("float32")).all())


def _join_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class Holders(NamedTuple):
    """Parameters, and the ranks that hold equal copies of them.

    Attributes:
        group: The group of the ranks.
        ranks: The ranks of the job.
        parameters: The parameters by name.
        tied: Whether the parameters are tied weights, which several stages have.
    """

    group: Group
    ranks: Sequence[int]
    parameters: Mapping[str, Tensor]
    tied: bool


def all_holders(layers: PipelineLayer, job: Job) -> list[Holders]:
    """Returns the parameters that this rank shares with other ranks, in the same order on each.

    The ranks with this rank's stages have an item even if they share no parameter.
    """
    if job.local:
        return []
    stage = tuple(job.mesh.along(job.coordinate, (*COPIES, *SHARDS)))
    shared: dict[tuple[int, ...], dict[str, Tensor]] = {stage: {}}
    for name, parameter in named_parameters(layers).items():
        ranks = tuple(job.mesh.along(job.coordinate, _axes_of_copies(parameter, job)))
        shared.setdefault(ranks, {})[name] = parameter
    tied: dict[tuple[int, ...], dict[str, Tensor]] = {}
    pipeline, tensors = job.pipeline_ranks(), layers.state.local_tensors()
    for weight in layers.shared_weights:
        ranks = tuple(pipeline[rank] for rank in weight.holders)
        tied.setdefault(ranks, {})[weight.name] = tensors[weight.name]
    return [
        Holders(job.members(ranks, PURPOSE), ranks, parameters, of is tied)
        for of in (shared, tied)
        for ranks, parameters in sorted(of.items(), key=lambda item: item[0])
        if len(ranks) > 1
    ]


def named_parameters(layers: PipelineLayer) -> dict[str, Tensor]:
    """Returns the trained parameters of this rank's stages and losses by fully qualified names.

    Other parameters may be running statistics, which differ between replicas.
    """
    named: dict[str, Tensor] = dict(layers.state.own_parameters())
    for number, layer in enumerate(layers.loss_layers()):
        named.update({f"loss {number}.{n}": p for n, p in layer.named_parameters()})
    return {name: p for name, p in named.items() if not p.stop_gradient}


def norm_parameters(parameters: Iterable[Tensor], layers: PipelineLayer, job: Job) -> list[Tensor]:
    """Returns the parameters that this rank counts in the global norm, so that each counts once."""
    tensors, coordinate = layers.state.local_tensors(), job.coordinate
    elsewhere = {
        id(tensors[w.name]) for w in layers.shared_weights if w.holders[0] != coordinate.pp
    }
    # Only the rank with a parameter's optimizer shard has its gradient then.
    scattered = {*job.degrees.state_axes, "moe_sharding"} if job.scatters_gradients else set()
    return [
        parameter
        for parameter in parameters
        if getattr(parameter, "need_clip", True) and id(parameter) not in elsewhere
        if not any(
            getattr(coordinate, a) for a in _axes_of_copies(parameter, job) if a not in scattered
        )
    ]


def _separating_axis(job: Job, differing: Sequence[int], ranks: Sequence[int]) -> str:
    """Returns the axis whose coordinate separates the differing ranks from the others.

    If there is none, returns the first axis on which the ranks have several coordinates.
    """
    places = {rank: job.mesh.coordinate(rank)._asdict() for rank in ranks}
    axes = [a for a in (*COPIES, *SHARDS, "pp") if len({at[a] for at in places.values()}) > 1]
    return axis_between(places, differing, axes) or axes[0]


def _axes_of_copies(parameter: Tensor, job: Job) -> tuple[str, ...]:
    """Returns the axes along which ranks have equal copies of a parameter."""
    return job.copy_axes(is_spread(parameter), (shard_axis(parameter),))
