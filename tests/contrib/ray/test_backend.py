"""What the environment of each rank says, from where Ray placed it."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fleetpipe[ray]'")

from fleetpipe.contrib.ray import paddle_trainer
from fleetpipe.contrib.ray.paddle_trainer import RankPlace, rank_environments


def test_each_rank_is_told_where_all_of_them_are() -> None:
    places = [
        RankPlace("a", "10.0.0.1", ""),
        RankPlace("b", "10.0.0.2", ""),
        RankPlace("b", "10.0.0.2", ""),
    ]
    told = rank_environments(places, {"a": [20001, 20002], "b": [20003, 20004, 20005]})
    assert [rank["PADDLE_CURRENT_ENDPOINT"] for rank in told] == [
        *("10.0.0.1:20001", "10.0.0.2:20003", "10.0.0.2:20004")
    ]
    assert {rank["PADDLE_TRAINER_ENDPOINTS"] for rank in told} == {
        "10.0.0.1:20001,10.0.0.2:20003,10.0.0.2:20004"
    }
    # Paddle's own store is not where the job's is.
    assert {rank["PADDLE_MASTER"] for rank in told} == {"10.0.0.1:20002"}
    assert [rank["PADDLE_LOCAL_RANK"] for rank in told] == ["0", "0", "1"]
    assert [rank["PADDLE_LOCAL_SIZE"] for rank in told] == ["1", "2", "2"]
    assert {rank["PADDLE_NNODES"] for rank in told} == {"2"}


def test_only_ranks_without_a_gpu_meet_over_gloo() -> None:
    on_cpu, on_gpu = rank_environments(
        [RankPlace("a", "10.0.0.1", ""), RankPlace("a", "10.0.0.1", "3")],
        {"a": [20001, 20002, 20003]},
    )
    assert on_cpu["PADDLE_DISTRI_BACKEND"] == "gloo"
    assert on_gpu["FLAGS_selected_gpus"] == "3"
    assert not on_cpu.keys() & {"FLAGS_selected_gpus"}
    assert not on_gpu.keys() & {"PADDLE_DISTRI_BACKEND"}


def test_a_port_at_which_somebody_listens_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        taken = listening.getsockname()[1]
        other = next(port for port in paddle_trainer.free_ports(2) if port != taken)
        monkeypatch.setattr(
            paddle_trainer, "_PORTS", range(min(taken, other), max(taken, other) + 1)
        )
        assert taken not in paddle_trainer.free_ports(1)
        monkeypatch.setattr(paddle_trainer, "_PORTS", range(taken, taken + 1))
        with pytest.raises(paddle_trainer.TransportError, match="too few free ports"):
            paddle_trainer.free_ports(1)
