"""``fleetpipe locate``: runs a job and its twin, and prints the first place that differs.

``run`` is the command, ``first_difference`` compares two records step by step, and ``_Comparison``
compares the phases of one step in their order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from fleetpipe.compare.differences import gap
from fleetpipe.contrib import locator
from fleetpipe.contrib.locator import CUT, Location, record
from fleetpipe.contrib.locator.flow import Flow, StepBesideTwin, Tolerances
from fleetpipe.contrib.locator.layouts import Matched, WholeTensors, is_sample, match
from fleetpipe.contrib.locator.locate_options import SETTING, TIMEOUT, Setting
from fleetpipe.contrib.locator.parameters import ParameterChecks
from fleetpipe.contrib.locator.record import DROPPED, Meaning, RankTensors, Record
from fleetpipe.errors import FleetPipeError, UsageError
from fleetpipe.launch import script, streams
from fleetpipe.launch.script import command_folder
from fleetpipe.mesh.axes import STREAMS

#: By micro-batch the loss that backward begins from.
Losses = dict[int, float]

#: The folders in a record: of the job, its twin, and the twin changed in the last place.
JOB, TWIN, PERTURBED = "job", "twin", "perturbed"


def first_difference(job: Record, twin: Record, perturbed: Record | None = None) -> Location | None:
    """Returns the first place where a job differs from its twin by more than rounding.

    Args:
        job: The tensors of the job's ranks.
        twin: The tensors of one device.
        perturbed: The tensors of the twin with its numbers changed in the last place; None: any
            different bit counts.
    """
    tolerances = Tolerances(twin, perturbed)
    steps = (
        _Comparison(StepBesideTwin(job, twin, tolerances, number), match(job, twin, number))
        for number in range(min(job.steps, twin.steps))
    )
    return next((finding for step in steps if (finding := step.first()) is not None), None)


class _Comparison:
    """Compares one step of a job with the twin's."""

    def __init__(self, step: StepBesideTwin, matched: Matched) -> None:
        self._at, self._matched = step, matched
        self._flow, self._parameters = Flow(step, matched), ParameterChecks(step)

    def first(self) -> Location | None:
        """Returns the first place that differs in this step."""
        parameters = self._parameters
        checks: list[Callable[[], Location | None]] = [
            parameters.initial,
            self._evaluation,
            self._data,
            lambda: self._flow.first("forward"),
            self._streams,
            self._loss,
            self._returned_losses,
            parameters.cleared,
            self._backward,
            parameters.reduction,
            parameters.trained,
            parameters.clip,
            parameters.optimizer_input,
            parameters.update,
            parameters.buffers,
        ]
        return next((finding for check in checks if (finding := check()) is not None), None)

    # Data and loss

    def _evaluation(self) -> Location | None:
        """Finds ranks that recorded a loss and no inputs: their model is in the mode of eval()."""
        step, ranks = self._at.number, self._at.job.ranks
        training = [
            r.rank for r in ranks if any(p.part.startswith("input") for p in r.of(step, "data"))
        ]
        wrong = [
            r.rank
            for r in ranks
            if r.rank not in training and {p.part for p in r.of(step, "loss")} == {"share"}
        ]
        if not training or not wrong:
            return None
        axis = self._at.axis_of(wrong, [*wrong, *training])
        return self._at.location("", "forward", wrong, locator.EVALUATING, axis)

    def _data(self) -> Location | None:
        """Finds a replica with other samples than the twin, or a rank with other labels."""
        at = self._at
        if self._matched.wrong is not None:
            cause, replica = self._matched.wrong
            if cause is locator.OTHER_SAMPLES and at.reads_on:
                raise _cut_by_the_script(replica, at.number)
            ranks = [n for n, rank in at.ranks.items() if at.job.replica(rank) == replica]
            axis = at.axis_of(ranks, at.ranks)
            return at.location("", "data", ranks, cause.format(replica), axis, 0)
        labels = [
            outcome
            for outcome in self._flow.outcomes("data")
            if not outcome.right
            and outcome.place.part.startswith("label")
            and is_sample(outcome.rank.tensors[outcome.place], outcome.place, at.twin)
        ]
        if not labels:
            return None
        first = min(outcome.place.micro_batch for outcome in labels)
        ranks = [o.rank.rank for o in labels if o.place.micro_batch == first]
        axis, split = at.axis_of(ranks, at.ranks), at.split("sep", "cp")
        cause = locator.LABELS if axis or not split else locator.LABELS_OF_PARTS
        return at.location("", "data", ranks, cause, axis or split, first)

    def _streams(self) -> Location | None:
        """Finds ranks whose dropouts drew the same numbers for different values."""
        at = self._at
        seen: dict[Meaning, list[tuple[RankTensors, bytes]]] = defaultdict(list)
        for rank in at.job.ranks:
            for place, mask in rank.of(at.number, "forward").items():
                if place.part == "mask" and mask.size > 32 and not mask.all():
                    seen[place].append((rank, mask.tobytes()))
        for place, masks in seen.items():
            for (one, drawn), (other, same) in itertools.combinations(masks, 2):
                axis = at.axis_of([one.rank], [one.rank, other.rank])
                if axis in ("", "pp", "ep") or drawn != same:
                    continue
                x, y = (rank.tensors.get(place._replace(part=DROPPED)) for rank in (one, other))
                alike = x is None or y is None or gap(x, y) <= 1e-3
                if axis in ("mp", "sep", "cp") and alike:
                    continue
                ranks, cause = [one.rank, other.rank], STREAMS.format(axis)
                measured = place.micro_batch, 1.0
                return at.location(place.name, "forward", ranks, cause, axis, *measured)
        return None

    def _loss(self) -> Location | None:
        """Compares the losses that backward begins from."""
        at, flow = self._at, self._flow
        shares, expected = self._shares(), _shares_of(at.twin, at.number)
        if not shares or not expected:
            return None
        tolerance = at.tolerance(at.place("loss", "", "share", 0), np.zeros(1, "float32"))
        ratio = _sum(shares.values()) / (_sum([expected]) or 1.0)
        off = min(abs(ratio / n - 1) for n in at.scales)
        if off <= tolerance or self._has_parts(ratio, _sum([expected]), tolerance):
            return None
        if flow.waiting is not None:
            return flow.describe(flow.waiting)
        count = len(next(iter(shares.values())))
        cause = locator.of_loss(ratio, tolerance, at.scales, count, flow.rows, at.degrees)
        ranks = [rank.rank for rank in at.job.ranks if _shares_of(rank, at.number)]
        # The twin has a loss of whole micro-batches of its own alone, not of other rows.
        wrong = [
            (number, rank.rank)
            for rank in at.job.ranks
            for number, share in _shares_of(rank, at.number).items()
            if (whole := flow.rows_of(rank, number).whole) in expected
            if min(abs(share / (expected[whole] or 1.0) / n - 1) for n in at.scales) > tolerance
        ]
        bad = [rank for _, rank in wrong] or ranks
        axis = at.axis_of(bad, ranks) or at.split("dp", "sharding", "sep", "cp", "mp")
        first = min(wrong)[0] if wrong else None
        return at.location("", "loss", bad, cause, axis, first, off, tolerance)

    def _shares(self, *more: str) -> dict[tuple[int, ...], Losses]:
        """Returns the losses of the ranks by their coordinates on the axes of data and ``more``."""
        shares: dict[tuple[int, ...], Losses] = {}
        for rank in self._at.job.ranks:
            axes = ("dp", "sharding", "sep", "cp", "ep", *more)
            place = tuple(rank.coordinate.get(axis, 0) for axis in axes)
            if place not in shares and (of_rank := _shares_of(rank, self._at.number)):
                shares[place] = of_rank
        return shares

    def _has_parts(self, ratio: float, expected: float, tolerance: float) -> bool:
        """Whether the ranks along mp have losses of different tokens, which sum to the twin's."""
        members = self._at.degrees.get("mp", 1)
        total = _sum(self._shares("mp").values()) / (expected or 1.0)
        apart = abs(total - members * ratio) > tolerance * abs(total)
        ways = (k * n for k in (1, members) for n in self._at.scales)
        return apart and min(abs(total / n - 1) for n in ways) <= tolerance

    def _returned_losses(self) -> Location | None:
        """Compares the losses that ``train_batch`` returns."""
        at, place = self._at, self._at.place("loss", "", "returned 0")
        value = at.twin.tensors.get(place)
        if value is None:
            return None
        tolerance = at.tolerance(place, value)
        held = {n: rank.tensors[place] for n, rank in at.ranks.items() if place in rank.tensors}
        apart = {n: gap(tensor, value) for n, tensor in held.items()}
        bad = [n for n, far in apart.items() if not far <= tolerance]
        if not bad:
            return None
        axis = at.axis_of(bad, apart) or at.split("dp", "sharding", *at.degrees)
        worst = max(apart.values())
        return at.location("", "loss", bad, locator.RETURNED, axis, None, worst, tolerance)

    # Backward

    def _backward(self) -> Location | None:
        """Finds the first wrong gradient of a layer's output, or of a parameter, in backward."""
        flow = self._flow
        outcomes = (o for o in flow.outcomes("gradient") if o.place.part.startswith("output"))
        wrong = flow.wrong(outcomes, backward=True)
        first = self._parameters.gradient()
        if wrong is None and first is not None:
            wrong = flow.waiting
        if wrong is not None and (first is None or wrong[0].position < first[0]):
            return flow.describe(wrong)
        if first is None:
            return None
        finding = first[1]
        if locator.NO_GRADIENT in finding.cause:
            return finding._replace(layer=flow.stopping() or finding.layer)
        if wrong is None and self._parameters.most_gradients_wrong:
            return finding._replace(layer="", cause=locator.ACCUMULATED)
        return finding


def _shares_of(rank: RankTensors, step: int) -> Losses:
    """Returns the losses that a rank's backward begins from."""
    losses = rank.of(step, "loss").items()
    return {p.micro_batch: float(tensor.sum()) for p, tensor in losses if p.part == "share"}


def _sum(shares: Collection[Losses]) -> float:
    return sum(itertools.chain.from_iterable(losses.values() for losses in shares))


def _cut_by_the_script(replica: int, step: int) -> UsageError:
    return UsageError(
        f"the samples of replica {replica} cannot be compared with those of one device",
        where=f"step {step}, a loop without train_batch",
        cause="the script cuts them by a number of replicas that it does not ask Fleet for, so "
        "that on one device it reads those of one replica; or the sampler is wrong",
        fix="say how it runs on one device, with --twin NAME=VALUE or --twin-arguments",
    )


def run(options: argparse.Namespace) -> int:
    """Runs a job and its twin and prints the result; in a started process, records a script.

    Returns:
        0 if nothing differs beyond rounding, 1 if something does, 2 if the command itself fails.

    Raises:
        UsageError: The job or its twin fails, trains nothing, or cannot be compared.
    """
    if SETTING in os.environ:
        if script.to_be_launched(options):
            return script.launch(options, "locate")
        from fleetpipe.contrib.locator import collecting

        return collecting.run(options)
    try:
        finding, steps = find_difference(options)
    except FleetPipeError:
        raise
    except Exception:
        traceback.print_exc()
        return 2
    if options.json:
        print(json.dumps(None if finding is None else finding.as_dict()))
    elif finding is None:
        print(f"locate: nothing differs beyond rounding (steps compared: {steps})")
    else:
        print(finding)
    return 0 if finding is None else 1


def find_difference(options: argparse.Namespace) -> tuple[Location | None, int]:
    """Runs a job and its twin, and compares them.

    Returns:
        The first place that differs, or None, and the number of compared steps.

    Raises:
        UsageError: The errors of :func:`run`.
    """
    with command_folder(large=True) as temporary:
        kept = None if options.against is None else _earlier_twins(options.against)
        folder_of_record = options.record or temporary
        for part in (JOB, TWIN, PERTURBED):
            (folder_of_record / part).mkdir(parents=True, exist_ok=True)
            for file in (folder_of_record / part).glob(record.FILES):
                file.unlink()
        _start(options, Setting(str(folder_of_record / JOB), options.steps))
        job = record.read(folder_of_record / JOB)
        if kept is not None:
            return first_difference(job, *kept), min(job.steps, kept[0].steps)
        automatic = not (options.twin or options.twin_arguments)
        setting = Setting(
            str(folder_of_record / TWIN), job.steps, str(folder_of_record / JOB), False, automatic
        )
        _start(options, setting)
        twin = record.read(folder_of_record / TWIN)
        steps = min(job.steps, twin.steps)
        finding = first_difference(job, twin)
        if finding is not None or options.record is not None:
            moved = folder_of_record / PERTURBED
            _start(options, setting._replace(folder=str(moved), perturbed=True))
            finding = first_difference(job, twin, record.read(moved))
        finding = _by_cut(job, twin, finding)
        if finding is None and steps < job.steps:
            raise UsageError(
                f"the twin ends after {steps} of the job's {job.steps} steps; nothing differs in "
                "these",
                cause="it trains with the samples of all replicas, and the script reads a fixed "
                "number",
                fix="say how the script reads all of them on one device, with --twin or "
                f"--twin-arguments, or compare --steps {steps}",
            )
        return finding, steps


def _earlier_twins(folder: Path) -> tuple[record.Record, record.Record]:
    """Reads the twins of an earlier record."""
    for part in (TWIN, PERTURBED):
        if not any((folder / part).glob(record.FILES)):
            raise UsageError(
                "--against names a folder that has no record of a twin",
                where=str(folder / part),
                cause="it is another folder, or the run that was to make it has failed",
                fix="make one first: fleetpipe locate --record FOLDER train.py",
            )
    return record.read(folder / TWIN), record.read(folder / PERTURBED)


def _by_cut(job: record.Record, twin: record.Record, finding: Location | None) -> Location | None:
    """Returns a finding, or else a weight whose shards are cut in another way than the twin's.

    Raises:
        UsageError: The finding is in a layer whose weight the ranks have drawn by themselves.
    """
    for name, moved in WholeTensors(job).unclear(twin.ranks[0].names(0, "initial")).items():
        layer = name.rpartition(".")[0]
        if finding is None and moved:
            ranks, cause = [rank.rank for rank in job.ranks], f"{name}: {CUT}"
            axis = "mp" if "mp" in job.degrees else next(iter(job.degrees), "")
            return Location(layer, "initial", axis, ranks, 0, None, float("inf"), 0.0, cause)
        if finding and (finding.phase, finding.layer) == ("forward", layer.rpartition(".")[0]):
            raise UsageError(
                "this layer is not compared: nothing shows of which whole weight ranks have parts",
                where=finding.layer,
                cause=f"each rank draws its part of {name} by itself, or cuts it in a rare way",
                fix="draw the whole weight on all ranks, and give each its part of it",
            )
    return finding


def locate(
    path: str | Path,
    arguments: Sequence[str] = (),
    nproc: int = 1,
    twin: Sequence[str] = (),
    twin_arguments: str | None = None,
    steps: int = 4,
    record: str | Path | None = None,
    against: str | Path | None = None,
    log_dir: str | Path = "log",
    timeout: float = TIMEOUT,
) -> Location | None:
    """Runs a training script and its twin on one device, and names the first difference.

    Args:
        path: The script.
        arguments: Its arguments.
        nproc: The number of processes.
        twin: Variables ``"NAME=VALUE"`` of the environment for degrees 1; empty with
            ``twin_arguments=None``: degrees are set to 1 in ``fleet.init``.
        twin_arguments: Additional arguments, after the others, with which it runs at degrees 1.
        steps: The number of steps to compare; the script is ended after them.
        record: A folder that stores the tensors of job and twin.
        against: Such a folder; the job is compared with the twin in it.
        log_dir: The folder for the logs of several processes.
        timeout: A run that finishes no step within so many seconds is ended.

    Returns:
        The first place that differs by more than rounding, or None.

    Raises:
        UsageError: The job or its twin fails, or trains nothing.

    Example:
        >>> finding = fleetpipe.locate("train.py", nproc=2)    # doctest: +SKIP
        >>> print(finding)                                     # doctest: +SKIP
    """
    options = argparse.Namespace(
        script=Path(path),
        arguments=list(arguments),
        nproc=nproc,
        twin=list(twin),
        twin_arguments=twin_arguments,
        steps=steps,
        record=None if record is None else Path(record),
        against=None if against is None else Path(against),
        log_dir=str(log_dir),
        timeout=timeout,
        log_level=streams.DEFAULT_LEVEL,
        json=True,
    )
    return find_difference(options)[0]


def _start(options: argparse.Namespace, setting: Setting) -> None:
    """Runs the script in recording processes."""
    alone = bool(setting.job)
    environment = {
        **streams.environment(options.log_level),
        SETTING: json.dumps(setting._asdict()),
    }
    words = script.script_words(options)
    if alone:
        environment = {k: v for k, v in environment.items() if not k.startswith("PADDLE_TRAINER")}
        environment.update(pair.split("=", 1) for pair in options.twin or ())
        words += shlex.split(options.twin_arguments or "")
    count = 1 if alone else options.nproc
    command = [sys.executable, str(script.LAUNCHED), "locate", "--nproc", str(count)]
    command += ["--log-dir", options.log_dir, "--log-level", options.log_level, *words]
    quiet = alone or options.json
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr if quiet else None)
    failure = _await_end(process, Path(setting.folder), options.timeout)
    if failure:
        raise UsageError(
            f"the {'twin' if alone else 'job'} failed before it had {setting.steps} steps",
            where=str(options.script),
            got=failure,
            cause="at degrees 1 the script needs other options" if alone else None,
            fix="say how it runs at degrees 1: --twin NAME=VALUE, or --twin-arguments '--pp 1'"
            if alone
            else "make the script run first: fleetpipe run",
        )


def _await_end(process: subprocess.Popen[bytes], folder: Path, limit: float) -> str:
    """Waits until a run ends, and ends it if it finishes no step within a limit.

    Returns:
        The failure in words; "" without one.
    """
    steps = -1
    while steps != (steps := sum(1 for _ in folder.iterdir())):
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit)
            return f"exit code {code}" if code else ""
    for end in (process.send_signal, process.send_signal, lambda _: process.kill()):
        # The launcher passes the first signal on to its ranks, and kills them at the second.
        end(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
            break
    return f"no step was finished within {limit:g} seconds (--timeout)"
