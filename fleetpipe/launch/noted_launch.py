"""Runs Paddle's launcher, and writes when its ranks start and end into the attempt's folder."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from fleetpipe.errors import UsageError
from fleetpipe.extras import extra
from fleetpipe.job import attempt_files
from fleetpipe.job.watch import EXIT_CODE
from fleetpipe.launch import forked_ranks, streams
from fleetpipe.launch.script import end_sessions, end_with_command, shell_exit_code
from fleetpipe.paddle_api import launcher
from fleetpipe.transport.base import SOCKETS


def launch() -> None:
    """Runs Paddle's launcher with the arguments of this process, and ends the process.

    Raises:
        SystemExit: With the exit code of the rank that failed first, 128 + n if signal n ended it;
            else 0.
    """
    streams.prepare()
    forked_ranks.load()
    directory = Path(os.environ[attempt_files.FOLDER])
    end_with_command(functools.partial(end_sessions, directory))
    try:
        launcher.launch(
            on_start=functools.partial(attempt_files.note_start, directory),
            on_end=functools.partial(attempt_files.note_end, directory),
            exit_code=functools.partial(_exit_code, directory),
            # Whether a rank has recorded the error that it raised, which is shown already.
            is_explained=lambda: any(
                report.failure.what == "raised" for report in attempt_files.failures(directory)
            ),
            allow_sharing=require_sockets,
            popen=forked_ranks.popen,
            adopt=extra("healing.replacing").rank_watcher(directory)
            if attempt_files.heals()
            else None,
        )
    except UsageError as error:
        sys.stderr.write(f"fleetpipe: {error}\n")
        raise SystemExit(2) from error


def require_sockets(ranks: int, cards: int) -> None:
    """Checks that ranks may share GPUs, which NCCL refuses.

    Args:
        ranks: The number of ranks on this host.
        cards: The number of GPUs.

    Raises:
        UsageError: The environment does not choose sockets as transport.
    """
    if os.environ.get("FLEETPIPE_TRANSPORT") != SOCKETS:
        raise UsageError(
            "there are fewer cards than ranks, and NCCL refuses two ranks on one card",
            where="on this host",
            expected=f"{ranks} cards, or fewer ranks",
            got=f"{cards} in sight; see CUDA_VISIBLE_DEVICES",
            fix="python train.py plays all ranks in one process, on one card. Or share the cards, "
            f"with all values through the host's memory: FLEETPIPE_TRANSPORT={SOCKETS}; or train "
            "on CPUs: CUDA_VISIBLE_DEVICES=",
        )


def _exit_code(directory: Path, seen: Mapping[int, int]) -> int:
    """Returns the exit code of the rank that failed first, as a shell shows it; 0 if none failed.

    A rank that fails because of another one, and may end sooner, has the code ``EXIT_CODE``.

    Args:
        directory: The folder of the attempt.
        seen: The exit codes that the launcher has seen, by rank.
    """
    codes = dict(attempt_files.ended_ranks(directory))
    for rank, code in seen.items():
        codes.setdefault(rank, code)
    # The launcher may end a rank that is cleaning up, and then sees only the signal.
    final_codes = [
        attempt_files.reported_exit_code(directory, rank) or code for rank, code in codes.items()
    ]
    failed = [code for code in final_codes if code]
    culprits = [code for code in failed if code != EXIT_CODE] or failed
    return shell_exit_code(culprits[0] if culprits else 0)
