"""What each action costs in time and memory, for simulation."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

from fleetpipe.errors import ConfigError, nearest
from fleetpipe.schedules.action import Action, Fused

#: One figure for every stage, or one for each stage in order.
PerStage = Union[float, tuple[float, ...]]

_PER_STAGE = ("forward", "input_grad", "weight_grad", "backward", "bytes", "comm")
_SCALAR = ("overlapped", "input_grad_frees")

#: Largest figure: sums of such stay finite.
_MOST = 1e100


@dataclass(frozen=True)
class Costs:
    """Costs of the actions of one stage each, in any unit of time.

    Args:
        forward: Time of F; one figure, or a tuple with one for each stage.
        input_grad: Time of I; likewise.
        weight_grad: Time of W; likewise.
        backward: Time of B; None means I + W.
        comm: Latency of a value on an edge between different ranks, and of its gradient back; one
            figure, or one for each stage that values leave. It keeps no rank busy.
        overlapped: Time of a fused pair of one F and one B; None means their sum, as it is for
            every other fused unit.
        input_grad_frees: Share, 0..1, of a forward's activations that I releases. W releases the
            rest, and B everything.
        bytes: Activation bytes that a forward of a stage holds, for ``Timeline.peak_bytes``.

    Raises:
        ConfigError: A figure that is no number in 0..1e100, or a share above 1.
    """

    forward: PerStage = 1
    input_grad: PerStage = 1
    weight_grad: PerStage = 1
    backward: PerStage | None = None
    comm: PerStage = 0
    overlapped: float | None = None
    input_grad_frees: float = 0
    bytes: PerStage | None = None

    def __post_init__(self) -> None:
        for name in _PER_STAGE:
            value = getattr(self, name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)
            for figure in value if isinstance(value, tuple) else (value,):
                _check(name, figure, optional=name in ("backward", "bytes"))
        for name in _SCALAR:
            _check(name, getattr(self, name), optional=name == "overlapped")
        if self.input_grad_frees > 1:
            raise ConfigError(
                "`input_grad_frees` is a share",
                expected="0..1",
                got=str(self.input_grad_frees),
                fix="give the share as a number from 0 to 1",
            )

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Reads ``{"forward": [1, 1.5], "input_grad": [1, 1.5], "comm": 0.1}`` and the like.

        The keys are the fields of this class, and ``profile``, which does not count: a file of
        ``model.profile`` is one of costs too. Each may be left out; a per-stage one holds a list
        or one number for all stages.

        Raises:
            ConfigError: No JSON object, an unknown key, or a figure that is not allowed.
        """
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                "the costs are not JSON",
                cause=str(error),
                fix='write an object such as {"forward": 1, "backward": 2}',
            ) from error
        except RecursionError as error:
            raise ConfigError(
                "the costs are nested too deeply",
                fix='write an object such as {"forward": 1, "backward": 2}',
            ) from error
        if not isinstance(fields, Mapping):
            raise ConfigError(
                "the costs are no JSON object",
                got=type(fields).__name__,
                fix='write an object such as {"forward": 1, "backward": 2}',
            )
        # What a profile has besides, for each layer.
        fields = {key: value for key, value in fields.items() if key != "profile"}
        for key in fields:
            if key not in _PER_STAGE + _SCALAR:
                raise ConfigError(
                    f"unknown cost {key!r}", fix=nearest(str(key), _PER_STAGE + _SCALAR)
                )
        return cls(**fields)

    def check_stages(self, stages: int) -> None:
        """Raises ConfigError where a per-stage figure does not have one entry for each stage."""
        for name in _PER_STAGE:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != stages:
                raise ConfigError(
                    f"`{name}` must have one figure for each stage",
                    expected=f"{stages} figures",
                    got=f"{len(value)}",
                    fix=f"give {stages} figures, or one number for all stages",
                )

    def of(self, kind: str, stage: int) -> float:
        """Returns the time of one action of ``kind`` on ``stage``."""
        if kind == "B" and self.backward is None:
            return _at(self.input_grad, stage) + _at(self.weight_grad, stage)
        values = {
            "F": self.forward,
            "I": self.input_grad,
            "W": self.weight_grad,
            "B": self.backward,
        }
        value = values[kind]
        return 0 if value is None else _at(value, stage)

    def comm_of(self, stage: int) -> float:
        """Returns the latency of what leaves ``stage``, and of the gradient that comes back."""
        return _at(self.comm, stage)

    def of_fused(self, unit: Fused) -> float:
        """Returns the time of a fused unit."""
        kinds = sorted(action.kind for action in unit.actions)
        if kinds == ["B", "F"] and self.overlapped is not None:
            return self.overlapped
        return sum(self.of(action.kind, action.stage) for action in unit.actions)

    def bytes_of(self, action: Action) -> float:
        """Returns the activation bytes that a forward of the action's stage holds."""
        return 0 if self.bytes is None else _at(self.bytes, action.stage)


def _at(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, tuple) else value


def _check(name: str, figure: object, *, optional: bool) -> None:
    if figure is None and optional:
        return
    number = isinstance(figure, (int, float)) and not isinstance(figure, bool)
    if not number or not 0 <= figure <= _MOST:  # type: ignore[operator]
        raise ConfigError(
            f"`{name}` must be a finite number of at least 0",
            expected=f"0..{_MOST:g}",
            got=f"{name}={reprlib.repr(figure)}",
            fix="give a number, such as 1.5",
        )
