"""The entry point of every rank of a ``fleetpipe`` command, started by its path."""

from __future__ import annotations

import sys
from pathlib import Path

# Python puts the folder of a file that is run by its path first on sys.path.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from fleetpipe.cli import main  # noqa: E402
from fleetpipe.errors import PeerFailed  # noqa: E402
from fleetpipe.job import attempt_files, watch  # noqa: E402
from fleetpipe.job.attempt_files import Failure  # noqa: E402
from fleetpipe.job.watch import EXIT_CODE  # noqa: E402
from fleetpipe.launch.script import end_with_command  # noqa: E402

end_with_command()
code = main(sys.argv[1:])
error = watch.error_at_exit()
# Recorded, since the launcher may end this process while it cleans up, and see only the signal.
attempt_files.tell_code(EXIT_CODE if code and isinstance(error, PeerFailed) else code)
if code and error is not None:
    # The watch of a job records it too; the first record counts.
    attempt_files.tell_failure(Failure.of(attempt_files.own_rank(), error))
folder = attempt_files.folder()
saved = folder is not None and attempt_files.steps_saved_at_stop(folder) is not None
# For any other code than 0 the launcher ends the other ranks.
sys.exit(0 if saved and code in (attempt_files.PREEMPTED, attempt_files.INTERRUPTED) else code)
