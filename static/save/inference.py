"""Saving what the stages have: one's own, or the whole network as one program for inference."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe._paddle import paddle
from fleetpipe.checkpoint import fleet_files
from fleetpipe.errors import CheckpointError
from fleetpipe.static._paddle import found_tensor, static
from fleetpipe.static.attached import pipeline_of
from fleetpipe.static.save.state import assign, fitting, full_state_dict, parameters, state_dict


def save(prefix: str | os.PathLike[str], program: Any = None) -> Path:
    """Saves what this process's stages have, the optimizer's state included.

    Args:
        prefix: Beginning of the file's path; each rank of a pipeline adds its number.
        program: The program of the pipeline; None for the default main program.

    Returns:
        The file, ``<prefix>.rank<r>.npz``.
    """
    pipeline, scope = pipeline_of(program), static.global_scope()
    own = state_dict(program)
    for name in pipeline.optimizer_variables:
        tensor = found_tensor(scope, name)
        if tensor is not None:
            own[name] = np.array(tensor)
    path = _file(prefix, pipeline)
    draft = path.with_suffix(f".{os.getpid()}.npz")
    arrays: Any = own  # the stub takes the names for options
    np.savez(draft, **arrays)
    # Replicas write the same: none may see the half of what another writes.
    os.replace(draft, path)
    return path


def load(prefix: str | os.PathLike[str], program: Any = None) -> None:
    """Loads what :func:`save` wrote on the same rank of a pipeline that is cut alike.

    Args:
        prefix: As for :func:`save`.
        program: As for :func:`save`.

    Raises:
        CheckpointError: There is no such file, it is damaged, or of other stages; nothing was
            changed.
    """
    pipeline, scope = pipeline_of(program), static.global_scope()
    path = _file(prefix, pipeline)
    if not path.exists():
        raise CheckpointError(f"there is no {path}", fix="save on as many ranks as load")
    state = fleet_files.archive(path)
    pairs = parameters(state, program, source=str(path))
    started = [n for n in pipeline.optimizer_variables if found_tensor(scope, n) is not None]
    names = [name for name in started if name in state]
    assign(pairs + fitting(state, names, scope, str(path)))


def save_inference_model(
    prefix: str | os.PathLike[str],
    feed_vars: Sequence[Any],
    fetch_vars: Sequence[Any],
    executor: Any,
    program: Any = None,
) -> None:
    """Writes the whole network, with the parameters of all stages, as one program for inference.

    Collective over the pipeline; the process of the first rank of the first replica writes.

    Args:
        prefix: As for ``paddle.static.save_inference_model``, which reads back as usual.
        feed_vars: What the network is fed.
        fetch_vars: What it returns.
        executor: An executor.
        program: The program of the pipeline; None for the default main program.
    """
    program = static.default_main_program() if program is None else program
    pipeline = pipeline_of(program)
    state = full_state_dict(program)
    if pipeline.rank or pipeline.job.replicas().rank:
        return
    scope = static.Scope()
    for name, value in state.items():
        scope.var(name).get_tensor().set(value, paddle.CPUPlace())
    stock = inspect.unwrap(static.save_inference_model)
    with static.scope_guard(scope):
        stock(os.fspath(prefix), list(feed_vars), list(fetch_vars), executor, program=program)


def _file(prefix: str | os.PathLike[str], pipeline: Any) -> Path:
    return Path(f"{os.fspath(prefix)}.rank{pipeline.rank}.npz")
