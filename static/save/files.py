"""Files of a process's part of a pipeline: parameters, statistics and optimizer state.

They have the form of ``paddle.static.save``, ``.pdparams`` and ``.pdopt``; each of several ranks
writes its own. The network can be exported as one program, with the parameters of all stages.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.aliases import Program, Variable
from fleetpipe.atomic_file import replacing
from fleetpipe.errors import CheckpointError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.static import found_tensor, static
from fleetpipe.static.pipeline_programs import pipeline_of
from fleetpipe.static.run.pipeline import StaticPipeline
from fleetpipe.static.save.state import assign, fitting, full_state_dict, parameters, state_dict

_SUFFIXES = (".pdparams", ".pdopt", ".pdmodel", ".json")


def save(
    prefix: str | os.PathLike[str],
    program: Program = None,
    protocol: int = 4,
    describe: Callable[[str], object] | None = None,
) -> Path:
    """Saves this process's stages, with the optimizer's state.

    Args:
        prefix: Beginning of the files' paths; each of several ranks adds its number.
        program: The program of the pipeline; None for the default main program.
        protocol: As for ``paddle.save``.
        describe: Writes files of the network to a path without an ending; those of the parameters
            and the optimizer take the place of its own. All files appear together.

    Returns:
        The file of the parameters, ``<prefix>.rank<r>.pdparams``, or ``<prefix>.pdparams`` of one
        process that plays all ranks; the optimizer's state is beside it, in ``.pdopt``.
    """
    pipeline, scope = pipeline_of(program), static.global_scope()
    base = Path(_base(os.fspath(prefix), pipeline))
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
    """Loads files of :func:`save`, on the same number of ranks or from a process with all stages.

    Args:
        prefix: As for :func:`save`, or the path of one of the files.
        program: As for :func:`save`.

    Raises:
        CheckpointError: The file is missing, not one of Paddle's, or has other stages; nothing was
            changed.
    """
    pipeline, prefix = pipeline_of(program), prefix_of(prefix)
    base = _base(prefix, pipeline)
    if not os.path.exists(f"{base}.pdparams"):
        base = prefix
    path = f"{base}.pdparams"
    pairs = parameters(_read(path, prefix, pipeline), program, source=path)
    names = pipeline.optimizer_variables
    if names:
        path = f"{base}.pdopt"
        pairs += fitting(
            _read(path, prefix, pipeline),
            names,
            static.global_scope(),
            source=path,
            fix="load with the optimizer and the stages that it was saved with; "
            "fleetpipe.static.load_state_dict takes parameters alone",
        )
    assign(pairs)


def prefix_of(path: str | os.PathLike[str]) -> str:
    """Returns the beginning of the files' paths from itself or the path of one of them."""
    prefix = os.fspath(path)
    for suffix in _SUFFIXES:
        prefix = prefix.removesuffix(suffix)
    return prefix


def of_rank(prefix: str, rank: int) -> str:
    """Returns the beginning of the paths of a rank's files."""
    return f"{prefix}.rank{rank}"


def _base(prefix: str, pipeline: StaticPipeline) -> str:
    return prefix if pipeline.local else of_rank(prefix, pipeline.rank)


def _read(path: str, prefix: str, pipeline: StaticPipeline) -> dict[str, np.ndarray]:
    if not os.path.exists(path):
        raise CheckpointError(
            f"there is no {path}",
            expected=f"{_base(prefix, pipeline)}.pdparams and .pdopt, or those of one process, "
            f"{prefix}.pdparams and .pdopt",
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
    """Exports the whole network, with the parameters of all stages, as one inference program.

    Collective over the pipeline; the process of the first rank of the first replica writes.

    Args:
        prefix: As for ``paddle.static.save_inference_model``, which reads back as usual.
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
