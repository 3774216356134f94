"""``fleetpipe run``: runs a script for ``paddle.distributed.fleet`` unedited on fleetpipe."""

from __future__ import annotations

import argparse
import os

from fleetpipe.extras import extra
from fleetpipe.launch import script


def run(options: argparse.Namespace) -> int:
    """Runs the script with fleetpipe's modules in place of Paddle's.

    Returns:
        The script's exit code; with several ranks that of the first that failed.
    """
    if script.to_be_launched(options):
        return script.launch(options, "run")
    # It loads Paddle, which a process that launches leaves to its launcher.
    from fleetpipe.launch.substitution import in_place_of_paddles

    if options.serve is not None:
        os.environ[extra("view.address").SERVE] = str(options.serve)
    with in_place_of_paddles():
        return script.execute_to_the_end(options.script, options.arguments)
