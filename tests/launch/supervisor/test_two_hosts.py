"""A host that is cut off and comes back: the job goes on with one host, and then with both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import namespaces
from tests.launching import ROOT, Finished, JobHung
from tests.namespaces import Host

Launch = Callable[..., Finished]

WORKER = ROOT / "tests" / "launch" / "resume_worker.py"
STEPS = 40

pytestmark = pytest.mark.processes


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    if why_not := namespaces.why_not():
        pytest.skip(why_not)
    with namespaces.joined(tmp_path, 2) as pair:
        yield pair


def wait_for(words: str, file: Path, seconds: float = 90.0) -> str:
    """Waits until a file has some words, and returns what it has."""
    deadline = time.monotonic() + seconds
    while True:
        text = file.read_text() if file.exists() else ""
        if words in text:
            return text
        if time.monotonic() > deadline:
            raise JobHung(f"{words!r} did not come\n{text}")
        time.sleep(0.1)


def test_a_job_goes_on_without_a_host_and_with_it_again(
    hosts: tuple[Host, Host], launch: Launch, tmp_path: Path
) -> None:
    alone = launch(WORKER, None, args=[str(STEPS)]).logs[0]
    second = hosts[1]
    logs = [tmp_path / host.name / "workerlog.0" for host in hosts]
    told = [tmp_path / f"{host.name}.log" for host in hosts]
    words = ["--nnodes", "1:2", "--checkpoint_dir", "shared", str(WORKER), str(STEPS)]
    env = {"RESUME_WORKER_PAUSE": "0.3"}
    with namespaces.supervised(hosts, *words, folder=tmp_path, env=env) as processes:
        wait_for("\nstep 4 ", logs[1])
        namespaces.cut(second)
        wait_for(f"host {second.address} is gone", told[0])
        wait_for("this one process plays all 2 ranks", logs[0])
        wait_for("the leading host is lost", told[1])
        namespaces.mend(second)
        said = wait_for("a host has come", told[0])
        assert [process.wait(90) for process in processes] == [0, 0], said
    done = [line for line in alone.splitlines() if line.startswith("step ")]
    for log in (file.read_text() for file in logs):
        # What was done twice, because it was not saved when the host was lost, has the same bits.
        assert set(done).issuperset(line for line in log.splitlines() if line.startswith("step "))
        assert done[-1] in log
        assert alone.splitlines()[-1] in log
    assert "life 2 begins: restart 1 of 3" in told[0].read_text()
    assert "life 3 of the job goes on after" in logs[0].read_text()
