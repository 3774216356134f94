"""The main job on real processes, as the README and the example say it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import Launch
from tests.launching import ROOT

EXAMPLE = ROOT / "examples" / "dygraph_alexnet.py"
LINE = re.compile(r"single_loss:\s+(\S+) pp_loss:\s+(\S+)")


def reported(launch: Launch, folder: Path, nproc: int | None, *args: str) -> Any:
    """Runs the example and returns its report, with what every rank printed checked."""
    report = folder / "report.json"
    job = launch(EXAMPLE, nproc, args=["--report", str(report), *args])
    found = json.loads(report.read_text())
    for log in job.logs:
        shown = LINE.findall(log)
        assert len(shown) == found["steps"]
        assert all(single == ours for single, ours in shown)
        assert "parity: bit-exact (losses, gradients and parameters)" in log
    assert found["bit_exact"]
    assert (found["max_abs_diff"], found["max_abs_param_diff"]) == (0.0, 0.0)
    assert found["pipeline_loss"] == found["single_loss"]
    gaps = np.abs(np.array(found["pipeline_loss"]) - np.array(found["whole_batch_loss"]))
    assert gaps.max() < 1e-5
    return found


@pytest.mark.parametrize(
    ("nproc", "words"), [(2, ()), (4, ("--schedule", "FThenB"))], ids=["two", "four"]
)
def test_the_pipeline_is_bit_exact_on_several_ranks(
    launch: Launch, tmp_path: Path, nproc: int, words: tuple[str, ...]
) -> None:
    found = reported(launch, tmp_path, nproc, *words)
    assert (found["steps"], found["ranks"]) == (5, nproc)
    assert found["schedule"] == ("FThenB" if words else "1F1B")
    assert (found["data"], found["dp"], found["mp"]) == ("digits", 1, 1)


def test_one_process_plays_three_ranks(launch: Launch, tmp_path: Path) -> None:
    assert reported(launch, tmp_path, None, "--pp", "3")["ranks"] == 3


def test_parameters_that_move_on_mnist_files_stay_bit_exact(launch: Launch, tmp_path: Path) -> None:
    """Paddle's own class reads the files."""
    write_mnist(tmp_path)
    words = ["--data", str(tmp_path), "--learning-rate", "0.05", "--steps", "5"]
    assert reported(launch, tmp_path, None, *words)["data"] == "MNIST"


def test_a_missing_folder_is_an_error(launch: Launch, tmp_path: Path) -> None:
    job = launch(EXAMPLE, None, args=["--data", str(tmp_path / "nowhere")], check=False)
    assert job.returncode == 1
    assert "train-images-idx3-ubyte.gz" in job.logs[0]


def test_an_unknown_schedule_fails_before_any_process_waits(launch: Launch) -> None:
    job = launch(EXAMPLE, 2, args=["--schedule", "1FB1"], check=False)
    assert job.returncode != 0
    for log in job.logs:
        assert "did you mean '1F1B'" in log


def write_mnist(folder: Path) -> None:
    """Writes digits in the format of MNIST's files."""
    import gzip
    import struct

    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.zeros((200, 28, 28), "uint8")
    images[:, 2:26, 2:26] = digits.images[:200].repeat(3, 1).repeat(3, 2) * 15
    with gzip.open(folder / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(struct.pack(">IIII", 2051, 200, 28, 28) + images.tobytes())
    with gzip.open(folder / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(struct.pack(">II", 2049, 200) + digits.target[:200].astype("uint8").tobytes())
