"""Saves and loads the state of a pipeline's stages: arrays by name, files, and checkpoints.

The names are those of the unsplit program. Files have the form of ``paddle.static.save``,
``.pdparams`` and ``.pdopt``; each of several ranks writes its own files. The replacements of
Paddle's functions, in ``entry/patches.py``, call these functions.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.aliases import Optimizer, Program, Scope, ScopeTensor, Tensor, Variable
from fleetpipe.atomic_file import replacing
from fleetpipe.errors import CheckpointError, ConfigError, nearest
from fleetpipe.mesh.parts import LocalTensor, ModelParts
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.paddle_api.static import dynamic_tensor, found_tensor, overwrite, static
from fleetpipe.static.pipeline_programs import pipeline_of
from fleetpipe.static.run.pipeline import StaticPipeline

#: The origin of a state in error messages, if no file is its origin.
_STATE = "the state"

#: The suffixes of the files that Paddle writes for one program.
_SUFFIXES = (".pdparams", ".pdopt", ".pdmodel", ".json")

#: The option ``names`` of :class:`fleetpipe.CheckpointManager`: the fully qualified names by the
#: program's names of parameters; ``_BY_ORDER``, to match a checkpoint's entries by their order; or
#: None, to use the program's own names.
_Names = Mapping[str, str] | str | None
_BY_ORDER = "order"


def state_dict(program: Program = None, scope: Scope = None) -> dict[str, np.ndarray]:
    """Returns the parameters and running statistics of this process's stages, by name.

    Args:
        program: The program of the pipeline; None for the default main program.
        scope: The scope of its variables; None for the global scope.

    Raises:
        CheckpointError: The startup program has not run.
    """
    pipeline = pipeline_of(program)
    scope = paddle.static.global_scope() if scope is None else scope
    return {name: np.array(tensor_in(scope, name)) for name in pipeline.persistable}


def full_state_dict(program: Program = None, scope: Scope = None) -> dict[str, np.ndarray]:
    """Returns the parameters and running statistics of all stages by name, on every rank.

    Collective over the pipeline.

    Args:
        program: As for :func:`state_dict`.
        scope: As for :func:`state_dict`.
    """
    arrays = state_dict(program, scope)
    pipeline = pipeline_of(program)
    pipeline.job.require_others()
    if pipeline.job.healing is not None:
        pipeline.job.healing.forbid_healing(
            "the script gathers the state of all stages within its step"
        )
    with dynamic_mode(), pipeline.job.calling("gathers the state of all stages", replicas=False):
        tensors = {name: paddle.to_tensor(value) for name, value in arrays.items()}
        tensors_by_rank = pipeline.job.group().all_gather(tensors)
        state = {
            name: np.array(tensor)
            for by_name in tensors_by_rank
            for name, tensor in by_name.items()
        }
    return dict(sorted(state.items()))


def load_state_dict(
    state: Mapping[str, np.ndarray | Tensor], program: Program = None, scope: Scope = None
) -> None:
    """Sets parameters and statistics of this process's stages; ignores other names in ``state``.

    Args:
        state: Arrays or tensors by name.
        program: The program of the pipeline; None for the default main program.
        scope: The scope of its variables; None for the global scope.

    Raises:
        CheckpointError: A name is missing, or a value has another shape or dtype; nothing was
            changed.
    """
    assign(pair_parameters(state, program, scope))


def pair_parameters(
    state: Mapping[str, np.ndarray | Tensor],
    program: Program = None,
    scope: Scope = None,
    source: str = _STATE,
) -> list[tuple[ScopeTensor, np.ndarray]]:
    """Returns the tensors that :func:`load_state_dict` sets, each with its new, checked value.

    Args:
        state: Arrays or tensors by name.
        program: The program of the pipeline; None for the default main program.
        scope: The scope of its variables; None for the global scope.
        source: The origin of the state, for error messages.
    """
    names = pipeline_of(program).persistable
    scope = paddle.static.global_scope() if scope is None else scope
    return pair_with_values(state, names, scope, source)


def pair_with_values(
    state: Mapping[str, np.ndarray | Tensor],
    names: Sequence[str],
    scope: Scope,
    source: str = _STATE,
    fix: str = "name the values as the program does: {p.name: p for p in model.parameters()}",
) -> list[tuple[ScopeTensor, np.ndarray]]:
    """Returns the tensor of each variable with its new value from ``state``, after checking both.

    Args:
        state: Arrays or tensors by name.
        names: The variables.
        scope: The scope of the variables.
        source: The origin of the state, for messages.
        fix: The advice in the error of a missing name.

    Raises:
        CheckpointError: A name is missing, a value has another shape or dtype, or a variable has no
            value yet.
    """
    missing = [name for name in names if name not in state]
    if missing:
        raise CheckpointError(
            f"{source} has no {missing[0]!r}",
            expected=f"{len(names)} names, of which {len(missing)} are missing",
            got=f"{len(state)} names, such as {', '.join(map(repr, list(state)[:3])) or 'none'}",
            fix=fix,
        )
    return [_pair_with_value(name, state[name], tensor_in(scope, name), source) for name in names]


def _pair_with_value(
    name: str, value: np.ndarray | Tensor, tensor: ScopeTensor, source: str
) -> tuple[ScopeTensor, np.ndarray]:
    """Returns a tensor and its new value as an array; refuses a value of another shape or dtype.

    Args:
        name: The name of the variable, for the error.
        value: The new value.
        tensor: The tensor of the variable.
        source: The origin of the value, for the error.
    """
    value, current = np.array(value), np.array(tensor)
    if (value.shape, value.dtype) != (current.shape, current.dtype):
        raise CheckpointError(
            f"{name!r} does not fit",
            where=source,
            expected=f"{current.dtype} of shape {list(current.shape)}",
            got=f"{value.dtype} of shape {list(value.shape)}",
            fix="build the program with the layers and the dtype that the state is from",
        )
    return tensor, value


def assign(pairs: Iterable[tuple[ScopeTensor, np.ndarray]]) -> None:
    """Sets each tensor of the pairs that :func:`pair_with_values` returns to its new value."""
    for tensor, value in pairs:
        overwrite(tensor, value)


def tensor_in(scope: Scope, name: str) -> ScopeTensor:
    """Returns the tensor of a scope's variable; refuses a variable without a value."""
    tensor = found_tensor(scope, name)
    if tensor is None:
        raise CheckpointError(
            f"{name!r} has no value yet",
            fix="exe.run(paddle.static.default_startup_program()) first, in the scope of now",
        )
    return tensor


def save(
    prefix: str | os.PathLike[str],
    program: Program = None,
    protocol: int = 4,
    describe: Callable[[str], object] | None = None,
) -> Path:
    """Saves the parameters and statistics of this process's stages, with the optimizer's state.

    Args:
        prefix: The beginning of the files' paths; each of several ranks adds its number.
        program: The program of the pipeline; None for the default main program.
        protocol: The version of pickle's format, as for ``paddle.save``.
        describe: Writes the network's files to a path without an extension. The files of parameters
            and optimizer replace those that it writes. All files appear together.

    Returns:
        The file of the parameters, ``<prefix>.rank<r>.pdparams``, or ``<prefix>.pdparams`` of one
        process that plays all ranks; the optimizer's state is beside it, in ``.pdopt``.
    """
    pipeline, scope = pipeline_of(program), static.global_scope()
    base = Path(_prefix_of_process(os.fspath(prefix), pipeline))
    tensors = {name: found_tensor(scope, name) for name in pipeline.optimizer_variables}
    state = {name: np.array(tensor) for name, tensor in tensors.items() if tensor is not None}
    parameters_file, state_file = f"{base.name}.pdparams", f"{base.name}.pdopt"
    files = {parameters_file: state_dict(program), state_file: state}
    with replacing(base.parent) as draft:
        if describe is not None:
            describe(str(draft / base.name))
        fleet_files.save_all(draft, files, protocol)
    return base.parent / parameters_file


def load(prefix: str | os.PathLike[str], program: Program = None) -> None:
    """Loads the files that :func:`save` wrote on as many ranks, or in a process with all stages.

    Args:
        prefix: The beginning of the files' paths, or the path of one of the files.
        program: The program of the pipeline; None for the default main program.

    Raises:
        CheckpointError: The file is missing, is not in Paddle's format, or has other stages;
            nothing was changed.
    """
    pipeline, prefix = pipeline_of(program), prefix_of(prefix)
    base = _prefix_of_process(prefix, pipeline)
    if not os.path.exists(f"{base}.pdparams"):
        base = prefix
    path = f"{base}.pdparams"
    pairs = pair_parameters(_read_arrays(path, prefix, pipeline), program, source=path)
    names = pipeline.optimizer_variables
    if names:
        path = f"{base}.pdopt"
        pairs += pair_with_values(
            _read_arrays(path, prefix, pipeline),
            names,
            static.global_scope(),
            source=path,
            fix="load with the optimizer and the stages that it was saved with; "
            "fleetpipe.static.load_state_dict takes parameters alone",
        )
    assign(pairs)


def prefix_of(path: str | os.PathLike[str]) -> str:
    """Returns the beginning of the files' paths: ``path`` without a suffix of one of the files."""
    prefix = os.fspath(path)
    for suffix in _SUFFIXES:
        prefix = prefix.removesuffix(suffix)
    return prefix


def prefix_of_rank(prefix: str, rank: int) -> str:
    """Returns the beginning of the paths of a rank's files."""
    return f"{prefix}.rank{rank}"


def _prefix_of_process(prefix: str, pipeline: StaticPipeline) -> str:
    """Returns the beginning of the paths of this process's files."""
    return prefix if pipeline.local else prefix_of_rank(prefix, pipeline.rank)


def _read_arrays(path: str, prefix: str, pipeline: StaticPipeline) -> dict[str, np.ndarray]:
    """Returns the arrays in a file by name; refuses a missing file.

    Args:
        path: The file.
        prefix: The beginning of the files' paths, for the error.
        pipeline: The pipeline that loads them, for the error.
    """
    if not os.path.exists(path):
        raise CheckpointError(
            f"there is no {path}",
            expected=f"{_prefix_of_process(prefix, pipeline)}.pdparams and .pdopt, or those of one "
            f"process, {prefix}.pdparams and .pdopt",
            fix="save and load on as many ranks, with the same path on each",
        )
    return fleet_files.arrays(path)


def save_inference_model(
    prefix: str | os.PathLike[str],
    feed_vars: Sequence[Variable],
    fetch_vars: Sequence[Variable],
    executor: object,
    program: Program = None,
) -> None:
    """Exports the network of all stages as one inference program, with the parameters.

    Collective over the pipeline; the process of the first rank of the first replica writes.

    Args:
        prefix: The beginning of the files' paths; Paddle reads the files back as its own.
        feed_vars: The inputs of the network.
        fetch_vars: The outputs of the network.
        executor: An executor.
        program: The program of the pipeline; None for the default main program.
    """
    program = static.default_main_program() if program is None else program
    pipeline = pipeline_of(program)
    state = full_state_dict(program)
    if not pipeline.job.leads():
        return
    scope = static.Scope()
    for name, value in state.items():
        scope.var(name).get_tensor().set(value, paddle.CPUPlace())
    stock = inspect.unwrap(static.save_inference_model)
    target = Path(prefix)
    with static.scope_guard(scope), replacing(target.parent) as draft:
        network = (list(feed_vars), list(fetch_vars), executor)
        stock(str(draft / target.name), *network, program=program)


def add_checkpoint_part(program: Program, pipeline: StaticPipeline) -> None:
    """Gives a program the method by which a checkpoint finds its state, :class:`ProgramParts`."""
    program.checkpoint_part_of_program = functools.partial(ProgramParts, pipeline)


class ProgramParts:
    """The state of this process's stages for checkpoints; needs dynamic mode.

    Attributes:
        parts: The parameters and statistics, by fully qualified name.
        by_order: Whether to pair the tensors with a checkpoint's by their order, not by name.
        minimized_by: The optimizer of the program's ``minimize``.
    """

    def __init__(self, pipeline: StaticPipeline, names: _Names) -> None:
        """Finds the parameters and statistics of this process's stages in the global scope.

        Args:
            pipeline: The pipeline of the program.
            names: How a checkpoint calls them: see :data:`_Names`.

        Raises:
            ConfigError: ``names`` does not fit the program.
            CheckpointError: The startup program has not run.
            StateError: The job of the pipeline has ended.
        """
        pipeline.require_current()
        self._pipeline, self._scope = pipeline, static.global_scope()
        #: By the program's name of each parameter and statistic, its fully qualified name.
        self._names = _full_names(pipeline.declared, names)
        # Statistics differ between replicas, which see other data; trained parameters do not.
        trained = set(pipeline.parameters)
        tensors = {
            self._names[name]: LocalTensor(self._shared_tensor(name), differs=name not in trained)
            for name in pipeline.declared
            if name in pipeline.persistable
        }
        shapes = {self._names[name]: tuple(shape) for name, shape in pipeline.declared.items()}
        self.parts = ModelParts(tensors, shapes)
        self.by_order = names == _BY_ORDER
        self.minimized_by: Optimizer = pipeline.optimizer

    def optimizer_state(self) -> dict[str, tuple[dict[str, LocalTensor], LocalTensor | None]]:
        """Returns the optimizer's state of each parameter that this process trains.

        Returns:
            By the fully qualified name of a parameter: the optimizer's variables by kind, such as
            "moment1", and the master weight, or None without one.

        Raises:
            ConfigError: The optimizer has state that belongs to no parameter.
        """
        _refuse_other_variables(self._pipeline)
        return {
            self._names[name]: (
                {
                    kind: LocalTensor(self._shared_tensor(variable))
                    for kind, variable in variables.kinds.items()
                },
                None
                if variables.master is None
                else LocalTensor(self._shared_tensor(variables.master)),
            )
            for name, variables in self._pipeline.optimizer_state.items()
        }

    def streams(self) -> tuple[int, bool, Mapping[int, Any]]:
        """Returns the random streams of this process's stages.

        Returns:
            The number of stages of the pipeline; whether a stage of this process draws from the
            default generator; and the state of each other stream of this process, by stage.
        """
        pipeline = self._pipeline
        return pipeline.split.stages, pipeline.leads_random, pipeline.streams

    def set_streams(self, streams: Mapping[int, Any]) -> None:
        """Restores the random streams of this process's stages.

        Args:
            streams: The states by stage, as :meth:`streams` returned them. A stage without one
                starts from the current seed.
        """
        self._pipeline.begin_streams(streams)

    def _shared_tensor(self, name: str) -> Any:
        """Returns a dynamic tensor that shares the memory of the scope's variable ``name``."""
        return dynamic_tensor(tensor_in(self._scope, name))


def _full_names(declared: Mapping[str, Sequence[int]], names: _Names) -> dict[str, str]:
    """Returns the fully qualified name of each parameter and statistic, by the program's name.

    Args:
        declared: The shapes of the parameters and statistics, by the program's names.
        names: The option ``names`` of :class:`fleetpipe.CheckpointManager`; see :data:`_Names`.

    Raises:
        ConfigError: ``names`` has a name that the program lacks, or one name for two parameters.
    """
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
    full_names = {name: wanted.get(name, name) for name in declared}
    # The program's name by the fully qualified name, to find one that is given twice.
    users: dict[str, str] = {}
    for name, full in full_names.items():
        if users.setdefault(full, name) != name:
            raise ConfigError(
                f"names= calls both {users[full]!r} and {name!r} {full!r}",
                fix="give each a name of its own",
            )
    return full_names


def _refuse_other_variables(pipeline: StaticPipeline) -> None:
    """Refuses an optimizer with a variable that belongs to no parameter."""
    expected = {pipeline.rate_name}
    for variables in pipeline.optimizer_state.values():
        expected.update(variables.kinds.values(), (variables.master,))
    unexpected = sorted(set(pipeline.optimizer_variables) - expected)
    if unexpected:
        raise ConfigError(
            f"the optimizer keeps {unexpected[0]!r}, which belongs to no parameter",
            cause="a checkpoint holds an optimizer's state by the names of the parameters",
            fix="save the model alone, and the rest by paddle.static.save",
        )
