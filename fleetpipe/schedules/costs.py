"""The time and memory that each action costs, for simulation."""

from __future__ import annotations

import os
import reprlib
from dataclasses import dataclass, fields, replace
from typing import Any

from fleetpipe.errors import ConfigError, nearest
from fleetpipe.json_value import MOST, JsonValue, Source, parse, read
from fleetpipe.representation import shows
from fleetpipe.schedules.action import Action, Fused, Item, parts
from fleetpipe.schedules.placement import Placement

#: One figure for every stage, or one for each stage in order.
PerStage = float | tuple[float, ...]

_PER_STAGE = ("forward", "input_grad", "weight_grad", "backward", "bytes", "comm", "exchange")

_SOURCE = Source(
    "these are no costs of a schedule",
    ConfigError,
    'write an object such as {"forward": 1, "backward": 2}, or model.profile(data, path)',
)


@shows(
    *("forward", "input_grad", "weight_grad", "backward"),
    *("comm", "exchange", "overlapped", "bytes"),
)
@dataclass(frozen=True)
class Costs:
    """Costs of the actions of one stage each, in any unit of time.

    Args:
        forward: Time of F; one figure, or a tuple with one for each stage.
        input_grad: Time of I, given like ``forward``.
        weight_grad: Time of W, given like ``forward``.
        backward: Time of B; None means I + W.
        comm: Latency of a value on an edge between different ranks, and of its gradient back; one
            figure, or one for each stage that values leave. It keeps no rank busy.
        exchange: The part of an F and of a B in which the rank waits for exchanges with other ranks
            of its stage; one figure, or one for each stage. In a fused pair of an F and a B of two
            stages the computation of each hides the wait of the other.
        overlapped: Time of a fused pair of one F and one B in any case; None means their sum
            without the waits that are hidden. Other fused units take the sum.
        input_grad_frees: Share, 0..1, of a forward's activations that I releases. W releases the
            rest, and B everything.
        bytes: Activation bytes that a forward of a stage holds, for ``Timeline.peak_bytes``.
        each_slice: The costs of the first slice of a sequence, the second, and so on, if they
            differ. The other figures are then those of a whole micro-batch. None: all slices cost
            the same.

    Raises:
        ConfigError: A figure that is not a number in 0..1e100, a share above 1, or costs of slices
            of another type.
    """

    forward: PerStage = 1
    input_grad: PerStage = 1
    weight_grad: PerStage = 1
    backward: PerStage | None = None
    comm: PerStage = 0
    exchange: PerStage = 0
    overlapped: float | None = None
    input_grad_frees: float = 0
    bytes: PerStage | None = None
    each_slice: tuple[Costs, ...] | None = None

    def __post_init__(self) -> None:
        for name in _PER_STAGE:
            value = getattr(self, name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)
            if value is None and name in ("backward", "bytes"):
                continue
            for figure in value if isinstance(value, tuple) else (value,):
                _require_figure(name, figure)
        if self.overlapped is not None:
            _require_figure("overlapped", self.overlapped)
        _require_figure("input_grad_frees", self.input_grad_frees)
        if self.input_grad_frees > 1:
            raise ConfigError(
                "`input_grad_frees` is a share",
                expected="0..1",
                got=str(self.input_grad_frees),
                fix="give the share as a number from 0 to 1",
            )
        if self.each_slice is not None:
            object.__setattr__(self, "each_slice", tuple(self.each_slice))
            self._check_slices()

    def _check_slices(self) -> None:
        """Refuses ``each_slice`` if it is empty, or has anything but plain costs of one slice."""
        for costs in self.each_slice or (None,):
            valid = (
                isinstance(costs, Costs)
                and costs.each_slice is None
                and (costs.bytes is None) == (self.bytes is None)
            )
            if not valid:
                raise ConfigError(
                    "`each_slice` has the costs of each slice, with bytes where the others have",
                    got=reprlib.repr(costs),
                    fix="each_slice=(Costs(forward=1), Costs(forward=1.2))",
                )

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Reads ``{"forward": [1, 1.5], "input_grad": [1, 1.5], "comm": 0.1}`` or other such keys.

        The keys are the fields of this class, and ``profile``, which is ignored, so that a file of
        ``model.profile`` can be read. Each may be left out; a per-stage one holds a list or one
        number for all stages.

        Raises:
            ConfigError: No JSON object, an unknown key, or a figure that is not allowed.
        """
        return cls._from_json_value(parse(text, _SOURCE))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Costs:
        """Reads a file in the form of :meth:`from_json`, and raises the same errors."""
        return read(path, _SOURCE, cls._from_json_value)

    @classmethod
    def _from_json_value(cls, content: JsonValue) -> Costs:
        """Reads the JSON object of :meth:`from_json`, and raises the same errors."""
        # "profile" has the figures of each layer.
        values = {name: value for name, value in content.fields().items() if name != "profile"}
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise ConfigError(f"unknown cost {name!r}", fix=nearest(name, names))
        slices = values.pop("each_slice", None)
        costs: dict[str, Any] = {name: value.content for name, value in values.items()}
        if slices is not None and slices.content is not None:
            costs["each_slice"] = tuple(map(cls._from_json_value, slices.items()))
        return cls(**costs)

    def check_stages(self, stages: int) -> None:
        """Raises ConfigError if a cost has figures by stage, and not ``stages`` of them."""
        for costs in (self, *(self.each_slice or ())):
            for name in _PER_STAGE:
                value = getattr(costs, name)
                if isinstance(value, tuple) and len(value) != stages:
                    raise ConfigError(
                        f"`{name}` must have one figure for each stage",
                        expected=f"{stages} figures",
                        got=f"{len(value)}",
                        fix=f"give {stages} figures, or one number for all stages",
                    )

    def without_loss(self, placement: Placement) -> Costs:
        """Returns these costs for a model with a vocabulary head, whose last stage is the loss.

        A time that is one figure for all stages becomes a tuple with 0 for the loss.

        Args:
            placement: The placement of the stages. Without a head the costs are returned unchanged.
        """
        if not placement.has_head:
            return self
        stages = placement.stages - 1
        changes: dict[str, Any] = {}
        for name in ("forward", "input_grad", "weight_grad", "backward"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                changes[name] = (value,) * stages + (0,)
        return replace(self, **changes)

    def by_slice(self, slices: int) -> tuple[Costs, ...]:
        """Returns the costs of each slice of a micro-batch, in order.

        Args:
            slices: Slices of each micro-batch of a schedule. 1: the result has the costs of whole
                micro-batches alone.

        Raises:
            ConfigError: ``each_slice`` has another number of slices.
        """
        if self.each_slice is None or slices == 1:
            return (self,) * slices
        if len(self.each_slice) != slices:
            raise ConfigError(
                "these costs are of sequences that are cut into another number of slices",
                expected=f"{len(self.each_slice)} slices",
                got=f"{slices} slices",
                fix=f"choose slices={len(self.each_slice)}, or measure the model with {slices}",
            )
        return self.each_slice

    def of(self, kind: str, stage: int) -> float:
        """Returns the time of one action, from its kind and its stage."""
        if kind == "B" and self.backward is None:
            return _figure_of_stage(self.input_grad, stage) + _figure_of_stage(
                self.weight_grad, stage
            )
        values = {
            "F": self.forward,
            "I": self.input_grad,
            "W": self.weight_grad,
            "B": self.backward,
        }
        value = values[kind]
        return 0 if value is None else _figure_of_stage(value, stage)

    def comm_of(self, stage: int) -> float:
        """Returns the latency of the values that leave a stage, and of their gradients."""
        return _figure_of_stage(self.comm, stage)

    def of_fused(self, unit: Fused) -> float:
        """Returns the time of a fused unit: the sum of its actions' times.

        Of a pair of F and B it is :attr:`overlapped`, if that is given; else, on two stages, the
        sum without the waits for exchanges, which the other action hides.
        """
        times = [self.of(action.kind, action.stage) for action in unit.actions]
        if sorted(action.kind for action in unit.actions) != ["B", "F"]:
            return sum(times)
        if self.overlapped is not None:
            return self.overlapped
        stages = {action.stage for action in unit.actions}
        if len(stages) == 1:
            return sum(times)
        return max(
            sum(times) - sum(_figure_of_stage(self.exchange, stage) for stage in stages), *times
        )

    def exchange_in(self, item: Item) -> float:
        """Returns the time of an action or a fused unit in which its rank waits for an exchange."""
        actions = parts(item)
        waits = [self._exchange_of(action) for action in actions]
        if not any(waits):
            return 0
        times = [self.of(action.kind, action.stage) for action in actions]
        whole = self.of_fused(item) if isinstance(item, Fused) else times[0]
        computing = sum(time - wait for time, wait in zip(times, waits))
        return min(max(whole - computing, 0), sum(waits), whole)

    def _exchange_of(self, action: Action) -> float:
        """Returns the time of an action, run alone, in which its rank waits for an exchange."""
        return 0 if action.kind == "W" else _figure_of_stage(self.exchange, action.stage)

    def bytes_of(self, action: Action) -> float:
        """Returns the bytes of activations that a forward of the action's stage holds."""
        return 0 if self.bytes is None else _figure_of_stage(self.bytes, action.stage)


def _figure_of_stage(value: PerStage, stage: int) -> float:
    """Returns the cost of one stage from a cost for all stages, or a tuple of one for each."""
    return value[stage] if isinstance(value, tuple) else value


def _require_figure(name: str, figure: object) -> None:
    """Raises ConfigError for a cost, named ``name``, that is not a number from 0 to MOST."""
    number = isinstance(figure, (int, float)) and not isinstance(figure, bool)
    if not number or not 0 <= figure <= MOST:  # type: ignore[operator]
        raise ConfigError(
            f"`{name}` must be a finite number of at least 0",
            expected=f"0..{MOST:g}",
            got=f"{name}={reprlib.repr(figure)}",
            fix="give a number, such as 1.5",
        )
