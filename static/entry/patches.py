"""The hooks that ``import fleetpipe.fleet`` puts into Paddle for static graph, and removes.

``Executor.run``, ``save`` and ``load`` check whether a program is a pipeline's. Under PIR, where
``device_guard`` marks nothing, a guard also marks every operation with its stage. Everything else
is unchanged.

Paddle's ``save`` and ``load`` need the parameters of the whole program, of which a rank has a part,
and the optimizer's state in the program, where a pipeline has none.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from fleetpipe.aliases import Program, Scope, Variable
from fleetpipe.errors import ConfigError
from fleetpipe.extras import extra
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.static import (
    Executor,
    OlderProgram,
    static,
    static_io,
    swap_switch_device,
    within,
)
from fleetpipe.static.entry.data_loader import items_for
from fleetpipe.static.graph import stage_of_device
from fleetpipe.static.pipeline_programs import (
    is_attached,
    note_clone,
    note_parsed,
    of_main,
    of_startup,
    refuse_appended,
    refuse_foreign,
)
from fleetpipe.static.save import files
from fleetpipe.static.save.state import assign, fitting

_restore: list[Callable[[], None]] = []


def install() -> None:
    """Installs the hooks, once."""
    if _restore:
        return
    original = Executor.run

    @functools.wraps(original)
    def run(self: Any, program: Program = None, *more: Any, **named: Any) -> Any:
        chosen = paddle.static.default_main_program() if program is None else within(program)
        if not is_attached(chosen):
            refuse_foreign(chosen, more[4] if len(more) > 4 else named.get("scope"))
            return original(self, program, *more, **named)
        return _run(functools.partial(original, self), self, chosen, *more, **named)

    _put(Executor, "run", run)
    _put(Executor, "train_from_dataset", _refusing_datasets(Executor.train_from_dataset))
    _put(OlderProgram, "clone", _noting_clones(OlderProgram.clone))
    parse = _noting_parsed(OlderProgram.parse_from_string)
    _put(OlderProgram, "parse_from_string", staticmethod(parse))
    for ours in (save, load, save_inference_model, set_program_state):
        for place in (paddle.static, static_io):
            _hook_saving(place, ours)
    _restore.extend(extra("program_ir.program_loader").note_starts())
    stamp = _stamp()
    if stamp is not None:
        _restore.append(_hook_guard(stamp))


def uninstall() -> None:
    """Removes the hooks."""
    while _restore:
        _restore.pop()()


def _run(
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
    """Runs a program of a pipeline; the arguments are those of ``Executor.run``."""
    variables = scope if scope is not None else paddle.static.global_scope()
    owner = of_startup(program)
    if owner is not None:
        return owner.start(functools.partial(original, scope=variables), program, variables)
    pipeline, is_main = of_main(program)
    if pipeline is not None and is_main:
        refuse_appended(program, pipeline)
        wanted = list(_flat(fetch_list))
        items = items_for(program, feed)
        if items is None and not feed:
            loader = extra("program_ir.program_loader")
            items = loader.items_of(program, functools.partial(original, scope=variables))
        feeds = feed if items is None else items
        healing = pipeline.job.healing
        if healing is not None:
            healing.follow(program, None, guards=0, drawn=False)
            if variables is not paddle.static.global_scope():
                healing.refuse("a program trains in another scope than the global one")
        return pipeline.run(executor.place, feeds, wanted, variables, return_numpy)
    if pipeline is not None:
        raise ConfigError(
            "a copy of a pipeline's program that was made after minimize trains nothing",
            cause="minimize leaves the program forward only; the backward is in the pipeline",
            fix="run the program itself to train; to evaluate, clone it before minimize, on "
            "several ranks export it by fleetpipe.static.save_inference_model",
        )
    names = (feed_var_name, fetch_var_name)
    return original(program, feed, fetch_list, *names, scope, return_numpy, *more, **named)


def _refusing_datasets(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_from_dataset(self: Any, program: Program = None, *more: Any, **named: Any) -> Any:
        chosen = paddle.static.default_main_program() if program is None else within(program)
        if is_attached(chosen):
            raise ConfigError(
                "a pipeline takes no dataset: train_from_dataset would train nothing",
                fix="exe.run(main, feed=iter(loader), ..) for each batch",
            )
        return original(self, program, *more, **named)

    return train_from_dataset


def _noting_clones(original: Callable[..., Program]) -> Callable[..., Program]:
    @functools.wraps(original)
    def clone(self: Program, for_test: bool = False) -> Program:
        copy = original(self, for_test)
        if not for_test:
            note_clone(self, copy)
        return copy

    return clone


def _noting_parsed(original: Callable[[bytes], Program]) -> Callable[[bytes], Program]:
    @functools.wraps(original)
    def parse_from_string(binary_str: bytes) -> Program:
        parsed = original(binary_str)
        note_parsed(binary_str, parsed)
        return parsed

    return parse_from_string


def _put(place: Any, name: str, replacement: object) -> None:
    """Installs a replacement, and stores how to remove it."""
    _restore.append(functools.partial(setattr, place, name, vars(place)[name]))
    setattr(place, name, replacement)


def _flat(fetches: object) -> Iterator[Variable | str]:
    """Yields the values to fetch; ``Executor.run`` also takes nested lists."""
    if isinstance(fetches, (list, tuple)):
        for one in fetches:
            yield from _flat(one)
    elif fetches is not None:
        yield fetches


def _hook_saving(module: ModuleType, ours: Callable[..., Any]) -> None:
    """Makes a function of Paddle's call ours of the same name."""
    original = getattr(module, ours.__name__)
    _put(module, ours.__name__, functools.wraps(original)(functools.partial(ours, original)))


def _stamp() -> Callable[[int | None], None] | None:
    """Returns a function that marks operations with a stage; None if guards do that."""
    if not hasattr(getattr(paddle, "pir", None), "set_chunk_id"):
        return None
    from fleetpipe.static.ir.pir.pir_reader import stamp

    return stamp


def _hook_guard(stamp: Callable[[int | None], None]) -> Callable[[], None]:
    def switch(device: str | None) -> object:
        stamp(stage_of_device(device))
        return original(device)

    original = swap_switch_device(switch)

    def restore() -> None:
        swap_switch_device(original)
        stamp(None)

    return restore


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
    pipeline, _ = of_main(program)
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


def set_program_state(
    original: Callable[..., object], program: Program, state_dict: Mapping[str, Any]
) -> None:
    """Sets this process's part of a state; Paddle's own needs the parameters of all stages."""
    pipeline, _ = of_main(program)
    if pipeline is None:
        original(program, state_dict)
        return
    owned = [*pipeline.persistable, *pipeline.optimizer_variables]
    names = [name for name in owned if name in state_dict]
    assign(fitting(state_dict, names, static.global_scope()))


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
    pipeline, _ = of_main(program)
    if pipeline is not None and not pipeline.local:
        raise ConfigError(
            "paddle.static.save_inference_model of a pipeline needs the parameters of all ranks",
            fix="call fleetpipe.static.save_inference_model(prefix, feed_vars, fetch_vars, exe) on "
            "every rank: it gathers them, and one rank writes",
        )
    return original(path_prefix, feed_vars, fetch_vars, executor, **named)
