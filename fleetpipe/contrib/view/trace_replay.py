"""Replays the steps of a trace (``ReplayedStep``), and adds up where their time went.

An operation begins when the operation before it on its stream has ended and its inputs have
arrived. The computations of a rank are one stream, in the order of the trace; each kind of transfer
is another. A computation waits for its receive, a send for its computation, a collective for the
computations whose gradients it reduces, and the optimizer for the collectives. A send and its
receive, and the replicas of a collective, begin together and then take their transfer time. A trace
without transfers is replayed as if these took no time. Launch delays are left out.

fleetpipe's own ranks have one thread: all operations of a rank are one stream, and a send does not
wait for its receive.

The rows of ``account_of`` add up to the measured step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.contrib.view.traced_ops import (
    COLLECTIVES,
    COMMUNICATIONS,
    TRANSFERS,
    TracedOperation,
)
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import BETWEEN
from fleetpipe.json_value import JsonValue, Source

#: ``[operations, cases]``: the seconds of each operation in each of several cases.
Durations = np.ndarray

#: The rows of time in which a rank had no processor.
QUEUEING, LIMITED, STOLEN = "queueing for a core", "stopped by a limit", "stolen by the host"
WAITING, OUTSIDE = "waiting for messages", "outside of operations"
#: By the kind of an operation, the operations whose values it may need: the kind of each, and how
#: many model parts further it runs, for the same micro-batch. It needs the first that is in the
#: trace: in the last part, which has no next one, a backward needs the forward of its own part.
_OF_BACKWARD = (("backward-recv", 0), ("I", 1), ("B", 1), ("F", 0))
_INPUTS: Mapping[str, Sequence[tuple[str, int]]] = {
    "forward-send": (("F", 0),),
    "backward-send": (("I", 0), ("B", 0)),
    "F": (("forward-recv", 0), ("F", -1)),
    "B": _OF_BACKWARD,
    "I": _OF_BACKWARD,
    "W": (("I", 0),),
}
_SOURCE = Source("this is no trace of fleetpipe's", ConfigError, "trace the run again")


class ReplayedStep:
    """The operations of one step, and the operations that each waits for.

    Attributes:
        operations: The operations, in the order of the trace.
        times_without_waits: [operations]; the seconds of each without waits: a communication counts
            from when all its operations have begun.
        span: Seconds to the end of the step from the end of the step before, or else from its
            begin.
        follows: Whether the step before is in the trace.
    """

    def __init__(self, operations: Iterable[TracedOperation], one_thread: bool = False) -> None:
        """Finds which operations wait for which.

        Args:
            operations: The operations of one step.
            one_thread: Whether a rank runs one operation after another, as in fleetpipe's traces.

        Raises:
            ConfigError: The order of the trace is impossible: operations wait in a circle.
        """
        self.operations = sorted(operations, key=lambda op: op.start)
        groups = _groups_that_end_together(self.operations)
        needs = _find_dependencies(self.operations, one_thread)
        #: By the index of an operation, the indices of its group, its own included.
        together = {index: group for group in groups for index in group}
        if one_thread:  # a send does not wait for its receive
            kinds = [op.kind for op in self.operations]
            together = {i: g for i, g in together.items() if not kinds[i].endswith("-send")}
        #: For each operation the indices of those that must end before it begins.
        self._waits = [
            sorted({need for member in together.get(index, (index,)) for need in needs[member]})
            for index in range(len(self.operations))
        ]
        try:
            self._order = list(TopologicalSorter(dict(enumerate(self._waits))).static_order())
        except CycleError as error:
            first = self.operations[error.args[1][0]]
            raise ConfigError(
                "operations of the trace wait for each other in a circle",
                where=f"step {first.step}, replica {first.replica}, stage {first.stage}, "
                f"{first.kind} of micro-batch {first.micro_batch}",
                cause="the clocks of the ranks differ, or two operations have one name",
                fix="give starts on one clock, and each operation once",
            ) from error
        self.follows = False
        self.span = max(op.end for op in self.operations) - self.operations[0].start
        self.times_without_waits = np.array([op.duration for op in self.operations])
        for index, group in together.items():
            last_start = max(self.operations[member].start for member in group)
            self.times_without_waits[index] = max(self.operations[index].end - last_start, 0)

    def ends(self, durations: Durations) -> np.ndarray:
        """Returns when each operation ends in each case: seconds from the step's begin.

        Args:
            durations: [operations, cases] in seconds; so is the result.
        """
        ends = np.zeros_like(durations)
        for index in self._order:
            waits = self._waits[index]
            if waits:
                np.add(ends[waits].max(axis=0), durations[index], out=ends[index])
            else:
                ends[index] = durations[index]
        return ends


def steps_of(operations: Iterable[TracedOperation], one_thread: bool = False) -> list[ReplayedStep]:
    """Returns the steps of a trace, in order; the arguments are :class:`ReplayedStep`'s."""
    by_step: defaultdict[int, list[TracedOperation]] = defaultdict(list)
    for operation in operations:
        by_step[operation.step].append(operation)
    steps = [ReplayedStep(by_step[number], one_thread) for number in sorted(by_step)]
    for before, step in itertools.pairwise(steps):
        first = step.operations[0]
        if one_thread and first.step == before.operations[0].step + 1:
            step.follows = True
            step.span += max(0.0, first.start - max(op.end for op in before.operations))
    return steps


def _groups_that_end_together(operations: Sequence[TracedOperation]) -> list[list[int]]:
    """Returns groups of operations that end together, each as indices.

    A group is a send and its receive, or the replicas of a collective.
    """
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    # How often a replica has run a collective.
    repeats: defaultdict[tuple[object, ...], int] = defaultdict(int)
    for index, op in enumerate(operations):
        if op.kind in TRANSFERS:
            way, end = op.kind.split("-")
            # An edge has the number of the model part before it: that of the part whose forward
            # sends, or whose backward receives.
            is_before_edge = (way == "forward") == (end == "send")
            edge = op.part if is_before_edge else op.part - 1
            groups[way, op.replica, edge, op.micro_batch].append(index)
        elif op.kind in COLLECTIVES:
            name = op.kind, op.stage, op.part, op.micro_batch
            repeats[name, op.replica] += 1
            repeated = *name, repeats[name, op.replica]
            groups[repeated].append(index)
    return [group for group in groups.values() if len(group) > 1]


def _find_dependencies(operations: Sequence[TracedOperation], one_thread: bool) -> list[list[int]]:
    """Returns for each operation the indices of the operations that must end before it begins.

    A send and its receive, or the replicas of a collective, begin together. Each has only its own
    dependencies in the result; the caller joins the group's.

    Args:
        operations: The operations of one step, sorted by start.
        one_thread: Whether all operations of a rank are one stream.
    """
    # The index of the last operation of each stream, and of the last optimizer step of each rank.
    last: dict[tuple[object, ...], int] = {}
    stepped: dict[tuple[int, int], int] = {}
    # By replica and model part: the operations that compute gradients of weights ("B" and "W"),
    # and those that gather parameters. By rank: the collectives that reduce gradients.
    backwards: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    gathers: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    reductions: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    # By kind, replica, model part and micro-batch; a fused operation has each of its kinds.
    index_of: dict[tuple[object, ...], int] = {}
    for index, op in enumerate(operations):
        for kind in op.kind.split("|"):
            index_of[kind, op.replica, op.part, op.micro_batch] = index
            if kind in ("B", "W"):
                backwards[op.replica, op.part].append(index)
    dependencies: list[list[int]] = []
    for index, op in enumerate(operations):
        kind = "collectives" if op.kind in COLLECTIVES else "computations"
        kind = op.kind if op.kind in TRANSFERS else kind
        # Operations of one stream run one after another.
        stream = op.rank if one_thread else (*op.rank, kind)
        # A fused forward and backward begins with the forward, and waits for its inputs.
        first_kind = "F" if op.kind.startswith("F|") else op.kind
        waits = [last[stream]] if stream in last else []
        last[stream] = index
        for kind, further in _INPUTS.get(first_kind, ()):
            source = index_of.get((kind, op.replica, op.part + further, op.micro_batch))
            if source is not None:
                waits.append(source)
                break
        if op.kind.startswith("grads"):
            waits += backwards[op.replica, op.part]
        if op.kind == "params-all-gather":
            gathers[op.replica, op.part].append(index)
            waits += [stepped[op.rank]] if op.rank in stepped else []
        elif op.kind in COLLECTIVES:
            reductions[op.rank].append(index)
        elif op.kind == "optimizer":
            waits += reductions[op.rank]
            stepped[op.rank] = index
        elif first_kind == "F":
            # Only gathers before it: one after the optimizer is for forwards of the next step.
            waits += gathers[op.replica, op.part]
        dependencies.append(waits)
    return dependencies


class Machine(NamedTuple):
    """What a trace records of the machine that ran it.

    Attributes:
        ranks: The number of ranks on each host.
        processors: The number of processors that the ranks of each host may use.
        limited: Seconds of each step in which a container's limit stopped the ranks.
        stolen: Seconds of each step that the hypervisor took.
        load: The mean number of threads, in the last minute, that ran or waited for a processor.
        between: Seconds before each step by their use (``BETWEEN``); empty in older traces.
    """

    ranks: tuple[int, ...] = ()
    processors: tuple[int, ...] = ()
    limited: tuple[float, ...] = ()
    stolen: tuple[float, ...] = ()
    load: float = 0.0
    between: Mapping[str, Sequence[float]] = {}

    @property
    def sentence(self) -> str:
        """Tells that ranks share processors; empty if each rank has its own."""
        for ranks, processors in zip(self.ranks, self.processors):
            if processors < ranks:
                if processors == 1:
                    return f"Nothing overlaps, since {ranks} ranks share one core."
                return f"At most {processors} of {ranks} ranks compute at a time: they share cores."
        return ""


def machine_of(document: Mapping[str, Any]) -> Machine:
    """Reads what a trace records of its machine; the result is empty for an older trace.

    Raises:
        ConfigError: The record is damaged.
    """
    other = document.get("otherData")
    content = other.get("machine", {}) if isinstance(other, dict) else {}
    return JsonValue(content, _SOURCE, "otherData.machine").record(
        Machine,
        between=lambda parts: {name: each.figures() for name, each in parts.fields().items()},
    )


def account_of(steps: Sequence[ReplayedStep], machine: Machine) -> dict[str, float]:
    """Returns how a mean rank spends the seconds of a mean step, by what it spends them on.

    The keys are "computing", ``WAITING``, ``QUEUEING``, ``LIMITED``, ``STOLEN`` and ``OUTSIDE``;
    the values sum to the mean step.

    Args:
        steps: The steps of a trace.
        machine: What the trace records of its machine; a figure for each step, or none.
    """
    ranks = {op.rank for step in steps for op in step.operations}
    rows: defaultdict[str, list[float]] = defaultdict(list)
    unknown = itertools.repeat(0.0)
    limits, thefts = (itertools.chain(row, unknown) for row in (machine.limited, machine.stolen))
    for step, limited, stolen in zip(steps, limits, thefts):
        for rank in ranks:
            operations = [op for op in step.operations if op.rank == rank]
            work = [op for op in operations if op.kind not in COMMUNICATIONS]
            in_work, in_all = _seconds_covered_by(work), _seconds_covered_by(operations)
            queued_in_work = sum(op.queued for op in work)
            queued = sum(op.queued for op in operations)
            by_limit = min(limited, queued)
            by_host = min(stolen, in_work - queued_in_work)
            rows["computing"].append(in_work - queued_in_work - by_host)
            rows[WAITING].append(in_all - in_work - (queued - queued_in_work))
            rows[QUEUEING].append(queued - by_limit)
            rows[LIMITED].append(by_limit)
            rows[STOLEN].append(by_host)
            rows[OUTSIDE].append(step.span - in_all)
    return {name: fmean(seconds) for name, seconds in rows.items()}


def shares_of(steps: Sequence[ReplayedStep], machine: Machine) -> dict[str, float]:
    """Returns the fraction of a mean step that a mean rank spends on each of ``PARTS``.

    A step lasts from the end of the step before to its own end; the first step of a trace is left
    out.

    Args:
        steps: The steps of a trace.
        machine: What the trace records of its machine.

    Returns:
        By part, numbers that sum to 1; empty if the trace has not recorded the time between steps.
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
    step = fmean(op.span for op in following)
    compute = max(0.0, step - waiting - sum(between.values()))
    spent = {"compute": compute, "waiting": waiting, **between}
    return {part: seconds / (sum(spent.values()) or 1.0) for part, seconds in spent.items()}


def _seconds_covered_by(operations: Iterable[TracedOperation]) -> float:
    """Returns the seconds in which at least one of the operations ran; they are sorted by start."""
    seconds, until = 0.0, float("-inf")
    for op in operations:
        seconds += max(0.0, op.end - max(op.start, until))
        until = max(until, op.end)
    return seconds
