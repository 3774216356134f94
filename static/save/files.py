"""``paddle.static.save``, ``load`` and ``save_inference_model`` for a program that is a pipeline's.

Stock ones look for the parameters of the whole program, of which a rank has a part, and for the
optimizer's state in the program, where a pipeline has none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from fleetpipe._paddle import paddle
from fleetpipe.checkpoint import fleet_files
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.static._paddle import found_tensor, static
from fleetpipe.static.attached import of_main
from fleetpipe.static.save.state import assign, fitting, parameters, state_dict

#: The stub knows tensors only.
_write: Any = paddle.save
_SUFFIXES = (".pdparams", ".pdopt", ".pdmodel", ".json")


def save(
    original: Callable[..., Any], program: Any, model_path: Any, protocol: int = 4, **configs: Any
) -> None:
    """Saves what this process has of a pipeline, the optimizer's state included.

    The files are those of ``paddle.static.save``; of several ranks each writes its own,
    ``<model_path>.rank<r>.pdparams`` and ``.pdopt``, without the network's description.
    """
    pipeline, _ = of_main(program)
    if pipeline is None:
        original(program, model_path, protocol, **configs)
        return
    model_path = os.fspath(model_path)
    if pipeline.local:
        original(program, model_path, protocol, **configs)
    base = _base(model_path, pipeline)
    folder = os.path.dirname(base)
    if folder:
        os.makedirs(folder, exist_ok=True)
    scope = static.global_scope()
    found = {name: found_tensor(scope, name) for name in pipeline.optimizer_variables}
    state = {name: np.array(tensor) for name, tensor in found.items() if tensor is not None}
    for suffix, content in ((".pdparams", state_dict(program)), (".pdopt", state)):
        # Replicas write the same: none may see the half of what another writes.
        draft = f"{base}{suffix}.{os.getpid()}"
        _write(content, draft, protocol=protocol)
        os.replace(draft, base + suffix)


def load(
    original: Callable[..., Any],
    program: Any,
    model_path: Any,
    executor: Any = None,
    var_list: Any = None,
) -> None:
    """Loads what :func:`save` wrote, on as many ranks as then or from a process that had all.

    Raises:
        CheckpointError: There is no such file, it is none of Paddle's, or of other stages; nothing
            was changed.
    """
    pipeline, _ = of_main(program)
    if pipeline is None:
        original(program, model_path, executor, var_list)
        return
    model_path = os.fspath(model_path)
    for suffix in _SUFFIXES:
        model_path = model_path.removesuffix(suffix)
    base = _base(model_path, pipeline)
    if not os.path.exists(f"{base}.pdparams"):
        base = model_path
    path = f"{base}.pdparams"
    pairs = parameters(_read(path, model_path, pipeline), program, source=path)
    names = pipeline.optimizer_variables
    if names:
        path = f"{base}.pdopt"
        state = _read(path, model_path, pipeline)
        pairs += fitting(
            state,
            names,
            static.global_scope(),
            source=path,
            fix="load with the optimizer and the stages that it was saved with; "
            "fleetpipe.static.load_state_dict takes parameters alone",
        )
    assign(pairs)


def save_inference_model(
    original: Callable[..., Any],
    path_prefix: Any,
    feed_vars: Any,
    fetch_vars: Any,
    executor: Any,
    **named: Any,
) -> Any:
    """Refuses on several ranks, of which none has the whole network.

    Raises:
        ConfigError: The program is a pipeline's, and this process has a part of its stages.
    """
    program = named.get("program") or static.default_main_program()
    pipeline, _ = of_main(program)
    if pipeline is not None and not pipeline.local:
        raise ConfigError(
            "paddle.static.save_inference_model of a pipeline needs the parameters of all ranks",
            fix="call fleetpipe.static.save_inference_model(prefix, feed_vars, fetch_vars, exe) on "
            "every rank: it gathers them, and one rank writes",
        )
    return original(path_prefix, feed_vars, fetch_vars, executor, **named)


def _base(model_path: str, pipeline: Any) -> str:
    return model_path if pipeline.local else f"{model_path}.rank{pipeline.rank}"


def _read(path: str, model_path: str, pipeline: Any) -> dict[str, Any]:
    if not os.path.exists(path):
        raise CheckpointError(
            f"there is no {path}",
            expected=f"{_base(model_path, pipeline)}.pdparams and .pdopt, or those of one process, "
            f"{model_path}.pdparams and .pdopt",
            fix="save and load on as many ranks, with the same path on each",
        )
    return fleet_files.arrays(path)
