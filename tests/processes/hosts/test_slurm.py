"""The batch script for Slurm, with a ``srun`` that starts two tasks here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, command

pytestmark = [pytest.mark.processes, pytest.mark.no_paddle]

BATCH = ROOT / "examples" / "slurm" / "train.sbatch"
SRUN = Path(__file__).with_name("srun.py")
WORKER = Path(__file__).with_name("hosts_worker.py")


def test_the_batch_script_trains_a_pipeline(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, words in (("srun", f"{sys.executable} {SRUN}"), ("python", sys.executable)):
        (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / name).chmod(0o755)
    told = {
        # The job's number decides on a port: another one for each process of the tests.
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node07",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    done = command("bash", BATCH, WORKER, cwd=tmp_path, **told)
    assert done.returncode == 0, done.stderr
    reports = [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(2)]
    assert [report["total"] for report in reports] == [[2, 2, 2]] * 2
    assert reports[0]["losses"] == reports[1]["losses"]
    assert len({*reports[0]["losses"]}) == 3
    job = f"Slurm's job {os.getpid()}, step 0: 2 ranks on 1 node(s), rank 0 at 127.0.0.1:"
    assert done.stderr.count(job) == 1
    assert list(tmp_path.glob(".secret*")) == []
