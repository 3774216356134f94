"""The tensors of a model or of an optimizer that one rank saves and restores, and their names.

The other modules know nothing of pipelines: through the protocols here a model and an optimizer
describe which part of which full tensor they have. ``saved_names`` matches the tensors of a
checkpoint with those of a model by name, or by order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fleetpipe.aliases import Optimizer, Tensor
from fleetpipe.errors import CheckpointError, listed
from fleetpipe.mesh.parts import Described, JoinedParts, LocalTensor, ModelParts

#: The fully qualified names of a program's variables, or ``"order"``; None: the variables' names.
Names = Mapping[str, str] | str | None
#: The groups of tensors; the names of a group's files begin with it:
#: ``model-00001-of-00002.safetensors``.
MODEL, BUFFERS, LATE_BUFFERS, LOSS, OPTIMIZER, MASTER_WEIGHTS, REPLICAS, STATE = GROUPS = (
    *("model", "buffers", "late_buffers", "loss", "optimizer", "master_weights", "replicas"),
    "state",
)

#: The random streams of the stages of a static program in one process: the number of stages of the
#: whole program; whether the default generator of this process is the stream of the first stage
#: that draws random numbers; the state of the generator of each later stage in this process.
StageStreams = tuple[int, bool, Mapping[int, Any]]

_Shapes = Mapping[str, tuple[int, ...]]


class TensorName(NamedTuple):
    """The fully qualified name of a tensor: its group of files, and its name there."""

    group: str
    name: str

    def of_replica(self, replica: int) -> TensorName:
        """Returns the name of a replica's own value, if it differs from the first replica's."""
        return TensorName(REPLICAS, f"{replica}/{self.group}/{self.name}")

    def __str__(self) -> str:
        return f"{self.name!r} of the {self.group.replace('_', ' ')}"


class Saved(NamedTuple):
    """The description of a checkpoint's tensors, for a :class:`SavedPart`.

    Attributes:
        tensors: The dtype and shape of all tensors by name.
        order: The names of the model's parameters and buffers in the order of the model.
        optimizer: The type of the optimizer that was saved; None if there was none.
        replicas: How many replicas saved it.
        plain_order: The plain model's name for each name in ``order``; empty if it is unknown, and
            ``order`` itself if ``order`` is not a model's, but sorted by name or by a map.
        adapters: As in :class:`ModelParts`; also empty in older checkpoints.
    """

    tensors: Mapping[TensorName, Described]
    order: tuple[str, ...]
    optimizer: str | None
    replicas: int = 1
    plain_order: tuple[str, ...] = ()
    adapters: str = ""


class SavedPart:
    """The part of a model or of an optimizer that one rank has. No method is collective."""

    _joined: JoinedParts[TensorName]

    def local_tensors(self) -> Mapping[TensorName, LocalTensor]:
        """Returns the tensors that this rank has, each once."""
        return JoinedParts(self._tensors()).tensors

    def wanted(self, saved: Saved) -> Mapping[TensorName, LocalTensor]:
        """Returns the tensors to fill, by their names in the checkpoint.

        It may allocate memory, but changes no value. :meth:`settle` or :meth:`abandon` follows.

        Raises:
            CheckpointError: The checkpoint does not fit.
        """
        self._joined = JoinedParts(self._targets(saved))
        for name, local in self._joined.tensors.items():
            _require_fit(name, local, saved.tensors[name])
        return self._joined.tensors

    def settle(self) -> None:
        """Takes over the tensors of :meth:`wanted`, after they were filled."""
        self._joined.hand_out()

    def abandon(self) -> None:
        """Undoes :meth:`wanted`, if its tensors were not filled."""

    def _tensors(self) -> Iterable[tuple[TensorName, LocalTensor]]:
        """Returns the tensors that this rank has; a tensor in parts has an item for each part."""
        raise NotImplementedError

    def _targets(self, saved: Saved) -> Iterable[tuple[TensorName, LocalTensor]]:
        """Returns the tensors to fill; a tensor in parts has an item for each part."""
        raise NotImplementedError


def _require_fit(name: TensorName, local: LocalTensor, saved: Described) -> None:
    """Raises an error if a tensor has another dtype or shape in the checkpoint."""
    if local.described != saved:
        cast = local.described.shape == saved.shape and name.group == MODEL
        statement = f"{name.name} -> {name.name}, dtype='{local.described.dtype}'"
        raise CheckpointError(
            f"{name} does not fit",
            expected=f"{local.described}, as here",
            got=f"{saved} in the checkpoint",
            fix="build the model and the optimizer as they were, or restore another checkpoint"
            + f"; or cast in a map of names (names=, --names): {statement!r}" * cast,
        )


class ProgramSource(Protocol):
    """The description of a static program for a checkpoint.

    Attributes:
        parts: The parameters and running statistics that this process has.
        by_order: Whether names of a checkpoint are matched by their position in the order.
        minimized_by: The optimizer of its ``minimize``.
    """

    parts: ModelParts
    by_order: bool
    minimized_by: Optimizer

    def optimizer_state(self) -> Mapping[str, tuple[Mapping[str, LocalTensor], LocalTensor | None]]:
        """Returns the optimizer's variables by kind, and the master weight, of each parameter.

        Raises:
            ConfigError: The optimizer has state that belongs to no parameter.
        """

    def streams(self) -> StageStreams:
        """Returns the random streams of this process's stages."""

    def set_streams(self, streams: Mapping[int, Any]) -> None:
        """Sets the streams of the later stages; a stage without one starts anew.

        The default generator is restored before.
        """


@runtime_checkable
class SavedModel(Protocol):
    """A model that has fully qualified names for its tensors."""

    def checkpoint_part(self) -> ModelParts:
        """Returns the tensors that this process has."""


@runtime_checkable
class SavedProgram(Protocol):
    """A static program that runs as a pipeline."""

    def checkpoint_part_of_program(self, names: Names) -> ProgramSource:
        """Returns the description of the part that this process has.

        Args:
            names: The fully qualified names of its variables; see
                :class:`fleetpipe.CheckpointManager`.

        Raises:
            ConfigError: ``names`` does not fit the program.
            CheckpointError: The startup program has not run.
        """


@runtime_checkable
class SavedOptimizer(Protocol):
    """An optimizer that wraps one of Paddle's."""

    def owns_state(self, parameter: Tensor) -> bool:
        """Whether this process has the state of a parameter."""

    @property
    def wrapped(self) -> Optimizer:
        """Paddle's optimizer inside it."""


def saved_names(parts: ModelParts, saved: Saved) -> dict[str, str]:
    """Returns the saved name of each tensor of a model: by name, by plain name, or by order.

    Args:
        parts: The tensors that this process has of the model.
        saved: The description of the checkpoint.

    Raises:
        CheckpointError: The checkpoint has other tensors, other names in an unknown order, or
            other adapters.
    """
    wanted, plain_names = parts.shapes, parts.plain_names
    # Only the scale is compared here: the names of tensors show which layers are adapted.
    scale, other = (text.partition(", targets")[0] for text in (parts.adapters, saved.adapters))
    if scale and other not in ("", scale):
        raise CheckpointError(
            "the checkpoint has other adapters than the model",
            expected=parts.adapters,
            got=saved.adapters,
            fix="call lora.adapt with the targets, the rank and the alpha of the checkpoint",
        )
    if set(saved.order) == set(wanted):
        return {name: name for name in wanted}
    here = dict(zip(plain_order(tuple(wanted), plain_names) or wanted, wanted))
    there = dict(zip(saved.plain_order or saved.order, saved.order))
    if here.keys() == there.keys():
        return {name: there[plain] for plain, name in here.items()}
    shapes = {plain: saved.tensors[TensorName(MODEL, name)].shape for plain, name in there.items()}
    if parts.adapters:
        raise CheckpointError(
            "the checkpoint has adapters, or trained parameters, of other layers than the model",
            expected=listed([name for name in here if name not in there]),
            got=listed([name for name in there if name not in here]),
            fix="call lora.adapt with the targets of the checkpoint, and set stop_gradient = False "
            "of what it has trained besides",
        )
    ordered = saved.plain_order != saved.order
    _require_same_shapes({n: wanted[name] for n, name in here.items()}, shapes, ordered)
    return dict(zip(wanted, saved.order))


def plain_order(order: tuple[str, ...], plain_names: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the first plain name of each fully qualified name; empty if both are the same."""
    first = {full: plain for plain, full in reversed([*plain_names.items()])}
    plain = tuple(first.get(name, name) for name in order)
    return () if plain == order else plain


def without_copies(
    saved: Saved,
    order: tuple[str, ...],
    plain_names: Mapping[str, str],
    read: Callable[[str], bytes],
) -> Saved:
    """Removes copies of tied weights, which other programs save under each of their names.

    Args:
        saved: The description of the checkpoint.
        order: The names of the model's tensors in its order, each once.
        plain_names: See :class:`ModelParts`.
        read: Returns the bytes of a saved tensor of the model.
    """
    names = {*(plain_order(order, plain_names) or order)}
    there = dict(zip(saved.plain_order or saved.order, saved.order))
    if not names < there.keys():
        return saved

    def has_copy(name: str) -> bool:
        described = saved.tensors[TensorName(MODEL, name)]
        alike = (n for n in names if saved.tensors[TensorName(MODEL, there[n])] == described)
        return any(read(there[other]) == read(name) for other in alike)

    kept = {plain: name for plain, name in there.items() if plain in names or not has_copy(name)}
    plain = tuple(kept) if saved.plain_order else ()
    return saved._replace(order=tuple(kept.values()), plain_order=plain)


def _require_same_shapes(wanted: _Shapes, saved: _Shapes, ordered: bool) -> None:
    """Raises an error unless tensors with other names can be matched by the model's order."""
    missing = [name for name in wanted if name not in saved]
    other = [name for name in saved if name not in wanted]
    if len(wanted) != len(saved):
        raise CheckpointError(
            "the checkpoint is of another model",
            expected=f"{len(wanted)} parameters and buffers, {listed(missing or [*wanted])}",
            got=f"{len(saved)}, {listed(other or [*saved])}",
            fix="build the model that was saved",
        )
    if not ordered:
        raise CheckpointError(
            "the checkpoint has other names than the model, and does not say the model's order",
            expected=listed(missing),
            got=listed(other),
            cause="files of safetensors are sorted by name, and a map of names has its own order",
            fix="load it with names=, or convert it with --names: a map to the names of the model",
        )
    for (name, shape_here), (other_name, shape) in zip(wanted.items(), saved.items()):
        if shape_here != shape:
            raise CheckpointError(
                f"{other_name!r} of the checkpoint does not fit {name!r}",
                expected=f"shape {list(shape_here)}",
                got=f"shape {list(shape)}",
                cause="models with other names are matched in their order, and the layers of one "
                "are declared in another order",
                fix="declare the layers in the order of the model that was saved",
            )
