"""Runs the layers of a stage one after another: keyed, and in recomputed pieces."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from fleetpipe._paddle import paddle
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.backward import recompute
from fleetpipe.dygraph.backward.recompute import Piece
from fleetpipe.dygraph.layers import refusals
from fleetpipe.dygraph.nest import replace, tensors_of
from fleetpipe.dygraph.random_keys import Keys
from fleetpipe.errors import ConfigError
from fleetpipe.partition import Partition


class _Step(NamedTuple):
    """A layer and its number in the whole list."""

    number: int
    function: Callable[[Any], Any]


class _Part(NamedTuple):
    """Layers of a stage one after another, which are recomputed together; without piece not."""

    steps: tuple[_Step, ...]
    piece: Piece | None


class StageRunner:
    """Calls the layers of the stages of this process, each with what the one before returned."""

    def __init__(
        self,
        functions: Mapping[int, Callable[[Any], Any]],
        partition: Partition,
        recompute_interval: int = 0,
    ) -> None:
        """Takes the built layers.

        Args:
            functions: The layers and functions by their number in the whole list.
            partition: The cut into stages.
            recompute_interval: Layers of a piece that is recomputed as one; 0 for none.
        """
        self._functions = functions
        self._partition = partition
        self._interval = recompute_interval
        self._parts: dict[int, list[_Part]] = {}
        #: Whether a stage, run with gradients or without, writes into what it is given.
        self._writes: dict[tuple[int, bool], bool] = {}

    def run(self, stage: int, value: Any, micro_batch: int | None = None) -> Any:
        """Runs the layers of ``stage``.

        Args:
            stage: A global stage of this process.
            value: What the first layer takes: a Tensor, or nested tuples, lists, dicts of them.
            micro_batch: The global micro-batch in a run of a plan; None in a direct call.

        Raises:
            BoundaryError: A layer cannot take what the one before returned.
        """
        kind = stage, paddle.is_grad_enabled()
        if self._writes.get(kind) is False:
            return self._run(stage, value, micro_batch)
        # Paddle lets nobody write into a leaf, and others may hold the memory.
        copies = {id(tensor): tensor.clone() for tensor in tensors_of(value)}
        versions = [copy.inplace_version for copy in copies.values()]
        output = self._run(stage, replace(value, copies), micro_batch)
        written = versions != [copy.inplace_version for copy in copies.values()]
        self._writes[kind] = written or self._writes.get(kind, False)
        return output

    def _run(self, stage: int, value: Any, micro_batch: int | None) -> Any:
        keys = None if micro_batch is None else random_keys.current()
        for part in self._parts.get(stage) or self._parts_of(stage):
            if part.piece is not None:
                value = _sole(value)
            if part.piece is not None and part.piece.needs_recompute(value):
                run = functools.partial(self._call, part.steps, keys, micro_batch)
                value = recompute.call(part.piece, run, value)
            else:
                value = self._call(part.steps, keys, micro_batch, value)
        return value

    def _parts_of(self, stage: int) -> list[_Part]:
        """Returns the parts of a stage, made at its first run."""
        first, last = self._partition.boundaries[stage : stage + 2]
        bounds = [*range(first, last, self._interval or last - first), last]
        self._parts[stage] = [self._part(stage, *ends) for ends in zip(bounds, bounds[1:])]
        return self._parts[stage]

    def _part(self, stage: int, start: int, end: int) -> _Part:
        functions = {index: self._functions[index] for index in range(start, end)}
        steps = tuple(_Step(index, function) for index, function in functions.items())
        if not self._interval:
            return _Part(steps, None)
        name = f"stage {stage}, layers {start} to {end - 1}"
        return _Part(steps, Piece(name, functions.values()))

    def _call(
        self, steps: tuple[_Step, ...], keys: Keys | None, micro_batch: int | None, value: Any
    ) -> Any:
        """Calls layers one after another, in a run of a plan each under its own key."""
        if micro_batch is None:
            keys = None
        elif keys is not None:
            keys.micro_batch = micro_batch
        for number, function in steps:
            if keys is not None:
                keys.enter(number, function)
            try:
                value = function(value)
            except Exception as error:
                if not refusals.is_refusal(error, value, __file__):
                    raise
                raise refusals.refusal(error, self._partition, number, function, value) from error
        return value


def _sole(value: Any) -> Any:
    """Returns the one entry of a tuple: so Fleet begins each piece, recomputed or not."""
    return value[0] if type(value) is tuple and len(value) == 1 else value


def checked_interval(recompute_interval: Any, recompute_ctx: Any) -> int:
    """Returns the number of layers that are recomputed together; 0 for none.

    Args:
        recompute_interval: The option of ``PipelineLayer``.
        recompute_ctx: Likewise. Its ``offload`` and ``partition`` change where Fleet keeps the
            inputs of a piece; here they have no effect.

    Raises:
        ConfigError: The interval is no such number, or is given without ``recompute_ctx``.
    """
    if (
        isinstance(recompute_interval, bool)
        or not isinstance(recompute_interval, int)
        or (recompute_interval < 0)
    ):
        raise ConfigError(
            "recompute_interval is a number of layers, or 0 for no recompute",
            got=repr(recompute_interval),
        )
    if recompute_interval and recompute_ctx is None:
        raise ConfigError(
            "recompute_interval needs recompute_ctx, as it does in Fleet",
            got=f"recompute_interval={recompute_interval}, recompute_ctx=None",
            fix='pass recompute_ctx={"mp_group": hcg.get_model_parallel_group(), '
            '"offload": False, "partition": False}',
        )
    return recompute_interval
