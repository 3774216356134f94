"""A pipeline's program in a checkpoint: what this process's stages have, under lasting names.

A static parameter has one name, which the user gave it or Paddle counted, ``linear_0.w_0``. It is
its lasting name, unless the user says another; the optimizer's variables go by it, as in dynamic
graph: ``0.weight/moment1_0``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleetpipe.aliases import Optimizer, Program, Scope
from fleetpipe.checkpoint.contents import layer_and_optimizer, parts
from fleetpipe.errors import CheckpointError, ConfigError, nearest
from fleetpipe.paddle_api.static import dynamic, static
from fleetpipe.static.run.pipeline import StaticPipeline
from fleetpipe.static.save.state import tensor_in

_BY_ORDER = "order"


def offer(program: Program, pipeline: StaticPipeline) -> None:
    """Has a program say what a checkpoint holds of it; see ``checkpoint`` for who asks."""
    program.checkpoint_part_of_program = functools.partial(ProgramState, pipeline)


class ProgramState(layer_and_optimizer.NamedTensors):
    """The parameters and running statistics of this process's stages; in dynamic mode."""

    def __init__(self, pipeline: StaticPipeline, names: parts.Names) -> None:
        """Finds them in the global scope.

        Args:
            pipeline: The pipeline.
            names: As for :class:`fleetpipe.CheckpointManager`.

        Raises:
            ConfigError: ``names`` does not fit the program.
            CheckpointError: The startup program has not run.
            StateError: The job of the pipeline has ended.
        """
        pipeline.require_current()
        self._pipeline, self._scope = pipeline, static.global_scope()
        self._by_order = names == _BY_ORDER
        self._names = _lasting(pipeline.declared, names)
        trained = set(pipeline.parameters)
        super().__init__(
            {
                self._names[name]: parts.Held(
                    _shared(self._scope, name), differs=name not in trained
                )
                for name in pipeline.declared
                if name in pipeline.persistable
            },
            {self._names[name]: tuple(shape) for name, shape in pipeline.declared.items()},
        )

    def saved_names(self, saved: parts.Saved) -> Mapping[str, str]:
        """Returns the saved name of each tensor of the whole program."""
        order = self.order()
        if set(order) != set(saved.order) and not self._by_order:
            missing_there = [name for name in order if name not in saved.order]
            missing_here = [name for name in saved.order if name not in order]
            raise ConfigError(
                "the program and the checkpoint call parameters by other names",
                expected=_listed(missing_there, "of the program"),
                got=_listed(missing_here, "of the checkpoint"),
                cause="Paddle counts the names of static parameters, and versions count otherwise",
                fix='CheckpointManager(.., names={"name in the program": "name in the '
                'checkpoint", ..}); names="order", where both declare the same layers in the '
                "same order",
            )
        return super().saved_names(saved)

    def optimizer(self, optimizer: Optimizer) -> ProgramOptimizer:
        """Returns the state of the optimizer that the program was minimized by."""
        if layer_and_optimizer.unwrapped(optimizer) is not layer_and_optimizer.unwrapped(
            self._pipeline.optimizer
        ):
            raise ConfigError(
                "the program was minimized by another optimizer",
                expected=f"that {type(self._pipeline.optimizer).__name__}, or what "
                "fleet.distributed_optimizer made of it",
                got=f"another {type(layer_and_optimizer.unwrapped(optimizer)).__name__}",
                fix="pass the optimizer of which minimize(loss) was called",
            )
        return ProgramOptimizer(self._pipeline, self._scope, self, self._names)

    def streams(self) -> parts.StageStreams:
        """Returns the random streams of this process's stages."""
        pipeline = self._pipeline
        return parts.StageStreams(pipeline.split.stages, pipeline.leads_random, pipeline.streams)

    def set_streams(self, streams: Mapping[int, Any]) -> None:
        """Makes ``streams`` of :meth:`streams` the streams again; the other stages begin anew."""
        self._pipeline.begin_streams(streams)


class ProgramOptimizer:
    """The optimizer's variables of this process's parameters; in dynamic mode."""

    def __init__(
        self, pipeline: StaticPipeline, scope: Scope, model: ProgramState, names: Mapping[str, str]
    ) -> None:
        """Describes them.

        Raises:
            ConfigError: The optimizer keeps what belongs to no parameter.
        """
        self._pipeline, self._scope = pipeline, scope
        self._model, self._names = model, names
        _require_expected(pipeline)

    @property
    def kind(self) -> str:
        """The type of the optimizer."""
        return type(layer_and_optimizer.unwrapped(self._pipeline.optimizer)).__name__

    def held(self) -> Mapping[parts.TensorName, parts.Held]:
        """Returns the state that this process keeps."""
        return {
            name: held
            for parameter in self._pipeline.kept
            for name, held in self._state(parameter, self._names[parameter])
        }

    def wanted(self, saved: parts.Saved) -> Mapping[parts.TensorName, parts.Held]:
        """Returns what is to be filled with the saved state.

        Raises:
            CheckpointError: The state is of another optimizer, or a parameter has none.
        """
        layer_and_optimizer.require_kind(self.kind, saved)
        names, there = self._model.saved_names(saved), layer_and_optimizer.by_parameter(saved)
        x: dict[parts.TensorName, parts.Held] = {}
        for parameter in self._pipeline.kept:
            path = names[self._names[parameter]]
            state = dict(self._state(parameter, path))
            if state and path not in there:
                raise CheckpointError(
                    f"the checkpoint has no state of the optimizer for {path!r}",
                    cause="it was saved before the first step, or did not train this parameter",
                    fix="restore the model alone right after the startup program has run: "
                    'only=("model",)',
                )
            layer_and_optimizer.require_kinds(path, set(state), there.get(path, set()))
            x.update(state)
        for name, held in x.items():
            layer_and_optimizer.require_fit(name, held, saved.tensors[name])
        return x

    def settle(self) -> None:
        """Does nothing: memory was there before."""

    def abandon(self) -> None:
        """Does nothing."""

    def _state(self, parameter: str, path: str) -> Iterator[tuple[parts.TensorName, parts.Held]]:
        kept = self._pipeline.kept[parameter]
        for kind, variable in kept.kinds.items():
            yield (
                layer_and_optimizer.state_name(path, kind),
                parts.Held(_shared(self._scope, variable)),
            )
        if kept.master is not None:
            yield (
                parts.TensorName(parts.MASTER_WEIGHTS, path),
                parts.Held(_shared(self._scope, kept.master)),
            )


def _shared(scope: Scope, name: str) -> Any:
    """Returns a dynamic tensor with the memory of a variable."""
    return dynamic(tensor_in(scope, name))


def _lasting(declared: Mapping[str, Sequence[int]], names: parts.Names) -> dict[str, str]:
    """Returns the lasting name of each parameter and statistic."""
    wanted = {} if names is None or names == _BY_ORDER else names
    if isinstance(wanted, str):
        raise ConfigError(
            f'names= is a dict, or "{_BY_ORDER}" (={wanted!r})',
            fix=f'names={{"linear_0.w_0": "0.weight"}}, or names="{_BY_ORDER}"',
        )
    for name in wanted:
        if name not in declared:
            raise ConfigError(
                f"names= has {name!r}, which the program has not",
                got=nearest(name, [*declared]),
                fix="name its parameters and running statistics, as "
                "fleetpipe.static.state_dict() does",
            )
    x = {name: wanted.get(name, name) for name in declared}
    users: dict[str, str] = {}
    for name, lasting in x.items():
        if users.setdefault(lasting, name) != name:
            raise ConfigError(
                f"names= calls both {users[lasting]!r} and {name!r} {lasting!r}",
                fix="give each a name of its own",
            )
    return x


def _require_expected(pipeline: StaticPipeline) -> None:
    expected = {pipeline.rate_name}
    for kept in pipeline.kept.values():
        expected.update(kept.kinds.values(), (kept.master,))
    unexpected = sorted(set(pipeline.optimizer_variables) - expected)
    if unexpected:
        raise ConfigError(
            f"the optimizer keeps {unexpected[0]!r}, which belongs to no parameter",
            cause="a checkpoint holds an optimizer's state by the names of the parameters",
            fix="save the model alone, and the rest by paddle.static.save",
        )


def _listed(names: Sequence[str], whose: str) -> str:
    shown = ", ".join(names[:6]) + (", .." if len(names) > 6 else "")
    return f"{shown} {whose}" if names else f"nothing {whose}"
