"""What the launcher starts on every rank of a ``fleetpipe`` command; run by its path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Run by path, this file's folder stands first on the path of modules, and must not.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from fleetpipe.cli import main  # noqa: E402
from fleetpipe.errors import PeerFailed  # noqa: E402
from fleetpipe.job.watch import EXIT_CODE  # noqa: E402
from fleetpipe.launch.script import EXIT_CODES  # noqa: E402

code = main(sys.argv[1:])
if EXIT_CODES in os.environ:
    # The launcher may end this process while it cleans up, and would see that alone.
    failed_after_another = isinstance(getattr(sys, "last_value", None), PeerFailed)
    told = EXIT_CODE if code and failed_after_another else code
    Path(os.environ[EXIT_CODES], os.environ["PADDLE_TRAINER_ID"]).write_text(str(told))
sys.exit(code)
