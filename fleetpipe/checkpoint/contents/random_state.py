"""The states of the random generators, as JSON: Paddle's, its streams', NumPy's and Python's.

A rank takes the states of the rank that had its place: its slice, its replica, its stages, as far
as these were split alike. Layers in a pipeline are keyed by batch, layer and micro-batch; what is
saved is where the next batch's number, and what the script itself draws, comes from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from fleetpipe.checkpoint.contents.parts import Streams
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.random import generator_from, generator_state

#: A value of JSON.
Json = Any
#: A rank's number and the number of ranks along each axis that splits them.
Place = Sequence[tuple[int, int]]
_REPLICA = 1


def taken(streams: Streams | None = None) -> Json:
    """Returns the states of now, and ``streams``, those of the stages of a static program."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    version, numbers, next_gauss = random.getstate()
    found = {
        "paddle": [generator_state(state) for state in paddle.get_rng_state()],
        "streams": {
            name: [generator_state(state) for state in states]
            for name, states in _tracker().get_states_tracker().items()
        },
        "numpy": [name, keys.tolist(), *rest],
        "python": [version, list(numbers), next_gauss],
    }
    if streams is not None:
        others = {str(s): generator_state(state) for s, state in streams.others.items()}
        found["program"] = {**streams._asdict(), "others": others}
    return found


def put_back(states: Json) -> None:
    """Makes states of :func:`taken` the states again; of streams, those that there are here."""
    paddle.set_rng_state([generator_from(state) for state in states["paddle"]])
    tracker = _tracker()
    streams = tracker.get_states_tracker()
    for name in streams.keys() & states["streams"].keys():
        streams[name] = [generator_from(state) for state in states["streams"][name]]
    tracker.set_states_tracker(streams)
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype="uint32"), *rest))
    version, numbers, next_gauss = states["python"]
    random.setstate((version, tuple(numbers), next_gauss))


def streams_in(states: Json, own: Streams) -> dict[int, Any]:
    """Returns the streams of a static program's stages in some states.

    Args:
        states: Those of a rank.
        own: The streams of now. Those of a program of other stages do not fit.
    """
    saved = states.get("program")
    if saved is None or saved["stages"] != own.stages:
        return {}
    return {int(s): generator_from(state) for s, state in saved["others"].items()}


def _tracker() -> Any:
    return paddle_fleet.meta_parallel.get_rng_state_tracker()


def merged(states: Sequence[Json], places: Sequence[Place]) -> Json:
    """Returns the states of all ranks as one value, equal ones once."""
    texts = [json.dumps(state, sort_keys=True) for state in states]
    distinct = list(dict.fromkeys(texts))
    return {
        "places": [list(place) for place in places],
        "of_rank": [distinct.index(text) for text in texts],
        "states": [json.loads(text) for text in distinct],
    }


def of_place(saved: Json, place: Place, leads: bool = True) -> Json:
    """Returns the states in a value of :func:`merged` for a rank with some place.

    Args:
        saved: The value.
        place: The place.
        leads: Whether Paddle's generator is to go on as the stream of the first stage that draws,
            where a static program was saved: on the rank that has it, and in dynamic graph.
    """
    places = [[tuple(axis) for axis in one] for one in saved["places"]]
    # What is named first weighs most; of equals the first rank's.
    likeness = [[own == other for own, other in zip(place, one)] for one in places]
    rank = likeness.index(max(likeness))
    replica = places[rank][_REPLICA]
    theirs = [
        saved["states"][index]
        for index, other in zip(saved["of_rank"], places)
        if other[_REPLICA] == replica and "program" in saved["states"][index]
    ]
    states = dict(saved["states"][saved["of_rank"][rank]])
    for other in theirs:
        if leads and other["program"]["leads"]:
            states["paddle"] = other["paddle"]
    if theirs:
        others = {s: state for one in theirs for s, state in one["program"]["others"].items()}
        states["program"] = {**theirs[0]["program"], "others": others}
    return states
