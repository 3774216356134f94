"""The command ``fleetpipe watch``, and the option ``--serve`` of others."""

from __future__ import annotations

import argparse
import json
import sys
import threading

from fleetpipe.errors import UsageError
from fleetpipe.watch.address import configure_serve
from fleetpipe.watch.server import Server
from fleetpipe.watch.source import source_of
from fleetpipe.watch.terminal import show, show_once


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe watch`` to its parser."""
    parser.add_argument(
        "job",
        nargs="?",
        default="run",
        metavar="RUN | HOST:PORT",
        help="the folder of a run, or where a job is served (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="show it once, and end")
    parser.add_argument("--json", action="store_true", help="with --once: as JSON, for scripts")
    configure_serve(parser)


def run(options: argparse.Namespace) -> int:
    """Shows a job that runs.

    Returns:
        0.

    Raises:
        ConfigError: There is no such job, or it cannot be served.
        PackageNotFound: rich or prometheus-client is not installed.
        UsageError: ``--json`` without ``--once``.
    """
    if options.json and not options.once:
        raise UsageError("--json shows a job once", fix="give --once --json")
    source = source_of(options.job)
    if options.json:
        sys.stdout.write(json.dumps(source().status()) + "\n")
    elif options.once:
        show_once(source)
    elif options.serve is not None:
        source()
        server = Server(options.serve, source)
        sys.stdout.write(f"{options.job} can be watched at {server.url}\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        finally:
            server.close()
    else:
        show(source)
    return 0
