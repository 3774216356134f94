"""Observers that refuse NaN or Inf in sent values, and state that backwards change for forwards.

``FLAGS_pp_check_naninf`` switches the check of sent values on. State is checked if ranks may
reorder actions: then a forward must not read what a backward writes, such as a scale that a hook
on a gradient computes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.backward.layer_state import (
    CONTAINERS,
    PADDLES_ATTRIBUTES,
    reachable_containers,
)
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.nest import outline, tensors_of
from fleetpipe.engine.observer import BatchObserver, Blocked, Instruction, Played, message_of
from fleetpipe.errors import BoundaryError
from fleetpipe.job.job import required_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import state_slots
from fleetpipe.paddle_api.tensor import to_host
from fleetpipe.schedules import Action, Op, Send
from fleetpipe.transport import MessageKey, Value
from fleetpipe.transport.wire.bridge import checksum

#: The environment variable that switches :class:`FiniteSends` on.
_FLAG = "FLAGS_pp_check_naninf"
#: The names of sent values in messages, by the kind of the message.
_VALUE_NAMES = {"F": "the output", "B": "the gradient of the input"}

#: Types of values that are compared by value, not by identity.
_NUMBERS = (bool, int, float, str)
#: The attributes of layers that are not compared: a schedule replaces ``forward`` in each action.
_LEFT_OUT = {*PADDLES_ATTRIBUTES, "forward"}
#: Stands for the earlier value of an attribute that did not exist before a backward.
_NO_VALUE = object()


class FiniteSends:
    """An observer of the engine that checks every value before it is sent."""

    @classmethod
    def asked_for(cls) -> FiniteSends | None:
        """Returns an observer if ``FLAGS_pp_check_naninf`` is on, else None."""
        return cls() if os.environ[_FLAG].lower() in ("1", "true", "t", "yes", "y") else None

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns a send that raises a :class:`BoundaryError` if its value has NaN or Inf."""
        if not isinstance(op, Send):
            return instruction
        key = message_of(op)

        def check() -> Blocked | None:
            """Refuses NaN and Inf in the value to be sent; else sends it."""
            _require_finite(played.values[key], key, played.rank)
            return instruction()

        return check


def _require_finite(value: Value, key: MessageKey, rank: int) -> None:
    """Refuses a value with NaN or Inf that ``rank`` is about to send as the message ``key``."""
    for tensor in tensors_of(value):
        if tensor.is_floating_point() and not _is_finite(tensor):
            source, target = key.source, key.target
            if key.kind != "F":
                source, target = target, source
            raise BoundaryError(
                f"{_VALUE_NAMES[key.kind]} of stage {source} holds NaN or Inf",
                where=f"rank {rank}, stage {source}, micro-batch {key.micro_batch}, before it is "
                f"sent to stage {target}",
                got=outline(value),
                cause="a too large learning rate, a product that passed the dtype's range, "
                "or such numbers in the data",
                fix=f"unset {_FLAG} to send it all the same",
            )


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite."""
    tensor = tensor.detach()
    if tensor.dtype in (paddle.float16, paddle.bfloat16):
        # Paddle lacks some CPU kernels for half precision.
        tensor = tensor.astype("float32")
    return bool(to_host(paddle.isfinite(tensor).all()))


class BackwardState(BatchObserver):
    """An observer that refuses backwards which change the state of layers, in the first batch."""

    def __init__(self, layers: PipelineLayer) -> None:
        """Creates an observer of the model ``layers``, before its first batch."""
        self._layers = layers
        self._has_ended = False
        self._layers_by_path: Mapping[str, Layer] = {}
        self._containers: list[Any] = []

    def begin(self, batch: Any) -> None:
        """Called before a batch: finds the layers and the containers that their code names."""
        if not self._has_ended:
            layers = dict(paddle.nn.Layer.named_sublayers(self._layers))
            for number, loss in enumerate(self._layers.loss_layers()):
                layers.update(loss.named_sublayers(f"loss.{number}", include_self=True))
            functions = self._layers.named_functions().values()
            self._layers_by_path = layers
            self._containers = [*reachable_containers([*layers.values()], functions)]

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns a backward with a comparison around it; other operations unchanged."""
        if not isinstance(op, Action) or op.kind == "F":
            return instruction

        def compared() -> Blocked | None:
            """Runs the backward; refuses a change of what forwards of the layers read."""
            if self._has_ended:
                return instruction()
            before = dict(self._iterate_values())
            blocked = instruction()
            for key, (name, value) in self._iterate_values():
                _, earlier = before.get(key, ("", _NO_VALUE))
                same_number = isinstance(value, _NUMBERS) and value == earlier
                if value is not earlier and not same_number:
                    _refuse_change(name)
            return blocked

        return compared

    def end(self) -> None:
        """Called after a batch: ends the comparisons, since all batches run the same backwards."""
        self._has_ended, self._layers_by_path, self._containers = True, {}, []

    def _iterate_values(self) -> Iterator[tuple[tuple[int, object], tuple[str, Any]]]:
        """Yields key, name and value of each attribute of layers that a forward may read.

        The value of a buffer or statistic is its checksum. Parameters are left out: only optimizer
        steps change them.
        """
        containers = [("beside the layers", container) for container in self._containers]
        for path, layer in self._layers_by_path.items():
            for name, value in vars(layer).items():
                if name not in _LEFT_OUT:
                    yield (id(layer), name), (f"{path}.{name}", value)
                    containers.append((f"{path}.{name}", value))
            for table, name in state_slots(layer):
                yield (id(table), name), (f"{path}.{name}", checksum([table[name]]))
        for name, value in containers:
            if isinstance(value, CONTAINERS):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in items:
                    yield (id(value), key), (f"{name}[{key!r}]", item)


def _refuse_change(name: str) -> None:
    """Refuses a change of ``name`` by a backward, unless the script allows it."""
    required_job("a batch").allow.refuse(
        "state",
        name,
        "a backward changes what forwards may read, and order='ready' reorders them",
        cause="a hook on a gradient, or the backward of a PyLayer, sets it",
        fix="leave order out",
    )
