"""A job on two hosts whose own names lead to a loopback address, as Debian's installer has it."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.byhand import PROMPT
from tests.processes.hosts.namespaces import Host, cut, joined, launch, started, why_not

pytestmark = [pytest.mark.processes, pytest.mark.once]

WORKER = Path(__file__).with_name("hosts_worker.py")
STARTER = WORKER.with_name("start_worker.py")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, ...]]:
    if reason := why_not():
        pytest.skip(reason)
    with joined(tmp_path, 2) as pair:
        yield pair


@pytest.mark.parametrize("moment", ["connecting", "within a group", "within the first sum"])
def test_a_cut_cable_ends_both_ranks_within_the_limit(
    hosts: tuple[Host, ...], moment: str, tmp_path: Path
) -> None:
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
    reports = [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(2)]
    for host, report, log in zip(hosts, reports, logs):
        assert report["named"] == "127.0.1.1"
        assert report["interface"] == host.interface
        assert report["total"] == [2, 2, 2]
        assert report["sealed"]
        assert f"Gloo uses the interface {host.interface} ({host.address})" in log
    assert reports[0]["losses"] == reports[1]["losses"]
    assert len({*reports[0]["losses"]}) == 3
