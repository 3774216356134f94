"""Predicts layers' costs if sequences or experts are split in another way than measured.

Along ``ep`` a rank has 1/n of the experts, and gets their tokens from n ranks: its work changes
only because some experts get more tokens than others. Along ``sep`` and ``cp`` a rank has 1/n of
all positions. The exchanged bytes follow from the tokens of experts, and from queries and keys; if
each of n ranks has equal parts for all ranks, it sends (n-1)/n of them. Slices of a schedule have
equal costs, although later ones attend to more positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.errors import ConfigError, require_whole
from fleetpipe.profiling.cost_model import LayerCost, Link, Transfer

_TIMES = ("forward", "backward", "input_grad", "weight_grad")
#: The figures of a layer that are proportional to the number of positions of a sequence.
_SIZES_PER_POSITION = (
    *("output", "held", "releases", "held_split", "waiting", "working", "saved"),
    *("routed", "queries", "keys"),
)


class LayerDegrees(NamedTuple):
    """The number of ranks that share the layers of a stage, by axis.

    Attributes:
        ep: Ranks that share experts.
        sep: Ranks that share sequences, and exchange heads for positions.
        cp: Ranks that share sequences, and pass keys on.
    """

    ep: int = 1
    sep: int = 1
    cp: int = 1

    @classmethod
    def of(cls, degrees: Any) -> LayerDegrees:
        """Returns the degrees ``ep``, ``sep`` and ``cp`` of a job's ``degrees``."""
        return cls(degrees.ep, degrees.sep, degrees.cp)

    def check(self) -> None:
        """Raises ConfigError unless all degrees are whole numbers of at least 1."""
        for axis, degree in self._asdict().items():
            require_whole(f"{axis}_degree", degree)

    @property
    def sequences(self) -> int:
        """The number of ranks over which a sequence is split, along sep and cp together."""
        return self.sep * self.cp

    def __str__(self) -> str:
        return ", ".join(f"{axis}_degree={degree}" for axis, degree in self._asdict().items())


class _Exchanged(NamedTuple):
    """The exchanges of one rank for a layer with other ranks of its stage, in F and B together.

    Attributes:
        calls: The number of exchanges.
        messages: The number of messages that the rank sends in them.
        nbytes: The bytes of these messages.
    """

    calls: int
    messages: int
    nbytes: float

    def busy(self, transfer: Transfer) -> float:
        """Returns the seconds for which these exchanges keep the rank busy in F, and in B or I."""
        per_message = transfer.sending + transfer.receiving
        return self.messages * per_message / 2 + self.nbytes * transfer.per_byte


def _exchanges_at(layer: LayerCost, measured: LayerDegrees, degrees: LayerDegrees) -> _Exchanged:
    """Returns a layer's exchanges at ``degrees``; its sizes were measured at other degrees."""
    ep, sep, cp = degrees
    routed, queries, keys = (
        size * measured.sequences / degrees.sequences
        for size in (layer.routed, layer.queries, layer.keys)
    )
    # Forward sends counts of tokens, the tokens, and the experts' outputs; backward two gradients.
    for_experts = 5 * len(layer.loads) * (ep > 1)
    for_heads = 4 * len(layer.heads) * (sep > 1)
    # Two chunks from each rank, and in backward gradients too. A causal ring leaves some out.
    for_chunks = 6 * len(layer.heads) * (cp - 1)
    return _Exchanged(
        calls=for_experts + for_heads + for_chunks,
        messages=for_experts * (ep - 1) + for_heads * (sep - 1) + for_chunks * (cp - 1),
        nbytes=4 * routed * (ep - 1) / ep
        + 2 * (2 * queries + keys) * (sep - 1) / sep
        + 2.5 * keys * (cp - 1),
    )


def _load_of_busiest_rank(layer: LayerCost, ep: int) -> float:
    """Returns the load of the rank whose experts get the most tokens, as a multiple of the mean.

    The experts of the layer are shared by ``ep`` ranks.
    """
    total = sum(map(sum, layer.loads))
    tokens = [0] * ep
    for loads in layer.loads:
        for expert, count in enumerate(loads):
            tokens[expert * ep // len(loads)] += count
    return ep * max(tokens) / total if total else 1.0


def costs_at(
    layers: Sequence[LayerCost],
    measured: LayerDegrees,
    degrees: LayerDegrees,
    transfer: Transfer,
    included_link: Link,
) -> list[LayerCost]:
    """Returns the costs of layers at other degrees, without the time of exchanges on links.

    Args:
        layers: The measured costs.
        measured: The degrees at which they were measured.
        degrees: The wanted degrees.
        transfer: The seconds for which a message keeps the sending and the receiving rank busy.
        included_link: The link of the exchanges among a stage's ranks, if ``layers`` include the
            time that values travel on it; else a link that takes no time.

    Raises:
        ConfigError: Some layer cannot have these degrees, or its costs say nothing about them.
    """
    _require_possible(layers, measured, degrees)
    subtracted = Link(-included_link.latency, -included_link.per_byte)
    bare = [layer.with_exchanges(subtracted) for layer in layers]
    return [_cost_at(layer, measured, degrees, transfer) for layer in bare]


def _cost_at(
    layer: LayerCost, measured: LayerDegrees, degrees: LayerDegrees, transfer: Transfer
) -> LayerCost:
    """Returns the costs of one layer at other degrees, as :func:`costs_at` does."""
    part = measured.sequences / degrees.sequences
    more = _load_of_busiest_rank(layer, degrees.ep) / _load_of_busiest_rank(layer, measured.ep)
    before = _exchanges_at(layer, measured, measured)
    after = _exchanges_at(layer, measured, degrees)
    times: dict[str, Any] = {}
    for name in _TIMES:
        seconds = getattr(layer, name)
        if seconds is not None:
            exchanges = name != "weight_grad"
            busy_before = before.busy(transfer) if exchanges else 0.0
            busy_after = after.busy(transfer) if exchanges else 0.0
            computing = seconds + (more - 1) * layer.expert_share * seconds - busy_before
            times[name] = max(computing, 0.0) * part + busy_after
    expert_seconds = layer.expert_share * layer.forward * more * part
    # Experts to which no tokens are routed are on every rank.
    elsewhere = layer.expert_parameters * (measured.ep / degrees.ep - 1) * bool(layer.loads)
    sizes: dict[str, Any] = {name: int(getattr(layer, name) * part) for name in _SIZES_PER_POSITION}
    return replace(
        layer,
        **times,
        **sizes,
        parameters=int(layer.parameters + elsewhere),
        gradients=int(layer.gradients + elsewhere),
        exchanges=max(layer.exchanges + after.calls - before.calls, 0),
        exchanged=int(max(layer.exchanged - before.nbytes, 0) * part + after.nbytes),
        expert_share=min(expert_seconds / times["forward"], 1.0) if times["forward"] else 0.0,
        expert_parameters=int(layer.expert_parameters + elsewhere),
    )


def _require_possible(
    layers: Sequence[LayerCost], measured: LayerDegrees, degrees: LayerDegrees
) -> None:
    """Refuses degrees that do not divide experts or heads, or of which nothing was measured."""
    degrees.check()
    experts = [(layer, len(loads)) for layer in layers for loads in layer.loads]
    heads = [(layer, count) for layer in layers for count in layer.heads]
    for axis, shared, what in (("ep", experts, "experts"), ("sep", heads, "heads")):
        degree = getattr(degrees, axis)
        for layer, count in shared:
            if count % degree:
                divisors = (n for n in range(1, count + 1) if count % n == 0)
                nearest = min(divisors, key=lambda n: abs(n - degree))
                raise ConfigError(
                    f"{count} {what} cannot be shared out to {axis}_degree={degree} ranks",
                    where=layer.name,
                    fix=f"give {axis}_degree={nearest}",
                )
    unknown = (degrees.ep != measured.ep and not experts and "experts") or (
        degrees[1:] != measured[1:] and not heads and "attention"
    )
    if unknown:
        raise ConfigError(
            f"the profile says nothing of {unknown}, so what other degrees cost is not known",
            expected=f"{measured}, those of the profile",
            got=str(degrees),
            cause="no layer has Experts or MoELayer, or none calls "
            "fleetpipe.dygraph.sequences.attention; or the profile is older, or written by hand",
            fix="measure the model with these degrees, or plan with those of the profile",
        )


def balanced(lengths: Sequence[int], times: Sequence[float], slices: int) -> tuple[int, ...]:
    """Returns the lengths of slices of the measured sequences that should take equally long.

    The computation-wise cut of Seq1F1B (arXiv:2406.03488), from times instead of operations: the
    slice of the positions a to b-1 costs x (b-a) + y (b^2-a^2)/2, with x and y fitted to the
    measured times, neither below 0.

    Args:
        lengths: The number of positions of each measured slice, in order.
        times: The seconds that each took, forward and backward.
        slices: The number of slices to cut into.

    Raises:
        ConfigError: There are fewer positions than slices.
    """
    require_whole("slices", slices)
    ends = list(accumulate(lengths))
    length = ends[-1]
    if slices > length:
        raise ConfigError(
            "a slice has at least one place",
            expected=f"at most {length} slices",
            got=f"{slices} slices",
            fix="cut into fewer slices",
        )
    x, y = _fit_times(lengths, ends, times)
    total = x * length + y * length**2 / 2
    balanced_lengths: list[int] = []
    for index in range(1, slices + 1):
        wanted = total * index / slices
        if y * length > 1e-9 * x:
            end = (math.sqrt(x**2 + 2 * y * wanted) - x) / y
        else:
            end = length * index / slices
        before = sum(balanced_lengths)
        balanced_lengths.append(max(1, min(round(end), length - (slices - index)) - before))
    return tuple(balanced_lengths)


def _fit_times(
    lengths: Sequence[int], ends: Sequence[int], times: Sequence[float]
) -> tuple[float, float]:
    """Fits x and y of :func:`balanced`: a position's own cost, and that for each it attends to.

    Args:
        lengths: The number of positions of each measured slice.
        ends: The position after the last one of each slice.
        times: The seconds that each slice took.
    """
    rounded = np.array(lengths, float)
    seen = rounded * (np.array(ends) - rounded / 2)
    measured = np.array(times)
    (x, y), *_ = np.linalg.lstsq(np.stack([rounded, seen], axis=1), measured, rcond=None)
    if y <= 0:
        return 1.0, 0.0
    return (float(x), float(y)) if x > 0 else (0.0, 1.0)
