"""``fleetpipe launch --least``: a job goes on with fewer ranks, and with all again, in its bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleetpipe import cli
from tests.fixtures import Capture, Launch
from tests.launch.supervisor.commands import launched

WORKER = Path(__file__).with_name("fewer_worker.py")


@pytest.mark.once
@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "pp"), [(3, 3), (4, 2)], ids=["stages", "replicas"])
def test_a_job_goes_on_with_fewer_ranks_and_with_all_again(
    launcher: Launch, launch: Launch, tmp_path: Path, ranks: int, pp: int
) -> None:
    file = tmp_path / "broken"
    alone = launch(WORKER, None, args=["10", str(pp), str(file)]).logs[0]
    file.touch()
    fewer = ["--nproc", str(ranks), "--least", "2", "--wider-after", "0.1", "--max-restart", "0"]
    arguments = ["10", str(pp), str(file)]
    told = launched(launcher, WORKER, "launch", *fewer, arguments=arguments, folder=tmp_path)
    assert told.code == 0, told.said
    given_up = [line for line in told.said if "is given up" in line]
    # A step is kept on all ranks or on none: the third may be lost with the rank.
    assert re.search(
        f"rank {ranks - 1} is given up, and tried again after 0.1 s: the job goes on after [23] "
        f"steps, from memory, with 2 ranks of {ranks}",
        given_up[0],
    )
    assert f"the job goes on with all {ranks} ranks again" in told.said[-1], told.said
    log = (tmp_path / "log" / "workerlog.0").read_text()
    did = re.findall(r"step (\d+) (\d+) (.*)", log)
    assert [*dict.fromkeys((step, loss) for step, _, loss in did)] == [
        (step, loss) for step, _, loss in re.findall(r"step (\d+) (\d+) (.*)", alone)
    ]
    with_ranks = [int(count) for *_, count in re.findall(r"step (\d+) (\d+)", log)]
    assert with_ranks[:3] == [ranks] * 3
    assert with_ranks[-1] == ranks
    assert {2, ranks} == {*with_ranks}
    assert alone.splitlines()[-1] in log


def test_a_job_that_may_not_have_fewer_ranks_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "train.py").touch()
    words = ["launch", "--nproc", "2", "--least", "2", str(tmp_path / "train.py")]
    assert cli.main(words) == 2
    assert "--least is a smaller number of ranks" in (told := capsys.readouterr().err)
    assert "what to do: --least 1" in told
