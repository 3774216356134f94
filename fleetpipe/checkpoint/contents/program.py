"""The state of a static program and its optimizer in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleetpipe.aliases import Optimizer
from fleetpipe.checkpoint.contents import layer_and_optimizer
from fleetpipe.checkpoint.contents.parts import (
    MASTER_WEIGHTS,
    ProgramSource,
    Saved,
    TensorName,
)
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.mesh.parts import LocalTensor


class ProgramState(layer_and_optimizer.NamedTensors):
    """The parameters and running statistics of a program's stages.

    Attributes:
        program: The program's description of itself.
    """

    def __init__(self, program: ProgramSource) -> None:
        super().__init__(program.parts)
        self.program = program

    def saved_names(self, saved: Saved) -> Mapping[str, str]:
        """Returns the saved name of each tensor of the whole program."""
        order = self.order()
        if set(order) != set(saved.order) and not self.program.by_order:
            missing_there = [name for name in order if name not in saved.order]
            missing_here = [name for name in saved.order if name not in order]
            raise ConfigError(
                "the program and the checkpoint call parameters by other names",
                expected=_names_text(missing_there, "of the program"),
                got=_names_text(missing_here, "of the checkpoint"),
                cause="Paddle counts the names of static parameters, and versions count otherwise",
                fix='CheckpointManager(.., names={"name in the program": "name in the '
                'checkpoint", ..}); names="order", where both declare the same layers in the '
                "same order",
            )
        return super().saved_names(saved)

    def optimizer(self, optimizer: Optimizer) -> ProgramOptimizer:
        """Returns the state of the optimizer of the program's ``minimize``.

        Raises:
            ConfigError: ``optimizer`` is another one.
        """
        minimized_by = layer_and_optimizer.unwrap(self.program.minimized_by)
        if layer_and_optimizer.unwrap(optimizer) is not minimized_by:
            raise ConfigError(
                "the program was minimized by another optimizer",
                expected=f"that {type(self.program.minimized_by).__name__}, or what "
                "fleet.distributed_optimizer made of it",
                got=f"another {type(layer_and_optimizer.unwrap(optimizer)).__name__}",
                fix="pass the optimizer of which minimize(loss) was called",
            )
        return ProgramOptimizer(self.program, self)


class ProgramOptimizer(layer_and_optimizer.OptimizerState):
    """The optimizer's variables for the parameters of this process."""

    def __init__(self, program: ProgramSource, model: ProgramState) -> None:
        super().__init__(program.minimized_by, model)
        self._by_parameter = program.optimizer_state()

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        yield from self._by_parameter.items()

    def _leave_out(self, parameter: Any, name: str) -> None:
        if dict(self._state(parameter, name)):
            raise CheckpointError(
                f"the checkpoint has no state of the optimizer for {name!r}",
                cause="it was saved before the first step, or did not train this parameter",
                fix="restore the model alone right after the startup program has run: "
                'only=("model",)',
            )

    def _create(self, parameter: Any) -> None:
        """Does nothing: the startup program has allocated the variables."""

    def _state(self, parameter: Any, path: str) -> Iterator[tuple[TensorName, LocalTensor]]:
        kinds, master = parameter
        for kind, local in kinds.items():
            yield layer_and_optimizer.state_name(path, kind), local
        if master is not None:
            yield TensorName(MASTER_WEIGHTS, path), master


def _names_text(names: Sequence[str], whose: str) -> str:
    shown = ", ".join(names[:6]) + (", .." if len(names) > 6 else "")
    return f"{shown} {whose}" if names else f"nothing {whose}"
