"""Runs the layers of a stage in order: under random keys, and in recomputed pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from fleetpipe.aliases import Nest
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.backward import recompute
from fleetpipe.dygraph.backward.recompute import RecomputedPiece, SavedInputs
from fleetpipe.dygraph.layers import refusals
from fleetpipe.dygraph.nest import copies_of, copy_tensors, differentiable, replace
from fleetpipe.dygraph.sums.uses import Uses
from fleetpipe.errors import ConfigError, require_whole
from fleetpipe.partition import Partition
from fleetpipe.schedules.action import GlobalMicroBatch

#: ``run(value, micro_batch)`` runs layers. The value is what the first takes, the micro-batch the
#: global one in a run of a plan, and None in a direct call.
Run = Callable[[Nest, GlobalMicroBatch | None], Nest]


class _Step(NamedTuple):
    """A layer and its number in the whole list."""

    number: int
    function: Callable[[Nest], Nest]


_Steps = tuple[_Step, ...]


class StageRunner:
    """Calls the layers of this process's stages, each with the result of the one before."""

    def __init__(
        self,
        functions: Mapping[int, Callable[[Nest], Nest]],
        partition: Partition,
        recompute_interval: int = 0,
        recompute: Collection[int] = (),
    ) -> None:
        """Creates a runner of built layers.

        Args:
            functions: The layers and functions by their number in the whole list.
            partition: The cut into stages.
            recompute_interval: The number of layers of a recomputed piece; 0 for none.
            recompute: Layers that are recomputed one by one, if there is no interval.
        """
        self._functions = functions
        self._partition = partition
        self._interval = recompute_interval
        self._chosen = frozenset(recompute)
        self._runs: dict[int, Run] = {}
        #: The uses of parameters in the batch that runs, if their gradients are summed apart.
        self.uses: Uses | None = None

    def function(self, stage: int) -> Run:
        """Returns a function that runs the layers of ``stage``, on copies of its argument.

        Copies, because layers may write into their input as within one model, while Paddle allows
        no writes into a leaf, and others may use the memory. The function raises a
        ``BoundaryError`` if a layer cannot take the result of the one before.
        """
        return self._runs.get(stage) or self._run_of(stage)

    def function_without_copies(self, stage: int) -> Run:
        """Returns the same without the copies and without recompute."""
        first, last = self._partition.boundaries[stage : stage + 2]
        return functools.partial(self._run_steps, self._steps(first, last))

    def _run_of(self, stage: int) -> Run:
        """Builds the function that runs a stage, only once: recomputed pieces have state."""
        first, last = self._partition.boundaries[stage : stage + 2]
        if self._interval or not self._chosen.isdisjoint(range(first, last)):
            starts = range(first, last, self._interval or 1)
            pieces = [self._piece(stage, *ends) for ends in zip(starts, [*starts[1:], last])]
            run: Run = functools.partial(self._run_pieces, pieces)
        else:
            run = functools.partial(self._run_steps, self._steps(first, last), on_copies=True)
        self._runs[stage] = run
        return run

    def _steps(self, start: int, end: int) -> _Steps:
        return tuple(_Step(index, self._functions[index]) for index in range(start, end))

    def _piece(self, stage: int, start: int, end: int) -> tuple[_Steps, RecomputedPiece | None]:
        steps = self._steps(start, end)
        if not (self._interval or start in self._chosen):
            return steps, None
        names = ", ".join(layer.name for layer in self._partition.layers[start:end])
        name = f"stage {stage}, layers {start} to {end - 1} ({names})"
        return steps, RecomputedPiece(name, [function for _, function in steps])

    def _run_pieces(
        self,
        pieces: list[tuple[_Steps, RecomputedPiece | None]],
        value: Nest,
        micro_batch: GlobalMicroBatch | None,
    ) -> Nest:
        copies = copies_of(value)
        inputs = SavedInputs((copies[id(tensor)], tensor) for tensor in differentiable(value))
        value = replace(value, copies)
        for steps, piece in pieces:
            if self._interval:
                value = _sole(value)
            run = functools.partial(self._run_steps, steps, micro_batch=micro_batch)
            if piece is not None and piece.needs_recompute(value):
                value = recompute.call(piece, run, value, inputs)
            else:
                value = run(value)
        return value

    def _run_steps(
        self,
        steps: _Steps,
        value: Nest,
        micro_batch: GlobalMicroBatch | None,
        on_copies: bool = False,
    ) -> Nest:
        """Calls layers in order, each under its own random key in a run of a plan."""
        if on_copies:
            value = copy_tensors(value)
        keys = None if micro_batch is None else random_keys.current()
        if keys is not None and micro_batch is not None:
            keys.micro_batch = micro_batch
        for number, function in steps:
            if keys is not None:
                keys.enter(number, function)
            try:
                if self.uses is None:
                    value = function(value)
                else:
                    with self.uses.running(number):
                        value = function(value)
            except Exception as error:
                if not refusals.is_refusal(error, value, __file__):
                    raise
                raise refusals.refusal(error, self._partition, number, function, value) from error
        return value


def _sole(value: Nest) -> Nest:
    """Returns the only entry of a tuple, if it has one: Fleet begins each piece like this."""
    return value[0] if type(value) is tuple and len(value) == 1 else value


def checked_interval(recompute_interval: object, recompute_ctx: object) -> int:
    """Returns the number of layers that are recomputed together; 0 for none.

    Args:
        recompute_interval: The option of ``PipelineLayer``.
        recompute_ctx: The option of ``PipelineLayer``. Its ``offload`` and ``partition`` change
            where Fleet keeps the inputs of a piece; here they have no effect.

    Raises:
        ConfigError: The interval is not a number of layers, or ``recompute_ctx`` is missing.
    """
    rule = "recompute_interval is a number of layers, or 0 for no recompute"
    fix = "give a whole number of 0 or more"
    interval = require_whole("recompute_interval", recompute_interval, 0, rule=rule, fix=fix)
    if interval and recompute_ctx is None:
        raise ConfigError(
            "recompute_interval needs recompute_ctx, as it does in Fleet",
            got=f"recompute_interval={interval}, recompute_ctx=None",
            fix='pass recompute_ctx={"mp_group": hcg.get_model_parallel_group(), '
            '"offload": False, "partition": False}',
        )
    return interval
