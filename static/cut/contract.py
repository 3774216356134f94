"""What a reader makes of a program: pieces that are run, and the names of what they exchange."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from fleetpipe.aliases import Optimizer, Program, Variable
from fleetpipe.static.cut.names import Names
from fleetpipe.static.cut.split import Split
from fleetpipe.static.graph import Declared, Graph


class ProgramPiece(NamedTuple):
    """A native program of a stage's backward.

    Attributes:
        program: The program; None where there is nothing to do.
        kept: Names of the variables that it takes from the forward, or that this was given.
        waiting: Those that it takes from the half before it, or that this was given.
        shapes: Those of ``kept`` of which it takes the shape alone.
    """

    program: Program | None = None
    kept: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    shapes: frozenset[str] = frozenset()


class Pieces(NamedTuple):
    """The native programs of a stage.

    Attributes:
        forward: Computes the values that leave the stage, and those kept for its backward.
        backward: Adds to the accumulators and computes the gradients that leave the stage.
        input_grad: Computes those gradients alone, where the schedule splits the backward; it also
            leaves what ``weight_grad`` takes from it.
        weight_grad: Adds to the accumulators; comes after it.
    """

    forward: Program
    backward: ProgramPiece = ProgramPiece()
    input_grad: ProgramPiece = ProgramPiece()
    weight_grad: ProgramPiece = ProgramPiece()

    @property
    def kept(self) -> dict[str, bool]:
        """The variables that any backward takes, and whether it is the shape alone."""
        by_shape: dict[str, bool] = {}
        for piece in (self.backward, self.input_grad, self.weight_grad):
            for name in piece.kept:
                by_shape[name] = by_shape.get(name, True) and name in piece.shapes
        return by_shape


class StageProgram(Protocol):
    """A stage with its own backward, to be cut into pieces.

    Attributes:
        feeds: The variable of each piece of data that the stage is fed, by its name.
        input_gradients: The variable of the gradient of each value that the stage is given, where
            one comes back to it; two values may share theirs.
        accumulators: The variable of each parameter's gradient.
    """

    @property
    def feeds(self) -> Mapping[str, str]: ...  # noqa: D102

    @property
    def input_gradients(self) -> Mapping[int, str]: ...  # noqa: D102

    @property
    def accumulators(self) -> Mapping[str, str]: ...  # noqa: D102

    def incoming(self, value: int) -> str:
        """Returns the variable in which the stage finds a value of an earlier one."""

    def outgoing(self, value: int) -> str:
        """Returns the variable in which the stage leaves a value that it makes."""

    def cut(self, exports: Iterable[int], kinds: Collection[str]) -> Pieces:
        """Cuts the stage; its forward leaves the values ``exports`` in their variables.

        Args:
            exports: Values that the stage makes.
            kinds: What the schedule runs: ``"B"`` for a whole backward, ``"I"`` and ``"W"``.
        """


class Kept(NamedTuple):
    """The variables that the optimizer keeps of a parameter.

    Attributes:
        kinds: By kind, as ``moment1``.
        master: That of its float32 copy; None where there is none.
    """

    kinds: Mapping[str, str]
    master: str | None


class Update(NamedTuple):
    """The optimizer step of a process.

    Attributes:
        step: Native program: updates the parameters from the accumulators, which it sets to 0.
        startup: Native program: makes the optimizer's own variables.
        rate_name: The variable of the learning rate.
        variables: Names of the optimizer's own variables.
        kept: Those of them that belong to a parameter, by its name.
    """

    step: Program
    startup: Program
    rate_name: str
    variables: tuple[str, ...]
    kept: Mapping[str, Kept]


class GraphReader(Protocol):
    """Reads a forward program of one of Paddle's two IRs.

    Attributes:
        graph: The program, described.
        data: What each ``paddle.static.data`` of it declares.
        declared: The shape of each parameter and statistic by name, in the order in which they
            were made.
        unclipped: The parameters of which ``need_clip`` is False.
    """

    @property
    def graph(self) -> Graph: ...  # noqa: D102

    @property
    def data(self) -> Mapping[str, Declared]: ...  # noqa: D102

    @property
    def declared(self) -> Mapping[str, Sequence[int]]: ...  # noqa: D102

    @property
    def unclipped(self) -> frozenset[str]: ...  # noqa: D102

    def number(self, target: Variable | str) -> int | None:
        """Returns the number of a value that the user fetches; None where it is not of this."""

    def stage(self, split: Split, stage: int, loss: int, weight: float) -> StageProgram:
        """Gives a stage its backward; ``weight`` is the gradient of the loss."""

    def update(
        self,
        names: Names,
        optimizer: Optimizer,
        parameters: Sequence[str],
        clipped: Collection[str],
    ) -> Update:
        """Makes the optimizer step; the gradients of ``clipped`` are first multiplied by a factor.

        The factor is a variable of the scope, ``names.clip_factor``.
        """

    def startup(self, program: Program, names: Iterable[str]) -> Program:
        """Returns the initialisation of the named variables alone, drawing as the whole does."""
