"""What happens at the end of a process: its job ends, and errors of stock Paddle are explained."""

from __future__ import annotations

import atexit

from fleetpipe import log
from fleetpipe.errors import FleetPipeError
from fleetpipe.job import job
from fleetpipe.job.watching import process_exit

_log = log.logger(__name__)

#: What stock Paddle's ``PipelineLayer`` says where there is no GPU; it names no cause.
_STOCK_ON_CPU = "'ParallelEnv' object has no attribute '_device_id'"
_STOCK_HINT = """\
the PipelineLayer of this script is stock Paddle's, which cannot be built on a CPU
  what to do: from fleetpipe.fleet.meta_parallel import PipelineLayer; where a library imports it, \
start the script with fleetpipe run, or with import fleetpipe; fleetpipe.install()"""

#: What stock Paddle's ``fleet.init`` says in one process.
_STOCK_ALONE = "nranks: 1, mp_num:"
_STOCK_ALONE_HINT = """\
the fleet.init of this script is stock Paddle's, which plays no pipeline in one process
  what to do: from fleetpipe import fleet, for fleet.init and all else; where a library calls it, \
start the script with fleetpipe run, or with import fleetpipe; fleetpipe.install()"""


def end_with_process() -> None:
    """Ends the job when the process ends, and sends an uncaught error to the other ranks."""
    error = process_exit.error()
    if isinstance(error, AttributeError) and _STOCK_ON_CPU in str(error):
        _log.error(_STOCK_HINT)
    if isinstance(error, AssertionError) and str(error).startswith(_STOCK_ALONE):
        _log.error(_STOCK_ALONE_HINT)
    try:
        job.end(error)
    except FleetPipeError as failure:
        # From here Python would print it and end with status 0.
        process_exit.end_with(failure)


def install() -> None:
    """Has the job end with this process."""
    process_exit.note_exits()
    atexit.register(end_with_process)
