"""What a script adds to a run by ``state=``: objects with a state of their own, and plain values.

An average of weights on one rank is not that of another: each rank saves its own, and a rank goes
on with that of its place, or else of one that had the same part of the model. Where no rank had,
it goes on with what all have saved alike, or one alone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fleetpipe import log
from fleetpipe.checkpoint.contents.parts import STATE, Saved, SavedPart, TensorName
from fleetpipe.checkpoint.ranks import Place
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.mesh.parts import LocalTensor
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
        taken = self._contents.items()  # without a tensor the ranks may have the same
        return {name: [self._prefix if tensors else "", t] for name, (t, tensors) in taken}

    @functools.cached_property
    def _contents(self) -> dict[str, tuple[Any, list[Any]]]:
        """The tree and the tensors of each, as of one moment."""
        taken = {}
        for name, value in self._state.items():
            try:
                has_state = hasattr(value, "state_dict")
                taken[name] = take_apart(_normal(value.state_dict() if has_state else value))
            except Unfit as error:
                raise ConfigError(
                    f"state[{name!r}] cannot be saved",
                    expected=f"an object whose state_dict() returns, or a value that is, {ALLOWED}",
                    got=str(error.args[1]),
                    fix="give it state_dict and set_state_dict, or leave it out",
                ) from None
        return taken

    def _tensors(self) -> Iterator[tuple[TensorName, LocalTensor]]:
        for name, (_, tensors) in self._contents.items():
            for number, tensor in enumerate(tensors):
                yield (
                    TensorName(STATE, f"{self._prefix}/{name}/{number}"),
                    LocalTensor(tensor, None, True),
                )

    def _targets(self, saved: Saved) -> Iterator[tuple[TensorName, LocalTensor]]:
        for name, there in self._state.items():
            if name not in self._saved:
                text = f"the checkpoint has no state {name!r}: it begins as the script makes it"
                log.once(_log.info, text)
                continue
            prefix, tree = self._saved[name]
            _, made = structure.decode(json.dumps([name, tree]).encode())
            if isinstance(there, (paddle.Tensor, np.ndarray)):
                _require_alike(name, structure.Structure(take_apart(_normal(there))[0]), made)
            kinds: list[tuple[list[int], Any]] = [([*one.shape], one.dtype) for one in made.leaves]
            tensors = [paddle.zeros(*kind) for kind in kinds]
            self._made[name] = made, tensors
            for number, tensor in enumerate(tensors):
                yield (
                    TensorName(STATE, f"{prefix}/{name}/{number}"),
                    LocalTensor(tensor, None, True),
                )

    def settle(self) -> None:
        """Gives the objects their states, and puts values in the place of those in the dict."""
        super().settle()
        for name, (made, tensors) in self._made.items():
            value, there = _original(made.rebuild(tensors)), self._state[name]
            set_state = _setter(there)
            if set_state is not None:
                set_state(value)
            elif isinstance(there, dict):
                there.clear()
                there.update(value)
            elif isinstance(there, list):
                there[:] = value
            elif isinstance(there, paddle.Tensor):
                there.set_value(value)
            elif isinstance(there, np.ndarray):
                there[...] = value
            else:
                self._state[name] = value


def require(state: Any) -> None:
    """Refuses what is no dict by name, or has an object of which no state can be restored."""
    if state is None:
        return
    for name, one in state.items() if isinstance(state, dict) else [(None, state)]:
        if not isinstance(name, str) or hasattr(one, "state_dict") != callable(_setter(one)):
            raise ConfigError(
                "state= is a dict by name of what the script adds to a run",
                expected="objects with state_dict and set_state_dict, or plain values and tensors",
                got=f"a {type(one).__name__}",
                fix='pass state={"ema": ema, "best": 0.0}; a value is in that dict after a restore',
            )


def _setter(one: Any) -> Any:
    """Returns what gives an object its state, as a layer or a ``GradScaler`` has it, or None."""
    return getattr(one, "set_state_dict", getattr(one, "load_state_dict", None))


def of_place(saved: Mapping[str, Any], place: Place) -> Trees:
    """Returns what a rank restores of what all ranks have saved.

    Raises:
        CheckpointError: Several ranks have saved a state, and none had this part of the model.
    """
    chosen = {}
    places = [Place.from_json(parts) for parts in saved["places"]]
    ranks = [saved["states"][index] for index in saved["of_rank"]]
    for name in dict.fromkeys(name for trees in ranks for name in trees):
        had = [(at, trees[name]) for at, trees in zip(places, ranks) if name in trees]
        here = [tree for at, tree in had if at == place]
        here += [tree for at, tree in had if at._replace(replica=place.replica) == place]
        trees = [tree for _, tree in had]
        if not here and any(tree != trees[0] for tree in trees):
            raise CheckpointError(
                f"state[{name!r}] is another on each of the ranks that saved it",
                expected=f"ranks like those {len(places)}: each goes on with its own",
                got=f"another layout of ranks, in which this one is {place.to_json()}",
                fix="restore under the layout that saved, or leave it out of state=",
            )
        chosen[name] = (here or trees)[0]
    return chosen


def _require_alike(name: str, *here_and_saved: structure.Structure) -> None:
    here, saved = (
        ", ".join(f"{leaf.dtype} {list(leaf.shape)}" for leaf in one.leaves) or "no tensor"
        for one in here_and_saved
    )
    if here != saved:
        raise CheckpointError(
            f"state[{name!r}] does not fit",
            expected=f"{here}, as here",
            got=f"{saved} in the checkpoint",
            fix="make it as it was when it was saved, or leave it out of state=",
        )


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
