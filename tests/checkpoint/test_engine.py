"""Where Paddle's generator stands, told in one version and taken up in another."""

from __future__ import annotations

import json
import random

import numpy as np
import paddle
import pytest

from fleetpipe.checkpoint import _paddle
from fleetpipe.checkpoint.contents import engine, random_state


@pytest.mark.parametrize("count", [0, 1, 311, 312, 313, 5000])
def test_numbers_drawn_since_a_seed_are_counted(count: int) -> None:
    def state() -> str:
        text: str = _paddle.generator_state(paddle.get_rng_state()[0])["engine"]
        return text

    paddle.seed(11)
    seeded = state()
    if count:
        paddle.rand([count])
    assert engine.draws(seeded, state()) == count


def test_a_state_of_another_seed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST", 1000)
    words = " ".join(map(str, range(312)))
    with pytest.raises(engine.CheckpointError, match="not within 1000 numbers of its seed"):
        engine.draws(f"{words} 312", f"1{words} 312")


def test_states_come_back_from_text() -> None:
    def drawn() -> tuple[list[float], float, float]:
        return paddle.randn([5]).tolist(), float(np.random.standard_normal()), random.gauss(0, 1)

    drawn()  # an odd number of Gaussians: each generator has one to spare
    text = json.dumps(random_state.taken())
    expected = drawn()
    paddle.seed(3)
    drawn()
    random_state.put_back(json.loads(text))
    assert drawn() == expected
