"""``fleetpipe plan`` and ``fleetpipe estimate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetpipe.cli import main
from fleetpipe.profiling import PipelinePlan, Profile
from fleetpipe.profiling.estimating import estimates
from tests.fixtures import Capture
from tests.profiling.models import big_vocabulary, even


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A file with a profile."""
    path = tmp_path / "profile.json"
    big_vocabulary(10).write(path)
    return str(path)


def test_a_plan_is_printed_and_written(profile: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "plan.json"
    words = ["plan", profile, "--ranks", "4", "--micro-batches", "6", "--memory-cap", "200MB"]
    assert main([*words, "-o", str(file)]) == 0
    made = PipelinePlan.read(file)
    assert capsys.readouterr().out == f"{made}\n\n{made.explain()}\n"
    assert main([*words, "--format", "json"]) == 0
    assert PipelinePlan.loads(capsys.readouterr().out) == made


def test_plans_and_profiles_are_drawn(profile: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    words = ["plan", profile, "--ranks", "2", "--micro-batches", "4", "--memory-cap", "1GB"]
    assert main([*words, "--plot", str(file)]) == 0
    assert "953.67 MiB" in file.read_text(encoding="utf-8")
    layers = Profile.read(profile)
    layers.plot(tmp_path / "profile.svg")
    text = (tmp_path / "profile.svg").read_text(encoding="utf-8")
    assert all(f">{number} {layer.name}<" in text for number, layer in enumerate(layers.layers))


def test_requests_that_cannot_be_met_are_refused(profile: str, capsys: Capture) -> None:
    for words, message in (
        (["--ranks", "4", "--memory-cap", "1MB"], "no plan keeps within"),
        (["--ranks", "4", "--memory-cap", "much"], "2GiB"),
        (["--ranks", "40"], "cannot be cut into 40 stages"),
        (["--ranks", "4", "--search", "cut"], "has no 'cut' to search"),
        (["--ranks", "4", "--micro-batches", "9" * 9], "at most 10000 ranks x micro-batches"),
    ):
        assert main(["plan", profile, *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["plan", "nowhere.json", "--ranks", "2"]) == 2


@pytest.mark.parametrize("command", [["plan", "--ranks", "16"], ["estimate", "--ranks", "2,16"]])
def test_a_search_of_minutes_is_refused(
    command: list[str], tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "profile.json"
    even(200).write(path)
    name, *words = command
    assert main([name, str(path), *words]) == 2
    assert "at most 2000 layers x ranks\n  got: 3200\n" in capsys.readouterr().err
    assert main(["estimate", str(path), "--micro-batches", "1" * 10]) == 2


def test_estimates_are_a_table_of_every_schedule(profile: str, capsys: Capture) -> None:
    assert main(["estimate", profile, "--ranks", "2,4", "--micro-batches", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {(line.split()[0], line.split()[2]) for line in lines[1:]}
    assert {("2", "1F1B"), ("4", "ZBV"), ("4", "Interleaved1F1B")} <= found
    assert main(["estimate", profile, "--ranks", "2", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)[0]["peak_bytes"]) == 2


def test_an_estimate_for_more_ranks_than_layers_is_refused(profile: str, capsys: Capture) -> None:
    assert main(["estimate", profile, "--ranks", "2,40"]) == 2
    captured = capsys.readouterr()
    assert "cannot be cut into 40 stages" in captured.err
    assert captured.out == ""


def test_one_rank_holds_the_whole_model() -> None:
    one, *_ = estimates(even(4), [1], 2)
    assert one.seconds == pytest.approx(2 * 4 * 3e-3)
