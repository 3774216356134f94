"""The cost model: costs of a layer, of a link between ranks, and of a stage of several layers.

Start with ``LayerCost``; ``Stages`` adds the costs of layers up. All times are in seconds for one
micro-batch. Activations that a forward leaves allocated for its backward are *held*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.json_value import MOST
from fleetpipe.representation import shows
from fleetpipe.schedules import Costs

_TIMES_THAT_MAY_LACK = ("backward", "input_grad", "weight_grad")


class Link(NamedTuple):
    """The time that a value takes between two ranks.

    Attributes:
        latency: Seconds for a value of any size.
        per_byte: Additional seconds for each byte.
    """

    latency: float = 3e-5
    per_byte: float = 3e-10

    def seconds(self, size: float) -> float:
        """Returns the seconds that a value of ``size`` bytes takes from one rank to the other."""
        return self.latency + self.per_byte * size


class Transfer(NamedTuple):
    """The time that a value between two ranks keeps both of them busy, besides the link's time.

    Attributes:
        sending: Seconds of the sending rank for a value of any size.
        receiving: Seconds of the receiving rank.
        per_byte: Additional seconds of each of them for each byte.
    """

    sending: float = 0.0
    receiving: float = 0.0
    per_byte: float = 0.0

    def sends(self, size: float) -> float:
        """Returns the seconds for which a rank is busy sending ``size`` bytes."""
        return self.sending + self.per_byte * size

    def receives(self, size: float) -> float:
        """Returns the seconds for which a rank is busy receiving ``size`` bytes."""
        return self.receiving + self.per_byte * size


class ProcessMemory(NamedTuple):
    """The bytes of its device's memory that a process takes, as a function of its tensors' bytes.

    On a CPU that is the resident size, which the system limits; on a GPU the bytes that Paddle
    reserves.

    Attributes:
        base: Bytes beside the tensors: the interpreter, its libraries, the user's data.
        growth: Bytes for each byte of tensors, at least 1: a process keeps a part of freed memory.
    """

    base: float
    growth: float

    def taken(self, tensors: float) -> int:
        """Returns the bytes of a process whose tensors take ``tensors`` bytes at their peak."""
        return round(self.base + self.growth * tensors)


@shows("name", "forward", "backward", "input_grad", "weight_grad", "parameters", "held")
@dataclass(frozen=True)
class LayerCost:
    """The costs of a layer (or a node of a captured model) for one micro-batch.

    Attributes:
        name: The name of its class or function; for a node its path.
        forward: Seconds of F.
        backward: Seconds of a whole B; None: I + W.
        input_grad: Seconds of I, plus the time by which F is slower when it stores what W needs.
            None if it was not measured: then no schedule splits the backward.
        weight_grad: Seconds of W; None if it was not measured.
        parameters: Bytes of its trained parameters, without those that an earlier layer uses.
        gradients: Bytes of the gradients of these parameters.
        buffers: Bytes of its untrained tensors, without those that an earlier layer uses.
        output: Bytes of the values that later layers use: they are sent if a stage ends here.
        held: Bytes that its F leaves allocated until B, its output included.
        releases: Bytes of its input that are freed after it has run, unless it is the first of a
            stage.
        held_split: The same as ``held`` under a split backward.
        waiting: Bytes that stay allocated between I and W.
        working: The most additional bytes that an action uses while it runs.
        saved: Bytes of ``held`` that recompute saves; 0: it is never recomputed.
        exchanges: Number of exchanges of its F and B with other ranks of the stage, such as those
            of experts along ep and of attention along sep and cp.
        exchanged: Bytes that F and B send in these exchanges.
        expert_share: The part of its times, 0 to 1, in which its experts compute.
        expert_parameters: Bytes of ``parameters`` that are of experts.
        routed: Bytes of the tokens that go to experts.
        queries: Bytes of the queries of its attention.
        keys: Bytes of the keys and values.
        heads: For each attention in it, the heads of its queries.
        loads: For each mixture in it, the number of tokens of each expert.
    """

    name: str
    forward: float
    backward: float | None = None
    input_grad: float | None = None
    weight_grad: float | None = None
    parameters: int = 0
    gradients: int = 0
    buffers: int = 0
    output: int = 0
    held: int = 0
    releases: int = 0
    held_split: int = 0
    waiting: int = 0
    working: int = 0
    saved: int = 0
    exchanges: int = 0
    exchanged: int = 0
    expert_share: float = 0.0
    expert_parameters: int = 0
    routed: int = 0
    queries: int = 0
    keys: int = 0
    heads: tuple[int, ...] = ()
    loads: tuple[tuple[int, ...], ...] = ()

    def exchange(self, link: Link) -> float:
        """Returns the seconds that exchanges over a link take in F; in B or I they take as many."""
        # Half of the time of all exchanges, which are those of F and of B together.
        return (link.latency * self.exchanges + link.per_byte * self.exchanged) / 2

    def with_exchanges(self, link: Link) -> LayerCost:
        """Returns the layer's costs with the time of its exchanges over a link added."""
        half = self.exchange(link)  # of F, and again of B or I
        if not half:
            return self
        times = {name: getattr(self, name) for name in ("forward", "backward", "input_grad")}
        slower = {name: time + half for name, time in times.items() if time is not None}
        return replace(self, **slower)

    @property
    def whole(self) -> float:
        """Seconds of B, a backward that is not split."""
        if self.backward is not None:
            return self.backward
        return (self.input_grad or 0) + (self.weight_grad or 0)

    @property
    def splits(self) -> bool:
        """Whether I and W were measured separately."""
        return self.input_grad is not None and self.weight_grad is not None

    @property
    def seconds(self) -> float:
        """Seconds of F and of the backward, whole or split, whichever is faster."""
        apart = (self.input_grad or 0) + (self.weight_grad or 0)
        return self.forward + (min(self.whole, apart) if self.splits else self.whole)

    @property
    def saved_split(self) -> int:
        """Bytes of ``held_split`` that recompute saves."""
        return max(self.held_split - (self.held - self.saved), 0) if self.saved else 0


def check_layer(layer: LayerCost, where: str) -> None:
    """Refuses a layer with an impossible figure, or without the time of its backward.

    Args:
        layer: The costs of the layer.
        where: What the error calls the layer.
    """
    for field in fields(LayerCost):
        if field.name not in ("name", "heads", "loads"):
            value = getattr(layer, field.name)
            if value is not None or field.name not in _TIMES_THAT_MAY_LACK:
                check_figure(field.name, value, where)
    if layer.backward is None and not layer.splits:
        halves = [
            name for name in ("weight_grad", "input_grad") if getattr(layer, name) is not None
        ]
        raise ConfigError(
            "the time of a backward is not known",
            where=where,
            expected="`backward`, or both `input_grad` and `weight_grad`",
            got=f"`{halves[0]}` alone" if halves else "none of them",
            fix="give what is missing, or measure it with model.profile(batch)",
        )


def check_figure(name: str, value: object, where: str) -> None:
    """Refuses a figure that is not a number of at least 0.

    Args:
        name: The name of the figure.
        value: Its value.
        where: What the error calls the thing that has the figure.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= float(value) <= MOST or math.isnan(float(value)):  # type: ignore[arg-type]
        raise ConfigError(
            f"`{name}` is no time or size",
            where=where,
            expected="a number of 0 or more",
            got=f"{name}={value!r}",
            fix="measure it again with model.profile(batch), or write a number of 0 or more",
        )


class StageCost(NamedTuple):
    """The costs of a stage for one micro-batch.

    Attributes:
        forward: Seconds of F.
        backward: Seconds of B.
        input_grad: Seconds of I; 0 if it was not measured.
        weight_grad: Seconds of W; 0 if it was not measured.
        parameters: Bytes of parameters.
        gradients: Bytes of the parameters' gradients.
        buffers: Bytes of untrained tensors.
        output: Bytes of the values that leave it.
        held: Bytes that F holds until B.
        held_split: Bytes that F holds until I.
        waiting: Bytes held between I and W.
        working: The most additional bytes that an action uses while it runs.
        exchange: The part of the seconds of F, and of B or I, that exchanges over a link take.
    """

    forward: float
    backward: float
    input_grad: float
    weight_grad: float
    parameters: int
    gradients: int
    buffers: int
    output: int
    held: int
    held_split: int
    waiting: int
    working: int
    exchange: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a forward and a whole backward."""
        return self.forward + self.backward


def costs_of(stages: Sequence[StageCost], comm: Any, **options: Any) -> Costs:
    """Returns the costs of the stages of a model in the form that a simulation takes.

    Args:
        stages: The costs of each stage.
        comm: The latency of the values that leave each stage.
        options: Further fields of ``Costs``.
    """
    names = ("forward", "backward", "input_grad", "weight_grad", "exchange")
    times: Any = {name: tuple(getattr(stage, name) for stage in stages) for name in names}
    return Costs(**times, comm=comm, **options)


class Stages:
    """The costs of any stage that consists of successive layers of a model, from prefix sums.

    Attributes:
        count: The number of layers, the loss not counted.
    """

    def __init__(
        self, layers: Sequence[LayerCost], loss: LayerCost | None, exchange: Link | None = None
    ) -> None:
        """Computes the prefix sums.

        Args:
            layers: All layers of a model.
            loss: The costs of the loss, which the last stage computes; None without one.
            exchange: The link over which layers exchange values with other ranks of their stage, if
                their times do not include it.
        """
        link = exchange or Link(0.0, 0.0)
        #: The seconds of exchanges in F, and in B or I, of the first 0, 1, 2, .. layers.
        self._exchanges = [0.0, *accumulate(layer.exchange(link) for layer in layers)]
        layers = [layer.with_exchanges(link) for layer in layers]
        #: The layers, then the loss: one more layer, always in the last stage, never recomputed.
        self._all = [*layers, *([] if loss is None else [loss])]
        self.count = len(layers)
        figures: tuple[Callable[[LayerCost], float], ...] = (
            lambda layer: layer.forward,
            lambda layer: layer.whole,
            lambda layer: layer.input_grad or 0,
            lambda layer: layer.weight_grad or 0,
            lambda layer: layer.parameters,
            lambda layer: layer.gradients,
            lambda layer: layer.buffers,
            lambda layer: layer.held - layer.releases,
            lambda layer: layer.held_split - layer.releases,
            lambda layer: layer.waiting,
        )
        #: For each of ``figures`` its sums over the first 0, 1, 2, .. entries of ``_all``.
        self._sums = [[0.0, *accumulate(map(figure, self._all))] for figure in figures]
        self._seconds: list[float] = [
            forward + backward for forward, backward in zip(*self._sums[:2])
        ]

    def _end_with_loss(self, end: int) -> int:
        """Returns a stage's end in ``_all``: after the loss if ``end`` is the number of layers."""
        return len(self._all) if end == self.count else end

    def seconds(self, start: int, end: int) -> float:
        """Returns the seconds of F and B of the layers ``start`` to ``end - 1``."""
        return self._seconds[self._end_with_loss(end)] - self._seconds[start]

    def least(self) -> float:
        """Returns the seconds of all layers, each with its faster backward, whole or split."""
        return sum(layer.seconds for layer in self._all)

    def static(self, start: int, end: int) -> tuple[int, int, int]:
        """Returns the bytes of parameters, gradients and buffers of ``start`` to ``end - 1``.

        Returns:
            Three numbers, in this order.
        """
        last = self._end_with_loss(end)
        parameters, gradients, buffers = (int(sums[last] - sums[start]) for sums in self._sums[4:7])
        return parameters, gradients, buffers

    def held(self, start: int, end: int) -> int:
        """Returns the bytes that F of ``start`` to ``end - 1`` holds, with nothing recomputed."""
        last = self._end_with_loss(end)
        return int(self._sums[7][last] - self._sums[7][start]) + self._input_bytes(start)

    def stage(self, start: int, end: int, recompute: Collection[int] = ()) -> StageCost:
        """Returns the costs of the stage of layers ``start`` to ``end - 1``, the loss included.

        Args:
            start: The first layer.
            end: The layer after the last.
            recompute: Layers whose forward is run again in backward; those of other stages are
                ignored.
        """
        last = self._end_with_loss(end)
        times = [sums[last] - sums[start] for sums in self._sums[:4]]
        received = self._input_bytes(start)
        held, held_split, waiting = (
            int(sums[last] - sums[start]) + extra
            for sums, extra in zip(self._sums[7:], (received, received, 0))
        )
        recomputed = [number for number in recompute if start <= number < end]
        for layer in (self._all[number] for number in recomputed):
            # Its W runs with its I: what W needs is recomputed only then.
            moved = layer.weight_grad or 0
            times[1] += layer.forward
            times[2] += layer.forward + moved
            times[3] -= moved
            held -= layer.saved
            held_split -= layer.saved_split
            waiting -= layer.waiting
        if not all(layer.splits for layer in self._all[start:last]):
            times[2:] = 0, 0
        parameters, gradients, buffers = self.static(start, end)
        working = self._peak_of_backward(start, last, frozenset(recomputed))
        output = self._all[end - 1].output
        forward, backward, input_grad, weight_grad = times
        return StageCost(
            *(forward, backward, input_grad, max(weight_grad, 0)),
            *(parameters, gradients, buffers, output),
            *(max(held, 0), max(held_split, 0), max(waiting, 0), working),
            self._exchanges[end] - self._exchanges[start],
        )

    def cut(
        self, boundaries: Sequence[int], recompute: Sequence[Collection[int]] = ()
    ) -> tuple[StageCost, ...]:
        """Returns the costs of each stage of a cut, in order.

        Args:
            boundaries: First layer of each stage, then the number of layers.
            recompute: For each stage the layers that are recomputed; may be left out.
        """
        recomputed = recompute or [()] * (len(boundaries) - 1)
        return tuple(
            self.stage(start, end, layers)
            for start, end, layers in zip(boundaries, boundaries[1:], recomputed)
        )

    def _input_bytes(self, start: int) -> int:
        """Returns the bytes that a stage holds for its input, if it begins with layer ``start``.

        They are the bytes that the stage receives, and what its first layer ``releases``: the
        layer's forward would free so many bytes of its input, but nothing frees a received input
        before the backward. The sums of ``held`` count them as freed, so they are added here.
        """
        # The input of the first stage is the batch, which is in memory anyway.
        received = self._all[start - 1].output if start else 0
        return received + self._all[start].releases

    def _peak_of_backward(self, start: int, last: int, recompute: Collection[int]) -> int:
        """Returns the most bytes that a backward of a stage uses beyond those held before it.

        The backward goes from the last layer to the first, and frees the activations of a layer
        when it has finished that layer.

        Args:
            start: The stage's first layer.
            last: The end of the stage in ``_all``.
            recompute: Layers whose forward is run again in backward.
        """
        most = freed = 0
        for number in range(last - 1, start - 1, -1):
            layer = self._all[number]
            # What the second forward of a recomputed layer allocates anew.
            again = layer.saved if number in recompute else 0
            most = max(most, layer.output + layer.working + again - freed)
            freed += max(layer.held - layer.releases - again, 0)
        return most
