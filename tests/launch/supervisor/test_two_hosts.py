"""A host that is cut off, or killed with its memory, and comes back: the job goes on."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fleetpipe.launch.keeping.slots import Slots
from tests import namespaces
from tests.launching import ROOT, Finished, JobHung
from tests.namespaces import Host

Launch = Callable[..., Finished]

WORKER = ROOT / "tests" / "launch" / "resume_worker.py"
REPLICAS_WORKER = WORKER.with_name("replicas_worker.py")
STEPS = 40

pytestmark = pytest.mark.processes


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    if why_not := namespaces.why_not():
        pytest.skip(why_not)
    with namespaces.joined(tmp_path, 2) as pair:
        yield pair


def wait_for(words: str, file: Path, times: int = 1) -> str:
    """Waits until a file has some words so often, and returns what it has."""
    wait_until(lambda: read(file).count(words) >= times, lambda: f"no {words!r} in\n{read(file)}")
    return read(file)


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def wait_until(it_is: Callable[[], bool], else_: Callable[[], str], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not it_is():
        if time.monotonic() > deadline:
            raise JobHung(else_())
        time.sleep(0.1)


def steps(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("step ")]


def require_bits(logs: list[Path], alone: str) -> None:
    """Whether what was done twice, as it was lost with a host, has the bits of ``alone`` always."""
    done = steps(alone)
    for log in map(read, logs):
        assert set(done).issuperset(steps(log))
        assert done[-1] in log
        assert alone.splitlines()[-1] in log


def copied(rank: int) -> int:
    """Returns the last step of a rank of which another host has a copy whole; 0: there is none."""
    found = [0]
    for file in Path("/dev/shm").glob(f"fleetpipe-launch-*/held/rank-{rank}.*"):
        with contextlib.suppress(FileNotFoundError):  # one in a newer form has come
            found += [stamp.step for stamp in Slots(file).stamps()]
    return max(found)


def wait_for_copies(step: int, log: Path) -> None:
    wait_until(lambda: min(map(copied, (0, 1))) >= step, lambda: f"no copies\n{read(log)}")


def test_a_job_goes_on_without_a_host_and_with_it_again(
    hosts: tuple[Host, Host], launch: Launch, tmp_path: Path
) -> None:
    alone = launch(WORKER, None, args=[str(STEPS)]).logs[0]
    second = hosts[1]
    logs = [tmp_path / host.name / "workerlog.0" for host in hosts]
    told = [tmp_path / f"{host.name}.log" for host in hosts]
    words = ["--nnodes", "1:2", "--checkpoint_dir", "shared", str(WORKER), str(STEPS)]
    env = {"RESUME_WORKER_PAUSE": "0.3"}
    with namespaces.supervised(hosts, *words, folder=tmp_path, env=env) as job:
        wait_for("\nstep 4 ", logs[1])
        namespaces.cut(second)
        wait_for(f"host {second.address} is gone", told[0])
        wait_for("this one process plays all 2 ranks", logs[0])
        wait_for("the leading host is lost", told[1])
        namespaces.mend(second)
        said = wait_for("a host has come", told[0])
        assert [process.wait(90) for process in job.processes] == [0, 0], said
    require_bits(logs, alone)
    assert "life 2 begins: restart 1 of 3" in told[0].read_text()
    assert "life 3 of the job goes on after" in logs[0].read_text()


def test_a_host_that_is_lost_with_its_memory_costs_the_steps_since_the_last_copy(
    hosts: tuple[Host, Host], launch: Launch, tmp_path: Path
) -> None:
    steps = "30"
    alone = launch(WORKER, None, args=[steps]).logs[0]
    logs = [tmp_path / host.name / "workerlog.0" for host in hosts]
    words = ["--nnodes", "2", "--keep_state", "--neighbour_every", "3"]
    words += ["--checkpoint_dir", "shared", str(WORKER), steps]
    env = {"RESUME_WORKER_PAUSE": "0.2", "RESUME_WORKER_SAVES": "1000"}
    gone_on = re.compile(r"goes on after (\d+) steps, as they were kept in memory")
    with namespaces.supervised(hosts, *words, folder=tmp_path, env=env) as job:
        # One that follows, then the one that leads.
        for times, host in enumerate((hosts[1], hosts[0]), 1):
            wait_for_copies(7 * times, logs[0])
            safe = min(map(copied, (0, 1)))
            namespaces.kill(host)
            job.start(host)
            log = wait_for(", as they were kept in memory", logs[0], times)
            assert int(gone_on.findall(log)[-1]) >= safe
        assert [process.wait(90) for process in job.processes[2:]] == [0, 0]
    require_bits(logs, alone)


def took(folder: Path) -> dict[int, dict[tuple[int, int], tuple[list[int], float]]]:
    """Returns by step what each life took: (life, replicas) -> the samples of all, and the loss."""
    found: dict[int, dict[tuple[int, int], tuple[list[int], float]]] = {}
    for file in sorted(folder.glob("took-*")):
        _, step, life, _ = file.name.split("-")
        told = json.loads(file.read_text())
        lives = found.setdefault(int(step), {})
        samples, _ = lives.get((int(life), told["replicas"]), ([], 0.0))
        lives[int(life), told["replicas"]] = samples + told["samples"], told["loss"]
    return found


def test_replicas_that_come_and_go_see_each_sample_as_if_they_had_not(
    hosts: tuple[Host, Host], launch: Launch, tmp_path: Path
) -> None:
    steps = 30
    for name in ("alone", "shared"):
        (tmp_path / name).mkdir()
    launch(REPLICAS_WORKER, None, args=[str(steps), str(tmp_path / "alone")])
    words = ["--nnodes", "1:2", "--checkpoint_dir", str(tmp_path / "checkpoints")]
    words += [str(REPLICAS_WORKER), str(steps), str(tmp_path / "shared")]
    env = {"RESUME_WORKER_PAUSE": "0.2"}
    told = tmp_path / f"{hosts[0].name}.log"

    def done(life: int) -> Callable[[], bool]:
        return lambda: len([*(tmp_path / "shared").glob(f"took-*-{life}-0")]) > 2

    with namespaces.supervised(hosts, *words, folder=tmp_path, env=env) as job:
        wait_until(done(1), lambda: read(told))
        namespaces.kill(hosts[1])
        wait_until(done(2), lambda: read(told))
        job.start(hosts[1])
        wait_until(done(3), lambda: read(told))
        assert [job.processes[host].wait(90) for host in (0, 2)] == [0, 0], read(told)
    alone, shared = took(tmp_path / "alone"), took(tmp_path / "shared")
    assert {lives for step in shared.values() for lives in step} == {(1, 2), (2, 1), (3, 2)}
    assert [*shared] == [*alone] == [*range(steps)]
    for step, lives in shared.items():
        ((samples, loss),) = alone[step].values()
        for own, other in lives.values():
            # A step in which a host was lost has what the other one noted of it.
            assert sorted(own) == sorted(samples) or set(own) < set(samples)
            assert other == pytest.approx(loss, rel=1e-5)
        assert sorted(lives[max(lives)][0]) == sorted(samples)
    states = [json.loads(read(tmp_path / name / "state.json")) for name in ("alone", "shared")]
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, rtol=1e-5, atol=1e-7)
