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


@pytest.mark.parametrize("script", ["stock_alexnet.py", "stock_static.py"])
def test_a_script_for_stock_paddle_runs_unedited(launcher: Launch, script: str) -> None:
    words = ["run", str(SCRIPTS / script), "4"]
    alone = losses(launcher(LAUNCHED, None, args=words).logs[0])
    assert len(alone) == 4
    assert len(set(alone)) == 4
    # A shell that names GPUs, which are not there, to Paddle's launcher.
    env = {"CUDA_VISIBLE_DEVICES": "0,1"} if device_kind() == "cpu" else {}
    first, last = (losses(log) for log in launcher(LAUNCHED, 2, args=words, env=env).logs)
    assert last == alone
    # In static graph only the owner of the loss has it.
    assert first == ([] if "static" in script else alone)


#: Prints the exit code of ``fleetpipe run`` with two ranks.
COMMAND = """
    import subprocess, sys
    words = ["run", "--nproc", "2", *sys.argv[1:]]
    done = subprocess.run([sys.executable, "-m", "fleetpipe", *words], check=False)
    print("ended with", done.returncode)
    """


def test_the_command_launches_the_ranks_itself(launcher: Launch) -> None:
    told = launcher(COMMAND, None, args=[str(SCRIPTS / "stock_alexnet.py"), "2"]).logs[0]
    # The launcher repeats what rank 0 prints.
    assert len(losses(told)) == 2
    assert "ended with 0" in told


# Paddle's own launcher takes what the variable names for GPUs, and dies where they are too few; its
# start waits for ever where there are enough.
@pytest.mark.parametrize(
    ("end", "code", "devices"),
    [("int('two')", 1, "0,1"), ("os.kill(os.getpid(), 9)", 137, ""), ("sys.exit(4)", 4, "-1")],
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
    # The launcher shows the log of the rank that failed.
    assert ("ValueError: invalid literal for int() with base 10: 'two'" in told[0]) == (code == 1)


def test_parity_takes_such_a_script_too(launch: Launch) -> None:
    words = ["parity", str(SCRIPTS / "stock_alexnet.py"), "2"]
    for nproc in (None, 2):
        for log in launch(LAUNCHED, nproc, args=words).logs:
            assert "parity: bit-exact (losses, gradients and parameters)" in log
