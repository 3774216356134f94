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
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.static._paddle import found_tensor, overwrite, static
from fleetpipe.static.attached import of_main
from fleetpipe.static.state import load_state_dict, state_dict

#: The stub knows tensors only.
_write: Any = paddle.save
_SUFFIXES = (".pdparams", ".pdopt", ".pdmodel", ".json")


def save(
    original: Callable[..., Any], program: Any, model_path: str, protocol: int = 4, **configs: Any
) -> None:
    """Saves what this process has of a pipeline, the optimizer's state included.

    The files are those of ``paddle.static.save``; of several ranks each writes its own,
    ``<model_path>.rank<r>.pdparams`` and ``.pdopt``, without the network's description.
    """
    pipeline, _ = of_main(program)
    if pipeline is None:
        original(program, model_path, protocol, **configs)
        return
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
    model_path: str,
    executor: Any = None,
    var_list: Any = None,
) -> None:
    """Loads what :func:`save` wrote, on as many ranks as then or from a process that had all.

    Raises:
        CheckpointError: There is no such file, or it is of other stages.
    """
    pipeline, _ = of_main(program)
    if pipeline is None:
        original(program, model_path, executor, var_list)
        return
    for suffix in _SUFFIXES:
        model_path = model_path.removesuffix(suffix)
    base = _base(model_path, pipeline)
    if not os.path.exists(f"{base}.pdparams"):
        base = model_path
    load_state_dict(_read(f"{base}.pdparams", model_path, pipeline), program)
    names = pipeline.optimizer_variables
    state = _read(f"{base}.pdopt", model_path, pipeline) if names else {}
    missing = [name for name in names if name not in state]
    if missing:
        raise CheckpointError(
            f"{base}.pdopt has no {missing[0]!r}",
            expected=f"{len(names)} variables of the optimizer, {len(missing)} of them are missing",
            got=f"{len(state)} names, such as {', '.join(map(repr, list(state)[:3])) or 'none'}",
            fix="load with the optimizer and the stages that it was saved with; "
            "fleetpipe.static.load_state_dict takes parameters alone",
        )
    for name in names:
        tensor = found_tensor(static.global_scope(), name)
        if tensor is None:
            raise CheckpointError(
                f"{name!r} has no value yet",
                fix="exe.run(paddle.static.default_startup_program()) first",
            )
        overwrite(tensor, np.asarray(state[name]))


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


def _read(path: str, model_path: str, pipeline: Any) -> Any:
    if not os.path.exists(path):
        raise CheckpointError(
            f"there is no {path}",
            expected=f"{_base(model_path, pipeline)}.pdparams and .pdopt, or those of one process, "
            f"{model_path}.pdparams and .pdopt",
            fix="save and load on as many ranks, with the same path on each",
        )
    return paddle.load(path, return_numpy=True)
