"""Stands for Slurm's ``srun``: two tasks on this host, told what srun(1) says; see test_slurm.py.

Usage: srun [--OPTION..] COMMAND ARGUMENTS..
"""

from __future__ import annotations

import os
import subprocess
import sys

TASKS = 2


def main() -> int:
    """Runs the command once for each task; returns the highest exit code."""
    command = sys.argv[1:]
    while command[0].startswith("--"):
        del command[0]
    told = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(TASKS),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_TASKS_PER_NODE": str(TASKS),
        "SLURM_NODEID": "0",
    }
    tasks = [
        subprocess.Popen(
            command,
            env={**os.environ, **told, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
        )
        for task in range(TASKS)
    ]
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
