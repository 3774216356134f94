"""The entry point that runs Paddle's launcher, started by its path."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

# A terminal's Ctrl-C reaches this process too. While it loads Paddle, it ends without a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)

# Python puts the folder of a file that is run by its path first on sys.path.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from fleetpipe.launch.forked_ranks import run_launcher  # noqa: E402
from fleetpipe.launch.noted_launch import launch  # noqa: E402

run_launcher(launch)
