"""The objects of a script that one save or restore handles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleetpipe.aliases import Layer, Optimizer, Scaler, Scheduler
from fleetpipe.checkpoint.contents import parts, script_state
from fleetpipe.checkpoint.contents.attributes import Attributes
from fleetpipe.checkpoint.contents.layer_and_optimizer import (
    NamedTensors,
    OptimizerState,
    unwrap,
    without_wrappers,
)
from fleetpipe.checkpoint.contents.program import ProgramState
from fleetpipe.checkpoint.contents.script_state import ScriptState
from fleetpipe.checkpoint.contents.training_state import SavedData, TrainingState
from fleetpipe.checkpoint.ranks import Place
from fleetpipe.errors import ConfigError, nearest
from fleetpipe.paddle_api import paddle

_NAMES = ("model", "optimizer", "lr_scheduler", "scaler", "data", "state")
RANDOM = "random"


@dataclass(frozen=True)
class Objects:
    """The objects to save or to restore; None for those that are not passed.

    Attributes:
        model: A model.
        optimizer: Its optimizer.
        lr_scheduler: The scheduler of its learning rate.
        scaler: Its ``GradScaler``.
        data: Holds the position of the run in its data.
        state: What the script adds, by name.
        random: Whether the random states are restored too.
        names_from: The model that names the optimizer's parameters, if it is not restored itself.
        rate: Whether the optimizer's own learning rate is restored too.
        names: The fully qualified names of the variables, if the model is a static program.
        attributes: Compares what these look like from one start of a run to the next.
    """

    model: Layer = None
    optimizer: Optimizer = None
    lr_scheduler: Scheduler = None
    scaler: Scaler = None
    data: SavedData | None = None
    state: dict[str, Any] | None = None
    random: bool = True
    names_from: Layer = None
    rate: bool = True
    names: parts.Names = None
    attributes: Attributes | None = None

    def __post_init__(self) -> None:
        script_state.require(self.state)
        if not isinstance(self.data, (SavedData, type(None))):
            raise ConfigError(
                "data= says where the run is in its data",
                expected="state_dict and set_state_dict, as a fleetpipe.io.DataLoader has",
                got=f"a {type(self.data).__name__}",
                fix="pass the loader that is read, or leave data= out",
            )
        if getattr(self.data, "read_ahead", False):
            raise ConfigError(
                "data= is a sampler of which a loader draws batches ahead of the training",
                got=f"a {type(self.data).__name__}, whose position is that of the loader",
                fix="pass data=loader, a fleetpipe.io.DataLoader with this batch_sampler",
            )

    def only(self, names: Sequence[str] | None) -> Objects:
        """Returns the objects with these names alone; all of them for None.

        Raises:
            ConfigError: There is no such name, or an object of that name was not passed.
        """
        if names is None:
            return self
        for name in names:
            if name != RANDOM and (name not in _NAMES or getattr(self, name) is None):
                raise ConfigError(
                    f"only={tuple(names)!r} names what was not passed",
                    got=repr(name)
                    + (f": {nearest(name, (*_NAMES, RANDOM))}" * (name not in _NAMES)),
                    fix="pass the object, or leave its name out",
                )
        left_out = {name: None for name in _NAMES if name not in names}
        random, rate = RANDOM in names, "lr_scheduler" in names
        return replace(self, **left_out, random=random, names_from=self.model, rate=rate)

    def model_part(self) -> NamedTensors | None:
        """Returns the tensors of the model under fully qualified names; None without a model."""
        model = self.names_from if self.model is None else self.model
        if model is None:
            return None
        model = without_wrappers(model)
        if not isinstance(model, paddle.nn.Layer) and isinstance(model, parts.SavedProgram):
            return ProgramState(model.checkpoint_part_of_program(self.names))
        if self.names is not None:
            raise ConfigError(
                "names= is for static programs: a model of dynamic graph has names of its own",
                got=f"a {type(model).__name__}",
                fix="leave names= out",
            )
        if isinstance(model, parts.SavedModel):
            return NamedTensors(model.checkpoint_part())
        if not isinstance(model, paddle.nn.Layer):
            raise ConfigError(
                "a checkpoint is one of a model",
                expected="what fleet.distributed_model returned, any Layer, or a static program "
                "that fleet.distributed_optimizer(optimizer, strategy).minimize(loss) made a "
                "pipeline of",
                got=f"a {type(model).__name__}",
                fix="pass model=paddle.static.default_main_program() after minimize",
            )
        return NamedTensors.of_layer(model)

    def required_model(self) -> NamedTensors:
        """Returns what :meth:`model_part` does; raises ``ConfigError`` without a model."""
        part = self.model_part()
        if part is None:
            raise ConfigError(
                "a checkpoint is one of a model, and none was given",
                got="model=None",
                fix="pass model=, what fleet.distributed_model returned or any Layer",
            )
        return part

    def optimizer_part(self, model: NamedTensors | None) -> OptimizerState | None:
        """Returns the optimizer's state, named after the model's parameters."""
        if self.optimizer is None:
            return None
        if model is None:
            raise ConfigError(
                "an optimizer's state goes by the names of the model's parameters",
                fix='pass model= as well; only=("optimizer",) leaves the model as it is',
            )
        if isinstance(model, ProgramState):
            return model.optimizer(self.optimizer)
        return OptimizerState(self.optimizer, model)

    def groups(self) -> tuple[str, ...]:
        """Returns the groups of files to read, which are the same on every rank."""
        groups = (parts.MODEL, parts.BUFFERS, parts.LATE_BUFFERS, parts.LOSS)
        of_model = () if self.model is None else groups
        of_optimizer = () if self.optimizer is None else (parts.OPTIMIZER, parts.MASTER_WEIGHTS)
        # What a script adds, some ranks of a job have alone, and not all replicas alike.
        return (*of_model, *of_optimizer, parts.REPLICAS, parts.STATE)

    def script_part(self, place: Place, saved: script_state.Trees | None = None) -> ScriptState:
        """Returns what the script adds; ``saved`` is what a rank restores of it."""
        return ScriptState(self.state or {}, place, saved)

    def training_state(self, model: NamedTensors | None) -> TrainingState:
        """Returns the state that is no tensor; ``model`` comes from :meth:`model_part`."""
        optimizer = None if self.optimizer is None else unwrap(self.optimizer)
        rate_of = optimizer if self.rate else None
        program = model.program if isinstance(model, ProgramState) else None
        first = getattr(self.optimizer, "first_rate", None)
        beside = self.lr_scheduler, self.scaler, self.data, rate_of, program, first
        return TrainingState(*beside, self.attributes)
