"""PaddleFleetX's scripts for Paddle 2.0 to 2.4 under ``fleetpipe run``, and what they promise."""

from __future__ import annotations

import gzip
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.launching import ROOT, Finished

LAUNCHED = ROOT / "fleetpipe" / "launch" / "rank_main.py"
SCRIPTS = ROOT / "tests" / "scripts"
KINDS = ("images-idx3", "labels-idx1")

#: Has Paddle's reader find its files in a folder, and take them for what it would download.
WITH_MNIST = """
import runpy
from paddle.dataset import common, mnist
common.DATA_HOME = {home!r}
for name, kind in zip(("IMAGE", "LABEL"), {kinds!r}):
    found = common.md5file(f"{home}/mnist/train-{{kind}}-ubyte.gz")
    setattr(mnist, f"TRAIN_{{name}}_MD5", found)
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture
def alexnet(tmp_path: Path) -> str:
    """The document's AlexNet, with scikit-learn's digits in the format of MNIST."""
    digits = load_digits()
    images = np.pad(np.kron(digits.images, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))) * 15.9
    # Paddle's reader takes blocks of 100.
    images, labels = images[:200].astype("uint8"), digits.target[:200].astype("uint8")
    heads = struct.pack(">IIII", 2051, 200, 28, 28), struct.pack(">II", 2049, 200)
    (tmp_path / "mnist").mkdir()
    for kind, head, array in zip(KINDS, heads, (images, labels)):
        with gzip.open(tmp_path / "mnist" / f"train-{kind}-ubyte.gz", "wb") as file:
            file.write(head + array.tobytes())
    script = tmp_path / "with_mnist.py"
    names = {"home": str(tmp_path), "kinds": KINDS, "script": str(SCRIPTS / "fleetx_alexnet.py")}
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
