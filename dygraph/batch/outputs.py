"""Batches that run forward only: their engines, and how their outputs are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetpipe.aliases import Nest
from fleetpipe.dygraph import nest
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.engine.engine import Engine
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.paddle_api import paddle
from fleetpipe.schedules import Edge, Placement, Plan, forward_only

#: Engines that are kept: one for full batches, one for a last, smaller one, a few for chance.
_MOST_ENGINES = 8


class Evaluation:
    """Builds and stores the engines that run forwards only, by number of micro-batches."""

    def __init__(
        self, placement: Placement, edges: Sequence[Edge] | None, build: Callable[[Plan], Engine]
    ) -> None:
        self._placement = placement
        self._edges = edges
        self._build = build
        self._engines: dict[int, Engine] = {}

    def engine(self, micro_batches: int) -> Engine:
        """Returns the engine for a batch of that many micro-batches."""
        if micro_batches not in self._engines:
            if len(self._engines) == _MOST_ENGINES:
                del self._engines[next(iter(self._engines))]
            plan = forward_only(self._placement, micro_batches).lower(self._edges)
            self._engines[micro_batches] = self._build(plan)
        return self._engines[micro_batches]


def require_count(batches: MicroBatches, count: int) -> None:
    """Makes sure that this rank has as many micro-batches as the first stage has."""
    for name, part in zip(batches._fields, batches):
        if part is not None and len(part) != count:
            raise ConfigError(
                f"the {name} given to this rank are not those of the first stage's batch",
                expected=f"{count} micro-batches",
                got=f"{len(part)} micro-batches",
                fix="give all ranks the same batch, or None where a rank needs none",
            )


def on_host(value: Nest) -> Nest:
    """Returns ``value`` with its tensors in the memory of the host."""
    return nest.map_tensors(
        lambda tensor: tensor if tensor.place.is_cpu_place() else tensor.cpu(), value
    )


def join_outputs(values: Sequence[Nest]) -> Nest:
    """Joins the outputs of micro-batches along axis 0; containers keep their form.

    Tensors without dimensions are stacked. Texts, flags and None must be equal in all outputs, and
    appear once.

    Raises:
        UsageError: The outputs do not have the same form, or have numbers that are no tensors.
    """
    return nest.join(_join, values)


def _join(parts: Sequence[Nest]) -> Nest:
    first = parts[0]
    if isinstance(first, paddle.Tensor):
        return paddle.concat(list(parts)) if first.ndim else paddle.stack(list(parts))
    if type(first) in (int, float) and len(parts) > 1:
        raise UsageError(
            "a number in an output is that of one micro-batch, and there are several",
            got=", ".join(map(str, parts)),
            fix="return a tensor, whose values are stacked; or take outputs one by one, from "
            "eval_batch",
        )
    unlike = any(type(part) is not type(first) for part in parts)
    if unlike or isinstance(first, (tuple, list, dict)) or any(part != first for part in parts):
        raise _different(parts)
    return first


def _different(values: Sequence[Nest]) -> UsageError:
    return UsageError(
        "the outputs of the micro-batches cannot be joined: they do not have the same form",
        got=", ".join(type(value).__name__ for value in values),
        fix="take them one by one, from eval_batch",
    )
