"""The command ``fleetpipe report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fleetpipe.arguments import new_file, using
from fleetpipe.contrib.view.reading.run_folder import read
from fleetpipe.contrib.view.reading.run_record import RunRecord
from fleetpipe.contrib.view.showing.page import comparison, page, short_names
from fleetpipe.errors import ConfigError
from fleetpipe.job.run_files import ABOUT, ATTEMPTS, METRICS, TRACE


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
    """Writes the page of one or several runs, also of runs that still go on or died.

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
        _refuse_file_of_run(folder, options.output)
        with using("FOLDER", folder, "the folder of a run"):
            runs.append(read(folder))
    names = short_names(folders)
    text = page(runs[0]) if len(runs) == 1 else comparison(dict(zip(names, runs)))
    with using("--output", options.output, "a file that can be written"):
        # Half a character of a pair, which JSON may hold, is no text.
        options.output.write_text(text, encoding="utf-8", errors="replace")
    for name, recorded in zip(names, runs):
        of = f"{name}: " if len(runs) > 1 else ""
        sys.stderr.writelines(f"fleetpipe: {of}{note}\n" for note in recorded.notes)
    sys.stdout.write(f"{options.output}: {len(text):,} characters\n")
    return 0


def _refuse_file_of_run(folder: Path, output: Path) -> None:
    names = (METRICS, ABOUT, ATTEMPTS, TRACE)
    if output.resolve() in {path.resolve() for name in names for path in folder.rglob(name)}:
        raise ConfigError(
            f"--output: {output} is a file of the run, which the page would replace",
            fix="give another name, such as report.html",
        )
