"""Names the tensors of a checkpoint, and defines what a rank saves and restores: ``SavedPart``.

The other modules know nothing of pipelines: through the protocols here a model and an optimizer
describe which part of which full tensor this rank has. A plain name is the name of a tensor in the
model as a single-device script builds it. ``saved_names`` matches the tensors of a checkpoint with
those of a model by name, by plain name, or by order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fleetpipe.aliases import Optimizer
from fleetpipe.errors import CheckpointError, listed
from fleetpipe.mesh.parts import Described, JoinedParts, LocalTensor, ModelParts

#: The fully qualified name of each variable of a static program, or ``"order"`` to match variables
#: by their order; None if the variables' own names are used.
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
    """The name of a tensor in a checkpoint.

    Attributes:
        group: The group of tensors to which it belongs, one of ``GROUPS``.
        name: Its fully qualified name in the group.
    """

    group: str
    name: str

    def of_replica(self, replica: int) -> TensorName:
        """Returns the name of a replica's value, which is saved if it differs from the first's."""
        return TensorName(REPLICAS, f"{replica}/{self.group}/{self.name}")

    def __str__(self) -> str:
        return f"{self.name!r} of the {self.group.replace('_', ' ')}"


class Saved(NamedTuple):
    """A description of the tensors in a checkpoint, from which a :class:`SavedPart` restores.

    Attributes:
        tensors: The dtype and shape of each tensor by name.
        order: The names of the model's parameters and buffers in the order of the model.
        optimizer: The type of the optimizer that was saved; None if there was none.
        replicas: The number of replicas of the job that saved.
        plain_order: For each name in ``order`` the tensor's name in the model without the pipeline;
            empty if it is unknown; ``order`` itself if that is sorted by name or by a map of names.
        adapters: The description of LoRA adapters; empty without any, and in older checkpoints.
    """

    tensors: Mapping[TensorName, Described]
    order: tuple[str, ...]
    optimizer: str | None
    replicas: int = 1
    plain_order: tuple[str, ...] = ()
    adapters: str = ""


class SavedPart:
    """The tensors of a model, of an optimizer or of a script that one rank saves and restores.

    No method is collective. A restore calls :meth:`wanted`, fills the tensors that it returns, and
    then calls :meth:`settle`, or :meth:`abandon` after an error.
    """

    _joined: JoinedParts[TensorName]

    def local_tensors(self) -> Mapping[TensorName, LocalTensor]:
        """Returns the tensors that this rank has, each once."""
        return JoinedParts(self._tensors()).tensors

    def wanted(self, saved: Saved) -> Mapping[TensorName, LocalTensor]:
        """Returns the tensors to fill from a checkpoint, by their names there.

        Memory may be allocated, but no value is changed.

        Raises:
            CheckpointError: A tensor has another dtype or shape in the checkpoint, or none.
        """
        self._joined = JoinedParts(self._targets(saved))
        for name, local in self._joined.tensors.items():
            _require_fit(name, local, saved.tensors[name])
        return self._joined.tensors

    def settle(self) -> None:
        """Hands the filled tensors of :meth:`wanted` to the objects that use them."""
        self._joined.copy_to_parts()

    def abandon(self) -> None:
        """Frees what :meth:`wanted` has allocated, if its tensors were not filled."""

    def _tensors(self) -> Iterable[tuple[TensorName, LocalTensor]]:
        """Returns the tensors that this rank has, with an item for each part of a tensor."""
        raise NotImplementedError

    def _targets(self, saved: Saved) -> Iterable[tuple[TensorName, LocalTensor]]:
        """Returns the tensors to fill from a checkpoint, with an item for each part of a tensor."""
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
        by_order: Whether the tensors of a checkpoint are matched by their order, not by name.
        minimized_by: The optimizer whose ``minimize`` made the program.
    """

    parts: ModelParts
    by_order: bool
    minimized_by: Optimizer

    def optimizer_state(self) -> Mapping[str, tuple[Mapping[str, LocalTensor], LocalTensor | None]]:
        """Returns the optimizer's variables of each parameter, by the parameter's name.

        The variables are a dict of the accumulators by kind, and the master weight or None.

        Raises:
            ConfigError: The optimizer has state that belongs to no parameter.
        """

    def streams(self) -> StageStreams:
        """Returns the random streams of this process's stages."""

    def set_streams(self, streams: Mapping[int, Any]) -> None:
        """Sets the random streams of the later stages, after the default generator was restored.

        A stage without a stream in ``streams`` starts a new one.
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
        """Returns the description of the program and of the tensors that this process has.

        Args:
            names: The fully qualified names of its variables, as for
                :class:`fleetpipe.CheckpointManager`.

        Raises:
            ConfigError: ``names`` does not fit the program.
            CheckpointError: The startup program has not run.
        """


def saved_names(parts: ModelParts, saved: Saved) -> dict[str, str]:
    """Returns the name in a checkpoint of each tensor of a model, by the tensor's name here.

    Tensors are matched by name; else by plain name, which is the name in the model without the
    pipeline; else by order.

    Args:
        parts: The tensors that this process has of the model.
        saved: The description of the checkpoint.

    Raises:
        CheckpointError: The checkpoint has other tensors, other names in an unknown order, or
            other adapters.
    """
    wanted, plain_names = parts.shapes, parts.plain_names
    # Only the scale is compared here: the names of tensors show which layers are adapted.
    scale, _, _ = parts.adapters.partition(", targets")
    saved_scale, _, _ = saved.adapters.partition(", targets")
    if scale and saved_scale not in ("", scale):
        raise CheckpointError(
            "the checkpoint has other adapters than the model",
            expected=parts.adapters,
            got=saved.adapters,
            fix="call lora.adapt with the targets, the rank and the alpha of the checkpoint",
        )
    if set(saved.order) == set(wanted):
        return {name: name for name in wanted}
    # By plain name, the name in the model and the name in the checkpoint.
    of_model = dict(zip(plain_order(tuple(wanted), plain_names) or wanted, wanted))
    of_save = dict(zip(saved.plain_order or saved.order, saved.order))
    if of_model.keys() == of_save.keys():
        return {name: of_save[plain] for plain, name in of_model.items()}
    shapes = {p: saved.tensors[TensorName(MODEL, name)].shape for p, name in of_save.items()}
    if parts.adapters:
        raise CheckpointError(
            "the checkpoint has adapters, or trained parameters, of other layers than the model",
            expected=listed([name for name in of_model if name not in of_save]),
            got=listed([name for name in of_save if name not in of_model]),
            fix="call lora.adapt with the targets of the checkpoint, and set stop_gradient = False "
            "of what it has trained besides",
        )
    # No names agree, so the order must. Equal orders mark a save that is sorted in another way.
    _require_same_shapes(
        {plain: wanted[name] for plain, name in of_model.items()},
        shapes,
        is_in_model_order=saved.plain_order != saved.order,
    )
    return dict(zip(wanted, saved.order))


def plain_order(order: tuple[str, ...], plain_names: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the name of each tensor in the model without the pipeline, its first if several.

    Args:
        order: The fully qualified names of the tensors.
        plain_names: The fully qualified name for each name in the model without the pipeline.

    Returns:
        The names in the same order; empty if all equal the fully qualified ones.
    """
    first_plain_name = {full: plain for plain, full in reversed([*plain_names.items()])}
    plain = tuple(first_plain_name.get(name, name) for name in order)
    return () if plain == order else plain


def without_copies(
    saved: Saved,
    order: tuple[str, ...],
    plain_names: Mapping[str, str],
    read: Callable[[str], bytes],
) -> Saved:
    """Returns a checkpoint's description without the copies of weights that the model has tied.

    Other programs save a tied weight under each of its names.

    Args:
        saved: The description of the checkpoint.
        order: The names of the model's tensors in its order, each once.
        plain_names: The fully qualified name for each name in the model without the pipeline.
        read: Returns the bytes of a saved tensor of the model, by its saved name.
    """
    names = {*(plain_order(order, plain_names) or order)}
    saved_name = dict(zip(saved.plain_order or saved.order, saved.order))
    if not names < saved_name.keys():
        return saved

    def is_copy(name: str) -> bool:
        """Returns whether a saved tensor that the model lacks has the bytes of one that it has."""
        described = saved.tensors[TensorName(MODEL, name)]
        return any(
            saved.tensors[TensorName(MODEL, saved_name[of_model])] == described
            and read(saved_name[of_model]) == read(name)
            for of_model in names
        )

    needed = {
        plain: name for plain, name in saved_name.items() if plain in names or not is_copy(name)
    }
    plain = tuple(needed) if saved.plain_order else ()
    return saved._replace(order=tuple(needed.values()), plain_order=plain)


def _require_same_shapes(wanted: _Shapes, saved: _Shapes, *, is_in_model_order: bool) -> None:
    """Raises an error unless tensors with other names can be matched by the model's order.

    Args:
        wanted: The shape of each tensor of the model, in the order of the model.
        saved: The shape of each tensor of the checkpoint.
        is_in_model_order: Whether ``saved`` is in the order of the saved model.

    Raises:
        CheckpointError: The numbers, the shapes, or the orders differ or are unknown.
    """
    only_wanted = [name for name in wanted if name not in saved]
    only_saved = [name for name in saved if name not in wanted]
    if len(wanted) != len(saved):
        raise CheckpointError(
            "the checkpoint is of another model",
            expected=f"{len(wanted)} parameters and buffers, {listed(only_wanted or [*wanted])}",
            got=f"{len(saved)}, {listed(only_saved or [*saved])}",
            fix="build the model that was saved",
        )
    if not is_in_model_order:
        raise CheckpointError(
            "the checkpoint has other names than the model, and does not say the model's order",
            expected=listed(only_wanted),
            got=listed(only_saved),
            cause="files of safetensors are sorted by name, and a map of names has its own order",
            fix="load it with names=, or convert it with --names: a map to the names of the model",
        )
    for (name, shape), (saved_name, saved_shape) in zip(wanted.items(), saved.items()):
        if shape != saved_shape:
            raise CheckpointError(
                f"{saved_name!r} of the checkpoint does not fit {name!r}",
                expected=f"shape {list(shape)}",
                got=f"shape {list(saved_shape)}",
                cause="models with other names are matched in their order, and the layers of one "
                "are declared in another order",
                fix="declare the layers in the order of the model that was saved",
            )
