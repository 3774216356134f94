"""Makes ``python -m fleetpipe`` run the command line."""

from __future__ import annotations

import sys

from fleetpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
