"""Reads the folder of a run, even if files are missing, torn or still being written.

The command ``fleetpipe report`` makes a page of it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetpipe.arguments import new_file, using
from fleetpipe.checkpoint.files import manifest, run_folder
from fleetpipe.checkpoint.files.manifest import SHORT
from fleetpipe.contrib.view.board import FILE as BOARD
from fleetpipe.contrib.view.board import BoardFile, JobBoard, Row, RunRecord
from fleetpipe.contrib.view.history import AttemptRecord, attempts_of
from fleetpipe.contrib.view.showing.page import comparison, page, short_names
from fleetpipe.contrib.view.traced_ops import Pipeline, pipeline_of
from fleetpipe.errors import CheckpointError, ConfigError, FleetPipeError
from fleetpipe.job.run_files import ABOUT, ATTEMPTS, METRICS, TRACE, read_lines

#: A larger figure counts as infinite.
_MOST = 1e200
#: The names in a row that are no figures.
_KEYS = ("step", "epoch", "phase", "time")
#: The settings of a training whose product is the number of its steps.
_SIZES = ("batches_per_epoch", "epochs")
#: The errors of a trace or a schedule that is none.
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
#: The files of a run that a page must not replace.
_FILES = (METRICS, ABOUT, ATTEMPTS, TRACE)


def read(folder: Path) -> RunRecord:
    """Reads the folder of a run.

    Args:
        folder: The folder into which ``MetricsLogger``, or a trace, was written.

    Raises:
        ConfigError: There is no such folder, or it has none of the files of a run.
    """
    traces = [path for path in (folder, *_subfolders(folder)) if (path / TRACE).is_file()]
    if not traces and not any((folder / name).exists() for name in (METRICS, ABOUT, ATTEMPTS)):
        raise ConfigError(
            "there is no run in this folder"
            if folder.is_dir()
            else "this is a file, and no folder of a run"
            if folder.exists()
            else "there is no such folder",
            expected=f"{METRICS}, {ABOUT} or {TRACE}",
            got=str(folder),
            fix="train with callbacks=MetricsLogger(folder), and give that folder",
        )
    notes: list[str] = []
    about = _read_about(folder / ABOUT, notes)
    train, evaluations = _read_rows(folder / METRICS, notes)
    attempts = attempts_of(_read_json_lines(folder / ATTEMPTS, notes))
    pipeline: Pipeline | None = None
    try:
        pipeline = pipeline_of(about.get("schedule"), traces[0] / TRACE if traces else None)
    except (*_DAMAGED, FleetPipeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        notes.append(f"The pipeline cannot be drawn: {first}.")
    if pipeline is None or not pipeline.measured:
        notes.append(
            "No step was traced, so the picture of what ran is missing: add "
            f'TraceSteps([10, 11], "{folder.name}/trace") to the callbacks.'
        )
    if train and "held_by_rank" not in train[-1].lists:
        notes.append(
            "No throughput and memory were measured: add ThroughputMonitor() to the callbacks, "
            "before MetricsLogger; it measures every 10 batches."
        )
    # The first evaluation follows the first epoch.
    finished = bool(attempts) and attempts[-1].finished
    if train and not evaluations and (finished or train[-1].epoch > train[0].epoch):
        notes.append("There was no evaluation: give fit some eval_data to have its curves.")
    board = _read_board(folder, [*train, *evaluations], about, attempts)
    name, saved = folder.resolve().name, _newest_checkpoint(folder)
    return RunRecord(name, board, train, evaluations, about, pipeline, notes, saved)


def _read_board(
    folder: Path, rows: Sequence[Row], about: Mapping[str, Any], attempts: Sequence[AttemptRecord]
) -> JobBoard:
    """Reads the job's state (board) as the job wrote it, or else makes it from the other files."""
    try:
        return BoardFile(folder / BOARD)()
    except ConfigError:
        last = max(rows, key=lambda row: (row.step, row.time), default=Row(0, 0, 0.0, {}, {}))
        training = about.get("training")
        sizes = training if isinstance(training, dict) else {}
        counts = [sizes[name] for name in _SIZES if isinstance(sizes.get(name), int)]
        steps = math.prod(counts) if len(counts) == len(_SIZES) else None
        norm = last.figures.get("gradient_norm")
        return JobBoard(last.time, last.step, steps, gradient_norm=norm, attempts=tuple(attempts))


def _newest_checkpoint(folder: Path) -> tuple[int, str] | None:
    """Returns the newest checkpoint below the folder: its step, and the hash of its model.

    Returns None if there is no checkpoint, or if the newest one is damaged.
    """
    complete = map(run_folder.complete_steps, _subfolders(folder))
    steps = {step: path for paths in complete for step, path in paths.items()}
    try:
        newest = max(steps)
        return newest, manifest.read_manifest(steps[newest]).model_hash[:SHORT]
    except (ValueError, CheckpointError):  # there is none, or it is damaged
        return None


def _subfolders(folder: Path) -> list[Path]:
    """Returns the folders within a folder, sorted."""
    return sorted(path for path in folder.glob("*") if path.is_dir())


def _read_about(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """Reads ``run.json``; returns an empty object, and notes why, if it is missing or damaged."""
    if not path.exists():
        notes.append(
            f"{path.name} is missing, so configuration, layout and versions are: MetricsLogger "
            "writes it when a training begins."
        )
        return {}
    try:
        about = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        notes.append(f"{path.name} is damaged: it holds no JSON object. It was left out.")
        return {}
    return about


def _read_rows(path: Path, notes: list[str]) -> tuple[list[Row], list[Row]]:
    """Reads ``metrics.jsonl``, and notes what is wrong with it.

    Returns:
        The rows of training batches and those of evaluations, by step.
    """
    by_phase: dict[str, dict[int, Row]] = {"train": {}, "eval": {}}
    invalid = 0
    for line in _read_json_lines(path, notes):
        row, phase = _row_from_line(line), str(line.get("phase"))
        if row is None or phase not in by_phase:
            invalid += 1
        else:
            by_phase[phase][row.step] = row
    if invalid:
        notes.append(f"{invalid} lines of {path.name} are no rows of a run, and were left out.")
    if not path.exists():
        notes.append(f"{path.name} is missing, so all curves are: MetricsLogger writes it.")
    elif not by_phase["train"]:
        notes.append(f"{path.name} has no row of a batch: none has been trained so far.")
    train, evaluations = ([rows[step] for step in sorted(rows)] for rows in by_phase.values())
    return train, evaluations


def _row_from_line(line: Mapping[str, Any]) -> Row | None:
    """Converts a line of ``metrics.jsonl`` to a row; returns None if the line is no row."""
    step, epoch, when = (line.get(name, 0) for name in ("step", "epoch", "time"))
    if not all(_is_number(value) and math.isfinite(value) for value in (step, epoch, when)):
        return None
    values = {name: value for name, value in line.items() if name not in _KEYS}
    figures = {name: _drawable_figure(value) for name, value in values.items() if _is_number(value)}
    lists = {
        name: [_drawable_figure(number) for number in value]
        for name, value in values.items()
        if isinstance(value, list) and value and all(map(_is_number, value))
    }
    return Row(int(step), int(epoch), float(when), figures, lists)


def _drawable_figure(value: float) -> float:
    """Returns a figure as a float, which is infinite if the figure is too large to draw."""
    return float(value) if not abs(value) > _MOST else math.copysign(math.inf, value)


def _is_number(value: Any) -> bool:
    """Returns whether a value of JSON is a number, and not too large for a float."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 1 << 63
    return isinstance(value, float)


def _read_json_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines, and notes how many lines are damaged."""
    try:
        values, torn = read_lines(path)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
        return []
    if torn:
        lines = "one line" if torn == 1 else f"{torn} lines"
        notes.append(
            f"{lines} of {path.name} cannot be read, as where a process is killed while it writes, "
            "and what it says is left out."
        )
    return values


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe report`` to its parser."""
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="of a run: what MetricsLogger was given, or the folder of a trace; of several runs "
        "one page compares them",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=new_file,
        default="report.html",
        metavar="FILE",
        help="the page to write (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Writes the page of one or several runs, which may go on, or have died.

    Raises:
        ConfigError: A folder has no run, or is given twice, a file cannot be read or written, or
            the page would replace a file of a run.
    """
    folders: list[Path] = options.folders
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError(
            "FOLDER: one folder is given twice",
            got=" ".join(map(str, folders)),
            fix="give the folders of different runs",
        )
    runs: list[RunRecord] = []
    for folder in folders:
        files = (path for name in _FILES for path in folder.rglob(name))
        if options.output.resolve() in {path.resolve() for path in files}:
            raise ConfigError(
                f"--output: {options.output} is a file of the run, which the page would replace",
                fix="give another name, such as report.html",
            )
        with using("FOLDER", folder, "the folder of a run"):
            runs.append(read(folder))
    names = short_names(folders)
    text = page(runs[0]) if len(runs) == 1 else comparison(dict(zip(names, runs)))
    with using("--output", options.output, "a file that can be written"):
        # JSON may hold half of a surrogate pair, which UTF-8 has no bytes for.
        options.output.write_text(text, encoding="utf-8", errors="replace")
    for name, recorded in zip(names, runs):
        of = f"{name}: " if len(runs) > 1 else ""
        sys.stderr.writelines(f"fleetpipe: {of}{note}\n" for note in recorded.notes)
    sys.stdout.write(f"{options.output}: {len(text):,} characters\n")
    return 0
