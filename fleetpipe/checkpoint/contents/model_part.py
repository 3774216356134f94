"""A model in a checkpoint: its tensors by name, matched with those that were saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.checkpoint.contents.parts import BUFFERS, MODEL, Held, Name, Saved
from fleetpipe.checkpoint.files.tensors import Cut, Described
from fleetpipe.errors import CheckpointError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api.tensor import has_memory


class NamedTensors:
    """A model as tensors under lasting names.

    Args:
        tensors: The parameters and buffers that this process holds, each once.
        outline: The names and whole shapes of the whole model, in its order.
        buffers: Buffers that no state dict has, by lasting name; a checkpoint may lack them.
    """

    def __init__(
        self,
        tensors: Mapping[str, Held],
        outline: Mapping[str, tuple[int, ...]],
        buffers: Mapping[str, Held] | None = None,
    ) -> None:
        self._tensors = tensors
        self._outline = outline
        self._buffers = {} if buffers is None else buffers

    @classmethod
    def of_layer(cls, layer: Layer, own_slice: tuple[int, int] = (0, 1)) -> NamedTensors:
        """Describes a model of which this process holds all layers, by its own names.

        A tensor that it has under several names counts under the first.

        Args:
            layer: The model, or what wraps it.
            own_slice: Which slice of tensor-parallel layers this process holds, and of how many.
        """
        layer = _inside(layer)
        state = layer.state_dict()
        names: dict[int, str] = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), name)
        tensors = {name: held_of(state[name], own_slice) for name in names.values()}
        buffers = {
            name: Held(tensor, differs=True)
            for name, tensor in layer.named_buffers()
            if name not in state and has_memory(tensor)
        }
        return cls(tensors, {name: held.described.shape for name, held in tensors.items()}, buffers)

    def order(self) -> tuple[str, ...]:
        """Returns the names of the whole model's parameters and buffers, in its order."""
        return tuple(self._outline)

    def parameters(self) -> Mapping[str, Held]:
        """Returns this process's parameters by lasting name."""
        return {n: held for n, held in self._tensors.items() if _is_parameter(held.tensor)}

    def held(self) -> Mapping[Name, Held]:
        """Returns what this process holds, each tensor once."""
        return {
            **{Name(MODEL, name): held for name, held in self._tensors.items()},
            **{Name(BUFFERS, name): held for name, held in self._buffers.items()},
        }

    def wanted(self, saved: Saved) -> Mapping[Name, Held]:
        """Returns what is to be filled with the saved tensors of these names.

        Raises:
            CheckpointError: The checkpoint is of another model.
        """
        names = self.saved_names(saved)
        found = {Name(MODEL, names[name]): held for name, held in self._tensors.items()}
        for path, held in self._buffers.items():
            if Name(BUFFERS, path) in saved.tensors:
                found[Name(BUFFERS, path)] = held
        for name, held in found.items():
            require_fit(name, held, saved.tensors[name])
        return found

    def settle(self) -> None:
        """Does nothing: memory was there before."""

    def abandon(self) -> None:
        """Does nothing."""

    def saved_names(self, saved: Saved) -> Mapping[str, str]:
        """Returns the saved name of each tensor of the whole model; its own, or by the order.

        Raises:
            CheckpointError: The checkpoint is of another model.
        """
        if set(saved.order) == set(self._outline):
            return {name: name for name in self._outline}
        shapes = {name: saved.tensors[Name(MODEL, name)].shape for name in saved.order}
        _require_same_shapes(self._outline, shapes)
        return dict(zip(self._outline, saved.order))


def held_of(tensor: Tensor, own_slice: tuple[int, int]) -> Held:
    """Describes a parameter or buffer.

    Args:
        tensor: It, or this process's slice of it.
        own_slice: Which slice of tensor-parallel layers this process holds, and of how many.
    """
    member, members = own_slice
    # Paddle's running statistics are parameters that need no gradient.
    differs = bool(tensor.stop_gradient)
    if members == 1 or not getattr(tensor, "is_distributed", False):
        return Held(tensor, None, differs)
    if not hasattr(tensor, "split_axis"):
        raise CheckpointError(
            "a parameter is distributed over the tensor-parallel ranks in a way that nobody knows",
            got=f"{tensor.name}: is_distributed, and no split_axis",
            fix="set its split_axis to the axis that is cut, or is_distributed=False if none is",
        )
    axis, size = int(tensor.split_axis), int(tensor.shape[tensor.split_axis])
    return Held(tensor, Cut(axis, member * size, (member + 1) * size, members * size), differs)


def _is_parameter(tensor: Tensor) -> bool:
    return hasattr(tensor, "trainable")


def own_slice() -> tuple[int, int]:
    """Returns which slice of tensor-parallel layers this process holds, and of how many."""
    job = current_job()
    if job is None or job.degrees.mp == 1:
        return 0, 1
    members = job.model_parallel()
    return members.rank, members.ranks


def _inside(layer: Layer) -> Layer:
    """Returns the model in the wrappers of data and tensor parallelism, whose names it lends."""
    while list(layer._sub_layers) == ["_layers"]:
        layer = layer._layers
    return layer


def require_fit(name: Name, held: Held, saved: Described) -> None:
    """Raises a ``CheckpointError`` where a saved tensor has another dtype or shape."""
    if held.described != saved:
        raise CheckpointError(
            f"{name} does not fit",
            expected=f"{held.described}, as here",
            got=f"{saved} in the checkpoint",
            fix="build the model and the optimizer as they were, or restore another checkpoint",
        )


def _require_same_shapes(
    outline: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]
) -> None:
    missing = [name for name in outline if name not in saved]
    if len(outline) != len(saved):
        other = [name for name in saved if name not in outline]
        raise CheckpointError(
            "the checkpoint is of another model",
            expected=f"{len(outline)} parameters and buffers, {_listed(missing or [*outline])}",
            got=f"{len(saved)}, {_listed(other or [*saved])}",
            fix="build the model that was saved",
        )
    for (name, own), (other_name, shape) in zip(outline.items(), saved.items()):
        if own != shape:
            raise CheckpointError(
                f"{other_name!r} of the checkpoint does not fit {name!r}",
                expected=f"shape {list(own)}",
                got=f"shape {list(shape)}",
                cause="models with other names are matched in their order, and the layers of one "
                "are declared in another order",
                fix="declare the layers in the order of the model that was saved",
            )


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (", .." if len(names) > most else "")
