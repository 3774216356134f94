"""The hooks that ``import fleetpipe.fleet`` puts into Paddle for static graph.

``Executor.run``, and Paddle's functions that read or write a program's state, check whether a
program is a pipeline's, and run it, save it, or refuse it: Paddle's own functions need the
parameters of the whole program, of which a rank has a part. A replacement that serves such a
program gets Paddle's own function as ``original``, for any other program. Start with
:func:`install`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fleetpipe.aliases import Program, Scope, ScopeTensor, Variable
from fleetpipe.errors import CheckpointError, ConfigError, UsageError
from fleetpipe.extras import extra
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.random import count_seedings
from fleetpipe.paddle_api.static import (
    AVERAGES,
    WHOLE_PROGRAM_STATE,
    Executor,
    OlderProgram,
    found_tensor,
    program_classes,
    program_within,
    static,
    static_io,
    swap_switch_device,
)
from fleetpipe.static import pipeline_programs as programs
from fleetpipe.static import saved_state
from fleetpipe.static.entry.optimizer import StaticOptimizer, amp_refusal, items_for
from fleetpipe.static.graph import stage_of_device
from fleetpipe.static.run.pipeline import StaticPipeline
from fleetpipe.static.saved_state import assign, pair_with_values, tensor_in

#: The key that Paddle 2.6.2's ``paddle.save`` adds to a state: its value maps the names of the
#: state to those of the program.
_NAMES_ENTRY = "StructuredToParameterName@@"

#: Functions that each remove one hook; empty while no hooks are installed.
_undo: list[Callable[[], None]] = []


def replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yields a module or class of Paddle, the name of a function in it, and its replacement."""
    for serve in SERVED:
        name = serve.__name__
        for module in (static, static_io):
            yield module, name, _replacement_of(vars(module)[name], serve)
    for method in SERVED_METHODS:
        name = method.__name__
        for program_class in program_classes():
            yield program_class, name, _replacement_of(vars(program_class)[name], method)
    for module, name in WHOLE_PROGRAM_STATE:
        refuse = functools.partial(_refuse_pipeline_state, name)
        yield module, name, _replacement_of(vars(module)[name], refuse)
    for average in AVERAGES:
        yield average, "__init__", _replacement_of(average.__init__, _begin_average)
    for place, serve in _HOOKS:
        yield place, serve.__name__, _replacement_of(getattr(place, serve.__name__), serve)
    parse = _replacement_of(OlderProgram.parse_from_string, _parse_from_string)
    yield OlderProgram, "parse_from_string", staticmethod(parse)


def _replacement_of(original: Callable[..., Any], serve: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement of Paddle's ``original`` that calls ``serve(original, ..)``."""

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
    """Replaces ``paddle.static.save``: saves this process's stages of a pipeline.

    The files have Paddle's form; a process with all stages also describes the network.
    """
    pipeline = _pipeline_to_read(program)
    if pipeline is None:
        original(program, model_path, protocol, **configs)
        return

    def save_by_paddle(path: str) -> None:
        """Writes all of Paddle's files, of which ``saved_state.save`` takes the network's only."""
        original(program, path, protocol, **configs)

    saved_state.save(model_path, program, protocol, save_by_paddle if pipeline.local else None)


def load(
    original: Callable[..., object],
    program: Program,
    model_path: str | os.PathLike[str],
    executor: object = None,
    var_list: Sequence[Variable] | None = None,
) -> None:
    """Replaces ``paddle.static.load``: loads files of :func:`save` into a pipeline.

    The files are of as many ranks, or of a process with all stages.

    Raises:
        CheckpointError: The file is missing, is not in Paddle's format, or has other stages;
            nothing was changed.
    """
    if programs.find_pipeline(program)[0] is None:
        original(program, model_path, executor, var_list)
    else:
        saved_state.load(model_path, program)


def load_program_state(
    original: Callable[..., dict[str, Any]],
    model_path: str | os.PathLike[str],
    var_list: Sequence[Variable] | None = None,
) -> dict[str, Any]:
    """Replaces ``paddle.static.load_program_state``: reads this rank's files, or one process's.

    Raises:
        CheckpointError: There are no such files.
    """
    job = current_job()
    path = saved_state.prefix_of(model_path)
    prefix = path
    if job is not None and not job.local:
        prefix = saved_state.prefix_of_rank(path, job.group().rank)
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
    """Replaces ``paddle.static.set_program_state``: sets the variables of this process's stages."""
    pipeline, _ = programs.find_pipeline(program)
    if pipeline is None:
        original(program, state_dict)
    else:
        _assign_state(pipeline, state_dict, static.global_scope())


def save_inference_model(
    original: Callable[..., Any],
    path_prefix: str | os.PathLike[str],
    feed_vars: Sequence[Variable],
    fetch_vars: Sequence[Variable],
    executor: object,
    **named: Any,
) -> Any:
    """Replaces ``paddle.static.save_inference_model``: refuses a pipeline on several ranks.

    Raises:
        ConfigError: The program is a pipeline's, and this process has some of its stages only.
    """
    program = named.get("program") or static.default_main_program()
    pipeline = _pipeline_to_read(program)
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
    """Replaces ``Program.state_dict``: returns the tensors of a program and of its optimizer.

    Raises:
        ConfigError: This process has some of the stages only, and the script does not allow that.
        UsageError: ``mode`` is none of Paddle's.
    """
    pipeline = _pipeline_to_read(program, scope)
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
    """Replaces ``Program.set_state_dict``: sets the variables of this process's stages."""
    pipeline, _ = programs.find_pipeline(program)
    if pipeline is None:
        original(program, state_dict, *(() if scope is None else (scope,)))
        return
    renamed = state_dict.get(_NAMES_ENTRY, {})
    named = {renamed.get(n, n): v for n, v in state_dict.items() if n != _NAMES_ENTRY}
    _assign_state(pipeline, named, static.global_scope() if scope is None else scope)


#: The replacements of functions of ``paddle.static``, and of methods of a program, by their names.
SERVED = (save, load, load_program_state, set_program_state, save_inference_model)
SERVED_METHODS = (state_dict, set_state_dict)


def _assign_state(pipeline: StaticPipeline, state: Mapping[str, Any], scope: Scope) -> None:
    """Sets the variables of this process that a state names.

    Other names in the state are ignored.

    Args:
        pipeline: The pipeline of the program.
        state: Values by the names of the program's variables.
        scope: The scope that has the variables.

    Raises:
        CheckpointError: The state names no variable of the program.
    """
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
    assign(pair_with_values(state, names, scope))


def _pipeline_to_read(program: Program, scope: Scope = None) -> StaticPipeline | None:
    """Returns the pipeline of a program whose state is read; None for any other program.

    Raises:
        ConfigError: The program is no pipeline's, and takes variables that other ranks have.
    """
    pipeline, _ = programs.find_pipeline(program)
    if pipeline is None:
        programs.refuse_foreign(program, scope)
    return pipeline


def _refuse_pipeline_state(
    name: str, original: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Replaces a function of Paddle's that saves or loads a whole program: refuses a pipeline's.

    It accepts variables of this process that the script names. If one process plays all ranks, it
    accepts a copy of the program, which has no optimizer. ``name`` is the function's name.
    """
    bound = inspect.signature(original).bind(*arguments, **named).arguments
    bound.update(bound.get("kwargs", {}))
    pipeline, is_main = programs.find_pipeline(
        _resolve_program(bound.get("main_program") or bound.get("program"))
    )
    if pipeline is not None:
        wanted = {getattr(variable, "name", variable) for variable in bound.get("vars") or ()}
        is_copy = pipeline.local and (not is_main or "serialize" in name)
        is_here = bool(wanted) and pipeline.elsewhere.isdisjoint(wanted)
        if not is_copy and not is_here:
            raise ConfigError(
                f"{name} takes the state of a whole program, and a pipeline's is elsewhere: "
                "the optimizer's beside it, the parameters on all ranks",
                fix="paddle.static.save(program, path) and paddle.static.load(program, path) "
                "on every rank; or name variables of this rank, vars=[..]",
            )
    return original(*arguments, **named)


def _begin_average(
    original: Callable[..., None], average: Any, *arguments: Any, **named: Any
) -> None:
    """Replaces the constructor of an average of parameters: refuses a pipeline's program.

    Another program is marked, so that it cannot become a pipeline's later.
    """
    if not paddle.in_dynamic_mode():
        programs.note_average(static.default_main_program(), type(average).__name__)
    original(average, *arguments, **named)


def install() -> None:
    """Replaces functions of Paddle's, once; ``fleet.init`` calls it."""
    if _undo:
        return
    for place, name, replacement in replacements():
        _undo.append(functools.partial(setattr, place, name, vars(place)[name]))
        setattr(place, name, replacement)
    _undo.append(count_seedings())
    _undo.extend(extra("program_ir").note_starts())
    # On a Paddle without PIR, device_guard itself marks operations.
    if hasattr(getattr(paddle, "pir", None), "set_chunk_id"):
        from fleetpipe.static.ir.pir_reader import stamp

        _undo.append(_hook_guard(stamp))


def uninstall() -> None:
    """Restores the functions of Paddle's; ``fleet.shutdown`` calls it."""
    while _undo:
        _undo.pop()()


def _resolve_program(program: Program) -> Program:
    """Returns the program of a call: inside of a compiled one, or the default one for None."""
    return program_within(static.default_main_program() if program is None else program)


def run(
    original: Callable[..., Any], executor: Any, program: Program = None, *more: Any, **named: Any
) -> Any:
    """Replaces ``Executor.run``: runs a pipeline if ``program`` has one."""
    chosen = _resolve_program(program)
    if programs.is_attached(chosen):
        return _run_attached(
            functools.partial(original, executor), executor, chosen, *more, **named
        )
    # After ``program`` come feed, fetch_list, two variables' names, and then the scope.
    programs.refuse_foreign(chosen, more[4] if len(more) > 4 else named.get("scope"))
    return original(executor, program, *more, **named)


def _run_attached(
    original: Callable[..., Any],
    executor: Any,
    program: Program,
    feed: object = None,
    fetch_list: object = None,
    feed_var_name: str = "feed",
    fetch_var_name: str = "fetch",
    scope: Scope = None,
    return_numpy: bool = True,
    *more: Any,
    **named: Any,
) -> Any:
    """Runs a pipeline's main or startup program, or a clone of one.

    ``original`` is Paddle's ``executor.run``; the others are the executor and its arguments.
    """
    variables = scope if scope is not None else paddle.static.global_scope()
    fetches = [] if fetch_list is None else list(_flatten(fetch_list))
    started = programs.pipeline_of_startup(program)
    if started is not None:
        started.start(functools.partial(original, scope=variables), program, variables)
        tensors = [found_tensor(variables, getattr(fetch, "name", fetch)) for fetch in fetches]
        if not return_numpy:
            return tensors or None
        return [None if tensor is None else np.array(tensor) for tensor in tensors] or None
    pipeline, is_main = programs.find_pipeline(program)
    if pipeline is not None and is_main:
        programs.refuse_appended(program, pipeline)
        items = items_for(program, feed)
        if items is None and not feed:
            loader = extra("program_ir")
            items = loader.items_from_loader(program, functools.partial(original, scope=variables))
        feeds = feed if items is None else items
        healing = pipeline.job.healing
        if healing is not None:
            healing.follow(program, None, guards=0, drawn=False)
            if variables is not paddle.static.global_scope():
                healing.refuse("a program trains in another scope than the global one")
        return pipeline.run(executor.place, feeds, fetches, variables, return_numpy)
    if pipeline is not None:
        raise ConfigError(
            "a copy of a pipeline's program that was made after minimize trains nothing",
            cause="minimize leaves the program forward only; the backward is in the pipeline",
            fix="run the program itself to train; to evaluate, clone it before minimize, on "
            "several ranks export it by fleetpipe.static.save_inference_model",
        )
    names = (feed_var_name, fetch_var_name)
    return original(program, feed, fetch_list, *names, scope, return_numpy, *more, **named)


def train_from_dataset(
    original: Callable[..., Any], executor: Any, program: Program = None, *more: Any, **named: Any
) -> Any:
    """Replaces ``Executor.train_from_dataset``: refuses a pipeline's program."""
    if programs.is_attached(_resolve_program(program)):
        raise ConfigError(
            "a pipeline takes no dataset: train_from_dataset would train nothing",
            fix="exe.run(main, feed=iter(loader), ..) for each batch",
        )
    return original(executor, program, *more, **named)


def decorate(original: Callable[..., Any], optimizer: Any, *more: Any, **named: Any) -> Any:
    """Replaces ``paddle.static.amp.decorate``: refuses a pipeline's optimizer."""
    if isinstance(optimizer, StaticOptimizer):
        raise amp_refusal()
    return original(optimizer, *more, **named)


def clone(original: Callable[..., Program], program: Program, for_test: bool = False) -> Program:
    """Replaces ``clone`` of older Programs: marks a copy of a pipeline's that is not for tests."""
    copy = original(program, for_test)
    if not for_test:
        programs.note_clone(program, copy)
    return copy


def _parse_from_string(original: Callable[[bytes], Program], binary_str: bytes) -> Program:
    """Replaces ``parse_from_string`` of older Programs: marks a copy of a pipeline's program."""
    parsed = original(binary_str)
    programs.note_parsed(binary_str, parsed)
    return parsed


#: Other replacements, each after the module or class that has the function of its name.
_HOOKS: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (Executor, run),
    (Executor, train_from_dataset),
    (OlderProgram, clone),
    (static.amp, decorate),
)


def _flatten(fetches: object) -> Iterator[Variable | str]:
    """Yields the values to fetch; ``Executor.run`` also takes nested lists of them."""
    if isinstance(fetches, (list, tuple)):
        for nested in fetches:
            yield from _flatten(nested)
    else:
        yield fetches


def _hook_guard(stamp: Callable[[int | None], None]) -> Callable[[], None]:
    """Makes each ``device_guard`` call ``stamp`` with the guard's stage.

    Args:
        stamp: Marks the operations that are built from now on with a stage; None ends that.

    Returns:
        A function that removes the hook.
    """

    def switch(device: str | None) -> object:
        stamp(stage_of_device(device))
        return original(device)

    original = swap_switch_device(switch)

    def restore() -> None:
        swap_switch_device(original)
        stamp(None)

    return restore
