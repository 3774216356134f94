"""The command ``fleetpipe why``: adds up where the time of traced steps went, and names stragglers.

Start with ``run``. ``page`` writes the same figures as a page, with two timelines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fleetpipe.arguments import new_file, using
from fleetpipe.contrib.pictures import Panel
from fleetpipe.contrib.view.answers import Answer, time_of
from fleetpipe.contrib.view.showing.drawing import Drawing, laid_out, moment, seconds
from fleetpipe.contrib.view.showing.page import template
from fleetpipe.contrib.view.slowdown import (
    Alternative,
    Slowdown,
    alternatives,
    ideal_times,
    slowdown_of,
)
from fleetpipe.contrib.view.trace_replay import (
    LIMITED,
    OUTSIDE,
    QUEUEING,
    STOLEN,
    ReplayedStep,
    account_of,
    machine_of,
    shares_of,
    steps_of,
)
from fleetpipe.contrib.view.traced_ops import (
    COLUMNS,
    COMMUNICATIONS,
    TracedOperation,
    placement_of,
    read_columns,
    read_trace,
)
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import BETWEEN
from fleetpipe.schedules.forms.trace import Event, caveat, device_of
from fleetpipe.version import __version__

#: If more than this share of the steps' time went elsewhere, that comes before the stragglers.
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
        help=f"TRACE is a table, CSV or Parquet, with the columns {', '.join(COLUMNS)}",
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
        operations = (read_columns if options.columns else read_trace)(path)
        document = {} if options.columns else json.loads(path.read_text("utf-8"))
        device, machine = device_of(document), machine_of(document)
    steps = steps_of(operations, one_thread=not options.columns)
    slowdown, schedules = slowdown_of(steps), alternatives(steps)
    account, shares = account_of(steps, machine), shares_of(steps, machine)
    parts = (_sentence(slowdown, account, shares), machine.sentence, caveat(device))
    sentence = " ".join(filter(None, parts))
    if options.output is not None:
        with using("--output", options.output, "a file that can be written"):
            text = page(steps, slowdown, sentence, account, shares)
            options.output.write_text(text, encoding="utf-8")
    # By rank the number of actions that it ran before others that the schedule has first.
    early = dict(sorted(Counter(one.stage for one in operations if one.early).items()))
    if options.json:
        listed = {
            "device": device,
            "schedules": [one._asdict() for one in schedules],
            "account": account,
            "shares": shares,
            "load": machine.load,
        }
        sys.stdout.write(json.dumps({**slowdown.as_json(), **listed, "early": early}) + "\n")
    else:
        lines = _lines(sentence, slowdown, schedules, account, shares)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        if machine.load:
            cores = sum(machine.processors)
            sys.stdout.write(f"load of the machine       {machine.load:.1f}, {cores} cores\n")
        for rank, count in early.items():
            sys.stdout.write(f"taken early by rank {rank}     {count} actions\n")
    return 0


def _lines(
    sentence: str,
    slowdown: Slowdown,
    schedules: list[Alternative],
    account: Mapping[str, float],
    shares: Mapping[str, float],
) -> Iterator[str]:
    measured, replayed, ideal = (sum(column) for column in zip(*slowdown.step_times))
    steps = len(slowdown.step_times)
    yield sentence
    yield ""
    yield f"steps                     {steps}, {len(slowdown.ranks)} ranks"
    if shares:
        yield f"wall time                 {time_of(shares)}"
    yield f"mean step, measured       {measured / steps:.6g} s"
    for name, taken in account.items():
        yield f"  {name:<24}{taken:.6g} s, {taken * steps / measured:.1%}"
    yield f"mean step, replayed       {replayed / steps:.6g} s ({replayed / measured:.4f} of it)"
    yield f"mean step, ideal          {ideal / steps:.6g} s"
    yield f"slowdown S                {slowdown.slowdown:.4f}"
    yield f"  of the last stage, M_S  {slowdown.last_stage:.2%}"
    yield f"  of the slowest 3 %, M_W {slowdown.slowest_ranks:.2%}"
    yield f"  of all communication    {slowdown.links:.2%}"
    for cause in slowdown.causes:
        yield f"  of {cause.name}: {cause.share:.2%}, {cause.factor:.2f} times its peers"
    for one in schedules:
        even = f"{one.even:.6g} s with even stages"
        yield f"under {one.name:<8}            {one.seconds:.6g} s, {even}"


def _sentence(slowdown: Slowdown, account: Mapping[str, float], shares: Mapping[str, float]) -> str:
    """Says in words where the time went, and which straggler costs most."""
    measured, replayed, ideal = (sum(column) for column in zip(*slowdown.step_times))
    slowest = _slowest(slowdown, replayed, ideal)
    step = sum(account.values())
    taken = sum(account[row] for row in (QUEUEING, LIMITED, STOLEN)) / step
    between = {part: shares[part] for part in BETWEEN if shares}
    if taken > _MOST_UNEXPLAINED:
        where = (
            f"{taken:.0%} of the steps' time the ranks had no processor: other work ran on these "
            "cores, or a limit stopped them"
        )
    elif sum(between.values()) > _MOST_UNEXPLAINED:
        worst = max(between, key=lambda part: between[part])
        where = (
            f"{sum(between.values()):.0%} of the time passed between one step and the next, most "
            f"of it {_BETWEEN[worst]}"
        )
    elif replayed < (1 - _MOST_UNEXPLAINED) * measured:
        outside = min(1 - replayed / measured, account[OUTSIDE] / step)
        where = (
            f"{outside:.0%} of the steps' time went outside of the operations of "
            "the trace: in data, the optimizer, checkpoints, callbacks, or other work on these "
            "cores"
        )
    else:
        return slowest
    return f"{where}. Of the rest: {slowest}"


def _slowest(slowdown: Slowdown, replayed: float, ideal: float) -> str:
    """Names the worst straggler, and how much shorter steps would be without it."""
    causes = [cause for cause in slowdown.causes if cause.share > 0]
    if not causes:
        return f"No rank, stage, link or micro-batch stands out; S = {slowdown.slowdown:.3f}."
    worst = causes[0]
    what = f"{worst.kind} ({worst.name})" if worst.kind in ("rank", "link") else worst.name
    gain = worst.share * (replayed - ideal) / replayed
    return (
        f"Slow: {what}, {worst.factor:.2f} times its peers; "
        f"steps would be {gain:.1%} shorter if it took the mean time."
    )


class HeatRow(NamedTuple):
    """The row of a rank in the heat map: in each column its computing time over the ideal one."""

    name: str
    factors: list[float]


def page(
    steps: Sequence[ReplayedStep],
    slowdown: Slowdown,
    sentence: str,
    account: Mapping[str, float],
    shares: Mapping[str, float],
) -> str:
    """Returns the page as an HTML text that loads no other file."""
    step = sum(account.values()) or 1.0
    lost = [replayed - ideal for _, replayed, ideal in slowdown.step_times]
    slowest = int(np.argmax(lost))
    width = -(-len(steps) // _MOST_COLUMNS)
    columns = [steps[first : first + width] for first in range(0, len(steps), width)]
    return template("why.html").render(
        sentence=sentence,
        answers=[
            Answer("slowdown S", f"{slowdown.slowdown:.3f}"),
            Answer("of the last stage, M_S", f"{slowdown.last_stage:.1%}"),
            Answer("of the slowest 3 %, M_W", f"{slowdown.slowest_ranks:.1%}"),
            Answer("of all communication", f"{slowdown.links:.1%}"),
            *([Answer("wall time", time_of(shares))] if shares else []),
            *(Answer(name, f"{seconds(x)}, {x / step:.1%}") for name, x in account.items()),
        ],
        drawing=_timelines(steps, slowdown, slowest),
        heat=_heat(columns, slowdown, ideal_times(steps)),
        columns=[str(column[0].operations[0].step) for column in columns],
        hottest=_HOTTEST,
        version=__version__,
        written=moment(time.time()),
    )


def _timelines(steps: Sequence[ReplayedStep], slowdown: Slowdown, number: int) -> Drawing:
    """Draws a step as it ran and with ideal durations, for the replica that loses most."""
    step, ideal = steps[number], ideal_times(steps)
    replica = max(slowdown.ranks, key=lambda rank: slowdown.ranks[rank])[0]
    durations = np.array([ideal[one.kind] for one in step.operations])
    ends = step.ends(durations[:, None])[:, 0]
    begin = min(one.start for one in step.operations)
    chosen = [
        (one, end, duration)
        for one, end, duration in zip(step.operations, ends.tolist(), durations.tolist())
        if one.replica == replica and one.kind not in COMMUNICATIONS
    ]
    measured = [_event(one, one.start - begin, one.end - begin) for one, _, _ in chosen]
    replayed = [_event(one, end - duration, end) for one, end, duration in chosen]
    try:
        placement = placement_of({one.part: one.stage for one, _, _ in chosen})
    except ValueError as error:
        fix = "give a trace of all ranks, or leave out --output"
        raise ConfigError(
            "the pipeline cannot be drawn", cause=str(error)[:200], fix=fix
        ) from error
    of = f" of replica {replica}" if len({rank[0] for rank in slowdown.ranks}) > 1 else ""
    name = f"Step {step.operations[0].step}{of}"
    return laid_out(
        [
            Panel(f"{name} as it ran", measured, placement, "s"),
            Panel("The same with every operation at its ideal time", replayed, placement, "s"),
        ]
    )


def _event(one: TracedOperation, start: float, end: float) -> Event:
    name = f"{one.kind}{one.part}.{one.micro_batch}" if len(one.kind) == 1 else one.kind
    return Event(one.stage, name, start, end)


def _heat(
    columns: Sequence[Sequence[ReplayedStep]], slowdown: Slowdown, ideal: Mapping[str, float]
) -> list[HeatRow]:
    """Returns the rows of the heat map, by replica and stage."""
    rows = {rank: ([0.0] * len(columns), [0.0] * len(columns)) for rank in sorted(slowdown.ranks)}
    for column, steps in enumerate(columns):
        for one in (each for step in steps for each in step.operations):
            if one.kind not in COMMUNICATIONS and one.rank in rows:
                taken, expected = rows[one.rank]
                taken[column] += one.duration
                expected[column] += ideal[one.kind]
    several = len({replica for replica, _ in rows}) > 1
    return [
        HeatRow(
            f"replica {replica}, stage {stage}" if several else f"stage {stage}",
            [seconds / (mean or 1.0) for seconds, mean in zip(taken, expected)],
        )
        for (replica, stage), (taken, expected) in rows.items()
    ]
