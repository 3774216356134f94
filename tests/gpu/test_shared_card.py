"""Ranks for which there are no cards: refused, or sharing one over sockets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.launch.noted_launch import require_sockets
from fleetpipe.paddle_api import launcher
from tests.gpu.pretending import pretend
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
