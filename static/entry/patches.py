"""The hooks that ``import fleetpipe.fleet`` puts into Paddle for static graph, and removes.

``Executor.run``, and what reads or writes a program's state (``program_state.py``), check whether a
program is a pipeline's. Under PIR, where ``device_guard`` marks nothing, a guard also marks every
operation with its stage. Everything else is unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fleetpipe.aliases import Program, Scope, Variable
from fleetpipe.errors import ConfigError
from fleetpipe.extras import extra
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.random import count_seedings
from fleetpipe.paddle_api.static import (
    Executor,
    OlderProgram,
    found_tensor,
    static,
    swap_switch_device,
    within,
)
from fleetpipe.static.entry import program_state
from fleetpipe.static.entry.data_loader import items_for
from fleetpipe.static.entry.optimizer import StaticOptimizer, amp_refusal
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
    for place, name, replacement in program_state.replacements():
        _put(place, name, replacement)
    _restore.append(count_seedings())
    _put(static.amp, "decorate", _refusing_pipelines(static.amp.decorate))
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
        owner.start(functools.partial(original, scope=variables), program, variables)
        fetched = [] if fetch_list is None else [*_flat(fetch_list)]
        values = [found_tensor(variables, getattr(one, "name", one)) for one in fetched]
        return [one if one is None or not return_numpy else np.array(one) for one in values] or None
    pipeline, is_main = of_main(program)
    if pipeline is not None and is_main:
        refuse_appended(program, pipeline)
        wanted = [] if fetch_list is None else list(_flat(fetch_list))
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


def _refusing_pipelines(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def decorate(optimizer: Any, *more: Any, **named: Any) -> Any:
        if isinstance(optimizer, StaticOptimizer):
            raise amp_refusal()
        return original(optimizer, *more, **named)

    return decorate


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
    else:
        yield fetches


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
