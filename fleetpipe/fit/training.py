"""The epochs of one ``fit``: training, evaluation, and what a checkpoint is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetpipe.fit.callbacks.checkpoint import Nothing, PipelineCheckpoint
from fleetpipe.fit.epoch import Callbacks, Logs, Pass
from fleetpipe.fit.position import Position
from fleetpipe.fit.runner import Runner
from fleetpipe.fit.sources import Source


class Training:
    """Goes from a position in the data to the end of the epochs."""

    def __init__(
        self,
        model: Any,
        runner: Runner,
        passes: Pass,
        called: Callbacks,
        position: Position,
        saver: PipelineCheckpoint | Nothing,
    ) -> None:
        """Begins nothing.

        Args:
            model: The ``fleetpipe.Model``, whose ``stop_training`` ends the training.
            runner: Asks all ranks whether to stop.
            passes: Runs the batches, as many as there may be.
            called: Called around the epochs.
            position: Where the training is.
            saver: Told of each step and epoch.
        """
        self._model = model
        self._runner = runner
        self._passes = passes
        self._called = called
        self._position = position
        self._saver = saver

    def run(
        self, source: Source, epochs: int, accumulate: int, evaluate: Callable[[int], Logs]
    ) -> None:
        """Trains on what is left. Collective over the job.

        Args:
            source: Gives the batches of an epoch.
            epochs: How many there are in all.
            accumulate: Batches of a step.
            evaluate: Evaluates after the epoch of a number, or does not; returns what it found.
        """
        position, called = self._position, self._called
        logs: Logs = {}
        called.on_begin("train")
        if position.step == 0:
            position.put_callbacks_back()
        while position.epoch < epochs and self._passes.left != 0 and not position.stopped:
            epoch = position.epoch
            called.on_epoch_begin(epoch, {"step": position.step})
            position.put_callbacks_back()
            self._model.mode = "train"
            logs = self._passes.train(source, position, accumulate, self._saver.step_done)
            called.on_epoch_end(epoch, logs)
            ended = self._passes.left != 0
            evaluated = evaluate(epoch)
            position.stopped = self._runner.any_rank(self._model.stop_training)
            if ended:
                position.next_epoch()
            self._saver.epoch_done(epoch, evaluated)
        called.on_end("train", logs)
