"""Every Paddle writes the same bytes for the same run; random states come back from text."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.checkpoint.contents import training_state
from fleetpipe.paddle_api import random as paddle_random
from fleetpipe.paddle_api.optimizer import create_state, master_weight_of, state_of
from fleetpipe.paddle_api.random import generator_from

#: Of paddlepaddle 2.6.2 and 3.3.1.
DIGEST = "0a6ef056ccb90a8e1e8d6edf6c4efdb575674e5894f1f2531701f468291c88f6"


def run(fill: bool) -> dict[str, Any]:
    """A model in two precisions with Adam's state, filled with numbers or with zeros."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Linear(4, 2))
    model[2].to(dtype="bfloat16")
    adam = paddle.optimizer.Adam(0.25, parameters=model.parameters(), multi_precision=True)
    numbers = np.random.default_rng(8)
    for parameter in model.parameters():
        create_state(adam, 0, [parameter])
        master = master_weight_of(adam, parameter.name)
        tensors = [*state_of(adam, parameter.name).values(), parameter]
        for tensor in [*tensors, *([] if master is None else [master])]:
            # Exact in bfloat16: the versions round differently.
            values = numbers.integers(-9, 9, tensor.shape).astype("float32") * fill
            tensor.set_value(paddle.to_tensor(values).astype(tensor.dtype))
    return {"model": model, "optimizer": adam}


def drawn() -> tuple[list[float], float, float]:
    return paddle.rand([3]).tolist(), float(np.random.standard_normal()), random.random()


def test_the_files_are_the_same_under_every_paddle(tmp_path: Path) -> None:
    paddle.seed(6)
    np.random.seed(6)
    random.seed(6)
    paddle.rand([1000])
    manager = fleetpipe.CheckpointManager(tmp_path)
    manager.save(2, **run(fill=True), extra={"epoch": 3})
    expected = drawn()
    digest = hashlib.sha256()
    names = []
    for path in sorted((tmp_path / "step-00000002").iterdir()):
        if path.name != "manifest.json":  # which has the versions
            names.append(path.name.partition("-")[0])
            digest.update(path.read_bytes())
    assert names.count("master_weights") == 1
    assert digest.hexdigest() == DIGEST
    other = run(fill=False)
    manager.restore(**other)
    assert drawn() == expected
    manager.save(3, **other, extra={"epoch": 3})
    for path in (tmp_path / "step-00000002").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "step-00000003" / path.name).read_bytes()


def test_states_come_back_from_text() -> None:
    def drawn() -> tuple[list[float], float, float]:
        return paddle.randn([5]).tolist(), float(np.random.standard_normal()), random.gauss(0, 1)

    drawn()  # an odd number of Gaussians: each generator has one to spare
    text = json.dumps(training_state.random_states())
    expected = drawn()
    paddle.seed(3)
    drawn()
    training_state.set_random_states(json.loads(text))
    assert drawn() == expected


def test_a_state_far_from_its_seed_comes_back() -> None:
    paddle.seed(7)
    paddle.rand([2_000_003])
    states = json.dumps(training_state.random_states())
    expected = paddle.rand([5]).tolist()
    paddle.seed(8)
    training_state.set_random_states(json.loads(states))
    assert paddle.rand([5]).tolist() == expected
    assert training_state.random_states() != json.loads(states)
    training_state.set_random_states(json.loads(states))
    assert training_state.random_states() == json.loads(states)


class Card:
    """The generator of a card, where there is none."""

    def __init__(self, device: int, offset: int) -> None:
        numbers = {"seed": 7, "offset": offset, "engine": ""}
        self.state = generator_from({**numbers, "device": device})

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_random_states_go_from_a_cpu_to_any_card_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, card, other = *paddle_random.generators(), Card(3, 12), Card(0, 0)
    paddle.seed(5)
    on_cpu = training_state.random_states()
    monkeypatch.setattr(paddle_random, "generators", lambda: [card, cpu])
    on_card = json.loads(json.dumps(training_state.random_states()))
    # Ranks on other cards have the same; keys of layers come from the CPU's generator beside.
    assert (on_card["paddle"][0]["device"], on_card["paddle"][1:]) == (0, on_cpu["paddle"])
    expected = paddle.rand([5]).tolist()
    monkeypatch.setattr(paddle_random, "generators", lambda: [other, cpu])
    for states, numbers in ((on_cpu, "0 7 0"), (on_card, "0 7 12")):
        training_state.set_random_states(states)
        assert str(other.state).startswith(f"{numbers} ")
        assert paddle.rand([5]).tolist() == expected
    monkeypatch.setattr(paddle_random, "generators", lambda: [cpu])
    training_state.set_random_states(on_card)
    assert paddle.rand([5]).tolist() == expected


def test_states_of_ranks_are_compared_by_the_card_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, tracker = [], paddle.distributed.fleet.meta_parallel.get_rng_state_tracker()
    for place in (0, 1):
        states = [Card(device, 12 * (device == place)).state for device in (0, 1)]
        monkeypatch.setattr(paddle_random, "device_id", lambda place=place: place)
        monkeypatch.setattr(tracker, "get_states_tracker", lambda states=states: {"mp": states})
        seen.append(paddle_random.stream_states())
    assert seen[0] == seen[1]
