"""``fleetpipe run``: a script written for ``paddle.distributed.fleet``, unedited, on fleetpipe."""

from __future__ import annotations

import argparse

from fleetpipe.running import script
from fleetpipe.running.substitution import in_place_of_paddles


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command, and what runs it."""
    parser.set_defaults(run=run)
    script.configure(parser, "a training script that uses paddle.distributed.fleet")


def run(options: argparse.Namespace) -> int:
    """Runs the script with fleetpipe's parts in the place of Paddle's.

    Returns:
        The script's own exit code; of several ranks that of the first that failed.

    Raises:
        ConfigError: There is no such script.
    """
    if script.to_be_launched(options):
        words = ["run", str(options.script), *options.arguments]
        return script.launch(options.nproc, words)
    with in_place_of_paddles():
        return script.execute_to_the_end(options.script, options.arguments)
