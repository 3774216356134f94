"""A static program under ``fleetpipe launch --heal``: no bit is another one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetpipe.job.job import current_job
from fleetpipe.static import full_state_dict
from tests.contrib.healing import program_worker
from tests.contrib.healing.test_healing import steps
from tests.fixtures import Launch, Patch
from tests.launch.supervisor.commands import launched
from tests.pipelines import begun
from tests.static.networks import executor_of, mlp, static_mode, strategy_of

WORKER = Path(program_worker.__file__)
DEATHS = (
    *("1.1=forward", "0.3=update", "0.4=before", "1.5=after"),
    *("0.6=kept", "1.7=kept", "1.8=before", "0.9=update", "1.9=update"),
)


def test_what_no_other_process_can_be_told_hinders_healing(monkeypatch: Patch) -> None:
    said: list[str] = []
    with static_mode(), begun(strategy_of()):
        executor_of(mlp(2)()[0], strategy_of())
        monkeypatch.setattr(current_job(), "healing", SimpleNamespace(hinder=said.append))
        full_state_dict()
    assert said == ["the script gathers the state of all stages within its step"]


@pytest.mark.processes
def test_a_program_goes_on_with_the_bits_of_an_undisturbed_run(
    launcher: Launch, tmp_path: Path
) -> None:
    alone: list[str] = []
    with static_mode():
        program_worker.train(11, str(tmp_path / "alone"), alone.append)
    options = ["--heal", "--max-restart", "9", "--checkpoint_dir", "shared"]
    job = launched(launcher, WORKER, "launch", *options, arguments=["11", *DEATHS], folder=tmp_path)
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in (0, 1)]
    assert (job.code, [line for line in job.said if "attempt" in line]) == (0, []), (job, logs)
    assert {file.name for file in tmp_path.glob("died.*")} == {f"died.{name}" for name in DEATHS}
    for log in logs:
        assert steps(log) == [line for line in alone if line.startswith("step")]
    state = [line for log in logs for line in log.splitlines() if line.startswith("bits")]
    assert sorted(state) == sorted(line for line in alone if line.startswith("bits"))
