"""Adds up where the time of the steps went: rows whose sum is the measured step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fleetpipe.contrib.view.judging.trace_replay import ReplayedStep
from fleetpipe.contrib.view.reading.traced_ops import COMMUNICATIONS, TracedOperation
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import BETWEEN
from fleetpipe.json_value import JsonValue, Source

#: The rows of time in which a rank had no processor.
QUEUEING, LIMITED, STOLEN = "queueing for a core", "stopped by a limit", "stolen by the host"
WAITING, OUTSIDE = "waiting for messages", "outside of operations"
_SOURCE = Source("this is no trace of fleetpipe's", ConfigError, "trace the run again")


class Machine(NamedTuple):
    """What a trace says of the machine that ran it.

    Attributes:
        ranks: How many ranks each host has.
        processors: How many processors these may use.
        limited: Seconds of each step that a container's limit took.
        stolen: Seconds of each step that the hypervisor took.
        load: Threads that ran or waited for a processor, in the last minute.
        between: Seconds on each of ``BETWEEN`` before each step; empty of older traces.
    """

    ranks: tuple[int, ...] = ()
    processors: tuple[int, ...] = ()
    limited: tuple[float, ...] = ()
    stolen: tuple[float, ...] = ()
    load: float = 0.0
    between: Mapping[str, Sequence[float]] = {}

    @property
    def sentence(self) -> str:
        """Says that ranks share processors; empty if each may have its own."""
        for ranks, processors in zip(self.ranks, self.processors):
            if processors < ranks:
                if processors == 1:
                    return f"Nothing overlaps, since {ranks} ranks share one core."
                return f"At most {processors} of {ranks} ranks compute at a time: they share cores."
        return ""


def machine_of(document: Mapping[str, Any]) -> Machine:
    """Reads what a trace says of its machine; nothing of an older one.

    Raises:
        ConfigError: It is no such record.
    """
    other = document.get("otherData")
    content = other.get("machine", {}) if isinstance(other, dict) else {}
    return JsonValue(content, _SOURCE, "otherData.machine").record(
        Machine,
        between=lambda parts: {name: each.figures() for name, each in parts.fields().items()},
    )


def account_of(steps: Sequence[ReplayedStep], machine: Machine) -> dict[str, float]:
    """Returns the seconds of a mean step by what a mean rank did; their sum is the step."""
    ranks = {one.rank for step in steps for one in step.operations}
    rows: defaultdict[str, list[float]] = defaultdict(list)
    for number, step in enumerate(steps):
        limited = (*machine.limited, *[0.0] * len(steps))[number]
        stolen = (*machine.stolen, *[0.0] * len(steps))[number]
        for rank in ranks:
            operations = [one for one in step.operations if one.rank == rank]
            work = [one for one in operations if one.kind not in COMMUNICATIONS]
            computing, all_of_it = _seconds_of(work), _seconds_of(operations)
            in_work, in_all = (sum(one.queued for one in each) for each in (work, operations))
            by_limit = min(limited, in_all)
            by_others = min(stolen, computing - in_work)
            rows["computing"].append(computing - in_work - by_others)
            rows[WAITING].append(all_of_it - computing - (in_all - in_work))
            rows[QUEUEING].append(in_all - by_limit)
            rows[LIMITED].append(by_limit)
            rows[STOLEN].append(by_others)
            rows[OUTSIDE].append(step.span - all_of_it)
    return {name: fmean(seconds) for name, seconds in rows.items()}


def shares_of(steps: Sequence[ReplayedStep], machine: Machine) -> dict[str, float]:
    """Returns the share of a mean step that a mean rank spends on each of ``PARTS``.

    A step lasts from the end of the step before to its own; those that no step precedes in the
    trace are left out. Empty of a trace that does not say what passed between two steps.
    """
    numbers = [number for number, step in enumerate(steps) if step.follows]
    if not machine.between or not numbers:
        return {}
    following = [steps[number] for number in numbers]
    between = {
        part: fmean((*machine.between.get(part, ()), *[0.0] * len(steps))[n] for n in numbers)
        for part in BETWEEN
    }
    waiting = account_of(following, Machine())[WAITING]
    step = fmean(one.span for one in following)
    compute = max(0.0, step - waiting - sum(between.values()))
    spent = {"compute": compute, "waiting": waiting, **between}
    return {part: seconds / (sum(spent.values()) or 1.0) for part, seconds in spent.items()}


def _seconds_of(operations: Iterable[TracedOperation]) -> float:
    """Returns the seconds in which one or several of the operations ran."""
    seconds, until = 0.0, float("-inf")
    for one in operations:
        seconds += max(0.0, one.end - max(one.start, until))
        until = max(until, one.end)
    return seconds
