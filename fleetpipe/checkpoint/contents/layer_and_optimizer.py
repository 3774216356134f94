"""A model and an optimizer of Paddle's in a checkpoint: tensors under lasting names.

Paddle knows an accumulator by a name that it counts as it makes one. Here it is found by the
parameter that it belongs to, and called ``3.weight/moment1_0``, as PaddleNLP calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fleetpipe.aliases import Layer, Optimizer, Tensor
from fleetpipe.checkpoint.contents.matching import saved_names
from fleetpipe.checkpoint.contents.parts import (
    BUFFERS,
    LATE_BUFFERS,
    MASTER_WEIGHTS,
    MODEL,
    OPTIMIZER,
    ModelPart,
    Saved,
    SavedOptimizer,
    TensorName,
)
from fleetpipe.errors import CheckpointError, listed
from fleetpipe.job.job import mp_shard
from fleetpipe.mesh.parts import (
    Described,
    Held,
    JoinedParts,
    ModelParts,
    held_of,
    whole_name,
)
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import layer_at, put_buffer, wrapped_layer
from fleetpipe.paddle_api.optimizer import (
    base_optimizer,
    create_state,
    forget_state,
    groups_of,
    master_weight_of,
    state_of,
)
from fleetpipe.paddle_api.tensor import has_memory

_FIRST = "_0"


class NamedTensors:
    """A model as tensors under lasting names.

    Args:
        parts: What this process holds of it.
    """

    def __init__(self, parts: ModelParts) -> None:
        self.plain_names = parts.plain_names
        self._parts = parts
        #: What takes the place of buffers when they are filled.
        self._made: dict[str, Tensor] = {}
        self._joined: JoinedParts[TensorName] = JoinedParts([])

    @classmethod
    def of_layer(cls, layer: Layer) -> NamedTensors:
        """Describes a model of which this process holds all layers, by its own names.

        A tensor that it has under several names counts under the first.

        Args:
            layer: The model.
        """
        state = layer.state_dict()
        names: dict[int, str] = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), name)
        tensors = {name: held_of(state[name], mp_shard) for name in names.values()}
        buffers = {
            name: Held(tensor, differs=True)
            for name, tensor in layer.named_buffers()
            if name not in state and has_memory(tensor)
        }
        outline = {whole_name(n, held.tensor): held.described.shape for n, held in tensors.items()}
        return cls(ModelParts(tensors, outline, buffers, root=layer))

    def order(self) -> tuple[str, ...]:
        """Returns the names of the whole model's parameters and buffers, in its order."""
        return tuple(self._parts.outline)

    def require_outline(self) -> None:
        """See :meth:`ModelPart.require_outline`."""
        added = [
            name for name in self._parts.tensors if self.whole_name(name) not in self._parts.outline
        ]
        if added:
            raise CheckpointError(
                "the model has parameters that it did not have when it was built: one that is "
                "built anew could not take what would be saved",
                got=listed(added),
                cause="a layer was put around another, as an adapter, after the model was made",
                fix="put it there before the model is made, or in the layer's __init__; or save "
                "layers.state_dict() by paddle.save on each rank",
            )

    def parameters(self) -> Mapping[str, Held]:
        """Returns this process's parameters by lasting name."""
        return {n: held for n, held in self._parts.tensors.items() if _is_parameter(held.tensor)}

    def held(self) -> Mapping[TensorName, Held]:
        """Returns what this process holds, each tensor once."""
        tensors = [
            (TensorName(MODEL, self.whole_name(name)), held)
            for name, held in self._parts.tensors.items()
        ]
        return {
            **JoinedParts(tensors).held,
            **{TensorName(BUFFERS, name): held for name, held in self._parts.buffers.items()},
            **{TensorName(LATE_BUFFERS, name): held for name, held in self._parts.late.items()},
        }

    def whole_name(self, name: str) -> str:
        """Returns the name of the whole of a parameter or buffer; mostly it is its own."""
        held = self._parts.tensors.get(name)
        return name if held is None else whole_name(name, held.tensor)

    def wanted(self, saved: Saved) -> Mapping[TensorName, Held]:
        """Returns what is to be filled with the saved tensors of these names."""
        names = self.saved_names(saved)
        self._joined = JoinedParts(
            (TensorName(MODEL, names[self.whole_name(name)]), held)
            for name, held in self._parts.tensors.items()
        )
        targets = dict(self._joined.held)
        for path, held in self._parts.buffers.items():
            if TensorName(BUFFERS, path) in saved.tensors:
                targets[TensorName(BUFFERS, path)] = held
        targets.update(self._with_late(saved))
        for name, held in targets.items():
            require_fit(name, held, saved.tensors[name])
        return targets

    def _with_late(self, saved: Saved) -> dict[TensorName, Held]:
        """Returns what the saved buffers fill that forwards make, or give another shape."""
        targets: dict[TensorName, Held] = {}
        for name, described in saved.tensors.items():
            late = name.group == LATE_BUFFERS
            held = (self._parts.late if late else self._parts.tensors).get(name.name)
            if late and held is not None and held.described == described:
                targets[name] = held
            elif (late or (name.group == MODEL and _has_grown(held, described))) and (
                layer_at(self._parts.root, name.name.rpartition(".")[0]) is not None
            ):
                dtype: Any = described.dtype
                made = paddle.zeros(list(described.shape), dtype)
                self._made[name.name], targets[name] = made, Held(made, differs=True)
        return targets

    def settle(self) -> None:
        """Gives parts of one tensor, which was filled as a whole, their values."""
        self._joined.hand_out()
        for name, tensor in self._made.items():
            put_buffer(self._parts.root, name, tensor)

    def abandon(self) -> None:
        """Does nothing."""

    def saved_names(self, saved: Saved) -> Mapping[str, str]:
        """Returns the saved name of each tensor of the whole model."""
        return saved_names(self._parts.outline, self.plain_names, saved)


def _has_grown(held: Held | None, saved: Described) -> bool:
    """Whether a buffer was saved in another shape."""
    return (
        held is not None
        and not _is_parameter(held.tensor)
        and held.described.dtype == saved.dtype
        and held.described.shape != saved.shape
    )


def _is_parameter(tensor: Tensor) -> bool:
    return hasattr(tensor, "trainable")


def without_wrappers(layer: Layer) -> Layer:
    """Returns the model in the wrappers of all kinds of parallelism, whose names it lends."""
    while (wrapped := wrapped_layer(layer)) is not None:
        layer = wrapped
    return layer


def require_fit(name: TensorName, held: Held, saved: Described) -> None:
    """Raises a ``CheckpointError`` where a saved tensor has another dtype or shape."""
    if held.described != saved:
        raise CheckpointError(
            f"{name} does not fit",
            expected=f"{held.described}, as here",
            got=f"{saved} in the checkpoint",
            fix="build the model and the optimizer as they were, or restore another checkpoint",
        )


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer of Paddle's that does the arithmetic."""
    return base_optimizer(getattr(optimizer, "wrapped", optimizer))


def _everything(parameter: Tensor) -> bool:
    return True


class OptimizerState:
    """The accumulators and master weights that this process keeps."""

    def __init__(self, optimizer: Optimizer, model: ModelPart) -> None:
        shared = isinstance(optimizer, SavedOptimizer)
        self._owns: Callable[[Tensor], bool] = optimizer.owns_state if shared else _everything
        self._optimizer = unwrapped(optimizer)
        self._model = model
        self._created: list[Tensor] = []
        self._unsaved: list[Tensor] = []
        self._joined: JoinedParts[TensorName] = JoinedParts([])

    @property
    def kind(self) -> str:
        """The type of the optimizer."""
        return type(self._optimizer).__name__

    def held(self) -> Mapping[TensorName, Held]:
        """Returns the state that this process keeps."""
        state = (
            pair
            for _, parameter, path, of in self._parameters()
            for pair in self._state(parameter, self._model.whole_name(path), of)
        )
        return JoinedParts(state).held

    def wanted(self, saved: Saved) -> Mapping[TensorName, Held]:
        """Returns what is to be filled with the saved state, which is made where there is none."""
        require_kind(self.kind, saved)
        names = self._model.saved_names(saved)
        there = by_parameter(saved)
        targets: list[tuple[TensorName, Held]] = []
        for group, parameter, path, of in self._parameters():
            name = names[self._model.whole_name(path)]
            if name not in there:
                self._unsaved.append(parameter)
                continue
            if not state_of(self._optimizer, parameter.name):
                self._created.append(parameter)
                create_state(self._optimizer, group, [parameter])
            state = dict(self._state(parameter, name, of))
            require_kinds(name, set(state), there[name])
            targets += state.items()
        self._joined = JoinedParts(targets)
        for target, held in self._joined.held.items():
            require_fit(target, held, saved.tensors[target])
        return self._joined.held

    def settle(self) -> None:
        """Forgets the state of parameters that had none when the checkpoint was saved."""
        self._joined.hand_out()
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

    def _state(self, parameter: Tensor, path: str, of: Held) -> Iterator[tuple[TensorName, Held]]:
        for kind, tensor in state_of(self._optimizer, parameter.name).items():
            # Powers of beta are one number, whatever a shard of the parameter has.
            sharded = list(tensor.shape) == list(parameter.shape) and "pow" not in kind
            yield state_name(path, kind), Held(tensor, of.cut if sharded else None)
        master = master_weight_of(self._optimizer, parameter.name)
        if master is not None:
            yield TensorName(MASTER_WEIGHTS, path), Held(master, of.cut)


def require_kind(kind: str, saved: Saved) -> None:
    """Raises a ``CheckpointError`` where the saved state is of another type of optimizer."""
    # AdamW is Adam with another decay; their states are alike.
    if saved.optimizer is None or saved.optimizer.rstrip("W") != kind.rstrip("W"):
        raise CheckpointError(
            "the checkpoint has no state of this optimizer",
            expected=kind,
            got=saved.optimizer or "no optimizer",
            fix="build the optimizer that was saved, or restore the model without optimizer=",
        )


def state_name(path: str, kind: str) -> TensorName:
    """Returns the name of the state of a kind that belongs to the parameter ``path``."""
    return TensorName(OPTIMIZER, f"{path}/{kind}{_FIRST}")


def by_parameter(saved: Saved) -> dict[str, set[TensorName]]:
    """Returns the names of the saved state by the name of the parameter that it belongs to."""
    kinds: dict[str, set[TensorName]] = {}
    for name in saved.tensors:
        if name.group == OPTIMIZER:
            kinds.setdefault(name.name.rpartition("/")[0], set()).add(name)
        elif name.group == MASTER_WEIGHTS:
            kinds.setdefault(name.name, set()).add(name)
    return kinds


def require_kinds(path: str, kinds: set[TensorName], saved: set[TensorName]) -> None:
    """Raises a ``CheckpointError`` where the saved state of a parameter has other kinds."""
    if kinds != saved:
        raise CheckpointError(
            f"the saved state of {path!r} is of an optimizer with other options",
            expected=", ".join(sorted(map(str, kinds))) or "nothing",
            got=", ".join(sorted(map(str, saved))) or "nothing",
            fix="build the optimizer as it was when it was saved (amsgrad, multi_precision)",
        )
