"""What one layer of a model costs, and one link between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.json_value import MOST
from fleetpipe.representation import shows

_OPTIONAL = ("backward", "input_grad", "weight_grad")


class Link(NamedTuple):
    """What a value costs between two ranks.

    Attributes:
        latency: Seconds on its way, whatever its size.
        per_byte: Seconds for each byte.
    """

    latency: float = 3e-5
    per_byte: float = 3e-10

    def seconds(self, size: float) -> float:
        """Returns how long a value of ``size`` bytes is on its way."""
        return self.latency + self.per_byte * size


class Transfer(NamedTuple):
    """What a value that crosses to another rank keeps both ranks busy with, beside its link.

    Attributes:
        sending: Seconds of the rank that sends it, whatever its size.
        receiving: Seconds of the rank that receives it.
        per_byte: Seconds of either for each byte.
    """

    sending: float = 0.0
    receiving: float = 0.0
    per_byte: float = 0.0

    def sends(self, size: float) -> float:
        """Returns how long a rank is busy that sends ``size`` bytes."""
        return self.sending + self.per_byte * size

    def receives(self, size: float) -> float:
        """Returns how long a rank is busy that receives ``size`` bytes."""
        return self.receiving + self.per_byte * size


@shows("name", "forward", "backward", "input_grad", "weight_grad", "parameters", "held")
@dataclass(frozen=True)
class LayerCost:
    """What a layer (or a node of a captured model) costs for one micro-batch.

    Attributes:
        name: Its class name, or that of a function; of a node its path.
        forward: Seconds of F.
        backward: Seconds of a whole B; None: I + W.
        input_grad: Seconds of I, and those by which an F is slower that keeps what W needs. None
            where it was not measured: then no schedule splits backward.
        weight_grad: Seconds of W; None likewise.
        parameters: Bytes of its trained parameters which no layer before it uses.
        gradients: Bytes of their gradients.
        buffers: Bytes of what it has that is not trained, and no layer before it uses.
        output: Bytes of what is alive after it: they cross where a stage ends with it.
        held: Bytes that its F leaves allocated until B, its output among them.
        releases: Bytes of its input that are let go once it has run, unless it is the first of a
            stage.
        held_split: As ``held``, where backward is split.
        waiting: Bytes that stay allocated between I and W.
        working: Most bytes that an action takes besides, while it runs.
        saved: Bytes of ``held`` that are not held where it is recomputed; 0: it never is.
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

    @property
    def whole(self) -> float:
        """Seconds of a whole backward."""
        if self.backward is not None:
            return self.backward
        return (self.input_grad or 0) + (self.weight_grad or 0)

    @property
    def splits(self) -> bool:
        """Whether I and W are known apart."""
        return self.input_grad is not None and self.weight_grad is not None

    @property
    def seconds(self) -> float:
        """Forward, and backward in the way that is faster."""
        apart = (self.input_grad or 0) + (self.weight_grad or 0)
        return self.forward + (min(self.whole, apart) if self.splits else self.whole)

    @property
    def saved_split(self) -> int:
        """Bytes of ``held_split`` that are not held where it is recomputed."""
        return max(self.held_split - (self.held - self.saved), 0) if self.saved else 0


def check_layer(layer: LayerCost, where: str) -> None:
    """Raises ConfigError for a figure that cannot be, or where no backward is known."""
    for field in fields(LayerCost):
        if field.name != "name":
            value = getattr(layer, field.name)
            if value is not None or field.name not in _OPTIONAL:
                check_figure(field.name, value, where)
    if layer.backward is None and not layer.splits:
        raise ConfigError(
            "the time of a backward is not known",
            where=where,
            expected="`backward`, or both `input_grad` and `weight_grad`",
            got="`weight_grad` alone"
            if layer.weight_grad is not None
            else "`input_grad` alone"
            if layer.input_grad is not None
            else "none of them",
            fix="give what is missing, or measure it with model.profile(batch)",
        )


def check_figure(name: str, value: object, where: str) -> None:
    """Raises ConfigError for what is no number of 0 or more."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= float(value) <= MOST or math.isnan(float(value)):  # type: ignore[arg-type]
        raise ConfigError(
            f"`{name}` is no time or size",
            where=where,
            expected="a number of 0 or more",
            got=f"{name}={value!r}",
            fix="measure it again with model.profile(batch), or write a number of 0 or more",
        )
