"""A test that hangs where no signal is taken: the process is ended, and the test named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launching import command

_HANGS = """
import ctypes
import pytest

@pytest.mark.timeout(1)
def test_that_hangs():
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.{library}(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
"""


# Without and with Python's own lock held, and without and with a worker of xdist.
@pytest.mark.parametrize(("library", "workers"), [("CDLL", 0), ("PyDLL", 1)])
def test_a_hang_without_signals_is_ended(library: str, workers: int, tmp_path: Path) -> None:
    file = tmp_path / "test_that_hangs.py"
    file.write_text(_HANGS.format(library=library))
    words = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", workers]
    limits = {"FLEETPIPE_TEST_SIGNAL_SECONDS": "1", "PYTEST_XDIST_WORKER": ""}
    done = command(*words, "--max-worker-restart=0", file, cwd=tmp_path, **limits)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "Timeout (0:00:02)!" in said
    assert f'File "{file}", line 10 in test_that_hangs' in said
    if workers:
        assert "crashed while running 'test_that_hangs.py::test_that_hangs'" in said
