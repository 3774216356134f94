"""The states of the random generators, as JSON: Paddle's, its streams', NumPy's and Python's.

Layers in a pipeline are keyed by batch, layer and micro-batch; what is saved is where the next
batch's number, and what the script itself draws, comes from.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from fleetpipe._paddle import paddle, paddle_fleet
from fleetpipe.checkpoint import _paddle

#: A value of JSON.
Json = Any


def taken() -> Json:
    """Returns the states of now."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    version, numbers, next_gauss = random.getstate()
    return {
        "paddle": [_paddle.generator_state(state) for state in paddle.get_rng_state()],
        "streams": {
            name: [_paddle.generator_state(state) for state in states]
            for name, states in _tracker().get_states_tracker().items()
        },
        "numpy": [name, keys.tolist(), *rest],
        "python": [version, list(numbers), next_gauss],
    }


def put_back(states: Json) -> None:
    """Makes states of :func:`taken` the states again."""
    paddle.set_rng_state([_paddle.generator_from(state) for state in states["paddle"]])
    if states["streams"]:
        _tracker().set_states_tracker(
            {
                name: [_paddle.generator_from(state) for state in stream]
                for name, stream in states["streams"].items()
            }
        )
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype="uint32"), *rest))
    version, numbers, next_gauss = states["python"]
    random.setstate((version, tuple(numbers), next_gauss))


def _tracker() -> Any:
    return paddle_fleet.meta_parallel.get_rng_state_tracker()
