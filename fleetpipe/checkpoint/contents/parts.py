"""The tensors of a model or of an optimizer that one rank saves and restores.

The other modules know nothing of pipelines: through the protocols here a model and an optimizer
describe which part of which whole tensor they hold, and its fully qualified name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fleetpipe.aliases import Optimizer, Tensor
from fleetpipe.errors import CheckpointError
from fleetpipe.mesh.parts import Described, JoinedParts, LocalTensor, ModelParts

#: The fully qualified names of a program's variables, or how they are found; None: they are their
#: own.
Names = Mapping[str, str] | str | None
#: The names of a kind of tensors' files begin with it: ``model-00001-of-00002.safetensors``.
MODEL, BUFFERS, LATE_BUFFERS, LOSS, OPTIMIZER, MASTER_WEIGHTS, REPLICAS, STATE = GROUPS = (
    *("model", "buffers", "late_buffers", "loss", "optimizer", "master_weights", "replicas"),
    "state",
)


class TensorName(NamedTuple):
    """The fully qualified name of a tensor: its group of files, and its name there."""

    group: str
    name: str

    def of_replica(self, replica: int) -> TensorName:
        """Returns the name for the value of a replica that differs from the first one's."""
        return TensorName(REPLICAS, f"{replica}/{self.group}/{self.name}")

    def __str__(self) -> str:
        return f"{self.name!r} of the {self.group.replace('_', ' ')}"


class Saved(NamedTuple):
    """The description of a checkpoint that is given to a :class:`SavedPart`.

    Attributes:
        tensors: The dtype and shape of all tensors by name.
        order: The names of the model's parameters and buffers in the order of the model.
        optimizer: The type of the optimizer that was saved; None if there was none.
        replicas: How many replicas saved it.
        plain_order: The plain model's name of each of ``order``; empty if it is unknown, and
            ``order`` itself if ``order`` is not a model's, but sorted by name or by a map.
        adapters: As in :class:`ModelParts`; empty in older checkpoints too.
    """

    tensors: Mapping[TensorName, Described]
    order: tuple[str, ...]
    optimizer: str | None
    replicas: int = 1
    plain_order: tuple[str, ...] = ()
    adapters: str = ""


class SavedPart:
    """The part of a model or of an optimizer that one rank holds. No method is collective."""

    _joined: JoinedParts[TensorName]

    def local_tensors(self) -> Mapping[TensorName, LocalTensor]:
        """Returns the tensors that this rank holds, each once."""
        return JoinedParts(self._tensors()).tensors

    def wanted(self, saved: Saved) -> Mapping[TensorName, LocalTensor]:
        """Returns the tensors to fill, by their names in the checkpoint.

        It may allocate memory, but changes nothing that exists. One of the two calls below follows.

        Raises:
            CheckpointError: The checkpoint does not fit.
        """
        self._joined = JoinedParts(self._targets(saved))
        for name, local in self._joined.tensors.items():
            _require_fit(name, local, saved.tensors[name])
        return self._joined.tensors

    def settle(self) -> None:
        """Ends a :meth:`wanted` whose tensors have been filled."""
        self._joined.hand_out()

    def abandon(self) -> None:
        """Undoes a :meth:`wanted` whose tensors have not been filled."""

    def _tensors(self) -> Iterable[tuple[TensorName, LocalTensor]]:
        """Returns the tensors that this rank holds; a tensor in parts has an item for each part."""
        raise NotImplementedError

    def _targets(self, saved: Saved) -> Iterable[tuple[TensorName, LocalTensor]]:
        """Returns the tensors to fill; a tensor in parts has an item for each part."""
        raise NotImplementedError


def _require_fit(name: TensorName, local: LocalTensor, saved: Described) -> None:
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


#: The random streams of the stages of a static program that one process has: the stages of the
#: whole program; whether the default generator of this process is the stream of the first stage
#: that draws random numbers; the state of the generator of each later one of this process.
StageStreams = tuple[int, bool, Mapping[int, Any]]


class ProgramSource(Protocol):
    """The description that a static program gives of itself to a checkpoint.

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

        The default generator has its state already.
        """


@runtime_checkable
class SavedModel(Protocol):
    """A model that gives its tensors fully qualified names by itself."""

    def checkpoint_part(self) -> ModelParts:
        """Returns the tensors that this process holds."""


@runtime_checkable
class SavedProgram(Protocol):
    """A static program that runs as a pipeline."""

    def checkpoint_part_of_program(self, names: Names) -> ProgramSource:
        """Returns the description of the part that this process holds.

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
