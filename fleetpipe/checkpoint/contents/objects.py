"""Describes the objects that a script passes to save or restore: ``Objects``, and its ``state=``.

Each rank saves its own ``state=``, since an average of weights, say, differs from rank to rank. A
rank restores the state of the rank that had its coordinates, or else a state that all ranks had.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fleetpipe import log
from fleetpipe.aliases import Layer, Optimizer, Scaler, Scheduler
from fleetpipe.checkpoint.contents import parts
from fleetpipe.checkpoint.contents.attributes import Attributes
from fleetpipe.checkpoint.contents.model_and_optimizer import (
    NamedTensors,
    OptimizerState,
    ProgramState,
    unwrap,
    without_wrappers,
)
from fleetpipe.checkpoint.contents.parts import STATE, Saved, SavedPart, TensorName
from fleetpipe.checkpoint.contents.training_state import SavedData, TrainingState
from fleetpipe.checkpoint.ranks import RankCoordinates
from fleetpipe.errors import CheckpointError, ConfigError, nearest
from fleetpipe.mesh.parts import LocalTensor
from fleetpipe.paddle_api import paddle
from fleetpipe.transport.wire import structure as message
from fleetpipe.transport.wire.bridge import ALLOWED, Unfit, take_apart

_log = log.logger(__name__)

#: The only key of a dict that stands for a NumPy array in a saved value.
_ARRAY = "numpy array"

#: One rank's ``state=`` as JSON: for each name a list of two, the prefix of the names of its
#: tensors ("" without tensors), and its tree, in which a tensor is a dtype and a shape; see
#: ``fleetpipe/transport/wire/structure.py``.
Trees = Mapping[str, Any]

#: The arguments of save and restore that are objects.
_OBJECT_NAMES = ("model", "optimizer", "lr_scheduler", "scaler", "data", "state")
RANDOM = "random"


class ScriptState(SavedPart):
    """One rank's objects and values of the argument ``state`` of a save or a restore."""

    def __init__(
        self, state: dict[str, Any], coordinates: RankCoordinates, saved: Trees | None = None
    ) -> None:
        """Stores the objects and values.

        Args:
            state: The objects and values by name.
            coordinates: The coordinates of this rank.
            saved: The saved trees of the objects and values to restore; None for a save.
        """
        self._state, self._saved = state, saved or {}
        self._prefix = f"{coordinates.shard.number}.{coordinates.stages.number}"
        #: By name, the structure of each saved value, and its tensors to fill.
        self._decoded: dict[str, tuple[message.Structure, list[Any]]] = {}

    def trees(self) -> Trees:
        """Returns the trees to save as JSON."""
        # A tree without tensors gets no prefix, so that it may be equal on all ranks.
        contents = self._contents.items()
        return {name: [self._prefix if tensors else "", tree] for name, (tree, tensors) in contents}

    @functools.cached_property
    def _contents(self) -> dict[str, tuple[Any, list[Any]]]:
        """The JSON tree and the tensors of each object or value, by name; computed once."""
        contents = {}
        for name, value in self._state.items():
            try:
                has_state = hasattr(value, "state_dict")
                contents[name] = take_apart(
                    _arrays_to_tensors(value.state_dict() if has_state else value)
                )
            except Unfit as error:
                raise ConfigError(
                    f"state[{name!r}] cannot be saved",
                    expected=f"an object whose state_dict() returns, or a value that is, {ALLOWED}",
                    got=str(error.args[1]),
                    fix="give it state_dict and set_state_dict, or leave it out",
                ) from None
        return contents

    def _tensors(self) -> Iterator[tuple[TensorName, LocalTensor]]:
        """Yields the tensors in all objects and values."""
        for name, (_, tensors) in self._contents.items():
            yield from _number_tensors(f"{self._prefix}/{name}", tensors)

    def _targets(self, saved: Saved) -> Iterator[tuple[TensorName, LocalTensor]]:
        """Yields new tensors to fill for each object and value that was saved."""
        for name, current in self._state.items():
            if name not in self._saved:
                text = f"the checkpoint has no state {name!r}: it begins as the script makes it"
                log.once(_log.info, text)
                continue
            prefix, tree = self._saved[name]
            _, structure = message.decode(json.dumps([name, tree]).encode())
            if isinstance(current, (paddle.Tensor, np.ndarray)):
                current_tree, _ = take_apart(_arrays_to_tensors(current))
                _require_same_specs(name, message.Structure(current_tree), structure)
            tensors = []
            for leaf in structure.leaves:
                dtype: Any = leaf.dtype
                tensors.append(paddle.zeros([*leaf.shape], dtype))
            self._decoded[name] = structure, tensors
            yield from _number_tensors(f"{prefix}/{name}", tensors)

    def settle(self) -> None:
        """Sets the states of objects from the filled tensors, and replaces values in the dict."""
        super().settle()
        for name, (structure, tensors) in self._decoded.items():
            value, current = _tensors_to_arrays(structure.rebuild(tensors)), self._state[name]
            set_state = _state_setter(current)
            if set_state is not None:
                set_state(value)
            elif isinstance(current, dict):
                current.clear()
                current.update(value)
            elif isinstance(current, list):
                current[:] = value
            elif isinstance(current, paddle.Tensor):
                current.set_value(value)
            elif isinstance(current, np.ndarray):
                current[...] = value
            else:
                self._state[name] = value


def _number_tensors(name: str, tensors: Sequence[Any]) -> Iterator[tuple[TensorName, LocalTensor]]:
    """Yields the tensors of one value of ``state=`` with their names, ``name`` and a number."""
    for number, tensor in enumerate(tensors):
        yield TensorName(STATE, f"{name}/{number}"), LocalTensor(tensor, differs=True)


def require_state(state: Any) -> None:
    """Raises a ConfigError unless ``state`` is a dict of values and objects to be restored."""
    if state is None:
        return
    for name, value in state.items() if isinstance(state, dict) else [(None, state)]:
        # An object with a state needs a method to set it; a plain value has neither.
        can_be_restored = hasattr(value, "state_dict") == callable(_state_setter(value))
        if not isinstance(name, str) or not can_be_restored:
            raise ConfigError(
                "state= is a dict by name of what the script adds to a run",
                expected="objects with state_dict and set_state_dict, or plain values and tensors",
                got=f"a {type(value).__name__}",
                fix='pass state={"ema": ema, "best": 0.0}; a value is in that dict after a restore',
            )


def _state_setter(value: Any) -> Any:
    """Returns the method of an object that sets its state; None if the object has none."""
    return getattr(value, "set_state_dict", getattr(value, "load_state_dict", None))


def trees_for_rank(saved: Mapping[str, Any], coordinates: RankCoordinates) -> Trees:
    """Chooses for each name in ``state=`` the saved JSON tree that a rank restores.

    The tree is that of the saved rank with the same coordinates; else of a rank with the same part
    of the model in any replica; else the tree that all ranks saved alike.

    Args:
        saved: The entry of ``state=`` in ``state.json``: "places" has the coordinates of each rank
            that saved, "states" has the different :data:`Trees` of all ranks, and "of_rank" the
            index in "states" of each rank's trees.
        coordinates: The coordinates of the rank that restores.

    Returns:
        The chosen trees by name.

    Raises:
        CheckpointError: No saved rank had this part of the model, and ranks saved different trees.
    """
    chosen = {}
    all_coordinates = [RankCoordinates.from_json(parts) for parts in saved["places"]]
    trees_by_rank = [saved["states"][index] for index in saved["of_rank"]]
    for name in dict.fromkeys(name for trees in trees_by_rank for name in trees):
        candidates = [
            (place, trees[name])
            for place, trees in zip(all_coordinates, trees_by_rank)
            if name in trees
        ]
        matching = [tree for place, tree in candidates if place == coordinates]
        # Any replica of the same part of the model.
        matching += [
            tree
            for place, tree in candidates
            if place._replace(replica=coordinates.replica) == coordinates
        ]
        trees = [tree for _, tree in candidates]
        if not matching and any(tree != trees[0] for tree in trees):
            raise CheckpointError(
                f"state[{name!r}] is another on each of the ranks that saved it",
                expected=f"ranks like those {len(all_coordinates)}: each goes on with its own",
                got=f"another layout of ranks, in which this one is {coordinates.to_json()}",
                fix="restore under the layout that saved, or leave it out of state=",
            )
        chosen[name], *_ = matching or trees
    return chosen


def _require_same_specs(name: str, current: message.Structure, saved: message.Structure) -> None:
    """Raises a CheckpointError if the tensors of two structures have other dtypes or shapes."""
    current_text, saved_text = (
        ", ".join(f"{leaf.dtype} {list(leaf.shape)}" for leaf in structure.leaves) or "no tensor"
        for structure in (current, saved)
    )
    if current_text != saved_text:
        raise CheckpointError(
            f"state[{name!r}] does not fit",
            expected=f"{current_text}, as here",
            got=f"{saved_text} in the checkpoint",
            fix="make it as it was when it was saved, or leave it out of state=",
        )


def _arrays_to_tensors(value: Any) -> Any:
    """Returns a nested value with tensors for NumPy's arrays and Python's numbers for NumPy's.

    A dict around each tensor marks an array's, so that :func:`_tensors_to_arrays` recognizes it.
    """
    if isinstance(value, Mapping):
        return {key: _arrays_to_tensors(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_arrays_to_tensors, value))
    if isinstance(value, np.ndarray):
        return {_ARRAY: paddle.to_tensor(value)}
    return value.item() if isinstance(value, np.generic) else value


def _tensors_to_arrays(value: Any) -> Any:
    """Returns a nested value with arrays for the tensors of :func:`_arrays_to_tensors`."""
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: _tensors_to_arrays(part) for key, part in value.items()}
    return (
        type(value)(map(_tensors_to_arrays, value)) if isinstance(value, (list, tuple)) else value
    )


@dataclass(frozen=True)
class Objects:
    """The objects to save or to restore; an attribute is None if its object was not passed.

    Attributes:
        model: A model.
        optimizer: The optimizer of the model.
        lr_scheduler: The scheduler of the learning rate.
        scaler: A ``GradScaler``.
        data: The object that has the position of the run in its data.
        state: The script's own objects and values, by name.
        random: Whether the random states are restored too.
        names_from: The model that names the optimizer's parameters, if it is not restored itself.
        rate: Whether the optimizer's own learning rate is restored too.
        names: The fully qualified names of the variables, if the model is a static program.
        attributes: Compares attributes of layers from one start of a run to the next.
    """

    model: Layer = None
    optimizer: Optimizer = None
    lr_scheduler: Scheduler = None
    scaler: Scaler = None
    data: SavedData | None = None
    state: dict[str, Any] | None = None
    random: bool = True
    names_from: Layer = None
    rate: bool = True
    names: parts.Names = None
    attributes: Attributes | None = None

    def __post_init__(self) -> None:
        require_state(self.state)
        if not isinstance(self.data, (SavedData, type(None))):
            raise ConfigError(
                "data= says where the run is in its data",
                expected="state_dict and set_state_dict, as a fleetpipe.io.DataLoader has",
                got=f"a {type(self.data).__name__}",
                fix="pass the loader that is read, or leave data= out",
            )
        if getattr(self.data, "read_ahead", False):
            raise ConfigError(
                "data= is a sampler of which a loader draws batches ahead of the training",
                got=f"a {type(self.data).__name__}, whose position is that of the loader",
                fix="pass data=loader, a fleetpipe.io.DataLoader with this batch_sampler",
            )

    def only(self, names: Sequence[str] | None) -> Objects:
        """Returns a copy with only the named objects; with all of them for None.

        Raises:
            ConfigError: A name is unknown, or its object was not passed.
        """
        if names is None:
            return self
        for name in names:
            if name != RANDOM and (name not in _OBJECT_NAMES or getattr(self, name) is None):
                raise ConfigError(
                    f"only={tuple(names)!r} names what was not passed",
                    got=repr(name)
                    + (
                        f": {nearest(name, (*_OBJECT_NAMES, RANDOM))}" * (name not in _OBJECT_NAMES)
                    ),
                    fix="pass the object, or leave its name out",
                )
        left_out = {name: None for name in _OBJECT_NAMES if name not in names}
        random, rate = RANDOM in names, "lr_scheduler" in names
        return replace(self, **left_out, random=random, names_from=self.model, rate=rate)

    def model_part(self) -> NamedTensors | None:
        """Returns the tensors of the model under fully qualified names; None without a model.

        Raises:
            ConfigError: ``model`` is no model, or does not take ``names``.
        """
        model = self.names_from if self.model is None else self.model
        if model is None:
            return None
        model = without_wrappers(model)
        if not isinstance(model, paddle.nn.Layer) and isinstance(model, parts.SavedProgram):
            return ProgramState(model.checkpoint_part_of_program(self.names))
        if self.names is not None:
            raise ConfigError(
                "names= is for static programs: a model of dynamic graph has names of its own",
                got=f"a {type(model).__name__}",
                fix="leave names= out",
            )
        if isinstance(model, parts.SavedModel):
            return NamedTensors(model.checkpoint_part())
        if not isinstance(model, paddle.nn.Layer):
            raise ConfigError(
                "a checkpoint is one of a model",
                expected="what fleet.distributed_model returned, any Layer, or a static program "
                "that fleet.distributed_optimizer(optimizer, strategy).minimize(loss) made a "
                "pipeline of",
                got=f"a {type(model).__name__}",
                fix="pass model=paddle.static.default_main_program() after minimize",
            )
        return NamedTensors.of_layer(model)

    def required_model(self) -> NamedTensors:
        """Returns :meth:`model_part`; raises ``ConfigError`` without a model."""
        part = self.model_part()
        if part is None:
            raise ConfigError(
                "a checkpoint is one of a model, and none was given",
                got="model=None",
                fix="pass model=, what fleet.distributed_model returned or any Layer",
            )
        return part

    def optimizer_part(self, model: NamedTensors | None) -> OptimizerState | None:
        """Returns the optimizer's state, named after the model's parameters.

        Args:
            model: The result of :meth:`model_part`.

        Returns:
            The state; None without an optimizer.

        Raises:
            ConfigError: There is no model.
        """
        if self.optimizer is None:
            return None
        if model is None:
            raise ConfigError(
                "an optimizer's state goes by the names of the model's parameters",
                fix='pass model= as well; only=("optimizer",) leaves the model as it is',
            )
        if isinstance(model, ProgramState):
            return model.optimizer(self.optimizer)
        return OptimizerState(self.optimizer, model)

    def groups(self) -> tuple[str, ...]:
        """Returns the groups of tensors to read, which are the same on every rank."""
        groups = (parts.MODEL, parts.BUFFERS, parts.LATE_BUFFERS, parts.LOSS)
        of_model = () if self.model is None else groups
        of_optimizer = () if self.optimizer is None else (parts.OPTIMIZER, parts.MASTER_WEIGHTS)
        # Always read: replicas' own statistics, and the script's state, which not all ranks have.
        return (*of_model, *of_optimizer, parts.REPLICAS, parts.STATE)

    def script_part(self, coordinates: RankCoordinates, saved: Trees | None = None) -> ScriptState:
        """Returns this rank's part of ``state=`` to save, or to restore from ``saved`` trees."""
        return ScriptState(self.state or {}, coordinates, saved)

    def training_state(self, model: NamedTensors | None) -> TrainingState:
        """Returns the states of the objects, except tensors.

        ``model`` is the result of :meth:`model_part`.
        """
        optimizer = None if self.optimizer is None else unwrap(self.optimizer)
        return TrainingState(
            self.lr_scheduler,
            self.scaler,
            self.data,
            optimizer=optimizer if self.rate else None,
            program=model.program if isinstance(model, ProgramState) else None,
            first_rate=getattr(self.optimizer, "first_rate", None),
            attributes=self.attributes,
        )
