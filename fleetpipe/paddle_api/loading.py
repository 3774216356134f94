"""Loading data: Paddle's private names below ``paddle.io``, alike in 2.6.2 and 3.3.x."""

from __future__ import annotations

from typing import Any

from paddle.io import multiprocess_utils

#: With the names that its stub hides.
_multiprocess_utils: Any = multiprocess_utils


def load_data_in_threads() -> None:
    """Lets a ``DataLoader`` with workers begin in another thread than the main one.

    It takes a handler of SIGCHLD, as only the main thread can, to be told at once that a worker
    died; without one it finds that out when it next waits for a batch.
    """
    _multiprocess_utils._SIGCHLD_handler_set = True
