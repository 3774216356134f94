"""Ranks for which there are no cards: refused, or sharing one over sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.job import attempt_files
from fleetpipe.launch.noted_launch import require_sockets
from fleetpipe.paddle_api import launcher
from tests.gpu.pretending import pretend
from tests.launching import ROOT
from tests.pipelines import Trained, momentum, train


def trained(transport: str | None = None) -> Trained:
    """Trains on replicas that are fed alike: their mean has the bits of one."""
    pretend(pytest.MonkeyPatch())
    return train(configs={"dp": 2, "transport": transport}, optimizer=momentum)


def test_ranks_that_share_a_card_have_the_bits_of_one_process(
    on_ranks: Callable[..., list[Any]],
) -> None:
    assert on_ranks(trained, 4) == [train(optimizer=momentum)] * 4


def refused() -> str:
    with pytest.raises(ConfigError) as error:
        trained("process_group")
    return str(error.value)


def test_ranks_that_share_a_card_have_no_process_groups(on_ranks: Callable[..., list[Any]]) -> None:
    for text in on_ranks(refused, 4):
        assert "NCCL refuses two ranks on one card" in text


COMMAND = """
import pytest
from tests.gpu.pretending import pretend
pretend(pytest.MonkeyPatch())
from fleetpipe.launch.noted_launch import launch
launch()
"""


def test_fewer_cards_than_ranks_end_the_launcher_before_a_rank_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w')")
    command = [sys.executable, "-c", COMMAND, "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", attempt_files.FOLDER: str(tmp_path)}
    environment["PYTHONPATH"] = str(ROOT)
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    done = run(command, env=environment)
    assert (done.returncode, (tmp_path / "started").exists()) == (2, False)
    assert "FLEETPIPE_TRANSPORT=sockets" in done.stderr
    done = run(command, env={**environment, "FLEETPIPE_TRANSPORT": "sockets"})
    assert (done.returncode, (tmp_path / "started").exists()) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("visible", "labels"), [("0", ["0"]), ("3,1,7", ["3"]), ("GPU-5ebe9fd2,", ["GPU-5ebe9fd2"])]
)
def test_the_launcher_counts_the_cards_that_are_there(
    monkeypatch: pytest.MonkeyPatch, visible: str, labels: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launcher._present_device().labels == labels


def launched(ranks: int, cards: int, devices: str = "") -> Any:
    """What Paddle's launcher knows of a host with cards, for so many ranks."""
    device = launcher._Device(launcher._device.DeviceType.GPU, labels=[*map(str, range(cards))])
    arguments = SimpleNamespace(nproc_per_node=ranks, devices=devices)
    context = SimpleNamespace(args=arguments, node=SimpleNamespace(device=device), envs={})
    return SimpleNamespace(ctx=context)


@pytest.mark.parametrize(
    ("ranks", "cards", "devices"),
    [(2, 2, ["0", "1"]), (2, 1, ["0", "0"]), (5, 2, ["0", "1", "0", "1", "0"])],
)
def test_ranks_share_cards_in_turn_where_they_send_over_sockets(
    monkeypatch: pytest.MonkeyPatch, ranks: int, cards: int, devices: list[str]
) -> None:
    monkeypatch.setenv("FLEETPIPE_TRANSPORT", "sockets")
    host = launched(ranks, cards)
    assert launcher._ranks_of_host(host, require_sockets) == ranks
    assert host.ctx.node.device.get_selected_devices("") == devices
    over = {"PADDLE_DISTRI_BACKEND": "gloo"} if cards < ranks else {}
    assert host.ctx.envs == over
    monkeypatch.delenv("FLEETPIPE_TRANSPORT")
    if cards < ranks:
        with pytest.raises(UsageError, match="two ranks on one card"):
            launcher._ranks_of_host(launched(ranks, cards), require_sockets)
