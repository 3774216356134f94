"""The command ``fleetpipe why``: adds up where the time of traced steps went, and names stragglers.

Start with ``run``. ``page`` writes the same figures as a page, with two timelines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fleetpipe.arguments import new_file, using
from fleetpipe.contrib.pictures import Panel
from fleetpipe.contrib.view import trace_replay as replay
from fleetpipe.contrib.view import traced_ops as traced
from fleetpipe.contrib.view.answers import Answer, shares_in_words
from fleetpipe.contrib.view.showing.drawing import Drawing, lay_out_timelines
from fleetpipe.contrib.view.showing.page import render
from fleetpipe.contrib.view.slowdown import alternatives, ideal_times, slowdown_of
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import BETWEEN
from fleetpipe.schedules.forms.trace import Event, caveat, device_of

Steps = Sequence[replay.ReplayedStep]

#: If stragglers do not explain more than this share of the steps' time, the sentence begins with
#: where that time went.
_MOST_UNEXPLAINED = 0.15
#: What happens between two steps, in words.
_BETWEEN = {
    "data": "in loading data",
    "callbacks": "in callbacks",
    "evaluation": "in evaluation",
    "saves": "in saves",
    "other": "in the script itself, such as in its own loading of data",
}

#: The most columns of the heat map; of more steps several share one.
_MOST_COLUMNS = 60
#: The cell of a rank whose computations take so many times the mean has the full colour.
_HOTTEST = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe why`` to its parser."""
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="trace.json of a traced run, or the folder that holds it",
    )
    parser.add_argument(
        "--columns",
        action="store_true",
        help=f"TRACE is a table, CSV or Parquet, with the columns {', '.join(traced.COLUMNS)}",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=new_file,
        metavar="FILE",
        help="write a page: two timelines, and what each rank takes in each step",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints how much faster a run would be without stragglers, and names them.

    Raises:
        ConfigError: The trace cannot be read, or its order is impossible.
    """
    path = options.trace / "trace.json" if options.trace.is_dir() else options.trace
    with using("TRACE", path, "a trace"):
        operations = (traced.read_columns if options.columns else traced.read_trace)(path)
        document = {} if options.columns else json.loads(path.read_text("utf-8"))
        device, machine = device_of(document), replay.machine_of(document)
    steps = replay.steps_of(operations, one_thread=not options.columns)
    analysis = TraceAnalysis(steps, machine, device)
    if options.output is not None:
        with using("--output", options.output, "a file that can be written"):
            options.output.write_text(page(analysis), encoding="utf-8")
    if options.json:
        sys.stdout.write(json.dumps(analysis.as_json()) + "\n")
    else:
        rows = (f"{name:<25} {text}\n" for name, text in analysis.rows())
        sys.stdout.writelines([f"{analysis.sentence}\n\n", *rows])
    return 0


class TraceAnalysis:
    """The figures of a trace, and the sentence that sums them up, for terminal, page and JSON.

    Attributes:
        steps: The steps of the trace.
        machine: The machine that ran the steps.
        device: The device that ran the steps, ``"cpu"`` or ``"gpu"``.
        slowdown: The stragglers, and what they cost.
        schedules: The times of a step under other schedules.
        account: The seconds of a mean step, by what a mean rank spends them on.
        shares: The shares of wall time; empty if the trace does not record them.
        early: By number of a rank in its pipeline, how many actions it ran before others that the
            schedule has first, in all steps and replicas.
    """

    def __init__(self, steps: Steps, machine: replay.Machine, device: str) -> None:
        self.steps, self.machine, self.device = steps, machine, device
        self.slowdown, self.schedules = slowdown_of(steps), alternatives(steps)
        self.account = replay.account_of(steps, machine)
        self.shares = replay.shares_of(steps, machine)
        # In a trace the stage of an operation is the number of its rank in the pipeline.
        early = Counter(op.stage for step in steps for op in step.operations if op.early)
        self.early = dict(sorted(early.items()))
        #: Seconds of all steps: as measured, as replayed, and ideal.
        self._seconds = [sum(column) for column in zip(*self.slowdown.step_times)]

    def as_json(self) -> dict[str, object]:
        """Returns all figures as plain values."""
        return {
            **self.slowdown.as_json(),
            "device": self.device,
            "schedules": [schedule._asdict() for schedule in self.schedules],
            "account": self.account,
            "shares": self.shares,
            "load": self.machine.load,
            "early": self.early,
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields lines to print: the name of a figure, indented if it is a part, and its text."""
        slowdown, steps = self.slowdown, len(self.steps)
        measured, replayed, ideal = self._seconds
        yield "steps", f"{steps}, {len(slowdown.ranks)} ranks"
        if self.shares:
            yield "wall time", shares_in_words(self.shares)
        yield "mean step, measured", f"{measured / steps:.6g} s"
        for name, taken in self.account.items():
            yield f"  {name}", f"{taken:.6g} s, {taken * steps / measured:.1%}"
        yield "mean step, replayed", f"{replayed / steps:.6g} s ({replayed / measured:.4f} of it)"
        yield "mean step, ideal", f"{ideal / steps:.6g} s"
        yield "slowdown S", f"{slowdown.slowdown:.4f}"
        yield "  of the last stage, M_S", f"{slowdown.last_stage:.2%}"
        yield "  of the slowest 3 %, M_W", f"{slowdown.slowest_ranks:.2%}"
        yield "  of all communication", f"{slowdown.links:.2%}"
        for cause in slowdown.causes:
            yield f"  of {cause.name}", f"{cause.share:.2%}, {cause.factor:.2f} times its peers"
        for name, seconds, even in self.schedules:  # with the measured costs, and with equal ones
            yield f"under {name}", f"{seconds:.6g} s, {even:.6g} s with even stages"
        if self.machine.load:
            cores = sum(self.machine.processors)
            yield "load of the machine", f"{self.machine.load:.1f}, {cores} cores"
        for rank, count in self.early.items():
            yield f"taken early by rank {rank}", f"{count} actions"

    @property
    def sentence(self) -> str:
        """A text: where the time went, the costliest straggler, and limits of the analysis."""
        slowest, loss = self._name_slowest(), self._name_largest_loss()
        first = f"{loss}. Of the rest: {slowest}" if loss else slowest
        return " ".join(filter(None, (first, self.machine.sentence, caveat(self.device))))

    def _name_largest_loss(self) -> str:
        """Returns a text: where much time went that stragglers do not explain; "" if little."""
        measured, replayed, _ = self._seconds
        step = sum(self.account.values())
        without_processor = (replay.QUEUEING, replay.LIMITED, replay.STOLEN)
        no_processor = sum(self.account[row] for row in without_processor) / step
        between = {part: self.shares[part] for part in BETWEEN if self.shares}
        if no_processor > _MOST_UNEXPLAINED:
            return (
                f"{no_processor:.0%} of the steps' time the ranks had no processor: other work ran "
                "on these cores, or a limit stopped them"
            )
        if sum(between.values()) > _MOST_UNEXPLAINED:
            worst = max(between, key=lambda part: between[part])
            return (
                f"{sum(between.values()):.0%} of the time passed between one step and the next, "
                f"most of it {_BETWEEN[worst]}"
            )
        if replayed < (1 - _MOST_UNEXPLAINED) * measured:
            outside = min(1 - replayed / measured, self.account[replay.OUTSIDE] / step)
            return (
                f"{outside:.0%} of the steps' time went outside of the operations of the trace: in "
                "data, the optimizer, checkpoints, callbacks, or other work on these cores"
            )
        return ""

    def _name_slowest(self) -> str:
        """Returns a text: the worst straggler, and how much shorter steps would be without."""
        _, replayed, ideal = self._seconds
        worst = next((cause for cause in self.slowdown.causes if cause.share > 0), None)
        if worst is None:
            slowdown = f"S = {self.slowdown.slowdown:.3f}"
            return f"No rank, stage, link or micro-batch stands out; {slowdown}."
        name = f"{worst.kind} ({worst.name})" if worst.kind in ("rank", "link") else worst.name
        gain = worst.share * (replayed - ideal) / replayed
        return (
            f"Slow: {name}, {worst.factor:.2f} times its peers; "
            f"steps would be {gain:.1%} shorter if it took the mean time."
        )


def page(analysis: TraceAnalysis) -> str:
    """Returns the page of an analysis as an HTML text that loads no other file."""
    steps = analysis.steps
    width = -(-len(steps) // _MOST_COLUMNS)  # steps of a column, rounded up
    columns = [steps[first : first + width] for first in range(0, len(steps), width)]
    return render(
        "why.html",
        time.time(),
        sentence=analysis.sentence,
        answers=[Answer(name.strip(), text) for name, text in analysis.rows()],
        drawing=_draw_timelines(analysis),
        heat=_heat_rows(analysis, columns),
        columns=[str(column[0].operations[0].step) for column in columns],
        hottest=_HOTTEST,
    )


def _draw_timelines(analysis: TraceAnalysis) -> Drawing:
    """Draws the slowest replica in the step that lost most, as it ran and with ideal durations."""
    # By rank, as (replica, number in the pipeline), its score; by kind, the ideal seconds.
    scores, ideal = analysis.slowdown.ranks, ideal_times(analysis.steps)
    lost = [replayed - ideal for _, replayed, ideal in analysis.slowdown.step_times]
    step = analysis.steps[int(np.argmax(lost))]
    replica, _ = max(scores, key=lambda rank: scores[rank])
    durations = np.array([[ideal[op.kind]] for op in step.operations])
    ends = step.ends(durations)
    begin = min(op.start for op in step.operations)
    measured, replayed, rank_by_part = [], [], {}
    for op, end, duration in zip(step.operations, ends.flat, durations.flat):
        if op.replica == replica and op.kind not in traced.COMMUNICATIONS:
            name = op.kind
            if len(name) == 1:  # F, B, I or W
                name = f"{op.kind}{op.part}.{op.micro_batch}"
            measured.append(Event(op.stage, name, op.start - begin, op.end - begin))
            replayed.append(Event(op.stage, name, float(end - duration), float(end)))
            rank_by_part[op.part] = op.stage
    try:
        placement = traced.placement_of(rank_by_part)
    except ValueError as error:
        fix = "give a trace of all ranks, or leave out --output"
        raise ConfigError(
            "the pipeline cannot be drawn", cause=str(error)[:200], fix=fix
        ) from error
    of_replica = f" of replica {replica}" if len({r for r, _ in scores}) > 1 else ""
    title = f"Step {step.operations[0].step}{of_replica} as it ran"
    return lay_out_timelines(
        [
            Panel(title, measured, placement, "s"),
            Panel("The same with every operation at its ideal time", replayed, placement, "s"),
        ]
    )


def _heat_rows(analysis: TraceAnalysis, columns: Sequence[Steps]) -> dict[str, list[float]]:
    """Returns the rows of the heat map, by the name of the rank.

    A row has for each column the time of the computations over their ideal time.

    Args:
        analysis: The analysis of the trace.
        columns: The steps of each column.
    """
    ranks, ideal = sorted(analysis.slowdown.ranks), ideal_times(analysis.steps)
    row_of = {rank: row for row, rank in enumerate(ranks)}
    taken, expected = np.zeros((2, len(ranks), len(columns)))
    for column, steps in enumerate(columns):
        for op in (op for step in steps for op in step.operations):
            if op.kind not in traced.COMMUNICATIONS:
                cell = row_of[op.rank], column
                taken[cell] += op.duration
                expected[cell] += ideal[op.kind]
    several = len({replica for replica, _ in ranks}) > 1
    names = [f"replica {r}, stage {stage}" if several else f"stage {stage}" for r, stage in ranks]
    factors = taken / np.where(expected > 0, expected, 1.0)
    return dict(zip(names, factors.tolist()))
