"""``fleetpipe run`` on the README's script, stock Paddle's and PaddleFleetX's: their losses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fleetpipe.paddle_api.device import device_kind
from tests.fixtures import Launch
from tests.launching import ROOT, Finished
from tests.processes.examples.test_examples import write_mnist

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


def test_a_script_for_stock_paddle_runs_unedited(launcher: Launch, launch: Launch) -> None:
    script = str(SCRIPTS / "stock_alexnet.py")
    alone = losses(launch(LAUNCHED, None, args=["run", script, "4"]).logs[0])
    assert len(set(alone)) == len(alone) == 4
    told = launcher(COMMAND, None, args=[script, "4"]).logs[0]
    # The launcher repeats what rank 0 prints.
    assert losses(told) == alone
    assert "ended with 0" in told


def test_a_static_script_under_paddles_launcher_runs_unedited(
    launcher: Launch, launch: Launch
) -> None:
    words = ["run", str(SCRIPTS / "stock_static.py"), "4"]
    alone = losses(launch(LAUNCHED, None, args=words).logs[0])
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
    for log in launch(LAUNCHED, 2, args=words).logs:
        assert "parity: bit-exact (losses, gradients and parameters)" in log


@pytest.fixture
def script(tmp_path: Path) -> Path:
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(import paddle\n.*?)```", text, flags=re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(code)
    return path


def test_the_first_script_runs_on_two_ranks_and_in_one_process(
    launcher: Launch, launch: Launch, script: Path
) -> None:
    told = set()
    for job in (launcher(script, 2), launch(script, None)):
        for log in job.logs:
            steps = re.findall(r"^(\d) (\d\.\d+)$", log, flags=re.MULTILINE)
            assert [int(step) for step, _ in steps] == list(range(10))
            losses = [float(loss) for _, loss in steps]
            assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
            told.add(tuple(losses))
    # Every rank of the two, and the one process: the same numbers.
    assert len(told) == 1


def test_the_first_script_passes_parity(launch: Callable[..., Finished], script: Path) -> None:
    job = launch(LAUNCHED, None, args=["parity", str(script)])
    assert "parity: bit-exact (losses, gradients and parameters)" in job.logs[0]


#: Has Paddle's reader find its files in a folder, and take them for what it would download.
WITH_MNIST = """
import runpy
from paddle.dataset import common, mnist
common.DATA_HOME = {home!r}
for name, kind in (("IMAGE", "images-idx3"), ("LABEL", "labels-idx1")):
    found = common.md5file(f"{home}/mnist/train-{{kind}}-ubyte.gz")
    setattr(mnist, f"TRAIN_{{name}}_MD5", found)
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture
def alexnet(tmp_path: Path) -> str:
    """The document's AlexNet, with scikit-learn's digits in the format of MNIST."""
    write_mnist(tmp_path / "mnist")
    script = tmp_path / "with_mnist.py"
    names = {"home": str(tmp_path), "script": str(SCRIPTS / "fleetx_alexnet.py")}
    script.write_text(WITH_MNIST.format(**names))
    return str(script)


def test_the_documents_alexnet_has_the_losses_of_its_plain_model(
    launch: Callable[..., Finished], alexnet: str
) -> None:
    runs = [launch(LAUNCHED, ranks, args=["run", alexnet]) for ranks in (None, 2)]
    logs = [log for run in runs for log in run.logs]
    pairs = [re.findall(r"single_loss:  (\S+) pp_loss:  (\S+)", log) for log in logs]
    assert pairs[0] == pairs[1] == pairs[2]
    single, pipeline = np.array(pairs[0], float).T
    assert len(set(single)) == 5
    # The document promises three decimals.
    assert abs(single - pipeline).max() < 1e-5


def test_the_static_resnet_has_one_loss_on_four_ranks_and_one(
    launch: Callable[..., Finished],
) -> None:
    words = ["run", str(SCRIPTS / "fleetx_resnet.py")]
    *others, last = launch(LAUNCHED, 4, args=words).logs
    told = re.findall(r"\[Epoch (\d), batch (\d)\] loss: (\S+), acc1: (\S+), acc5: (\S+)", last)
    # Of 17 samples 16 make two batches of four micro-batches.
    assert [line[:2] for line in told] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert float(told[0][2]) == pytest.approx(2.29993, abs=1e-3)
    assert len({line[2] for line in told}) == 4
    assert not [log for log in others if "Epoch" in log]
    alone = launch(LAUNCHED, None, args=words).logs[0]
    assert [line for line in last.splitlines() if "Epoch" in line] == [
        line for line in alone.splitlines() if "Epoch" in line
    ]
