"""The benchmark example on real processes, made small: every mode, loss reduction and replicas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import Launch
from tests.launching import ROOT

EXAMPLE = ROOT / "examples" / "dygraph_mlp.py"
ACCURACY = re.compile(r"^test accuracy: (\S+)$", re.MULTILINE)
LINE = re.compile(r"^epoch \d+, iteration (\d+): loss (\S+), \S+ s$", re.MULTILINE)


def reported(launch: Launch, folder: Path, nproc: int | None, *args: str) -> Any:
    """Runs the example with narrow layers and returns its report."""
    report = folder / "report.json"
    small = ["--hidden", "64", "--steps", "21", "--report", str(report), *args]
    job = launch(EXAMPLE, nproc, args=small)
    found = json.loads(report.read_text())
    assert found["passed"], found["first_difference"]
    assert found["steps"] == 21
    (told,) = ACCURACY.findall("\n".join(job.logs))
    assert float(told) == pytest.approx(found["test_accuracy"], abs=1e-4)
    ((number, loss),) = LINE.findall("\n".join(job.logs))
    assert number == "20"
    assert float(loss) == pytest.approx(found["pipeline_loss"][19], abs=1e-4)
    return found


def test_every_mode_is_bit_exact_and_they_are_all_alike(launch: Launch, tmp_path: Path) -> None:
    modes = ("sequential", "FThenB", "1F1B")
    found = {name: reported(launch, tmp_path, 2, "--mode", name) for name in modes}
    for name in modes:
        assert found[name]["bit_exact"]
        assert found[name]["schedule"] == name
        assert (found[name]["ranks"], found[name]["dp"], found[name]["mp"]) == (2, 1, 1)
        assert found[name]["pipeline_loss"] == found["1F1B"]["single_loss"]
        assert found[name]["test_accuracy"] == found["1F1B"]["test_accuracy"]
        gaps = np.subtract(found[name]["pipeline_loss"], found[name]["whole_batch_loss"])
        assert np.abs(gaps).max() < 1e-4
    losses = found["1F1B"]["pipeline_loss"]
    assert losses[-1] < losses[0] - 0.1


def test_the_sum_is_the_mean_times_the_number_of_micro_batches(
    launch: Launch, tmp_path: Path
) -> None:
    mean = reported(launch, tmp_path, None)
    summed = reported(launch, tmp_path, None, "--loss-reduction", "sum")
    assert summed["bit_exact"]
    assert mean["bit_exact"]
    assert summed["pipeline_loss"][0] == 2 * mean["pipeline_loss"][0]
    # Adam divides the gradients by their own size, so both runs stay close together.
    assert np.allclose(summed["pipeline_loss"], np.multiply(2, mean["pipeline_loss"]), rtol=1e-2)
    assert summed["pipeline_loss"] != list(np.multiply(2, mean["pipeline_loss"]))


def test_replicas_agree_with_one_device_on_all_rows(launch: Launch, tmp_path: Path) -> None:
    found = reported(launch, tmp_path, 4, "--dp", "2")
    assert (found["ranks"], found["dp"]) == (2, 2)
    assert np.allclose(found["pipeline_loss"], found["single_loss"], rtol=1e-6, atol=0)
    assert np.allclose(found["pipeline_loss"], found["whole_batch_loss"], rtol=1e-5, atol=0)


def test_the_stages_are_those_of_the_benchmark(launch: Launch) -> None:
    job = launch(EXAMPLE, None, args=["--steps", "2"])
    rows = re.findall(r"^ +([01]) +\1 +\S+ .* (\S+) +\S+%$", job.logs[0], re.MULTILINE)
    assert rows == [("0", "3,952,640"), ("1", "4,208,650")]
    assert re.search(r"^1F1B: \d+ images/s$", job.logs[0], re.MULTILINE)
    assert "parity" not in job.logs[0]


def test_it_learns_to_read_digits(launch: Launch) -> None:
    job = launch(EXAMPLE, None, args=["--hidden", "64", "--epochs", "10"])
    assert float(ACCURACY.findall(job.logs[0])[0]) > 0.85


def test_the_table_of_schedules(launch: Launch, tmp_path: Path) -> None:
    report = tmp_path / "table.json"
    tiny = ["--hidden", "8", "--epochs", "2", "--batch-size", "256", "--micro-batch-size", "64"]
    example = ROOT / "examples" / "mnist_mlp_benchmark.py"
    log = launch(example, 2, args=[*tiny, "--report", str(report)]).logs[0]
    rows = json.loads(report.read_text())["rows"]
    assert list(rows) == ["sequential", "FThenB", "1F1B", "Interleaved1F1B"]
    for name, row in rows.items():
        figures = "images_per_second", "train_loss", "test_loss", "accuracy"
        speed, train, test, accuracy = (row[figure] for figure in figures)
        assert speed > 0
        pattern = rf"^{name} +{speed:.0f} +\S+x +{train:.6f} +{test:.6f} +{accuracy:.4f}$"
        assert re.search(pattern, log, re.MULTILINE), log
    assert "losses and accuracy are equal" in log
