"""Runs a script in a way of ``fleetpipe parity --whole``, here or on ranks, and records its trail.

The outermost calls alone are events; those of ``fit`` and, before it, each batch that it trains.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.compare.differences import kind_of, leaves, numbers_of
from fleetpipe.compare.strategies import Changes
from fleetpipe.compare.trail import BEGIN, TRAINS, CallRecord, Summary, file_of
from fleetpipe.dygraph import PipelineParallel
from fleetpipe.fit.model import Model
from fleetpipe.job.watching.calls import line_of_the_script
from fleetpipe.launch import script
from fleetpipe.launch.substitution import in_place_of_paddles
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.paddle_api.random import generator_states, python_states
from fleetpipe.paddle_api.static import dynamic, found_tensor
from fleetpipe.static.run.pipeline import StaticPipeline

_BATCHES = ("train_batch", "forward_backward_pipeline", "eval_batch", "predict_batch")
#: Its batches are events of their own.
_FIT = "fit"
_OF_FIT = (_FIT, "evaluate", "predict")


def run(options: argparse.Namespace) -> int:
    """Runs the script in this process, records its trail, and returns its exit code."""
    changed = Changes.of(options.set).in_force() if options.set else nullcontext()
    record = recording(options.record, options.steps, options.stop_after)
    with in_place_of_paddles(), changed, record:
        return script.execute_to_the_end(options.script, options.arguments)


class TrailRecorder:
    """Writes the events of this process."""

    def __init__(self, file: TextIO, steps: int | None, stop_after: int | None) -> None:
        """Takes the file.

        Args:
            file: Where lines are written.
            steps: Ends the script behind so many training steps; None leaves it to itself.
            stop_after: Sends SIGTERM to this process behind so many training steps.
        """
        self._file, self._last, self._stop_after = file, steps, stop_after
        self._steps = self._depth = 0
        self._begun: set[int] = set()

    def recording(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``call``, which is an event unless it is called within another."""

        @functools.wraps(call)
        def recorded(owner: Any, *arguments: Any, **named: Any) -> Any:
            if self._depth:
                return call(owner, *arguments, **named)
            line = line_of_the_script()
            if name in TRAINS and id(owner) not in self._begun:
                self._begun.add(id(owner))
                state = _state_of(owner, [*arguments])
                self._write(CallRecord(BEGIN, line, self._steps, {}, state, _streams()))
            self._depth += name != _FIT
            try:
                result = call(owner, *arguments, **named)
            finally:
                self._depth -= name != _FIT
            self._end(name, line, owner, [*arguments, *named.values()], result)
            return result

        return recorded

    def _end(self, name: str, line: str, owner: Any, arguments: list[Any], result: Any) -> None:
        trains = name in TRAINS
        self._steps += trains
        around = {**_rate(arguments), **_rows(arguments), **_streams()}
        state = _state_of(owner, arguments) if trains else {}
        self._write(CallRecord(name, line, self._steps, summaries(result), state, around))
        if not trains:
            return
        if self._steps == self._stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._steps == self._last:
            raise SystemExit(0)

    def _write(self, event: CallRecord) -> None:
        self._file.write(event.to_json() + "\n")
        self._file.flush()


@contextmanager
def recording(folder: Path, steps: int | None, stop_after: int | None) -> Iterator[None]:
    """Records what is called while it is open.

    Args:
        folder: Where this rank's file is made.
        steps: As for :class:`TrailRecorder`.
        stop_after: As for :class:`TrailRecorder`.
    """
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    folder.mkdir(parents=True, exist_ok=True)
    with file_of(folder, rank).open("w", encoding="utf-8") as file:
        recorder = TrailRecorder(file, steps, stop_after)
        methods: list[tuple[type[Any], str]] = [(PipelineParallel, name) for name in _BATCHES]
        methods += [*((Model, name) for name in _OF_FIT), (StaticPipeline, "run")]
        changed = [
            (owner, name, recorder.recording(name, getattr(owner, name))) for owner, name in methods
        ]
        with replaced(*changed):
            yield


def summaries(value: Any, name: str = "") -> dict[str, Summary]:
    """Returns the tensors, arrays and plain values of a nested value, by their paths."""
    kinds = (paddle.Tensor, np.ndarray, np.generic, int, float, str)
    parts = leaves(value, name).items()
    return {path: _summary(part) for path, part in parts if isinstance(part, kinds)}


def _summary(value: Any) -> Summary:
    if isinstance(value, paddle.Tensor):
        return Summary.of_array(kind_of(value), numbers_of(value))
    if isinstance(value, (int, float, str)) and not isinstance(value, np.generic):
        return Summary.of_plain(value)
    return Summary.of_array(kind_of(np.asarray(value)), np.asarray(value))


def _state_of(owner: Any, arguments: list[Any]) -> dict[str, Summary]:
    """Returns what this rank has of the model, parameters and buffers, by name."""
    with dynamic_mode():
        if not isinstance(owner, StaticPipeline):
            local = Objects(owner).required_model().local_tensors()
            return {str(name): _summary(one.tensor) for name, one in local.items()}
        _, _, _, scope, _ = arguments
        variables = ((name, found_tensor(scope, name)) for name in owner.persistable)
        return {name: _summary(dynamic(one)) for name, one in variables if one is not None}


def _rate(arguments: list[Any]) -> dict[str, Summary]:
    rates = [float(one.get_lr()) for one in arguments if hasattr(one, "minimize")]
    return {"learning rate": Summary.of_plain(rates[0])} if rates else {}


def _rows(arguments: list[Any]) -> dict[str, Summary]:
    """Returns the rows that a call was given; an iterator's are not known before it takes them."""
    listed = arguments and isinstance(arguments[0], (list, tuple, paddle.Tensor))
    return summaries(arguments[0], "rows") if listed else {}


def _streams() -> dict[str, Summary]:
    of_python = python_states()
    states = {
        "Paddle": generator_states(),
        "NumPy": of_python["numpy"],
        "Python": of_python["python"],
    }
    return {
        f"random numbers of {name}": Summary.of_bytes("state", repr(state).encode())
        for name, state in states.items()
    }
