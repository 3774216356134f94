"""Runs a script in a way of ``fleetpipe parity --whole``, here or on ranks, and records its trail.

The outermost calls alone are events; those of ``fit`` and, before it, each batch that it trains.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from fleetpipe import fleet as our_fleet
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.compare.differences import kind_of, leaves, numbers_of
from fleetpipe.compare.trail import BEGIN, TRAINS, CallRecord, Summary, file_of
from fleetpipe.dygraph import PipelineParallel
from fleetpipe.errors import UsageError
from fleetpipe.fit.model import Model
from fleetpipe.job.watching.calls import line_of_the_script
from fleetpipe.launch import script
from fleetpipe.launch.substitution import in_place_of_paddles
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.paddle_api.random import generator_states, python_states
from fleetpipe.paddle_api.static import dynamic, found_tensor
from fleetpipe.schedules.registry import canonical_name
from fleetpipe.static.run.pipeline import StaticPipeline

_BATCHES = ("train_batch", "forward_backward_pipeline", "eval_batch", "predict_batch")
#: Its batches are events of their own.
_FIT = "fit"
_OF_FIT = (_FIT, "evaluate", "predict")
_SCHEDULE = "schedule"
#: Those whose product is the number of ranks.
_AXES = {"dp", "pp", "sharding", "sep", "cp", "mp"}


class Changes(NamedTuple):
    """What a way has otherwise than the script: ``pp=1,dp=2``, ``schedule=ZBH1``.

    Attributes:
        text: As the user writes it.
        degrees: By axis.
        schedule: Its name; None leaves the script's.
    """

    text: str
    degrees: Mapping[str, int]
    schedule: str | None

    @classmethod
    def of(cls, text: str) -> Changes:
        """Reads the text.

        Raises:
            ConfigError: There is no such schedule.
            UsageError: It is none.
        """
        pairs = dict(one.partition("=")[::2] for one in text.split(","))
        schedule = pairs.pop(_SCHEDULE, None)
        if not {*pairs} <= _AXES or not all(v.isdecimal() and int(v) for v in pairs.values()):
            raise UsageError(
                "--also changes degrees or the schedule",
                expected=f"{', '.join(sorted(_AXES))} with a number, or {_SCHEDULE}",
                got=repr(text),
                fix="write pp=1,dp=2 or schedule=ZBH1",
            )
        if schedule is not None:
            canonical_name(schedule)
        return cls(text, {axis: int(value) for axis, value in pairs.items()}, schedule)

    @property
    def ranks(self) -> int:
        """Processes: one plays all stages where no other axis is given."""
        return math.prod(self.degrees.values()) if {*self.degrees} - {"pp"} else 1


def run(options: argparse.Namespace) -> int:
    """Runs the script and records its trail.

    Returns:
        The exit code of the script, or of the first rank that failed.
    """
    if script.to_be_launched(options):
        words = [
            word
            for name in ("record", "steps", "stop_after", "set")
            for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))
            if getattr(options, name) is not None
        ]
        return script.launch(options, "parity", *words)
    steps, stop = options.steps, options.stop_after
    with (
        in_place_of_paddles(),
        replaced((our_fleet, "init", _init(options.set))),
        recording(options.record, steps, stop),
    ):
        return script.execute_to_the_end(options.script, options.arguments)


def _init(text: str | None) -> Any:
    """Returns ``fleet.init`` with changes in the strategy."""
    begin = our_fleet.init
    if text is None:
        return begin
    changes = Changes.of(text)

    @functools.wraps(begin)
    def init(
        role_maker: Any = None,
        is_collective: bool = False,
        strategy: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        strategy = our_fleet.DistributedStrategy() if strategy is None else strategy
        degrees = {f"{axis}_degree": degree for axis, degree in changes.degrees.items()}
        if degrees:
            strategy.hybrid_configs = degrees
        if changes.schedule is not None:
            strategy.pipeline_configs = {"schedule_mode": changes.schedule}
        return begin(role_maker, is_collective, strategy, *more, **named)

    return init


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
    if isinstance(value, (int, float, str)) and not isinstance(value, np.generic):
        return Summary.of_plain(value)
    if isinstance(value, paddle.Tensor):
        return Summary.of_array(kind_of(value), numbers_of(value))
    array = np.asarray(value)
    return Summary.of_array(f"{array.dtype} {list(array.shape)}", array)


def _state_of(owner: Any, arguments: list[Any]) -> dict[str, Summary]:
    """Returns what this rank has of the model, parameters and buffers, by name."""
    with dynamic_mode():
        if not isinstance(owner, StaticPipeline):
            held = Objects(owner).required_model().held()
            return {str(name): _summary(one.tensor) for name, one in held.items()}
        _, _, _, scope, _ = arguments
        variables = ((name, found_tensor(scope, name)) for name in owner.persistable)
        return {name: _summary(dynamic(one)) for name, one in variables if one is not None}


def _rate(arguments: list[Any]) -> dict[str, Summary]:
    rates = [float(one.get_lr()) for one in arguments if hasattr(one, "minimize")]
    return {"learning rate": Summary.of_plain(rates[0])} if rates else {}


def _rows(arguments: list[Any]) -> dict[str, Summary]:
    """Returns the rows that a call was given; an iterator's are not known before it takes them."""
    data = (
        arguments[0]
        if arguments and isinstance(arguments[0], (list, tuple, paddle.Tensor))
        else None
    )
    return summaries(data, "rows")


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
