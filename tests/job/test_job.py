"""The end of a job whose other rank is gone, over socket pairs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fleetpipe.errors import PeerFailed
from fleetpipe.job.job import Job
from fleetpipe.job.watching.watch import Watch
from fleetpipe.mesh.axes import Degrees
from tests.job.test_meeting import MemoryStore
from tests.job.watching.test_watch import sockets_of, soon, vanish


def bereft() -> tuple[Job, Watch, list[str]]:
    """A job of two ranks of which rank 1 has died; its watch; what its end has called."""
    watch, other = (Watch(rank, ends) for rank, ends in enumerate(sockets_of(2)))
    topology = SimpleNamespace(get_global_rank=lambda: 0)
    job = Job(Degrees(pp=2), topology, 5.0, store=MemoryStore(), watch=watch)
    ended: list[str] = []
    job.endings.append(lambda: ended.append("closed"))
    vanish(other)
    assert soon(lambda: watch.failure)
    return job, watch, ended


def test_the_end_of_a_job_tells_of_a_death_that_was_not_told_before() -> None:
    job, _, ended = bereft()
    with pytest.raises(PeerFailed, match=r"rank 1 died: .*\n.*ending the job"):
        job.close()
    assert ended == ["closed"]


def test_a_job_whose_failure_is_known_ends_in_silence() -> None:
    job, watch, ended = bereft()
    with pytest.raises(PeerFailed, match="rank 1 died"):
        watch.check()
    job.close()
    assert ended == ["closed"]
    job, _, ended = bereft()
    job.close(ValueError("of this rank"))
    assert ended == ["closed"]
