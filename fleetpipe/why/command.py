"""The command ``fleetpipe why``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from fleetpipe.arguments import new_file, using
from fleetpipe.why.operations import COLUMNS, read_columns, read_trace
from fleetpipe.why.page import page
from fleetpipe.why.replay import steps_of
from fleetpipe.why.schedules import Alternative, alternatives
from fleetpipe.why.slowdown import Slowdown, slowdown_of


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
    """Says how much faster a run would be without stragglers, and which these are.

    Raises:
        ConfigError: The trace cannot be read, or its order cannot have been.
    """
    path = options.trace / "trace.json" if options.trace.is_dir() else options.trace
    with using("TRACE", path, "a trace"):
        operations = (read_columns if options.columns else read_trace)(path)
    steps = steps_of(operations, one_thread=not options.columns)
    slowdown, schedules = slowdown_of(steps), alternatives(steps)
    if options.output is not None:
        with using("--output", options.output, "a file that can be written"):
            text = page(steps, slowdown, _sentence(slowdown))
            options.output.write_text(text, encoding="utf-8")
    if options.json:
        listed = {"schedules": [one._asdict() for one in schedules]}
        sys.stdout.write(json.dumps({**slowdown.as_json(), **listed}) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(slowdown, schedules))
    return 0


def _lines(slowdown: Slowdown, schedules: list[Alternative]) -> Iterator[str]:
    measured, replayed, ideal = (sum(column) for column in zip(*slowdown.step_times))
    steps = len(slowdown.step_times)
    yield _sentence(slowdown)
    yield ""
    yield f"steps                     {steps}, {len(slowdown.ranks)} ranks"
    yield f"mean step, measured       {measured / steps:.6g} s"
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


def _sentence(slowdown: Slowdown) -> str:
    if not slowdown.causes:
        return f"No rank, stage, link or micro-batch stands out; S = {slowdown.slowdown:.3f}."
    worst = slowdown.causes[0]
    what = f"{worst.kind} ({worst.name})" if worst.kind in ("rank", "link") else worst.name
    _, replayed, ideal = (sum(column) for column in zip(*slowdown.step_times))
    gain = worst.share * (replayed - ideal) / replayed
    return (
        f"Slow: {what}, {worst.factor:.2f} times its peers; "
        f"steps would be {gain:.1%} shorter if it took the mean time."
    )
