"""The command ``fleetpipe doctor``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fleetpipe import arguments as kinds
from fleetpipe.doctor import device, host, ranks
from fleetpipe.doctor.finding import OK, WRONG, Finding, wrong
from fleetpipe.extras import needed_for
from fleetpipe.version import __version__


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe doctor`` to its parser."""
    parser.add_argument(
        "--nproc",
        type=kinds.processes,
        default=2,
        metavar="N",
        help="ranks to start on this host (default: %(default)s)",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="look at every node of the Ray cluster at HOST:PORT too; auto, the default: the one "
        "that ray start began here",
    )
    parser.add_argument(
        *kinds.spelled("checkpoint_dir"),
        type=Path,
        default=Path(os.environ.get("FLEETPIPE_CHECKPOINT_DIR", "checkpoints")),
        metavar="FOLDER",
        help="where checkpoints are kept (default: $FLEETPIPE_CHECKPOINT_DIR, else checkpoints)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Looks at this host, at Paddle, at some ranks, and at a cluster's nodes.

    Returns:
        0 where nothing is wrong, else 1.
    """
    findings = host.findings(options.nproc, options.checkpoint_dir)
    findings += (of_paddle := device.findings())
    if options.nproc > 1 and not wrong(of_paddle):
        findings += ranks.findings(options.nproc)
    if options.ray is not None:
        with needed_for("a Ray cluster is looked at"):
            from fleetpipe.doctor import cluster
        findings += cluster.findings(options.ray, options.nproc, options.checkpoint_dir)
    if options.json:
        listed = [finding._asdict() for finding in findings]
        result = {"fleetpipe": __version__, "findings": listed, "wrong": len(wrong(findings))}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(findings))
    return int(bool(wrong(findings)))


def _lines(findings: list[Finding]) -> Iterator[str]:
    width = max(len(finding.subject) for finding in findings)
    for subject, state, text, fix, _ in findings:
        yield f"{state.upper() if state == WRONG else state:<6}{subject:<{width}}  {text}"
        if fix and state != OK:
            yield f"{'':<{width + 8}}what to do: {fix}"
    count = len(wrong(findings))
    yield f"fleetpipe {__version__}: " + (f"{count} wrong" if count else "nothing is wrong")
