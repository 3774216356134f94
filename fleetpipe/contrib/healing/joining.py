"""How all ranks connect again after the death of one, in which another may die."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import cast

from fleetpipe import systems
from fleetpipe.errors import PeerFailed
from fleetpipe.job import generation, meeting
from fleetpipe.job.generation import Generation
from fleetpipe.job.groups import neighbours, paddle_groups
from fleetpipe.job.job import Job
from fleetpipe.job.start import connect_ranks
from fleetpipe.job.watching.watch import Watch
from fleetpipe.transport import View

#: Seconds after a death in which a rank that connects Paddle's groups notices it, if ever.
_STUCK_SECONDS = 5.0


class Changed(PeerFailed):
    """A rank has died while the others connected."""


def require_going_on(now: Generation) -> None:
    """Checks that the launcher still heals the job.

    Raises:
        PeerFailed: It does not.
    """
    if now.refused:
        raise PeerFailed(
            "a rank died, and no process takes its place",
            cause=now.refused,
            fix="none here: the job is started again, from what was kept",
        )


def connect_again(job: Job, now: Generation, served_anew: bool) -> None:
    """Connects all ranks of a generation. Collective over the job, in which some are new.

    Args:
        job: The job.
        now: The generation.
        served_anew: Whether rank 0 is another process than when this one opened the job's store.

    Raises:
        Changed: Another rank has died meanwhile.
        PeerFailed: Another rank has died, or the launcher replaces no further process.
        PipelineTimeout: A rank did not come within the limit.
    """

    def check() -> None:
        later = generation.current()
        require_going_on(later)
        if later.number != now.number:
            raise Changed("another rank has died while the job healed")

    timeout = job.timeout
    namespace = f"fleetpipe/0/generation/{now.number}"
    job.disconnect()
    if served_anew:
        store = meeting.open_store_again(timeout, check)
    else:
        store = meeting.opened_store(timeout)
    store.check, store.timeout = check, timeout
    meeting.meet(store, f"{namespace}/here", timeout, "the healing of the job")
    watch, used = connect_ranks(store, f"{namespace}/mesh", timeout)
    watch.patient = True
    job.connect_again(store, watch, used, namespace)
    with killed_if_stuck(watch):
        paddle_groups.connect(store, f"{namespace}/groups", now.number, timeout)
        if job.neighbours:
            [view] = job.connect_among(job.pipeline_ranks()).values()
            where = store, f"{namespace}/neighbours", timeout
            job.connect_neighbours(*neighbours.lanes(cast(View, view), job.neighbours, *where))
    store.check = watch.check


@contextlib.contextmanager
def killed_if_stuck(watch: Watch) -> Iterator[None]:
    """While it is open, the death of a rank ends this process, too, if it does not notice it.

    Gloo waits for a member that has died, and no exception ends that. Another process takes the
    place of this one, which has kept its state.
    """
    done = threading.Event()

    def kill() -> None:
        if not done.wait(_STUCK_SECONDS):
            os.kill(os.getpid(), systems.SIGKILL)

    watch.on_failure(lambda: threading.Thread(target=kill, daemon=True).start())
    try:
        yield
    finally:
        done.set()
