"""The trail of a run: a record, or event, of each call of a pipeline that the script makes.

Start with ``run``, which records, and ``compare``, which finds the first event that differs. Rank r
writes one line of JSON for each event into ``rank-r.jsonl``. The line has of a tensor its dtype and
shape, a digest of its bytes, its norm and some of its numbers.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from fleetpipe import fleet
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.compare.differences import (
    ROUNDING,
    digest_of,
    gap,
    kind_of,
    largest_of,
    leaves,
    numbers_of,
)
from fleetpipe.dygraph import PipelineParallel
from fleetpipe.errors import UsageError
from fleetpipe.fit.model import Model
from fleetpipe.job.records import line_of_the_script
from fleetpipe.launch import script
from fleetpipe.launch.substitution import in_place_of_paddles
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.paddle_api.random import generator_states, python_states
from fleetpipe.paddle_api.static import dynamic_tensor, found_tensor
from fleetpipe.schedules.registry import canonical_name
from fleetpipe.static.run.pipeline import StaticPipeline

#: The calls that train a step.
TRAINS = ("train_batch", "forward_backward_pipeline", "run")
#: The name of the event that is recorded before the first call that trains a model.
BEGIN = "begin"
#: How many numbers of a tensor an event has; they are evenly spaced.
_SAMPLES = 8
#: The largest relative difference that is rounding in any event after the first that differs: the
#: steps of an optimizer make rounding larger.
_LATER_ROUNDING = 1e-3

#: The name by which ``--also`` changes the schedule.
_SCHEDULE = "schedule"
#: The axes whose degrees multiply to the number of ranks.
_AXES = {"dp", "pp", "sharding", "sep", "cp", "mp"}

#: The methods of a pipeline that are recorded.
_BATCHES = ("train_batch", "forward_backward_pipeline", "eval_batch", "predict_batch")
#: The method of ``Model`` whose batches are recorded too, each as an event.
_FIT = "fit"


class Summary(NamedTuple):
    """A short description of a tensor or plain value, by which two runs of a script are compared.

    Attributes:
        kind: The dtype and shape of the tensor, or the type of the plain value.
        digest: A digest of the value's bytes.
        numbers: Of a tensor of floats the norm, a weighted sum of all numbers, and some of the
            numbers; empty for others, which do not differ by rounding.
    """

    kind: str
    digest: str
    numbers: tuple[float, ...] = ()

    @classmethod
    def of_bytes(cls, kind: str, content: bytes | np.ndarray) -> Summary:
        """Returns the summary of bytes, which has their digest and no numbers."""
        return cls(kind, digest_of(content))

    @classmethod
    def of_array(cls, kind: str, array: np.ndarray) -> Summary:
        """Summarizes an array, whose dtype and shape are ``kind``."""
        flat = np.ascontiguousarray(array).reshape(-1)
        summary = cls.of_bytes(kind, flat)
        if not flat.size or flat.dtype.kind != "f":
            return summary
        exact = flat.astype(np.float64)
        # The same numbers in another order have the same norm, and another weighted sum.
        weighed = float(exact @ np.cos(np.arange(flat.size)))
        samples = exact[np.linspace(0, flat.size - 1, min(_SAMPLES, flat.size)).astype(int)]
        norm = math.sqrt(float(exact @ exact))
        return summary._replace(numbers=(norm, weighed, *samples.tolist()))

    @classmethod
    def of_plain(cls, value: Any) -> Summary:
        """Summarizes a number, a text or None."""
        return cls(type(value).__name__, repr(value), (value,) if isinstance(value, float) else ())

    def distance(self, other: Summary) -> float:
        """Returns the largest difference of two summaries, relative to their largest number.

        The result is 0 for equal digests, and infinite if kinds differ or there are no numbers.
        """
        if self[:2] == other[:2]:
            return 0.0
        same_kind = self.kind == other.kind and len(self.numbers) == len(other.numbers)
        if not same_kind or not self.numbers:
            return math.inf
        here, there = np.array(self.numbers), np.array(other.numbers)
        # Digests differ, so if all these numbers are equal, the difference is too small for them.
        return gap(here, there, max(largest_of(here), largest_of(there))) or 1e-16


@dataclass(frozen=True)
class CallRecord:
    """A recorded call of a method of the pipeline or model, and the state of the run after it.

    Attributes:
        call: The name of the method, such as ``train_batch``; :data:`BEGIN` for the event before
            the first call that trains.
        line: The line of the script that called it.
        steps: Training steps so far, this one included.
        values: What the call returned, by the path of each value.
        state: The parameters and buffers by fully qualified name, if the call trains.
        around: The learning rate, the rows of the batch, the states of the random generators, by
            name.
    """

    call: str
    line: str
    steps: int
    values: Mapping[str, Summary] = field(default_factory=dict)
    state: Mapping[str, Summary] = field(default_factory=dict)
    around: Mapping[str, Summary] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the event as a line of JSON."""
        return json.dumps(asdict(self))

    @property
    def trains(self) -> bool:
        """Whether the call trains a step."""
        return self.call in TRAINS

    @classmethod
    def from_json(cls, text: str) -> CallRecord:
        """Reads an event from the line that :meth:`to_json` returned."""
        raw = json.loads(text)
        for name in ("values", "state", "around"):
            raw[name] = {
                path: Summary(kind, digest, tuple(numbers))
                for path, (kind, digest, numbers) in raw[name].items()
            }
        return cls(**raw)


#: The events of each rank of a run.
Ranks = Sequence[Sequence[CallRecord]]


def file_of(folder: Path, rank: int) -> Path:
    """Returns the path of the file for the trail of a rank."""
    return folder / f"rank-{rank}.jsonl"


def read(folder: Path) -> list[list[CallRecord]]:
    """Reads the events of each rank of a run from the files in its folder."""
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda file: int(file.stem.rpartition("-")[2]))
    lines_of_ranks = (file.read_text(encoding="utf-8").splitlines() for file in files)
    return [[*map(CallRecord.from_json, lines)] for lines in lines_of_ranks]


class TrailDifference(NamedTuple):
    """One difference between the recorded trails of two runs.

    Attributes:
        what: The value and the event that differ, in words; or the calls, if the runs call
            different methods.
        line: The line of the script.
        apart: The relative difference; infinite if shape, dtype or kind differ.
    """

    what: str
    line: str
    apart: float

    def __str__(self) -> str:
        size = "" if math.isinf(self.apart) else f" by {self.apart:.1e} relative"
        return f"{self.what}{size} ({self.line})"


class TrailComparison(NamedTuple):
    """The result of a comparison of two trails.

    Attributes:
        steps: Training steps that were compared.
        calls: Calls that were compared.
        first: The first difference; None if all bits are equal.
        worst: The largest relative difference of all events.
    """

    steps: int
    calls: int
    first: TrailDifference | None
    worst: float

    @property
    def rounding(self) -> bool:
        """Whether the two runs differ, by no more than another order of sums explains."""
        if self.first is None:
            return False
        return self.first.apart <= ROUNDING and self.worst <= _LATER_ROUNDING


def unseeded_generators(expected: Ranks, again: Ranks) -> frozenset[str]:
    """Returns the names of the random generators that a script does not seed.

    Args:
        expected: The events of a run.
        again: The events of a second run of the same script in the same way.
    """
    first = _summaries_of_ranks(_events_at(expected, 0), "around")
    second = _summaries_of_ranks(_events_at(again, 0), "around")
    common = first.keys() & second.keys()
    return frozenset(name for name in common if _largest_distance(first[name], second[name]))


def compare(expected: Ranks, got: Ranks, skipped: Collection[str] = ()) -> TrailComparison:
    """Compares two runs call by call.

    A value that only some ranks have is compared on these ranks only.

    Args:
        expected: The events of each rank of one run.
        got: The events of each rank of the other.
        skipped: The names of values that are not compared.
    """
    first: TrailDifference | None = None
    worst, steps, calls = 0.0, 0, 0
    length = max(len(events) for events in (*expected, *got))
    for index in range(length):
        pair = _events_at(expected, index), _events_at(got, index)
        for finding in _find_differences(*pair, skipped):
            first, worst = first or finding, max(worst, finding.apart)
        if math.isinf(worst):
            break
        calls, steps = index + 1, steps + pair[0][0].trains
    return TrailComparison(steps, calls, first, worst)


def _events_at(ranks: Ranks, index: int) -> list[CallRecord]:
    """Returns event ``index``, from 0, of each rank that has more than ``index`` events."""
    return [events[index] for events in ranks if index < len(events)]


def _find_differences(
    expected: list[CallRecord], got: list[CallRecord], skipped: Collection[str]
) -> Iterator[TrailDifference]:
    """Yields the differences of one call in two runs, a cause before its effects.

    Args:
        expected: The event of each rank of one run.
        got: The event of each rank of the other.
        skipped: The names of values that are not compared.
    """
    shown = (expected or got)[0]  # the event that the texts name
    where = shown.call if shown.call == BEGIN else f"{shown.call} after {shown.steps} steps"
    calls = {event.call for event in (*expected, *got)}
    if not expected or not got or len(calls) > 1:
        instead = " and ".join(sorted(calls)) if len(calls) > 1 else "nothing"
        yield TrailDifference(f"{where}: the other run calls {instead}", shown.line, math.inf)
        return
    for field_name in ("around", "values", "state"):
        first, second = (_summaries_of_ranks(events, field_name) for events in (expected, got))
        # A rank may lack a result; of the model's state, some rank has each tensor.
        both = {**first, **second} if field_name == "state" else [n for n in first if n in second]
        for name in (name for name in both if name not in skipped):
            apart = _largest_distance(first.get(name, []), second.get(name, []))
            if apart:
                # In words, what has the name, by the field in which it is.
                words = {"around": name, "values": f"result{name}", "state": f"state {name}"}
                what = f"{words[field_name]} of {where} differs"
                yield TrailDifference(what, shown.line, apart)


def _summaries_of_ranks(events: Sequence[CallRecord], field_name: str) -> dict[str, list[Summary]]:
    """Returns the different summaries that ranks have of each value, by the value's name.

    Args:
        events: The event of each rank for one call.
        field_name: The field of the events in which the values are.
    """
    by_name: dict[str, list[Summary]] = {}
    for event in events:
        of_rank: Mapping[str, Summary] = getattr(event, field_name)
        for name, summary in of_rank.items():
            if summary not in by_name.setdefault(name, []):
                by_name[name].append(summary)
    return by_name


def _largest_distance(expected: Sequence[Summary], got: Sequence[Summary]) -> float:
    """Returns the largest distance from a summary of one run to the nearest of the other run.

    The result is infinite if one run has no summary.
    """
    if not expected or not got:
        return math.inf
    return max(
        *(min(summary.distance(other) for other in got) for summary in expected),
        *(min(summary.distance(other) for other in expected) for summary in got),
    )


class Changes(NamedTuple):
    """The degrees and the schedule that replace the script's: ``pp=1,dp=2``, ``schedule=ZBH1``.

    Attributes:
        text: The changes as the user writes them.
        degrees: The degree of each changed axis.
        schedule: The name of the schedule; None leaves the script's.
    """

    text: str
    degrees: Mapping[str, int]
    schedule: str | None

    @classmethod
    def of(cls, text: str) -> Changes:
        """Reads the changes from the text of ``--also``.

        Raises:
            ConfigError: There is no such schedule.
            UsageError: The text names another axis, or a degree is no number above 0.
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
        """The number of processes; it is 1 if only ``pp`` is given: one process runs all stages."""
        return math.prod(self.degrees.values()) if {*self.degrees} - {"pp"} else 1

    def applied(self) -> AbstractContextManager[None]:
        """Returns a context in which the strategies that the script passes have these changes."""

        def change_strategy(strategy: Any) -> Any:
            if self.degrees:
                strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in self.degrees.items()}
            if self.schedule is not None:
                strategy.pipeline_configs = {"schedule_mode": self.schedule}
            return strategy

        return strategies_changed(change_strategy)


def strategies_changed(change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Returns a context in which ``fleet.init`` gets ``change(strategy)``, not the script's own."""

    def init_changed(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        passed = inspect.signature(original).bind(*arguments, **named).arguments
        strategy = passed.get("strategy")
        passed["strategy"] = change(fleet.DistributedStrategy() if strategy is None else strategy)
        return original(**passed)

    return wrapping((fleet, "init", init_changed))


def wrapping(*wrappers: tuple[Any, str, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Returns a context in which calls of functions and methods go through wrappers.

    Args:
        wrappers: For each: a module or class, the name of a function in it, and the wrapper, which
            is called with the function and then with the arguments of the call.
    """

    def wrap(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_wrapper(*arguments: Any, **named: Any) -> Any:
            return wrapper(original, *arguments, **named)

        return call_wrapper

    return replaced(
        *((owner, name, wrap(getattr(owner, name), wrapper)) for owner, name, wrapper in wrappers)
    )


def run(options: argparse.Namespace) -> int:
    """Runs the script in this process, records its trail, and returns its exit code."""
    changed = Changes.of(options.set).applied() if options.set else nullcontext()
    record = recording(options.record, options.steps, options.stop_after)
    with in_place_of_paddles(), changed, record:
        return script.execute_to_the_end(options.script, options.arguments)


class TrailRecorder:
    """Writes an event for each outermost call of a pipeline's or model's method in this process."""

    def __init__(self, file: TextIO, steps: int | None, stop_after: int | None) -> None:
        """Stores the file and the limits.

        Args:
            file: The file for the lines.
            steps: The number of training steps after which the script ends; None sets no limit.
            stop_after: The number of training steps after which this process gets SIGTERM.
        """
        self._file, self._last_step, self._stop_after = file, steps, stop_after
        #: The training steps so far, and how many recorded calls are running: a call within another
        #: one is no event. A batch of ``fit`` is.
        self._steps = self._depth = 0
        #: The ids of the pipelines and models that have begun to train.
        self._begun: set[int] = set()

    def record(
        self, name: str, method: Callable[..., Any], owner: Any, *arguments: Any, **named: Any
    ) -> Any:
        """Calls a method of a pipeline or model, and writes an event unless it is within another.

        Args:
            name: The name of the method.
            method: The method.
            owner: The object whose method it is.
            arguments: The positional arguments of the call.
            named: Its keyword arguments.

        Returns:
            The result of the method.
        """
        if self._depth:
            return method(owner, *arguments, **named)
        line = line_of_the_script()
        if name in TRAINS and id(owner) not in self._begun:
            self._begun.add(id(owner))
            state = _summarize_state(owner, [*arguments])
            self._write(CallRecord(BEGIN, line, self._steps, {}, state, _summarize_streams()))
        self._depth += name != _FIT
        try:
            result = method(owner, *arguments, **named)
        finally:
            self._depth -= name != _FIT
        self._end(name, line, owner, [*arguments, *named.values()], result)
        return result

    def _end(self, name: str, line: str, owner: Any, arguments: list[Any], result: Any) -> None:
        """Writes the event of a call; ends or stops the script after its number of steps.

        Args:
            name: The name of the method.
            line: The line of the script.
            owner: The object whose method it is.
            arguments: The arguments of the call: first the batch; among them perhaps the optimizer.
            result: What the method returned.
        """
        trains = name in TRAINS
        self._steps += trains
        around = _summarize_streams()
        # An iterator's rows are not known before the call takes them.
        if arguments and isinstance(arguments[0], (list, tuple, paddle.Tensor)):
            around = {**summaries(arguments[0], "rows"), **around}
        rates = [float(a.get_lr()) for a in arguments if hasattr(a, "minimize")]
        if rates:
            around = {"learning rate": Summary.of_plain(rates[0]), **around}
        state = _summarize_state(owner, arguments) if trains else {}
        self._write(CallRecord(name, line, self._steps, summaries(result), state, around))
        if not trains:
            return
        if self._steps == self._stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._steps == self._last_step:
            raise SystemExit(0)

    def _write(self, event: CallRecord) -> None:
        """Writes an event as a line, and flushes the file, as the process may be killed."""
        self._file.write(event.to_json() + "\n")
        self._file.flush()


@contextmanager
def recording(folder: Path, steps: int | None, stop_after: int | None) -> Iterator[None]:
    """Records the calls of this rank while the context is open.

    Args:
        folder: The folder for this rank's file.
        steps: The number of training steps after which the script ends; None sets no limit.
        stop_after: The number of training steps after which this process gets SIGTERM.
    """
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    folder.mkdir(parents=True, exist_ok=True)
    with file_of(folder, rank).open("w", encoding="utf-8") as file:
        recorder = TrailRecorder(file, steps, stop_after)
        methods: list[tuple[type[Any], str]] = [(PipelineParallel, name) for name in _BATCHES]
        methods += [(Model, name) for name in (_FIT, "evaluate", "predict")]
        methods.append((StaticPipeline, "run"))
        record = recorder.record
        with wrapping(*((kind, name, functools.partial(record, name)) for kind, name in methods)):
            yield


def summaries(value: Any, name: str = "") -> dict[str, Summary]:
    """Summarizes the tensors, arrays and plain values of a nested value, by their paths.

    Args:
        value: The nested value.
        name: The beginning of each path.
    """
    kinds = (paddle.Tensor, np.ndarray, np.generic, int, float, str)
    parts = leaves(value, name).items()
    return {path: _summary(part) for path, part in parts if isinstance(part, kinds)}


def _summary(value: Any) -> Summary:
    """Summarizes a tensor, an array, a number or a text."""
    if isinstance(value, paddle.Tensor):
        return Summary.of_array(kind_of(value), numbers_of(value))
    if isinstance(value, (int, float, str)) and not isinstance(value, np.generic):
        return Summary.of_plain(value)
    return Summary.of_array(kind_of(np.asarray(value)), np.asarray(value))


def _summarize_state(owner: Any, arguments: list[Any]) -> dict[str, Summary]:
    """Summarizes the parameters and buffers that this rank has of a model, by name.

    Args:
        owner: The model, or its pipeline.
        arguments: The arguments of the call; for a static pipeline the fourth is the scope.
    """
    with dynamic_mode():
        if not isinstance(owner, StaticPipeline):
            local = Objects(owner).required_model().local_tensors()
            return {str(name): _summary(one.tensor) for name, one in local.items()}
        _, _, _, scope, _ = arguments
        variables = ((name, found_tensor(scope, name)) for name in owner.persistable)
        return {name: _summary(dynamic_tensor(one)) for name, one in variables if one is not None}


def _summarize_streams() -> dict[str, Summary]:
    """Summarizes the states of the random generators, by name."""
    of_python = python_states()
    paddles, numpys, pythons = generator_states(), of_python["numpy"], of_python["python"]
    states = {"Paddle": paddles, "NumPy": numpys, "Python": pythons}
    return {
        f"random numbers of {name}": Summary.of_bytes("state", repr(state).encode())
        for name, state in states.items()
    }
