"""What a script adds to a run by ``state=``: objects with a state of their own, and plain values.

An average of weights on one rank is not that of another: each rank saves its own, and a rank goes
on with that of its place. Where the layout is another, what only one has saved is that of all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fleetpipe import log
from fleetpipe.checkpoint.contents.parts import STATE, Saved, SavedPart, TensorName
from fleetpipe.checkpoint.ranks import Place
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.mesh.parts import Held
from fleetpipe.paddle_api import paddle
from fleetpipe.transport.wire import structure
from fleetpipe.transport.wire.value import ALLOWED, Unfit, take_apart

_log = log.logger(__name__)

_ARRAY = "numpy array"

#: By name, the prefix of the names of tensors, and a tree in which these are leaves.
Trees = Mapping[str, Any]


class ScriptState(SavedPart):
    """The part of a rank."""

    def __init__(self, state: dict[str, Any], place: Place, saved: Trees | None = None) -> None:
        """Takes the objects and values by name; ``saved`` is for those that are restored."""
        self._state, self._saved = state, saved or {}
        self._prefix = f"{place.shard.number}.{place.stages.number}"
        self._made: dict[str, tuple[structure.Structure, list[Any]]] = {}

    def trees(self) -> Trees:
        """Returns what is saved as JSON, with the names of the tensors beside it."""
        taken = self._take_apart()  # without a tensor the ranks may have the same
        return {name: [self._prefix if tensors else "", t] for name, (t, tensors) in taken}

    def values(self) -> dict[str, Any]:
        """Returns what has been filled, once :meth:`wanted` has made it."""
        return {n: _original(made.rebuild(tensors)) for n, (made, tensors) in self._made.items()}

    def _take_apart(self) -> Iterator[tuple[str, tuple[Any, list[Any]]]]:
        for name, value in self._state.items():
            try:
                has_state = hasattr(value, "state_dict")
                yield name, take_apart(_normal(value.state_dict() if has_state else value))
            except Unfit as error:
                raise ConfigError(
                    f"state[{name!r}] cannot be saved",
                    expected=f"an object whose state_dict() returns, or a value that is, {ALLOWED}",
                    got=str(error.args[1]),
                    fix="give it state_dict and set_state_dict, or leave it out",
                ) from None

    def _tensors(self) -> Iterator[tuple[TensorName, Held]]:
        for name, (_, tensors) in self._take_apart():
            for number, tensor in enumerate(tensors):
                yield TensorName(STATE, f"{self._prefix}/{name}/{number}"), Held(tensor, None, True)

    def _targets(self, saved: Saved) -> Iterator[tuple[TensorName, Held]]:
        for name in self._state:
            if name not in self._saved:
                text = f"the checkpoint has no state {name!r}: it begins as the script makes it"
                log.once(_log.info, text)
                continue
            prefix, tree = self._saved[name]
            _, made = structure.decode(json.dumps([name, tree]).encode())
            kinds: list[tuple[list[int], Any]] = [([*one.shape], one.dtype) for one in made.leaves]
            tensors = [paddle.zeros(*kind) for kind in kinds]
            self._made[name] = made, tensors
            for number, tensor in enumerate(tensors):
                yield TensorName(STATE, f"{prefix}/{name}/{number}"), Held(tensor, None, True)

    def settle(self) -> None:
        """Gives the objects their states, and puts values in the place of those in the dict."""
        super().settle()
        for name, value in self.values().items():
            there = self._state[name]
            if hasattr(there, "set_state_dict"):
                there.set_state_dict(value)
            elif isinstance(there, dict):
                there.clear()
                there.update(value)
            elif isinstance(there, list):
                there[:] = value
            elif isinstance(there, (paddle.Tensor, np.ndarray)):
                there[...] = value
            else:
                self._state[name] = value


def require(state: Any) -> None:
    """Refuses what is no dict by name, or has an object of which no state can be restored."""
    wrong = (
        []
        if state is None
        else [state]
        if not isinstance(state, dict)
        else [
            one
            for name, one in state.items()
            if not isinstance(name, str)
            or hasattr(one, "state_dict") != hasattr(one, "set_state_dict")
        ]
    )
    if wrong:
        raise ConfigError(
            "state= is a dict by name of what the script adds to a run",
            expected="objects with state_dict and set_state_dict, or plain values and tensors",
            got=f"a {type(wrong[0]).__name__}",
            fix='pass state={"ema": ema, "best": 0.0}; a value is in that dict after a restore',
        )


def merge_states(states: list[Trees], places: list[Any]) -> dict[str, Any]:
    """Returns by name what each rank has saved, None for one that has nothing of the name."""
    names = dict.fromkeys(name for state in states for name in state)
    by_name = {name: [state.get(name) for state in states] for name in names}
    return {"places": places, "by_name": by_name}


def of_place(saved: Mapping[str, Any], place: Place) -> Trees:
    """Returns what a rank restores of :func:`merge_states`.

    Raises:
        CheckpointError: Several ranks have saved a state, and no rank had this place.
    """
    chosen = {}
    places = [Place.from_json(parts) for parts in saved["places"]]
    alike = [one.shard == place.shard and one.stages == place.stages for one in places]
    for name, by_rank in saved["by_name"].items():
        here = [tree for tree, same in zip(by_rank, alike) if same and tree is not None]
        trees = [tree for tree in by_rank if tree is not None]
        if not here and any(tree != trees[0] for tree in trees):
            raise CheckpointError(
                f"state[{name!r}] is another on each of the ranks that saved it",
                expected=f"ranks like those {len(places)}: each goes on with its own",
                got=f"another layout of ranks, in which this one is {place.to_json()}",
                fix="restore under the layout that saved, or leave it out of state=",
            )
        chosen[name] = (here or trees)[0]
    return chosen


def _normal(value: Any) -> Any:
    """Returns a value in types that are saved exactly."""
    if isinstance(value, Mapping):
        return {key: _normal(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_normal, value)) if type(value) in (list, tuple) else value
    if isinstance(value, np.ndarray):
        return {_ARRAY: paddle.to_tensor(value)}
    return value.item() if isinstance(value, np.generic) else value


def _original(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: _original(part) for key, part in value.items()}
    return type(value)(map(_original, value)) if isinstance(value, (list, tuple)) else value
