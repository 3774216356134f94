"""Parameters and running statistics of a pipeline by their names, as arrays.

The names are those of the unsplit program: a dynamic-graph model built in the same order has them,
too, as the ``name`` of its parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fleetpipe.aliases import Program, Scope, ScopeTensor, Tensor
from fleetpipe.errors import CheckpointError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.paddle_api.static import found_tensor, overwrite
from fleetpipe.static.pipeline_programs import pipeline_of

_STATE = "the state"


def state_dict(program: Program = None, scope: Scope = None) -> dict[str, np.ndarray]:
    """Returns the parameters and statistics of this process's stages.

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
    """Returns the parameters and statistics of all stages, on every rank. Collective.

    Args:
        program: As for :func:`state_dict`.
        scope: As for :func:`state_dict`.
    """
    arrays = state_dict(program, scope)
    pipeline = pipeline_of(program)
    pipeline.job.require_others()
    if pipeline.job.healing is not None:
        pipeline.job.healing.hinder("the script gathers the state of all stages within its step")
    with dynamic_mode(), pipeline.job.calling("gathers the state of all stages", replicas=False):
        tensors = {name: paddle.to_tensor(value) for name, value in arrays.items()}
        everyone = pipeline.job.group().all_gather(tensors)
        whole = {name: np.array(value) for by_name in everyone for name, value in by_name.items()}
    return dict(sorted(whole.items()))


def load_state_dict(
    state: Mapping[str, np.ndarray | Tensor], program: Program = None, scope: Scope = None
) -> None:
    """Sets parameters and statistics of this process's stages; ignores other names in ``state``.

    Args:
        state: Arrays or tensors by name.
        program: As for :func:`state_dict`.
        scope: As for :func:`state_dict`.

    Raises:
        CheckpointError: A name is missing, or a value has another shape or dtype; nothing was
            changed.
    """
    assign(parameters(state, program, scope))


def parameters(
    state: Mapping[str, np.ndarray | Tensor],
    program: Program = None,
    scope: Scope = None,
    source: str = _STATE,
) -> list[tuple[ScopeTensor, np.ndarray]]:
    """Returns the checked assignments of :func:`load_state_dict`; ``source`` is for messages."""
    names = pipeline_of(program).persistable
    scope = paddle.static.global_scope() if scope is None else scope
    return fitting(state, names, scope, source)


def fitting(
    state: Mapping[str, np.ndarray | Tensor],
    names: Sequence[str],
    scope: Scope,
    source: str = _STATE,
    fix: str = "name the values as the program does: {p.name: p for p in model.parameters()}",
) -> list[tuple[ScopeTensor, np.ndarray]]:
    """Pairs the tensor of each variable with its value in ``state``, after checking them.

    Args:
        state: Arrays or tensors by name.
        names: The variables.
        scope: The scope of the variables.
        source: The origin of the state, for messages.
        fix: What to do where a name is missing.

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
    return [_fitting(name, state[name], tensor_in(scope, name), source) for name in names]


def _fitting(
    name: str, value: np.ndarray | Tensor, tensor: ScopeTensor, source: str
) -> tuple[ScopeTensor, np.ndarray]:
    value, arrays = np.array(value), np.array(tensor)
    if (value.shape, value.dtype) != (arrays.shape, arrays.dtype):
        raise CheckpointError(
            f"{name!r} does not fit",
            where=source,
            expected=f"{arrays.dtype} of shape {list(arrays.shape)}",
            got=f"{value.dtype} of shape {list(value.shape)}",
            fix="build the program with the layers and the dtype that the state is from",
        )
    return tensor, value


def assign(pairs: Iterable[tuple[ScopeTensor, np.ndarray]]) -> None:
    """Assigns the values that :func:`fitting` has paired with tensors."""
    for tensor, value in pairs:
        overwrite(tensor, value)


def tensor_in(scope: Scope, name: str) -> ScopeTensor:
    """Returns the tensor of a scope's variable."""
    tensor = found_tensor(scope, name)
    if tensor is None:
        raise CheckpointError(
            f"{name!r} has no value yet",
            fix="exe.run(paddle.static.default_startup_program()) first, in the scope of now",
        )
    return tensor
