"""Jobs on several hosts: they compute what one does, survive or name what happens."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import byhand, pipelines
from tests.byhand import PROMPT
from tests.processes.hosts import hosts_worker
from tests.processes.hosts.namespaces import (
    Host,
    cut,
    joined,
    launch,
    launched,
    mend,
    started,
    why_not,
)
from tests.repository import test_repository

pytestmark = [pytest.mark.processes, pytest.mark.once]

WORKER = Path(__file__).with_name("hosts_worker.py")


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Host, ...]]:
    """Two hosts, or as many as a test asks for."""
    with joined(tmp_path, getattr(request, "param", 2)) as several:
        yield several


def reports(folder: Path, ranks: int) -> list[Any]:
    return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_four_hosts_have_the_bits_of_one(hosts: tuple[Host, ...], tmp_path: Path) -> None:
    secret = {"FLEETPIPE_SECRET": "correct horse battery staple"}
    with started(hosts, WORKER, "2", "4", folder=tmp_path, env=secret) as job:
        ends = job.wait()
    assert [end.code for end in ends.values()] == [0] * 4, ends
    found = reports(tmp_path, 4)
    with byhand.started(WORKER, 4, "2", "4", folder=tmp_path) as job:
        assert [end.code for end in job.wait().values()] == [0] * 4
        expected = reports(job.home, 1)[0]["losses"]
    assert [report["losses"] for report in found] == [expected] * 4
    addresses = [host.address for host in hosts]
    for rank, report in enumerate(found):
        assert report["others"] == addresses[:rank] + addresses[rank + 1 :]


def test_a_short_cut_is_waited_out(hosts: tuple[Host, ...], tmp_path: Path) -> None:
    limit = {"HOSTS_TIMEOUT": "20"}
    with started(hosts, WORKER, "2", "12", folder=tmp_path, env=limit) as job:
        job.wait_for("step2.0")
        cut(hosts[1])
        time.sleep(3)
        mend(hosts[1])
        ends = job.wait()
    assert [end.code for end in ends.values()] == [0, 0], ends
    found = reports(tmp_path, 2)
    assert min(report["longest"] for report in found) > 2.5
    with pipelines.job(2):
        expected = hosts_worker.train(12)[0]
    assert [report["losses"] for report in found] == [expected] * 2


@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_a_host_that_is_cut_off_is_named(hosts: tuple[Host, ...], tmp_path: Path) -> None:
    limit = {"HOSTS_TIMEOUT": "4"}
    with started(hosts, WORKER, "4", "400", folder=tmp_path, env=limit) as job:
        job.wait_for("step2.0")
        since = time.monotonic()
        cut(hosts[2])
        ends = job.wait()
    for rank, ended in ends.items():
        assert ended.code > 0
        assert job.moment(f"told.{rank}") - since < 4 + PROMPT
        assert "PipelineTimeout: " in ended.log
        if rank != 2:
            assert re.search(r"rank 2 is silent for \d", ended.log), ended.log


def test_what_is_computed_may_go_over_ipv6(hosts: tuple[Host, ...], tmp_path: Path) -> None:
    by_ipv4 = launched([host.address for host in hosts])

    def told(rank: int) -> dict[str, str]:
        return {**by_ipv4(rank), "FLEETPIPE_ADDRESS": hosts[rank].address6}

    with started(hosts, WORKER, "2", "3", folder=tmp_path, env={}, told=told) as job:
        ends = job.wait()
    assert [end.code for end in ends.values()] == [0, 0], ends
    found = reports(tmp_path, 2)
    assert [report["others"] for report in found] == [[hosts[1].address6], [hosts[0].address6]]
    assert found[0]["losses"] == found[1]["losses"]


def test_two_nodes_of_slurm(hosts: tuple[Host, ...], tmp_path: Path) -> None:
    names = [host.name for host in hosts]
    stem = names[0][:-1]

    def told(rank: int) -> dict[str, str]:
        return {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": f"{stem}[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(rank),
        }

    with started(hosts, WORKER, "2", "3", folder=tmp_path, env={}, told=told) as job:
        ends = job.wait()
    assert [end.code for end in ends.values()] == [0, 0], ends
    assert f"2 ranks on 2 node(s), rank 0 at {names[0]}:12217" in ends[0].log
    found = reports(tmp_path, 2)
    assert [report["others"] for report in found] == [[hosts[1].address], [hosts[0].address]]
    assert found[0]["losses"] == found[1]["losses"]


def test_two_pods_of_kubernetes(tmp_path: Path) -> None:
    def told(number: int) -> dict[str, str]:
        # But for the secret, whose volume is not here.
        said = test_repository.told(number, pods[number].address)
        return {name: text for name, text in said.items() if name != "FLEETPIPE_SECRET_FILE"}

    with joined(tmp_path, 2, own_names_lead_home=False, service="pipeline-worker-0") as pods:
        launch(pods, WORKER, tmp_path, {}, told=told)
    found = reports(tmp_path, 2)
    assert [report["total"] for report in found] == [[2, 2, 2]] * 2
    assert not any(report["sealed"] for report in found)
    assert [report["interface"] for report in found] == [pod.interface for pod in pods]
    assert found[0]["losses"] == found[1]["losses"]


STARTER = WORKER.with_name("start_worker.py")


@pytest.mark.parametrize("moment", ["connecting", "within a group", "within the first sum"])
def test_a_cut_cable_ends_both_ranks(hosts: tuple[Host, ...], moment: str, tmp_path: Path) -> None:
    limit = {"START_TIMEOUT": "4"}
    arguments = (moment, "SIGSTOP", "1")
    with started(hosts, STARTER, *arguments, folder=tmp_path, env=limit) as job:
        job.wait_for("troubled.1")
        cut(hosts[1])
        since = time.monotonic()
        job.signal(1, signal.SIGCONT)
        ends = job.wait()
    for rank, ended in ends.items():
        assert ended.code > 0
        assert ended.at - since < 4 + PROMPT
        assert re.search(rf"PipelineTimeout: .*rank(\(s\))? {1 - rank}\b", ended.log), ended.log


def test_two_hosts_whose_names_lead_to_themselves(hosts: tuple[Host, ...], tmp_path: Path) -> None:
    logs = launch(hosts, WORKER, tmp_path, {"FLEETPIPE_SECRET": "correct horse battery staple"})
    found = reports(tmp_path, 2)
    for host, report, log in zip(hosts, found, logs):
        assert report["named"] == "127.0.1.1"
        assert report["interface"] == host.interface
        assert report["total"] == [2, 2, 2]
        assert report["sealed"]
        assert f"Gloo uses the interface {host.interface} ({host.address})" in log
    assert found[0]["losses"] == found[1]["losses"]
    assert len({*found[0]["losses"]}) == 3
