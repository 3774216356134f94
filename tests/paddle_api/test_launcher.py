"""Paddle's launcher as fleetpipe runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import Launch

#: Paddle learns of a process only when it has begun.
AMID = """
    import os, signal, subprocess, sys
    from fleetpipe.paddle_api import launcher

    class Popen(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            print("started")
            os.kill(os.getpid(), signal.SIGABRT)

    sys.argv[1:] = ["--nproc_per_node", "2", "train.py"]
    nothing = dict.fromkeys(["started", "ended", "exit_code", "explained", "share"], print)
    launcher.launch(**nothing, popen=Popen)
    """


@pytest.mark.processes
def test_a_signal_amid_the_start_of_ranks_waits_and_leaves_none(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(100)")
    # It raises an error if a process is left.
    job = launch(AMID, None, cwd=tmp_path, check=False)
    assert (job.returncode, job.logs[0].count("started")) == (6, 2)
