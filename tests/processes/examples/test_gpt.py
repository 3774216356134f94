"""The GPT example, made small: tied embedding, every axis, against a single device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import Launch
from tests.launching import ROOT

EXAMPLE = ROOT / "examples" / "dygraph_gpt.py"
SMALL = ["--width", "32", "--length", "16", "--steps", "4"]
STEP = re.compile(r"^step (\d+): loss (\S+), \S+ s$", re.MULTILINE)
#: How close losses are; gradients and parameters have the example's own tolerance.
CLOSE = 1e-6


def reported(launch: Launch, folder: Path, nproc: int | None, *args: str) -> Any:
    """Runs the example beside a single device and returns its report."""
    report = folder / "report.json"
    words = [*SMALL, "--report", str(report), *args]
    job = launch(EXAMPLE, nproc, args=words)
    found = json.loads(report.read_text())
    assert found["passed"], found["first_difference"]
    assert (found["steps"], found["data"]) == (4, "pydoc_data.topics")
    assert np.allclose(found["pipeline_loss"], found["single_loss"], rtol=CLOSE, atol=0)
    told = STEP.findall("\n".join(job.logs))
    assert [int(step) for step, _ in told] == [0, 1, 2, 3]
    assert [float(loss) for _, loss in told] == pytest.approx(found["pipeline_loss"], abs=1e-4)
    return found


def learned(launch: Launch, folder: Path, ranks: int, *words: str) -> Any:
    """The report of one process of several ranks that learns as a single device does."""
    found = reported(launch, folder, None, "--pp", str(ranks), *words)
    assert (found["ranks"], found["dp"], found["mp"]) == (ranks, 1, 1)
    assert np.allclose(found["whole_batch_loss"], found["pipeline_loss"], rtol=1e-5, atol=0)
    # The bytes of English are far from equally likely, which is the first thing to learn.
    assert found["pipeline_loss"][0] == pytest.approx(np.log(256), rel=0.02)
    assert found["pipeline_loss"][-1] < found["pipeline_loss"][0] - 0.1
    return found


def test_one_process_of_four_ranks_learns_as_a_single_device(
    launch: Launch, tmp_path: Path
) -> None:
    learned(launch, tmp_path, 4, "--schedule", "ZBH1")


def test_dropout_and_recompute_change_nothing_between_one_and_two_ranks(
    launch: Launch, tmp_path: Path
) -> None:
    words = ["--dropout", "0.1", "--chunks", "2"]
    alone = reported(launch, tmp_path, None, *words)
    recomputed = reported(launch, tmp_path, 2, *words, "--recompute", "1")
    assert (recomputed["ranks"], recomputed["schedule"]) == (2, "Interleaved1F1B")
    assert np.allclose(recomputed["pipeline_loss"], alone["pipeline_loss"], rtol=CLOSE, atol=0)
    plain = learned(launch, tmp_path, 2)
    assert abs(plain["pipeline_loss"][0] - alone["pipeline_loss"][0]) > 1e-5


def test_slices_of_each_layer_learn_as_a_single_device(launch: Launch, tmp_path: Path) -> None:
    found = reported(launch, tmp_path, 4, "--mp", "2")
    assert (found["ranks"], found["dp"], found["mp"]) == (2, 1, 2)


def test_the_speed_is_told_where_nothing_is_compared(launch: Launch) -> None:
    job = launch(EXAMPLE, 2, args=SMALL)
    assert re.search(r"^1F1B: \d+ tokens/s$", job.logs[1], re.MULTILINE)
    assert "parity" not in job.logs[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "3"], "--width (=32) must be divisible by 3"),
        (["--mp", "8"], "--heads (=4) must be divisible by 8"),
        (["--heads", "32", "--mp", "3"], "must be divisible by 3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(
    launch: Launch, words: list[str], message: str
) -> None:
    job = launch(EXAMPLE, None, args=[*SMALL, *words], check=False)
    assert job.returncode == 2
    assert message in job.logs[0]
