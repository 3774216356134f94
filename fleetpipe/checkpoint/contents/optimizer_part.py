"""An optimizer of Paddle's in a checkpoint: its state by the lasting names of the parameters.

Paddle knows an accumulator by a name that it counts as it makes one. Here it is found by the
parameter that it belongs to, and called ``3.weight/moment1_0``, as PaddleNLP calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fleetpipe.aliases import Optimizer, Tensor
from fleetpipe.checkpoint.contents.model_part import require_fit
from fleetpipe.checkpoint.contents.parts import (
    MASTER_WEIGHTS,
    OPTIMIZER,
    Held,
    ModelPart,
    Name,
    Saved,
    SavedOptimizer,
)
from fleetpipe.errors import CheckpointError
from fleetpipe.paddle_api.optimizer import (
    base_optimizer,
    create_state,
    forget_state,
    groups_of,
    master_weight_of,
    state_of,
)

_FIRST = "_0"


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer of Paddle's that does the arithmetic."""
    return base_optimizer(getattr(optimizer, "wrapped", optimizer))


def _everything(parameter: Tensor) -> bool:
    return True


class OptimizerState:
    """The accumulators and master weights that this process keeps."""

    def __init__(self, optimizer: Optimizer, model: ModelPart) -> None:
        """Describes an optimizer.

        Args:
            optimizer: One of Paddle's, or what wraps one.
            model: The model that it trains, which names its parameters.
        """
        shared = isinstance(optimizer, SavedOptimizer)
        self._owns: Callable[[Tensor], bool] = optimizer.owns_state if shared else _everything
        self._optimizer = unwrapped(optimizer)
        self._model = model
        self._created: list[Tensor] = []
        self._unsaved: list[Tensor] = []

    @property
    def kind(self) -> str:
        """The type of the optimizer."""
        return type(self._optimizer).__name__

    def held(self) -> Mapping[Name, Held]:
        """Returns the state that this process keeps."""
        return {
            name: held
            for _, parameter, path, of in self._parameters()
            for name, held in self._state(parameter, path, of)
        }

    def wanted(self, saved: Saved) -> Mapping[Name, Held]:
        """Returns what is to be filled with the saved state, which is made where there is none.

        Raises:
            CheckpointError: The state is of another optimizer.
        """
        require_kind(self.kind, saved)
        names = self._model.saved_names(saved)
        there = by_parameter(saved)
        found: dict[Name, Held] = {}
        for group, parameter, path, of in self._parameters():
            if names[path] not in there:
                self._unsaved.append(parameter)
                continue
            if not state_of(self._optimizer, parameter.name):
                self._created.append(parameter)
                create_state(self._optimizer, group, [parameter])
            state = dict(self._state(parameter, names[path], of))
            require_kinds(names[path], set(state), there[names[path]])
            found.update(state)
        for name, held in found.items():
            require_fit(name, held, saved.tensors[name])
        return found

    def settle(self) -> None:
        """Forgets the state of parameters that had none when the checkpoint was saved."""
        for parameter in self._unsaved:
            forget_state(self._optimizer, parameter)

    def abandon(self) -> None:
        """Forgets the state that was made to be filled."""
        for parameter in self._created:
            forget_state(self._optimizer, parameter)

    def _parameters(self) -> Iterator[tuple[int, Tensor, str, Held]]:
        """Yields group, parameter, lasting name and place of each parameter with state here."""
        named = {id(held.tensor): (name, held) for name, held in self._model.parameters().items()}
        for group, parameters in enumerate(groups_of(self._optimizer)):
            for parameter in parameters:
                if id(parameter) in named and self._owns(parameter):
                    yield (group, parameter, *named[id(parameter)])

    def _state(self, parameter: Tensor, path: str, of: Held) -> Iterator[tuple[Name, Held]]:
        for kind, tensor in state_of(self._optimizer, parameter.name).items():
            # Powers of beta are one number, whatever a slice of the parameter has.
            sliced = list(tensor.shape) == list(parameter.shape) and "pow" not in kind
            yield state_name(path, kind), Held(tensor, of.cut if sliced else None)
        master = master_weight_of(self._optimizer, parameter.name)
        if master is not None:
            yield Name(MASTER_WEIGHTS, path), Held(master, of.cut)


def require_kind(kind: str, saved: Saved) -> None:
    """Raises a ``CheckpointError`` where the saved state is of another type of optimizer."""
    if saved.optimizer is None or saved.optimizer != kind:
        raise CheckpointError(
            "the checkpoint has no state of this optimizer",
            expected=kind,
            got=saved.optimizer or "no optimizer",
            fix='build the optimizer that was saved, or restore the model alone: only=("model",)',
        )


def state_name(path: str, kind: str) -> Name:
    """Returns the name of the state of a kind that belongs to the parameter ``path``."""
    return Name(OPTIMIZER, f"{path}/{kind}{_FIRST}")


def by_parameter(saved: Saved) -> dict[str, set[Name]]:
    """Returns the names of the saved state by the name of the parameter that it belongs to."""
    found: dict[str, set[Name]] = {}
    for name in saved.tensors:
        if name.group == OPTIMIZER:
            found.setdefault(name.name.rpartition("/")[0], set()).add(name)
        elif name.group == MASTER_WEIGHTS:
            found.setdefault(name.name, set()).add(name)
    return found


def require_kinds(path: str, own: set[Name], saved: set[Name]) -> None:
    """Raises a ``CheckpointError`` where the saved state of a parameter has other kinds."""
    if own != saved:
        raise CheckpointError(
            f"the saved state of {path!r} is of an optimizer with other options",
            expected=", ".join(sorted(map(str, own))) or "nothing",
            got=", ".join(sorted(map(str, saved))) or "nothing",
            fix="build the optimizer as it was when it was saved (amsgrad, multi_precision)",
        )
