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
DIGEST = "a03a83cb92ef003177a9e55be1870dd46cc1c2486882bcc18ae2855cd67e7110"


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


class Cards:
    """The generators of some cards, of which this process uses one, where there are none."""

    def __init__(self, count: int, place: int, offset: int, patch: pytest.MonkeyPatch) -> None:
        numbers = {"seed": 7, "offset": offset, "engine": ""}
        self.states = [generator_from({**numbers, "device": k}) for k in range(count)]
        patch.setattr(paddle_random, "device_place", lambda: place)
        patch.setattr(paddle, "get_rng_state", lambda: self.states)
        patch.setattr(paddle, "set_rng_state", self.set)

    def set(self, states: list[Any]) -> None:
        assert len(states) == len(self.states)
        self.states = states

    def after(self, states: Any) -> list[list[str]]:
        """Device, seed and offset of each, once the process has some states."""
        training_state.set_random_states(states)
        return [str(state).split()[:3] for state in self.states]


def test_random_states_fit_on_any_number_of_cards_and_on_none() -> None:
    paddle.seed(6)
    later = training_state.random_states()
    paddle.seed(5)
    on_cpu = training_state.random_states()
    with pytest.MonkeyPatch.context() as patch:
        Cards(8, 3, 12, patch)
        on_card = json.loads(json.dumps(training_state.random_states()))
    # Ranks on other cards have the same.
    assert on_card["paddle"][0]["device"] == 0
    assert on_card["paddle"][1:] == on_cpu["paddle"]
    for count, place in ((1, 0), (2, 1)):
        with pytest.MonkeyPatch.context() as patch:
            cards = Cards(count, place, 0, patch)
            others = [["0", "7", "0"]] * place
            assert cards.after(on_card) == [*others, [str(place), "7", "12"]]
            # An engine has no place on a card: a stream of its own for each, again and again.
            first, again = cards.after(on_cpu), cards.after(on_cpu)
            assert first == again != cards.after(later)
            assert first[:place] == others
            assert first[place][1] not in ("5", "7")
    drawn = []
    card_alone = {**on_card, "paddle": on_card["paddle"][:1]}
    for states in (on_cpu, on_card, card_alone, card_alone):
        training_state.set_random_states(states)
        drawn.append(paddle.rand([5]).tolist())
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
