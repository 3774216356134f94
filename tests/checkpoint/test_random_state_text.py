"""The states of the random generators as text."""

from __future__ import annotations

import json
import random

import numpy as np
import paddle

from fleetpipe.checkpoint.contents import training_state


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
