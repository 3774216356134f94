"""The results of reading a program: pieces to run, and the names of exchanged variables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from fleetpipe.aliases import Optimizer, Program, Variable
from fleetpipe.static.cut.scope_names import Names
from fleetpipe.static.cut.split import Split
from fleetpipe.static.graph import Declared, Graph


class ProgramPiece(NamedTuple):
    """A native program of a stage's backward.

    Attributes:
        program: The program; None if there is nothing to do.
        kept: Names of the variables that it takes from the forward or from the forward's inputs.
        waiting: Names of the variables that it takes from the half before it, or from that half's
            inputs.
        shapes: The names in ``kept`` of which it needs only the shape.
    """

    program: Program | None = None
    kept: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    shapes: frozenset[str] = frozenset()


class Pieces(NamedTuple):
    """The native programs of a stage.

    Attributes:
        forward: Computes the values that leave the stage, and those stored for its backward.
        backward: Adds to the accumulators and computes the gradients that leave the stage.
        input_grad: Computes only those gradients, if the schedule splits the backward, and the
            values that ``weight_grad`` takes from it.
        weight_grad: Adds to the accumulators; comes after it.
    """

    forward: Program
    backward: ProgramPiece = ProgramPiece()
    input_grad: ProgramPiece = ProgramPiece()
    weight_grad: ProgramPiece = ProgramPiece()

    @property
    def kept(self) -> dict[str, bool]:
        """The variables that any backward takes, each with whether only its shape is needed."""
        by_shape: dict[str, bool] = {}
        for piece in (self.backward, self.input_grad, self.weight_grad):
            for name in piece.kept:
                by_shape[name] = by_shape.get(name, True) and name in piece.shapes
        return by_shape


class StageProgram(Protocol):
    """A stage with its own backward, to be cut into pieces.

    Attributes:
        feeds: The variable of each data input of the stage, by name.
        input_gradients: The variable of the gradient of each incoming value that gets one; two
            values may share theirs.
        accumulators: The variable of each parameter's gradient.
    """

    @property
    def feeds(self) -> Mapping[str, str]: ...  # noqa: D102

    @property
    def input_gradients(self) -> Mapping[int, str]: ...  # noqa: D102

    @property
    def accumulators(self) -> Mapping[str, str]: ...  # noqa: D102

    def incoming(self, value: int) -> str:
        """Returns the variable in which the stage finds a value of an earlier stage."""

    def outgoing(self, value: int) -> str:
        """Returns the variable in which the stage puts a value that it computes."""

    def cut(self, exports: Iterable[int], kinds: Collection[str]) -> Pieces:
        """Cuts the stage; its forward puts the values ``exports`` into their variables.

        Args:
            exports: Values that the stage computes.
            kinds: The kinds of backward in the schedule: ``"B"`` for a whole one, ``"I"`` and
                ``"W"``.
        """


class Kept(NamedTuple):
    """The variables of the optimizer's state for a parameter.

    Attributes:
        kinds: The variables by kind, as ``moment1``.
        master: The variable of its float32 copy; None without one.
    """

    kinds: Mapping[str, str]
    master: str | None


class Update(NamedTuple):
    """The optimizer step of a process.

    Attributes:
        step: Native program: updates the parameters from the accumulators, which it sets to 0.
        startup: Native program: creates the optimizer's own variables.
        rate_name: The variable of the learning rate.
        variables: Names of the optimizer's own variables.
        kept: The variables that belong to a parameter, by its name.
    """

    step: Program
    startup: Program
    rate_name: str
    variables: tuple[str, ...]
    kept: Mapping[str, Kept]


class GraphReader(Protocol):
    """Reads a forward program of one of Paddle's two IRs.

    Attributes:
        graph: The description of the program.
        data: The declaration of each ``paddle.static.data`` of it.
        declared: The shape of each parameter and statistic by name, in the order of creation.
        unclipped: The parameters whose ``need_clip`` is False.
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
        """Returns the number of a value to fetch; None if it is not in this program."""

    def stage(self, split: Split, stage: int, loss: int, weight: float) -> StageProgram:
        """Adds a backward to a stage; ``weight`` is the gradient of the loss."""

    def update(
        self,
        names: Names,
        optimizer: Optimizer,
        parameters: Sequence[str],
        clipped: Collection[str],
    ) -> Update:
        """Builds the optimizer step; gradients of ``clipped`` are multiplied by a factor first.

        The factor is a variable of the scope, ``names.clip_factor``.
        """

    def startup(self, program: Program, names: Iterable[str]) -> Program:
        """Returns a program that initializes only the named variables, to the same values."""
