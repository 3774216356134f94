"""The README's script, run in the three ways that the README names: its loss falls in each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import ROOT, Finished


@pytest.fixture
def script(tmp_path: Path) -> Path:
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(import paddle\n.*?)```", text, flags=re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(code)
    return path


def test_the_first_script_runs_on_two_ranks_and_in_one_process(
    launcher: Callable[..., Finished], script: Path
) -> None:
    told = set()
    for nproc in (2, None):
        job = launcher(script, nproc)
        for log in job.logs:
            steps = re.findall(r"^(\d) (\d\.\d+)$", log, flags=re.MULTILINE)
            assert [int(step) for step, _ in steps] == list(range(10))
            losses = [float(loss) for _, loss in steps]
            assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
            told.add(tuple(losses))
    # Every rank of the two, and the one process: the same numbers.
    assert len(told) == 1


def test_the_first_script_passes_parity(launch: Callable[..., Finished], script: Path) -> None:
    launched = ROOT / "fleetpipe" / "launch" / "rank_main.py"
    job = launch(launched, None, args=["parity", str(script)])
    assert "parity: bit-exact (losses, gradients and parameters)" in job.logs[0]
