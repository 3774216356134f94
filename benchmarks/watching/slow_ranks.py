"""Slows one rank of a real job after another, and counts the steps until it is named.

    python -m benchmarks.watching.slow_ranks [--rows FILE]     some six minutes, on two quiet cores
    python -m benchmarks.watching.slow_ranks --replay FILE     the rows of such a run, once more

Jobs of two ranks, of four in a row, and of two replicas of two. A rank computes more, has a part of
a processor (needs root, cgroups of version 1), waits longer for data, saves longer, or the link to
the next rank is slow; see ``slow_job.py``. Who else is named, and who in steps of which none is
slow, is counted too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.figures import answer, is_rank, on_ranks, table
from benchmarks.watching.slow_job import INJECTED, RECOVERY, Injection, injections, rows_of
from fleetpipe.contrib.view.slow_ranks import LIMIT, SlowRanks
from fleetpipe.job.records import StepRow

#: What a rank is named for, by the kind of its injection.
WHAT = {"compute": "compute", "processor": LIMIT, "data": "data", "save": "save"}
#: Steps in which it should be.
SOON = 10


class Case(NamedTuple):
    """A job: its ranks, its replicas, its injections by factor, its quiet steps."""

    ranks: int
    replicas: int
    counts: dict[float, int]
    quiet: int


CASES = {
    "2": Case(2, 1, {1.3: 20, 1.5: 4, 2.0: 4}, 200),
    "4": Case(4, 1, {1.3: 6, 1.5: 2, 2.0: 2}, 1000),
    "2x2": Case(4, 2, {1.3: 4, 1.5: 1, 2.0: 1}, 200),
}


def expected(one: Injection) -> tuple[int, str]:
    """Returns who is to be named for an injection, and for what."""
    return one.rank, WHAT.get(one.kind, f"link to rank {one.rank + 1}")


def named_by_step(answers: Sequence[Mapping[str, Any]]) -> Iterator[set[tuple[int, str]]]:
    """Yields who is named after each step."""
    places = {rank: (tuple(one["place"][0]), one["place"][1]) for rank, one in enumerate(answers)}
    slow = SlowRanks(places)
    for rows in zip(*(one["rows"] for one in answers)):
        new = {rank: [StepRow(*row)] for rank, row in enumerate(rows)}
        yield {(one.rank, one.what) for one in slow.add(new)}


def judge(case: Case, answers: Sequence[Mapping[str, Any]]) -> None:
    """Prints what was named in a job."""
    named = list(named_by_step(answers))
    planned = injections(case.ranks, case.replicas, case.counts)
    quiet = set().union(*named[: case.quiet])
    print(f"named in {case.quiet} quiet steps: {sorted(quiet) or 'nobody'}")
    spans = [row[1] for row in answers[0]["rows"]]
    rows, wrong = [], []
    for kind in WHAT | {"link": ""}:
        for factor in case.counts:
            chosen = [one for one in planned if (one.kind, one.factor) == (kind, factor)]
            after, longer = [], []
            for one in chosen:
                # The first row is missing: a row stands at its step less one.
                first = case.quiet + one.first - 1
                steps = named[first : first + INJECTED]
                usual = fmean(spans[first - INJECTED : first])
                longer.append(fmean(spans[first : first + INJECTED]) / usual)
                after.append(next((n for n, who in enumerate(steps, 1) if expected(one) in who), 0))
                others = set().union(*named[first + 1 : first + INJECTED + RECOVERY])
                wrong += [(*who, one) for who in others - {expected(one)}]
            soon = [n for n in after if 0 < n <= SOON]
            steps = f"{median(soon):g}" if soon else "-"
            of = f"{len(soon)} of {len(after)}"
            rows.append((kind, f"{factor:g}", f"{median(longer):.2f}", of, steps))
    columns = ("kind", "factor", "of the step", f"within {SOON} steps", "median steps")
    print(table(columns, rows))
    print(f"named wrongly: {len(wrong)}")
    for who, what, one in wrong:
        print(f"  rank {who}, {what}, while {one}")


def main() -> None:
    """Runs the jobs, or reads what they left."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=Path, metavar="FILE", help="write the rows of all jobs")
    options.add_argument("--replay", type=Path, metavar="FILE", help="judge the rows of a file")
    options.add_argument("--only", choices=CASES, help="one job alone")
    options.add_argument("--quiet", type=int, metavar="STEPS", help="in which none is slow")
    options.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    cases = CASES
    if chosen.quiet is not None:
        cases = {name: case._replace(quiet=chosen.quiet) for name, case in cases.items()}
    if is_rank():
        answer(rows_of(*cases[chosen.case]))
        return
    stored = json.loads(chosen.replay.read_text()) if chosen.replay else {}
    for name, case in cases.items():
        if chosen.only not in (None, name) or (chosen.replay and name not in stored):
            continue
        begin = time.monotonic()
        if not chosen.replay:
            stored[name] = on_ranks(case.ranks, "--case", name)
        span = median(row[1] for row in stored[name][0]["rows"])
        print(f"\n{name} ranks, steps of {1e3 * span:.1f} ms, {time.monotonic() - begin:.0f} s")
        judge(case, stored[name])
    if chosen.rows:
        chosen.rows.write_text(json.dumps(stored))


if __name__ == "__main__":
    main()
