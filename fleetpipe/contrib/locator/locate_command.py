"""``fleetpipe locate``: runs a job and its twin, and prints the first place that differs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fleetpipe.contrib.locator import record
from fleetpipe.contrib.locator.causes import CUT, Location
from fleetpipe.contrib.locator.comparison import first_difference
from fleetpipe.contrib.locator.layouts import WholeTensors
from fleetpipe.contrib.locator.locate_options import SETTING, TIMEOUT, Setting
from fleetpipe.errors import FleetPipeError, UsageError
from fleetpipe.launch import log_filter, script
from fleetpipe.launch.command_folder import command_folder

#: Where a record has the job, its twin, and the twin that was moved in the last place.
JOB, TWIN, PERTURBED = "job", "twin", "perturbed"


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
        _empty_folder(folder_of_record)
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
    """Names a weight whose parts form another whole than that of one device."""
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
        log_level=log_filter.DEFAULT_LEVEL,
        json=True,
    )
    return find_difference(options)[0]


def _empty_folder(folder_of_record: Path) -> None:
    for part in (JOB, TWIN, PERTURBED):
        (folder_of_record / part).mkdir(parents=True, exist_ok=True)
        for file in (folder_of_record / part).glob(record.FILES):
            file.unlink()


def _start(options: argparse.Namespace, setting: Setting) -> None:
    """Runs the script in recording processes."""
    alone = bool(setting.job)
    environment = {
        **log_filter.environment(options.log_level),
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
        # It passes the first on to its ranks, which have sessions of their own, then kills them.
        end(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
            break
    return f"no step was finished within {limit:g} seconds (--timeout)"
