"""A pipeline's program in a checkpoint: this process's tensors, under fully qualified names.

A static parameter has one name, which the user gave it or Paddle counted, ``linear_0.w_0``. It is
its fully qualified name, unless the user gives another one; the optimizer's variables are named
after it, as in dynamic graph: ``0.weight/moment1_0``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fleetpipe.aliases import Optimizer, Program
from fleetpipe.errors import ConfigError, nearest
from fleetpipe.mesh.parts import LocalTensor, ModelParts
from fleetpipe.paddle_api.static import dynamic, static
from fleetpipe.static.run.pipeline import StaticPipeline
from fleetpipe.static.save.state import tensor_in

#: See :class:`fleetpipe.CheckpointManager`.
_Names = Mapping[str, str] | str | None
_BY_ORDER = "order"


def offer(program: Program, pipeline: StaticPipeline) -> None:
    """Attaches to a program a method by which checkpoints get its parts."""
    program.checkpoint_part_of_program = functools.partial(ProgramParts, pipeline)


class ProgramParts:
    """The parameters and running statistics of this process's stages; needs dynamic mode.

    Attributes:
        parts: The parameters and statistics, by fully qualified name.
        by_order: Whether names of a checkpoint are matched by their order.
        minimized_by: The optimizer of the program's ``minimize``.
    """

    def __init__(self, pipeline: StaticPipeline, names: _Names) -> None:
        """Finds the variables in the global scope.

        Raises:
            ConfigError: ``names`` does not fit the program.
            CheckpointError: The startup program has not run.
            StateError: The job of the pipeline has ended.
        """
        pipeline.require_current()
        self._pipeline, self._scope = pipeline, static.global_scope()
        self._names = _full_names(pipeline.declared, names)
        trained = set(pipeline.parameters)
        tensors = {
            self._names[name]: LocalTensor(self._share(name), differs=name not in trained)
            for name in pipeline.declared
            if name in pipeline.persistable
        }
        shapes = {self._names[name]: tuple(shape) for name, shape in pipeline.declared.items()}
        self.parts = ModelParts(tensors, shapes)
        self.by_order = names == _BY_ORDER
        self.minimized_by: Optimizer = pipeline.optimizer

    def optimizer_state(self) -> dict[str, tuple[dict[str, LocalTensor], LocalTensor | None]]:
        """Returns the optimizer's variables by kind, and the master weight, of each parameter.

        Raises:
            ConfigError: The optimizer has state that belongs to no parameter.
        """
        _require_expected(self._pipeline)
        return {
            self._names[name]: (
                {kind: LocalTensor(self._share(variable)) for kind, variable in kept.kinds.items()},
                None if kept.master is None else LocalTensor(self._share(kept.master)),
            )
            for name, kept in self._pipeline.kept.items()
        }

    def streams(self) -> tuple[int, bool, Mapping[int, Any]]:
        """Returns the number of stages, and the random streams of this process's stages.

        Between the two: whether the default generator is the stream of the first that draws.
        """
        pipeline = self._pipeline
        return pipeline.split.stages, pipeline.leads_random, pipeline.streams

    def set_streams(self, streams: Mapping[int, Any]) -> None:
        """Restores the last item of :meth:`streams`; the other stages start again."""
        self._pipeline.begin_streams(streams)

    def _share(self, name: str) -> Any:
        """Returns a dynamic tensor that shares the memory of a variable."""
        return dynamic(tensor_in(self._scope, name))


def _full_names(declared: Mapping[str, Sequence[int]], names: _Names) -> dict[str, str]:
    """Returns the fully qualified name of each parameter and statistic."""
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
    for name, full in x.items():
        if users.setdefault(full, name) != name:
            raise ConfigError(
                f"names= calls both {users[full]!r} and {name!r} {full!r}",
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
