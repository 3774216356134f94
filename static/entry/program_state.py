"""The names of Paddle's that read or write a program's state: a pipeline serves or refuses each.

Paddle's own need the parameters of the whole program, of which a rank has a part, and the
optimizer's state in the program, where a pipeline has none. Names that stand in neither table here
take the description of a program alone; a test reads Paddle's packages for more.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fleetpipe.aliases import Program, Scope, ScopeTensor, Variable
from fleetpipe.errors import CheckpointError, ConfigError, UsageError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.static import (
    AVERAGES,
    WHOLE_PROGRAM_STATE,
    program_classes,
    static,
    static_io,
    within,
)
from fleetpipe.static.pipeline_programs import note_average, of_main, refuse_foreign
from fleetpipe.static.run.pipeline import StaticPipeline
from fleetpipe.static.save import files
from fleetpipe.static.save.state import assign, fitting, tensor_in

#: What 2.6.2's ``paddle.save`` adds to a state, from other names of it to those of the program.
_OTHER_NAMES = "StructuredToParameterName@@"


def replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yields each place of a name, the name, and what stands there while static graph is hooked."""
    for serve in SERVED:
        for place in (static, static_io):
            yield place, serve.__name__, _serving(vars(place)[serve.__name__], serve)
    for method in SERVED_METHODS:
        for kind in program_classes():
            yield kind, method.__name__, _serving(vars(kind)[method.__name__], method)
    for place, name in WHOLE_PROGRAM_STATE:
        yield place, name, _refusing(vars(place)[name], name)
    for kind in AVERAGES:
        yield kind, "__init__", _refusing_average(kind.__init__, kind.__name__)


def _serving(original: Callable[..., Any], serve: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        return serve(original, *arguments, **named)

    return call


def save(
    original: Callable[..., object],
    program: Program,
    model_path: str | os.PathLike[str],
    protocol: int = 4,
    **configs: object,
) -> None:
    """Saves this process's part of a pipeline.

    The files are those of Paddle; a process with all stages adds the network's description.
    """
    pipeline = _pipeline_read(program)
    if pipeline is None:
        original(program, model_path, protocol, **configs)
        return

    def describe(path: str) -> None:
        original(program, path, protocol, **configs)

    files.save(model_path, program, protocol, describe if pipeline.local else None)


def load(
    original: Callable[..., object],
    program: Program,
    model_path: str | os.PathLike[str],
    executor: object = None,
    var_list: Sequence[Variable] | None = None,
) -> None:
    """Loads files of :func:`save`, on the same number of ranks or from a process with all stages.

    Raises:
        CheckpointError: The file is missing, not one of Paddle's, or has other stages; nothing was
            changed.
    """
    if of_main(program)[0] is None:
        original(program, model_path, executor, var_list)
    else:
        files.load(model_path, program)


def load_program_state(
    original: Callable[..., dict[str, Any]],
    model_path: str | os.PathLike[str],
    var_list: Sequence[Variable] | None = None,
) -> dict[str, Any]:
    """Returns what this rank saved, or else what one process did.

    Raises:
        CheckpointError: There is nothing.
    """
    job = current_job()
    path = files.prefix_of(model_path)
    prefix = path if job is None or job.local else files.of_rank(path, job.group().rank)
    saved_here = os.path.exists(f"{prefix}.pdparams")
    state = original(prefix if saved_here else os.fspath(model_path), var_list)
    if not state:
        raise CheckpointError(
            f"there is no state at {path}",
            expected=f"{prefix}.pdparams, or {path}.pdparams of one process",
            fix="save and load on as many ranks, after minimize, with the same path on each",
        )
    return state


def set_program_state(
    original: Callable[..., object], program: Program, state_dict: Mapping[str, Any]
) -> None:
    """Sets this process's part of a state; Paddle's own needs the parameters of all stages."""
    pipeline, _ = of_main(program)
    if pipeline is None:
        original(program, state_dict)
    else:
        _assign(pipeline, state_dict, static.global_scope())


def save_inference_model(
    original: Callable[..., Any],
    path_prefix: str | os.PathLike[str],
    feed_vars: Sequence[Variable],
    fetch_vars: Sequence[Variable],
    executor: object,
    **named: Any,
) -> Any:
    """Refuses on several ranks, as none of them has the whole network.

    Raises:
        ConfigError: The program is a pipeline's, and this process has a part of its stages.
    """
    program = named.get("program") or static.default_main_program()
    pipeline = _pipeline_read(program)
    if pipeline is not None and not pipeline.local:
        raise ConfigError(
            "paddle.static.save_inference_model of a pipeline needs the parameters of all ranks",
            fix="call fleetpipe.static.save_inference_model(prefix, feed_vars, fetch_vars, exe) on "
            "every rank: it gathers them, and one rank writes",
        )
    return original(path_prefix, feed_vars, fetch_vars, executor, **named)


def state_dict(
    original: Callable[..., dict[str, Any]],
    program: Program,
    mode: str = "all",
    scope: Scope = None,
) -> dict[str, ScopeTensor]:
    """Returns the tensors of a program and its optimizer, ``Program.state_dict``.

    Raises:
        ConfigError: This process has a part of the stages, and the script does not allow that.
        UsageError: ``mode`` is none of Paddle's.
    """
    pipeline = _pipeline_read(program, scope)
    if pipeline is None:
        return original(program, mode, scope)
    modes = {"param": pipeline.persistable, "opt": [*pipeline.optimizer_variables]}
    modes["all"] = [*modes["param"], *modes["opt"]]
    if mode not in modes:
        expected = ", ".join(modes)
        fix = 'program.state_dict("all"), say'
        raise UsageError("a program has no such state", expected=expected, got=repr(mode), fix=fix)
    if not pipeline.local:
        pipeline.job.allow.refuse(
            "state",
            "Program.state_dict",
            "the state of a pipeline's program is in parts, one on each rank",
            got="program.state_dict()",
            cause="the parts of several ranks would replace one another in one file",
            fix="paddle.static.save(program, path) on every rank, or the parameters of all by "
            "fleetpipe.static.full_state_dict(program)",
        )
    scope = static.global_scope() if scope is None else scope
    return {name: tensor_in(scope, name) for name in modes[mode]}


def set_state_dict(
    original: Callable[..., object],
    program: Program,
    state_dict: Mapping[str, Any],
    scope: Scope = None,
) -> None:
    """Sets this process's part of a state, ``Program.set_state_dict``."""
    pipeline, _ = of_main(program)
    if pipeline is None:
        original(program, state_dict, *(() if scope is None else (scope,)))
        return
    renamed = state_dict.get(_OTHER_NAMES, {})
    named = {renamed.get(n, n): v for n, v in state_dict.items() if n != _OTHER_NAMES}
    _assign(pipeline, named, static.global_scope() if scope is None else scope)


#: What serves a pipeline's program, by its name in ``paddle.static``, and as a method of a program.
SERVED = (save, load, load_program_state, set_program_state, save_inference_model)
SERVED_METHODS = (state_dict, set_state_dict)


def _assign(pipeline: StaticPipeline, state: Mapping[str, Any], scope: Scope) -> None:
    """Assigns what a state has of this process's variables."""
    names = [
        name for name in (*pipeline.persistable, *pipeline.optimizer_variables) if name in state
    ]
    if not names and not pipeline.elsewhere.intersection(state):
        raise CheckpointError(
            "the state has no name of the program",
            expected=f"names such as {', '.join(map(repr, [*pipeline.declared][:3]))}",
            got=f"{len(state)} names, such as {', '.join(map(repr, [*state][:3])) or 'none'}",
            fix="name the values as the program does",
        )
    assign(fitting(state, names, scope))


def _pipeline_read(program: Program, scope: Scope = None) -> StaticPipeline | None:
    """Returns the pipeline of a program that is read; refuses what other ranks have of another."""
    pipeline, _ = of_main(program)
    if pipeline is None:
        refuse_foreign(program, scope)
    return pipeline


def _refusing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function of Paddle's that refuses a pipeline's program whose state is elsewhere.

    It lets pass variables of this process that the script names; and, where one process plays all
    ranks, a copy of the program, which has no optimizer.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named).arguments
        bound.update(bound.get("kwargs", {}))
        chosen = bound.get("main_program") or bound.get("program")
        pipeline, is_main = of_main(within(chosen or static.default_main_program()))
        if pipeline is not None:
            wanted = {getattr(one, "name", one) for one in bound.get("vars") or ()}
            copies = pipeline.local and (not is_main or "serialize" in name)
            if not copies and (not wanted or pipeline.elsewhere & wanted):
                raise ConfigError(
                    f"{name} takes the state of a whole program, and a pipeline's is elsewhere: "
                    "the optimizer's beside it, the parameters on all ranks",
                    fix="paddle.static.save(program, path) and paddle.static.load(program, path) "
                    "on every rank; or name variables of this rank, vars=[..]",
                )
        return original(*arguments, **named)

    return call


def _refusing_average(original: Callable[..., None], name: str) -> Callable[..., None]:
    """Returns a constructor that refuses a pipeline's program, and notes on others what it adds."""

    @functools.wraps(original)
    def begin(*arguments: Any, **named: Any) -> None:
        if not paddle.in_dynamic_mode():
            note_average(static.default_main_program(), name)
        original(*arguments, **named)

    return begin
