"""What a run consists of beside tensors, as JSON: schedules, scaler, random states, position.

It is ``state.json`` in the folder of a step. Everything is looked at before anything is set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fleetpipe.aliases import Optimizer, Scaler, Scheduler
from fleetpipe.checkpoint.contents import random_state
from fleetpipe.checkpoint.contents.parts import ProgramPart
from fleetpipe.errors import CheckpointError
from fleetpipe.paddle_api import paddle

FILE = "state.json"
#: A value of JSON.
Json = Any


@runtime_checkable
class SavedData(Protocol):
    """Where a run is in its data: a sampler, or what reads through one."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the position as values of JSON, the same on every rank."""

    def set_state_dict(self, state: Mapping[str, Any]) -> object:
        """Goes to a position of :meth:`state_dict`."""


def plain(value: Any, where: str) -> Json:
    """Returns a state as JSON: numbers of NumPy's and Paddle's become Python's.

    Args:
        value: Nested dicts, lists and tuples of numbers, texts, None, and tensors.
        where: What the error calls it.

    Raises:
        CheckpointError: It holds something else.
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
    """The objects of a script whose states decide the next bit, beside model and optimizer."""

    def __init__(
        self,
        lr_scheduler: Scheduler = None,
        scaler: Scaler = None,
        data: SavedData | None = None,
        optimizer: Optimizer = None,
        program: ProgramPart | None = None,
    ) -> None:
        """Takes the objects.

        Args:
            lr_scheduler: None for that of the optimizer, if it has one.
            scaler: A ``GradScaler``.
            data: Where the run is in its data.
            optimizer: Has a learning rate that may have been set by hand.
            program: The model, where it is a static program with random streams of its own.
        """
        self._scheduler = lr_scheduler
        rate = getattr(optimizer, "_learning_rate", None)
        if lr_scheduler is None and hasattr(rate, "set_state_dict"):
            self._scheduler = rate
        self._optimizer = optimizer if isinstance(rate, float) else None
        self._scaler = scaler
        self._data = data
        self._program = program

    def taken(self) -> dict[str, Json]:
        """Returns all states, those of objects that are there.

        Raises:
            CheckpointError: One is not of plain values.
        """
        streams = None if self._program is None else self._program.streams()
        found: dict[str, Json] = {"random": random_state.taken(streams)}
        if self._scheduler is not None:
            found["lr_scheduler"] = plain(self._scheduler.state_dict(), "the LR scheduler's state")
        if self._optimizer is not None:
            found["learning_rate"] = self._optimizer.get_lr()
        if self._scaler is not None:
            found["scaler"] = plain(self._scaler.state_dict(), "the scaler's state")
        if self._data is not None:
            found["data"] = plain(self._data.state_dict(), "the position in the data")
        return found

    def require(self, state: Mapping[str, Json]) -> None:
        """Makes sure that a saved state has what is to be restored.

        Raises:
            CheckpointError: It has not.
        """
        for name, thing in (
            ("lr_scheduler", self._scheduler),
            ("scaler", self._scaler),
            ("data", self._data),
        ):
            if thing is not None and name not in state:
                raise CheckpointError(
                    f"the checkpoint has no {name}",
                    got=", ".join(sorted(state)),
                    fix=f"leave {name}= out, or restore a checkpoint that was saved with it",
                )
        if self._scheduler is not None:
            _require_keys("LR scheduler", self._scheduler.state_dict(), state["lr_scheduler"])
        if self._scaler is not None:
            _require_keys("scaler", self._scaler.state_dict(), state["scaler"])

    def put_back(self, state: Mapping[str, Json]) -> None:
        """Sets the states of all objects."""
        if self._data is not None:
            self._data.set_state_dict(state["data"])
        if self._scheduler is not None:
            self._scheduler.set_state_dict(state["lr_scheduler"])
        if self._optimizer is not None and "learning_rate" in state:
            self._optimizer.set_lr(state["learning_rate"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    def put_back_random(self, states: Json) -> None:
        """Makes the random states those of one rank."""
        random_state.put_back(states)
        if self._program is not None:
            self._program.set_streams(random_state.streams_in(states, self._program.streams()))

    def put_back_random_of(self, place: random_state.Place, saved: Json) -> None:
        """Makes the random states those of a rank with some place, of all that were saved."""
        leads = self._program is None or self._program.streams().leads
        self.put_back_random(random_state.of_place(saved, place, leads))


def _require_keys(what: str, own: Mapping[str, Any], saved: Mapping[str, Json]) -> None:
    if set(own) != set(saved):
        raise CheckpointError(
            f"the saved state of the {what} is of another type of it",
            expected=", ".join(own) or "nothing",
            got=", ".join(saved) or "nothing",
            fix="build the one that was saved, or leave it out",
        )


def to_text(state: Mapping[str, Json]) -> str:
    """Returns the contents of the file. Numbers come back with the bits that they have."""
    return json.dumps(state, indent=None, sort_keys=True) + "\n"


def from_text(text: str) -> dict[str, Json]:
    """Returns the states of :func:`to_text`."""
    state: dict[str, Json] = json.loads(text)
    return state


def merged(
    states: Sequence[Mapping[str, Json]], places: Sequence[random_state.Place]
) -> dict[str, Json]:
    """Returns one state for the states that the ranks of a job have.

    What only some ranks have is theirs; random states are kept for each rank.

    Raises:
        CheckpointError: Two ranks have something else.
    """
    found: dict[str, Json] = {"extra": states[0]["extra"]}
    owners: dict[str, int] = {}
    for rank, state in enumerate(states):
        for name, value in state.items():
            if name in ("extra", "random"):
                continue
            owner = owners.setdefault(name, rank)
            if to_text({name: found.setdefault(name, value)}) != to_text({name: value}):
                raise CheckpointError(
                    f"the ranks do not have the same {name}",
                    expected=f"{found[name]} as on rank {owner}"[:200],
                    got=f"{value} on rank {rank} of the job"[:200],
                    fix="step it alike on every rank; positions in data count global samples",
                )
    found["random"] = random_state.merged([state["random"] for state in states], places)
    return found
