"""The command ``fleetpipe report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fleetpipe.arguments import new_file, using
from fleetpipe.errors import ConfigError
from fleetpipe.report.files import ABOUT, ATTEMPTS, METRICS, TRACE
from fleetpipe.report.page import page
from fleetpipe.report.run import read


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe report`` to its parser."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="of a run: what MetricsLogger was given, or the folder of a trace",
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
    """Writes the page of a run; of one that still runs, or that died, what there is.

    Returns:
        0.

    Raises:
        ConfigError: The folder holds no run, or a file cannot be read or written, or the page
            would replace a file of the run.
    """
    _refuse_file_of_run(options.folder, options.output)
    with using("FOLDER", options.folder, "the folder of a run"):
        recorded = read(options.folder)
    text = page(recorded)
    with using("--output", options.output, "a file that can be written"):
        # Half a character of a pair, which JSON may hold, is no text.
        options.output.write_text(text, encoding="utf-8", errors="replace")
    for note in recorded.notes:
        sys.stderr.write(f"fleetpipe: {note}\n")
    sys.stdout.write(f"{options.output}: {len(text):,} characters\n")
    return 0


def _refuse_file_of_run(folder: Path, output: Path) -> None:
    names = (METRICS, ABOUT, ATTEMPTS, TRACE)
    if output.resolve() in {path.resolve() for name in names for path in folder.rglob(name)}:
        raise ConfigError(
            f"--output: {output} is a file of the run, which the page would replace",
            fix="give another name, such as report.html",
        )
