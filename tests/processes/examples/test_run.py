"""``fleetpipe run`` on scripts written for stock Paddle: one process and two ranks, same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleetpipe.paddle_api.device import device_kind
from tests.fixtures import Launch
from tests.launching import ROOT

LAUNCHED = ROOT / "fleetpipe" / "launch" / "rank_main.py"
SCRIPTS = ROOT / "tests" / "scripts"
LOSS = re.compile(r"^pp_loss: +(\d+) (\S+)$", re.MULTILINE)


def losses(log: str) -> list[float]:
    found = LOSS.findall(log)
    assert [int(step) for step, _ in found] == list(range(len(found)))
    return [float(loss) for _, loss in found]


#: Prints the exit code of ``fleetpipe run`` with two ranks.
COMMAND = """
    import subprocess, sys
    words = ["run", "--nproc", "2", *sys.argv[1:]]
    done = subprocess.run([sys.executable, "-m", "fleetpipe", *words], check=False)
    print("ended with", done.returncode)
    """


def test_a_script_for_stock_paddle_runs_unedited(launcher: Launch) -> None:
    script = str(SCRIPTS / "stock_alexnet.py")
    alone = losses(launcher(LAUNCHED, None, args=["run", script, "4"]).logs[0])
    assert len(set(alone)) == len(alone) == 4
    told = launcher(COMMAND, None, args=[script, "4"]).logs[0]
    # The launcher repeats what rank 0 prints.
    assert losses(told) == alone
    assert "ended with 0" in told


def test_a_static_script_under_paddles_launcher_runs_unedited(launcher: Launch) -> None:
    words = ["run", str(SCRIPTS / "stock_static.py"), "4"]
    alone = losses(launcher(LAUNCHED, None, args=words).logs[0])
    assert len(set(alone)) == len(alone) == 4
    # A shell that names GPUs, which are not there, to Paddle's launcher.
    env = {"CUDA_VISIBLE_DEVICES": "0,1"} if device_kind() == "cpu" else {}
    first, last = (losses(log) for log in launcher(LAUNCHED, 2, args=words, env=env).logs)
    # In static graph only the owner of the loss has it.
    assert (first, last) == ([], alone)


# Paddle's own launcher takes what the variable names for GPUs, and dies where they are too few; its
# start waits for ever where there are enough.
@pytest.mark.once
@pytest.mark.parametrize(
    ("end", "code", "devices"), [("os.kill(os.getpid(), 9)", 137, "0,1"), ("sys.exit(4)", 4, "-1")]
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    launcher: Launch, tmp_path: Path, end: str, code: int, devices: str
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys, time\n"
        "from paddle.distributed import fleet\n"
        "strategy = fleet.DistributedStrategy()\n"
        "strategy.hybrid_configs = {'pp_degree': 2}\n"
        "fleet.init(is_collective=True, strategy=strategy)\n"
        "if fleet.worker_index() == 1:\n"
        f"    {end}\n"
        "time.sleep(60)\n"
    )
    told = launcher(COMMAND, None, args=[str(script)], env={"CUDA_VISIBLE_DEVICES": devices}).logs
    assert f"ended with {code}" in told[0]


def test_parity_takes_such_a_script_too(launch: Launch) -> None:
    words = ["parity", str(SCRIPTS / "stock_alexnet.py"), "2"]
    for nproc in (None, 2):
        for log in launch(LAUNCHED, nproc, args=words).logs:
            assert "parity: bit-exact (losses, gradients and parameters)" in log
