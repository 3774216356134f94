"""Saves and restores the state of a run beside its tensors, as JSON: ``TrainingState``.

It has the states of the learning rate's scheduler and of the scaler, random states, and the
position in the data. It is ``state.json`` in the folder of a step, and is checked as a whole before
any value is set.

A rank restores the random states of the saved rank that had its coordinates: its shard, its replica
and its stages, or else the most of these. Random numbers of layers in a pipeline depend on batch,
layer and micro-batch; the saved generators draw the next batch's seed and the script's own numbers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fleetpipe import log
from fleetpipe.aliases import Optimizer, Scaler, Scheduler
from fleetpipe.checkpoint.contents.attributes import Attributes
from fleetpipe.checkpoint.contents.parts import STATE, ProgramSource, StageStreams
from fleetpipe.checkpoint.ranks import RankCoordinates
from fleetpipe.errors import CheckpointError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api import random as paddle_random
from fleetpipe.paddle_api.device import device_id
from fleetpipe.paddle_api.optimizer import learning_rate_of, rate_of_steps, scheduler_of, set_rates

#: The file with the state in the folder of a step.
FILE = "state.json"
#: The name of the attributes of layers in that state.
ATTRIBUTES = "attributes"
#: The values of ``fleetpipe_configs["sums"]``, the two ways to add gradients up.
_TREE, _RUNNING = "tree", "running"

_log = log.logger(__name__)

#: A value of JSON.
Json = Any


@runtime_checkable
class SavedData(Protocol):
    """An object that has the position of a run in its data, such as a sampler or a loader."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the position as values of JSON, the same on every rank."""

    def set_state_dict(self, state: Mapping[str, Any]) -> object:
        """Continues at a position that :meth:`state_dict` returned."""


def as_json(value: Any, where: str) -> Json:
    """Returns a state as values of JSON: NumPy's and Paddle's numbers become Python's.

    Args:
        value: Nested dicts, lists and tuples of numbers, texts, None, and tensors.
        where: The name of the value for the error.

    Raises:
        CheckpointError: The state contains a value of another type.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, paddle.Tensor)):
        return np.asarray(value).tolist()
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise CheckpointError(
        f"{where} cannot be saved",
        expected="dicts with texts as keys, lists, numbers, texts and None",
        got=f"a {type(value).__name__}",
        fix="leave it out, or save what it can be made of again",
    )


class TrainingState:
    """The states, except tensors, of all objects on which the next step depends.

    :meth:`collect` returns them for a save. A restore calls :meth:`require`, which changes nothing,
    and then :meth:`put_back` and :meth:`put_back_random_of`.
    """

    def __init__(
        self,
        lr_scheduler: Scheduler = None,
        scaler: Scaler = None,
        data: SavedData | None = None,
        optimizer: Optimizer = None,
        program: ProgramSource | None = None,
        first_rate: float | Scheduler = None,
        attributes: Attributes | None = None,
    ) -> None:
        """Stores the objects.

        Args:
            lr_scheduler: The scheduler; None takes the optimizer's, if there is one.
            scaler: A ``GradScaler``.
            data: The object that has the position in the data.
            optimizer: The optimizer whose learning rate a script may have set by hand.
            program: The model, if it is a static program, which has random streams of its own.
            first_rate: The learning rate that the script gave the optimizer; None if it is unknown.
            attributes: The attributes of model and optimizer, in a run that resumes.
        """
        self._attributes = attributes
        self._scheduler, self._first_rate = lr_scheduler, first_rate
        rate = None if optimizer is None else learning_rate_of(optimizer)
        if lr_scheduler is None and optimizer is not None:
            self._scheduler = scheduler_of(optimizer)
        self._optimizer = optimizer if isinstance(rate, float) else None
        self._scaler = scaler
        self._data = data
        #: Has in ``begun`` the random states at the begin of the pass over the data; None for data
        #: that knows the position by itself.
        self._pass: Any = getattr(data, "random_of_pass", None)
        self._program = program

    def collect(self) -> dict[str, Json]:
        """Returns the states of all objects that were passed, as values of JSON by name.

        The keys of a scheduler are "lr_scheduler", and "restarts" for counters that its state dict
        lacks. Those of a constant learning rate are "learning_rate", "learning_rate_of_steps" (see
        :func:`rate_of_steps`) and "first_learning_rate", which the script began with.
        """
        streams = None if self._program is None else self._program.streams()
        state: dict[str, Json] = {"random": random_states(streams)}
        if self._pass is not None and self._pass.begun is not None:
            state["random"]["pass"] = self._pass.begun
        if self._scheduler is not None:
            state["lr_scheduler"] = as_json(
                self._scheduler.state_dict(), "the LR scheduler's state"
            )
            state["restarts"] = [
                _restart_counters(scheduler)
                for scheduler in _with_inner_schedulers(self._scheduler)
            ]
        if self._optimizer is not None:
            state["learning_rate"] = self._optimizer.get_lr()
            state["learning_rate_of_steps"] = rate_of_steps(self._optimizer)
            state["first_learning_rate"] = self._first_rate
        if self._scaler is not None:
            state["scaler"] = as_json(self._scaler.state_dict(), "the scaler's state")
        if self._data is not None:
            state["data"] = as_json(self._data.state_dict(), "the position in the data")
        if _gradient_sums() == _TREE:
            state["sums"] = _TREE
        attributes = None if self._attributes is None else self._attributes.state()
        if attributes is not None:
            state[ATTRIBUTES] = attributes
        return state

    def require(self, state: Mapping[str, Json]) -> None:
        """Checks that a saved state has a valid value for each object that was passed.

        A scheduler that replaces a saved constant learning rate needs no value: it begins anew.

        Args:
            state: The merged state of all ranks.

        Raises:
            CheckpointError: A value is missing, or does not fit the object.
        """
        begins_anew = "learning_rate" in state and "lr_scheduler" not in state
        scheduler = None if begins_anew else self._scheduler
        objects = {"lr_scheduler": scheduler, "scaler": self._scaler, "data": self._data}
        for name, passed in objects.items():
            if passed is not None and name not in state:
                raise CheckpointError(
                    f"the checkpoint has no {name}",
                    got=", ".join(sorted(state)),
                    fix=f"leave {name}= out, or restore a checkpoint that was saved with it",
                )
        if scheduler is not None:
            _require_keys("LR scheduler", scheduler.state_dict(), state["lr_scheduler"])
        if self._scaler is not None:
            _require_keys("scaler", self._scaler.state_dict(), state["scaler"])
        self._require_types(state, scheduler)

    def _require_types(self, state: Mapping[str, Json], scheduler: Scheduler) -> None:
        """Checks the types of all values, before tensors are restored and the values are set.

        Args:
            state: The merged state of all ranks.
            scheduler: The scheduler to restore; None without one.

        Raises:
            CheckpointError: A value has another type than is saved there.
        """
        random_here = random_states()
        random_of_rank = {**random_here, "paddle": type(random_here["paddle"])(), "streams": {}}
        # What a merged state has for each rank, as :func:`_merge_by_rank` returns it.
        of_ranks = {"places": [RankCoordinates().to_json()], "of_rank": [0]}
        examples: dict[str, Json] = {
            "random": {**of_ranks, "states": [random_of_rank]},
            ATTRIBUTES: {**of_ranks, "states": [{"begun": {}, "now": {}}]},
            STATE: {**of_ranks, "states": [{}]},
            "learning_rate": 0.0,
            "learning_rate_of_steps": 0.0,
        }
        if scheduler is not None:
            where = "the LR scheduler's state"
            examples["lr_scheduler"] = _without_contents(scheduler.state_dict(), where)
            schedulers = _with_inner_schedulers(scheduler)
            examples["restarts"] = list(map(_restart_counters, schedulers))
        if self._scaler is not None:
            where = "the scaler's state"
            examples["scaler"] = _without_contents(self._scaler.state_dict(), where)
        for name, example in examples.items():
            if not _has_types_of(state.get(name), example):
                raise CheckpointError(
                    f"{name!r} of {FILE} is no such value as is saved there",
                    got=f"{state[name]!r}"[:200],
                    fix="restore another step; the file has been edited",
                )

    def put_back(
        self, state: Mapping[str, Json], coordinates: RankCoordinates | None = None
    ) -> None:
        """Restores the states of all objects; logs if the job adds gradients up in another way.

        Args:
            state: The state of one rank, or the merged state of all ranks.
            coordinates: The coordinates of this rank, for a merged state.
        """
        if self._attributes is not None and ATTRIBUTES in state:
            attributes = state[ATTRIBUTES]
            if coordinates is not None:
                # Under another layout the attributes of a layer are those of another saved rank.
                ranks = [*attributes["states"], _state_for_rank(attributes, coordinates)]
                attributes = {moment: {} for moment in ranks[0]}
                for of_rank in ranks:
                    for moment, texts in attributes.items():
                        texts.update(of_rank[moment])
            self._attributes.put_back(attributes)
        saved = state.get("sums", _RUNNING)
        if _gradient_sums() not in (saved, None):
            _log.info(
                "sums were %r and are %r: the bits are others from here on", saved, _gradient_sums()
            )
        if self._data is not None:
            self._data.set_state_dict(state["data"])
        if self._scheduler is not None and "lr_scheduler" in state:
            with warnings.catch_warnings():  # about the entry of a scheduler after a warm-up
                warnings.filterwarnings("ignore", "There are some unused values")
                self._scheduler.set_state_dict(state["lr_scheduler"])
            for scheduler, counts in zip(
                _with_inner_schedulers(self._scheduler), state.get("restarts", ())
            ):
                vars(scheduler).update(
                    {name: counts[name] for name in _restart_counters(scheduler)}
                )
        self._restore_rate(state)
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    def _restore_rate(self, state: Mapping[str, Json]) -> None:
        """Restores a constant learning rate, unless the script now begins with another one.

        ``state`` is the state of one rank, or the merged state.
        """
        saved, saved_first = state.get("learning_rate"), state.get("first_learning_rate")
        current: Any = None if self._optimizer is None else self._optimizer.get_lr()
        first_rates_known = None not in (saved_first, self._first_rate)
        is_same_script_rate = not first_rates_known or saved_first == self._first_rate
        if current is not None and saved is not None and is_same_script_rate:
            set_rates(self._optimizer, saved, state.get("learning_rate_of_steps", saved))
            if not first_rates_known and current != saved:
                _log.info(
                    "the learning rate is %s, as it was saved, not the script's %s", saved, current
                )
        elif current is not None or (saved is not None and self._scheduler is not None):
            was = "a scheduler's" if saved is None else saved
            if current is None:
                current = f"the script's {type(self._scheduler).__name__}"
            _log.info("the learning rate was %s when it was saved, and is now %s", was, current)

    def put_back_random(self, states: Json) -> None:
        """Restores the random states of one rank, the part ``random`` of its state."""
        set_random_states(states)
        if self._pass is not None:
            self._pass.begun = states.get("pass")
        if self._program is not None:
            stages, *_ = self._program.streams()
            saved, streams = states.get("program"), dict[int, Any]()
            if saved is not None and saved["stages"] == stages:
                now = paddle_random.generators()[0].get_state()
                for stage, stream in saved["others"].items():
                    state = paddle_random.state_like(now, [stream])
                    # state_like returns ``now`` for a state that does not fit.
                    if state is not now:
                        streams[int(stage)] = state
            self._program.set_streams(streams)

    def put_back_random_of(self, coordinates: RankCoordinates, saved: Json) -> None:
        """Restores the random states of the saved rank with the most equal coordinates.

        ``saved`` are the random states of all ranks that saved.
        """
        leads = True
        if self._program is not None:
            _, leads, _ = self._program.streams()
        self.put_back_random(_state_for_rank(saved, coordinates, leads))


def _gradient_sums() -> str | None:
    """Returns how the job adds gradients up, ``_TREE`` or ``_RUNNING``; None without a job."""
    job = current_job()
    if job is None:
        return None
    return _TREE if job.sums_by_tree else _RUNNING


def _with_inner_schedulers(scheduler: Scheduler) -> list[Scheduler]:
    """Returns a scheduler and the schedulers inside it, such as the one that follows a warm-up."""
    schedulers = [scheduler]
    inner = vars(scheduler).get("learning_rate")
    while hasattr(inner, "set_state_dict"):
        schedulers.append(inner)
        inner = vars(inner).get("learning_rate")
    return schedulers


def _restart_counters(scheduler: Scheduler) -> dict[str, Json]:
    """Returns the counters that ``CosineAnnealingWarmRestarts.state_dict()`` lacks."""
    return {name: vars(scheduler)[name] for name in ("T_cur", "T_i") if name in vars(scheduler)}


def _without_contents(state: Mapping[str, Any], where: str) -> Json:
    """Returns an object's state as JSON with empty lists and dicts, for :func:`_has_types_of`.

    An empty list or dict is an example for any list or dict. ``where`` is the name of the state for
    errors.
    """
    values = as_json(state, where).items()
    return {name: type(v)() if isinstance(v, (list, dict)) else v for name, v in values}


def _has_types_of(saved: Json, example: Json) -> bool:
    """Returns whether a saved value of JSON has the same types as an example, at every depth.

    Numbers have one type, and None stands for a value of any type, on both sides. A saved list has
    at least as many items as the example's list, whose last item is the example for all further
    items; an empty list is an example for any list. A saved dict has at least the example's keys.

    Args:
        saved: The value from ``state.json``.
        example: A value of the types that are expected.
    """
    if isinstance(saved, list) and len(saved) == 1 and not isinstance(example, list):
        (saved,) = saved  # a number that was a tensor
    if saved is None or example is None:
        return True
    if isinstance(example, list):
        if not isinstance(saved, list) or len(saved) < len(example):
            return False
        examples = zip_longest(saved, example, fillvalue=example[-1]) if example else ()
        return all(_has_types_of(item, example_item) for item, example_item in examples)
    if isinstance(example, dict):
        if not isinstance(saved, dict) or not saved.keys() >= example.keys():
            return False
        return all(_has_types_of(saved[name], item) for name, item in example.items())
    return isinstance(saved, (int, float) if isinstance(example, (int, float)) else str)


def _require_keys(what: str, state: Mapping[str, Any], saved: Mapping[str, Json]) -> None:
    """Raises a CheckpointError if the saved state of an object has other keys than its state now.

    Args:
        what: The object's name in the error, such as "scaler".
        state: The state of the object now.
        saved: The saved state.
    """
    if not isinstance(saved, dict) or set(state) != set(saved):
        raise CheckpointError(
            f"the saved state of the {what} is of another type of it",
            expected=", ".join(state) or "nothing",
            got=", ".join(map(str, saved if isinstance(saved, dict) else [saved])) or "nothing",
            fix="build the one that was saved, or leave it out",
        )


def to_text(state: Mapping[str, Json]) -> str:
    """Returns the JSON text of a state; numbers keep their bits."""
    return json.dumps(state, indent=None, sort_keys=True) + "\n"


def merge_states(
    states: Sequence[Mapping[str, Json]], all_coordinates: Sequence[RankCoordinates]
) -> dict[str, Json]:
    """Merges the states of all ranks of a job into one, for ``state.json``.

    Some values exist on some ranks only. Random states, attributes and the state of ``state=`` are
    stored for each rank.

    Args:
        states: The state of each rank.
        all_coordinates: The coordinates of each rank.

    Raises:
        CheckpointError: Ranks have different values of what must be equal on all.
    """
    merged: dict[str, Json] = {"extra": states[0]["extra"]}
    owners: dict[str, int] = {}
    for rank, state in enumerate(states):
        for name, value in state.items():
            if name in ("extra", "random", ATTRIBUTES, STATE):
                continue
            owner = owners.setdefault(name, rank)
            if to_text({name: merged.setdefault(name, value)}) != to_text({name: value}):
                raise CheckpointError(
                    f"the ranks do not have the same {name}",
                    expected=f"{merged[name]} as on rank {owner}"[:200],
                    got=f"{value} on rank {rank} of the job"[:200],
                    fix="step it alike on every rank; positions in data count global samples",
                )
    merged["random"] = _merge_by_rank([state["random"] for state in states], all_coordinates)
    if any(STATE in state for state in states):
        merged[STATE] = _merge_by_rank([state.get(STATE, {}) for state in states], all_coordinates)
    if all(ATTRIBUTES in state for state in states):
        merged[ATTRIBUTES] = _merge_by_rank(
            [state[ATTRIBUTES] for state in states], all_coordinates
        )
    return merged


def random_states(streams: StageStreams | None = None) -> Json:
    """Returns the random states of this process: a value of JSON by each generator's name.

    Args:
        streams: The random streams of a static program's stages; None in dynamic graph.
    """
    states = {
        "paddle": paddle_random.generator_states(),
        "streams": {name: [state] for name, state in paddle_random.stream_states().items()},
        **paddle_random.python_states(),
    }
    if streams is not None:
        stages, leads, later = streams
        by_stage = {
            str(stage): paddle_random.generator_state(state) for stage, state in later.items()
        }
        states["program"] = {"stages": stages, "leads": leads, "others": by_stage}
    return states


def set_random_states(states: Json) -> None:
    """Restores a result of :func:`random_states`; streams that this process lacks are ignored."""
    paddle_random.set_generator_states(states["paddle"])
    tracker, card = paddle_fleet.meta_parallel.get_rng_state_tracker(), device_id()
    streams = tracker.get_states_tracker()
    for name in streams.keys() & states["streams"].keys():
        saved = states["streams"][name]
        streams[name][card] = paddle_random.state_like(streams[name][card], saved)
    tracker.set_states_tracker(streams)
    paddle_random.set_python_states(states)


def _merge_by_rank(states: Sequence[Json], all_coordinates: Sequence[RankCoordinates]) -> Json:
    """Returns the states of all ranks as one value of JSON, in which equal states occur once.

    The value has the coordinates of each rank ("places"), the different states ("states"), and for
    each rank the index of its state ("of_rank"). :func:`_state_for_rank` reads it.

    Args:
        states: The state of each rank.
        all_coordinates: The coordinates of each rank.
    """
    texts = [json.dumps(state, sort_keys=True) for state in states]
    distinct = list(dict.fromkeys(texts))
    return {
        "places": [coordinates.to_json() for coordinates in all_coordinates],
        "of_rank": [distinct.index(text) for text in texts],
        "states": [json.loads(text) for text in distinct],
    }


def _state_for_rank(saved: Json, coordinates: RankCoordinates, leads: bool = True) -> Json:
    """Returns the state of the saved rank with the most equal coordinates.

    The random streams of a static program's stages are those of all ranks of its replica.

    Args:
        saved: A value of :func:`_merge_by_rank`.
        coordinates: The coordinates of this rank.
        leads: For random states, whether this rank's default generator continues the stream of the
            first stage that draws, if a static program was saved; true in dynamic graph.
    """
    all_coordinates = [RankCoordinates.from_json(parts) for parts in saved["places"]]
    states_by_rank = [saved["states"][index] for index in saved["of_rank"]]
    # For each saved rank, which of its coordinates are equal; in a comparison of lists the earlier
    # ones weigh more. The first of several equal lists is taken.
    likeness = [
        [here == there for here, there in zip(coordinates, saved_coordinates)]
        for saved_coordinates in all_coordinates
    ]
    rank = likeness.index(max(likeness))
    state = dict(states_by_rank[rank])
    of_program = [
        other
        for other, other_coordinates in zip(states_by_rank, all_coordinates)
        if other_coordinates.replica == all_coordinates[rank].replica and "program" in other
    ]
    streams: dict[str, Json] = {}
    for other in of_program:
        streams.update(other["program"]["others"])
        if leads and other["program"]["leads"]:
            state["paddle"] = other["paddle"]
    if of_program:
        state["program"] = {**of_program[0]["program"], "others": streams}
    return state
