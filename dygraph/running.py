"""Runs the layers of a stage one after another."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

from fleetpipe._paddle import paddle
from fleetpipe.dygraph.values import outline
from fleetpipe.errors import BoundaryError
from fleetpipe.partition import Partition


class StageRunner:
    """Calls the layers of the stages of this process, each with what the one before returned."""

    def __init__(
        self, functions: Mapping[int, Callable[[Any], Any]], partition: Partition
    ) -> None:
        """Takes the built layers and functions by their number in the whole list, and the cut."""
        self._functions = functions
        self._partition = partition

    def run(self, stage: int, value: Any, micro_batch: int | None = None) -> Any:
        """Runs the layers of ``stage``.

        Args:
            stage: A global stage of this process.
            value: What the first layer takes: a Tensor, or nested tuples, lists, dicts of them.
            micro_batch: The global micro-batch in a run of a plan; None in a direct call.

        Raises:
            BoundaryError: The first layer cannot take what the stage before sent.
        """
        start, end = self._partition.boundaries[stage : stage + 2]
        try:
            output = self._functions[start](value)
        except Exception as error:
            if stage == 0 or not _refused(error):
                raise
            raise BoundaryError(
                f"layer {start} ({self._partition.layers[start].name}) cannot take "
                f"what layer {start - 1} returned",
                where=f"first layer of stage {stage}",
                got=outline(value),
                cause=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}",
                fix="run the list of layers in one process (pp_degree=1) to see where shapes part",
            ) from error
        for index in range(start + 1, end):
            output = self._functions[index](output)
        return output


def _refused(error: Exception) -> bool:
    """Tells whether Paddle or the call itself refused a value, and not the layer's own code."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_in = Path(frame.f_code.co_filename)
    inside_paddle = Path(paddle.__file__).parent in raised_in.parents
    return not isinstance(error, MemoryError) and (inside_paddle or raised_in == Path(__file__))
