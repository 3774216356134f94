"""The state of a run beside its tensors, as JSON: schedules, scaler, random states, position.

Start with ``TrainingState``. The state is ``state.json`` in the folder of a step; it is checked as
a whole before a value is set.

A rank restores the random states of the rank that had its place: its shard, its replica and its
stages, or else the most of these. Random numbers of layers in a pipeline depend on batch, layer and
micro-batch; the saved generators draw the next batch's seed and the script's own numbers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fleetpipe import log
from fleetpipe.aliases import Optimizer, Scaler, Scheduler
from fleetpipe.checkpoint.contents.attributes import Attributes
from fleetpipe.checkpoint.contents.parts import STATE, ProgramSource, StageStreams
from fleetpipe.checkpoint.ranks import Place
from fleetpipe.errors import CheckpointError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.device import device_id
from fleetpipe.paddle_api.optimizer import (
    learning_rate_of,
    rate_of_steps,
    scheduler_of,
    set_rates,
)
from fleetpipe.paddle_api.random import (
    generator_state,
    generator_states,
    generators,
    python_states,
    set_generator_states,
    set_python_states,
    state_like,
    stream_states,
)

FILE = "state.json"
ATTRIBUTES = "attributes"
#: The values of ``fleetpipe_configs["sums"]``, the two ways to add gradients up.
_TREE, _RUNNING = "tree", "running"

_log = log.logger(__name__)

#: A value of JSON.
Json = Any


@runtime_checkable
class SavedData(Protocol):
    """An object that has the position in the data, such as a sampler or a loader."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the position as values of JSON, the same on every rank."""

    def set_state_dict(self, state: Mapping[str, Any]) -> object:
        """Moves to a position that :meth:`state_dict` returned."""


def plain(value: Any, where: str) -> Json:
    """Converts a state to values of JSON: NumPy's and Paddle's numbers become Python's.

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
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise CheckpointError(
        f"{where} cannot be saved",
        expected="dicts with texts as keys, lists, numbers, texts and None",
        got=f"a {type(value).__name__}",
        fix="leave it out, or save what it can be made of again",
    )


class TrainingState:
    """The states of all objects except tensors on which the next step depends."""

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
            lr_scheduler: The scheduler; None takes the optimizer's, if it has one.
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
        #: The random states at the begin of the data, if a resumed run reads them from there.
        self._pass: Any = getattr(data, "random_of_pass", None)
        self._program = program

    def collect(self) -> dict[str, Json]:
        """Returns the states of all objects that were passed, as JSON."""
        streams = None if self._program is None else self._program.streams()
        state: dict[str, Json] = {"random": random_states(streams)}
        if self._pass is not None and self._pass.begun is not None:
            state["random"]["pass"] = self._pass.begun
        if self._scheduler is not None:
            state["lr_scheduler"] = plain(self._scheduler.state_dict(), "the LR scheduler's state")
            state["restarts"] = [_restarts(scheduler) for scheduler in _chain(self._scheduler)]
        if self._optimizer is not None:
            state["learning_rate"] = self._optimizer.get_lr()
            state["learning_rate_of_steps"] = rate_of_steps(self._optimizer)
            state["first_learning_rate"] = self._first_rate
        if self._scaler is not None:
            state["scaler"] = plain(self._scaler.state_dict(), "the scaler's state")
        if self._data is not None:
            state["data"] = plain(self._data.state_dict(), "the position in the data")
        if _sums() == _TREE:
            state["sums"] = _TREE
        looks = None if self._attributes is None else self._attributes.state()
        if looks is not None:
            state[ATTRIBUTES] = looks
        return state

    def require(self, state: Mapping[str, Json]) -> None:
        """Checks that a saved state has an entry for each object that was passed.

        A scheduler that replaces a saved constant learning rate needs no entry: it begins anew.
        """
        begins = "learning_rate" in state and "lr_scheduler" not in state
        scheduler = None if begins else self._scheduler
        for name, thing in (
            ("lr_scheduler", scheduler),
            ("scaler", self._scaler),
            ("data", self._data),
        ):
            if thing is not None and name not in state:
                raise CheckpointError(
                    f"the checkpoint has no {name}",
                    got=", ".join(sorted(state)),
                    fix=f"leave {name}= out, or restore a checkpoint that was saved with it",
                )
        if scheduler is not None:
            _require_keys("LR scheduler", scheduler.state_dict(), state["lr_scheduler"])
        if self._scaler is not None:
            _require_keys("scaler", self._scaler.state_dict(), state["scaler"])
        self._require_forms(state, scheduler)

    def _require_forms(self, state: Mapping[str, Json], scheduler: Scheduler) -> None:
        """Checks the types of all entries, since the model is restored before they are set."""
        here = random_states()
        of_rank = {**here, "paddle": type(here["paddle"])(), "streams": {}}
        of_ranks = {"places": [Place().to_json()], "of_rank": [0]}
        forms: dict[str, Json] = {
            "random": {**of_ranks, "states": [of_rank]},
            ATTRIBUTES: {**of_ranks, "states": [{"begun": {}, "now": {}}]},
            STATE: {**of_ranks, "states": [{}]},
            "learning_rate": 0.0,
            "learning_rate_of_steps": 0.0,
        }
        if scheduler is not None:
            forms["lr_scheduler"] = _outline(scheduler.state_dict(), "the LR scheduler's state")
            forms["restarts"] = [_restarts(one) for one in _chain(scheduler)]
        if self._scaler is not None:
            forms["scaler"] = _outline(self._scaler.state_dict(), "the scaler's state")
        for name, form in forms.items():
            if not _fits(state.get(name), form):
                raise CheckpointError(
                    f"{name!r} of {FILE} is no such value as is saved there",
                    got=f"{state[name]!r}"[:200],
                    fix="restore another step; the file has been edited",
                )

    def put_back(self, state: Mapping[str, Json], place: Place | None = None) -> None:
        """Restores the states of all objects; logs if the job adds gradients up in another way.

        Args:
            state: The state of one rank, or the merged state of all ranks.
            place: The place of this rank, for a merged state.
        """
        if self._attributes is not None and ATTRIBUTES in state:
            looks = state[ATTRIBUTES]
            if place is not None:
                # Under another layout the attributes of a layer are those of another saved rank.
                ranks = [*looks["states"], _of_place(looks, place)]
                looks = {w: {n: v for one in ranks for n, v in one[w].items()} for w in ranks[0]}
            self._attributes.put_back(looks)
        saved = state.get("sums", _RUNNING)
        if _sums() not in (saved, None):
            _log.info("sums were %r and are %r: the bits are others from here on", saved, _sums())
        if self._data is not None:
            self._data.set_state_dict(state["data"])
        if self._scheduler is not None and "lr_scheduler" in state:
            with warnings.catch_warnings():  # about the entry of a scheduler after a warm-up
                warnings.filterwarnings("ignore", "There are some unused values")
                self._scheduler.set_state_dict(state["lr_scheduler"])
            for scheduler, counts in zip(_chain(self._scheduler), state.get("restarts", ())):
                vars(scheduler).update({name: counts[name] for name in _restarts(scheduler)})
        self._put_rate(state)
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    def _put_rate(self, state: Mapping[str, Json]) -> None:
        """Restores a constant learning rate, unless the script now begins with another one."""
        saved, first = state.get("learning_rate"), state.get("first_learning_rate")
        here: Any = None if self._optimizer is None else self._optimizer.get_lr()
        both = None not in (first, self._first_rate)
        if here is not None and saved is not None and (not both or first == self._first_rate):
            set_rates(self._optimizer, saved, state.get("learning_rate_of_steps", saved))
            if not both and here != saved:
                _log.info(
                    "the learning rate is %s, as it was saved, not the script's %s", saved, here
                )
        elif here is not None or (saved is not None and self._scheduler is not None):
            was = "a scheduler's" if saved is None else saved
            here = f"the script's {type(self._scheduler).__name__}" if here is None else here
            _log.info("the learning rate was %s when it was saved, and is now %s", was, here)

    def put_back_random(self, states: Json) -> None:
        """Restores the random states of one rank."""
        set_random_states(states)
        if self._pass is not None:
            self._pass.begun = states.get("pass")
        if self._program is not None:
            stages, *_ = self._program.streams()
            saved, streams = states.get("program"), dict[int, Any]()
            if saved is not None and saved["stages"] == stages:
                now = generators()[0].get_state()
                fitting = ((int(s), state_like(now, [one])) for s, one in saved["others"].items())
                # state_like returns ``now`` for a state that does not fit.
                streams = {stage: state for stage, state in fitting if state is not now}
            self._program.set_streams(streams)

    def put_back_random_of(self, place: Place, saved: Json) -> None:
        """Restores the random states of the saved rank whose place is most like ``place``."""
        leads = self._program is None or self._program.streams()[1]
        self.put_back_random(_of_place(saved, place, leads))


def _sums() -> str | None:
    """Returns how the job adds gradients up; None without a job."""
    job = current_job()
    return None if job is None else _TREE if job.sums_by_tree else _RUNNING


def _chain(scheduler: Scheduler) -> list[Scheduler]:
    """Returns a scheduler and the schedulers inside it, as the one that follows a warm-up."""
    schedulers = [scheduler]
    while hasattr(after := vars(schedulers[-1]).get("learning_rate"), "set_state_dict"):
        schedulers.append(after)
    return schedulers


def _restarts(scheduler: Scheduler) -> dict[str, Json]:
    """Returns the counters that ``CosineAnnealingWarmRestarts.state_dict()`` lacks."""
    return {name: vars(scheduler)[name] for name in ("T_cur", "T_i") if name in vars(scheduler)}


def _outline(state: Mapping[str, Any], where: str) -> Json:
    """Returns the form of an object's state, with empty lists and dicts for any contents."""
    values = plain(state, where).items()
    return {name: type(v)() if isinstance(v, (list, dict)) else v for name, v in values}


def _fits(saved: Json, form: Json) -> bool:
    """Whether a saved value has the types of ``form``; None has any type."""
    if isinstance(saved, list) and len(saved) == 1 and not isinstance(form, list):
        (saved,) = saved  # a number that was a tensor
    if saved is None or form is None:
        return True
    if isinstance(form, list):
        last = len(form) - 1
        return (
            isinstance(saved, list)
            and len(saved) >= len(form)
            and (not form or all(_fits(one, form[min(n, last)]) for n, one in enumerate(saved)))
        )
    if isinstance(form, dict):
        whole = saved.keys() >= form.keys() if isinstance(saved, dict) else False
        return whole and all(_fits(saved[name], one) for name, one in form.items())
    kinds = (int, float) if isinstance(form, (int, float)) else str
    return isinstance(saved, kinds)


def _require_keys(what: str, state: Mapping[str, Any], saved: Mapping[str, Json]) -> None:
    """Raises an error if a saved state has other keys than the present one."""
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


def merge_states(states: Sequence[Mapping[str, Json]], places: Sequence[Place]) -> dict[str, Json]:
    """Merges the states of all ranks of a job into one.

    An entry may come from only some ranks. Random states, attributes and the state of ``state=``
    are kept for each rank.
    """
    whole: dict[str, Json] = {"extra": states[0]["extra"]}
    owners: dict[str, int] = {}
    for rank, state in enumerate(states):
        for name, value in state.items():
            if name in ("extra", "random", ATTRIBUTES, STATE):
                continue
            owner = owners.setdefault(name, rank)
            if to_text({name: whole.setdefault(name, value)}) != to_text({name: value}):
                raise CheckpointError(
                    f"the ranks do not have the same {name}",
                    expected=f"{whole[name]} as on rank {owner}"[:200],
                    got=f"{value} on rank {rank} of the job"[:200],
                    fix="step it alike on every rank; positions in data count global samples",
                )
    whole["random"] = _merge([state["random"] for state in states], places)
    if any(STATE in state for state in states):
        whole[STATE] = _merge([state.get(STATE, {}) for state in states], places)
    if all(ATTRIBUTES in state for state in states):
        whole[ATTRIBUTES] = _merge([state[ATTRIBUTES] for state in states], places)
    return whole


def random_states(streams: StageStreams | None = None) -> Json:
    """Returns the current random states; ``streams`` are those of a static program's stages."""
    states = {
        "paddle": generator_states(),
        "streams": {name: [state] for name, state in stream_states().items()},
        **python_states(),
    }
    if streams is not None:
        stages, leads, later = streams
        by_stage = {str(stage): generator_state(state) for stage, state in later.items()}
        states["program"] = {"stages": stages, "leads": leads, "others": by_stage}
    return states


def set_random_states(states: Json) -> None:
    """Restores the result of :func:`random_states`, for the streams that exist here."""
    set_generator_states(states["paddle"])
    tracker, card = paddle_fleet.meta_parallel.get_rng_state_tracker(), device_id()
    streams = tracker.get_states_tracker()
    for name in streams.keys() & states["streams"].keys():
        streams[name][card] = state_like(streams[name][card], states["streams"][name])
    tracker.set_states_tracker(streams)
    set_python_states(states)


def _merge(states: Sequence[Json], places: Sequence[Place]) -> Json:
    """Returns the states of all ranks as one value of JSON, which has equal states once."""
    texts = [json.dumps(state, sort_keys=True) for state in states]
    distinct = list(dict.fromkeys(texts))
    return {
        "places": [place.to_json() for place in places],
        "of_rank": [distinct.index(text) for text in texts],
        "states": [json.loads(text) for text in distinct],
    }


def _of_place(saved: Json, place: Place, leads: bool = True) -> Json:
    """Returns the state of the saved rank whose place is most like ``place``.

    Args:
        saved: A value of :func:`_merge`.
        place: The place of this rank.
        leads: For random states, whether this rank's default generator continues the stream of the
            first stage that draws, if a static program was saved; true in dynamic graph.
    """
    places = [Place.from_json(parts) for parts in saved["places"]]
    # The first rank, if several are equally like it.
    likeness = [[axis == other for axis, other in zip(place, one)] for one in places]
    rank = likeness.index(max(likeness))
    replica = places[rank].replica
    matching = [
        saved["states"][index]
        for index, other in zip(saved["of_rank"], places)
        if other.replica == replica and "program" in saved["states"][index]
    ]
    states = dict(saved["states"][saved["of_rank"][rank]])
    for other in matching:
        if leads and other["program"]["leads"]:
            states["paddle"] = other["paddle"]
    if matching:
        by_stage = {s: state for one in matching for s, state in one["program"]["others"].items()}
        states["program"] = {**matching[0]["program"], "others": by_stage}
    return states
