"""What ``import fleetpipe.fleet`` changes in Paddle for static graph, and takes back on request.

``Executor.run`` asks whether a program is a pipeline's; under PIR, where ``device_guard`` marks
nothing, a guard also has every operation carry its stage. Everything else runs as it did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.errors import ConfigError
from fleetpipe.static._paddle import Executor, swap_switch_device
from fleetpipe.static.loader import items_for
from fleetpipe.static.tags import stage_of_device

_PIPELINE, _STARTUP = "_fleetpipe", "_fleetpipe_startup"
_restore: list[Callable[[], None]] = []


def install() -> None:
    """Puts the hooks in, unless they are."""
    if _restore:
        return
    original = Executor.run

    @functools.wraps(original)
    def run(self: Any, program: Any = None, *more: Any, **named: Any) -> Any:
        chosen = paddle.static.default_main_program() if program is None else program
        if getattr(chosen, _PIPELINE, None) is None and getattr(chosen, _STARTUP, None) is None:
            return original(self, program, *more, **named)
        return _run(functools.partial(original, self), self, chosen, *more, **named)

    Executor.run = run
    _restore.append(functools.partial(setattr, Executor, "run", original))
    stamp = _stamp()
    if stamp is not None:
        _restore.append(_hook_guard(stamp))


def uninstall() -> None:
    """Takes the hooks back."""
    while _restore:
        _restore.pop()()


def attach(program: Any, startup: Any, pipeline: Any) -> None:
    """Makes a program and its startup program those of a pipeline."""
    setattr(program, _PIPELINE, (program, pipeline))
    setattr(startup, _STARTUP, (startup, pipeline))


def pipeline_of(program: Any = None) -> Any:
    """Returns the pipeline that ``minimize`` made of a program.

    Args:
        program: A program; None for the default main program.

    Raises:
        ConfigError: It is none.
    """
    program = paddle.static.default_main_program() if program is None else program
    found = getattr(program, _PIPELINE, None)
    if found is None:
        raise ConfigError("the program is no pipeline: distributed_optimizer(..).minimize makes it")
    return found[1]


def _run(
    original: Callable[..., Any],
    executor: Any,
    program: Any,
    feed: Any = None,
    fetch_list: Any = None,
    feed_var_name: str = "feed",
    fetch_var_name: str = "fetch",
    scope: Any = None,
    return_numpy: bool = True,
    *more: Any,
    **named: Any,
) -> Any:
    """Runs a program of a pipeline; the arguments are those of ``Executor.run``."""
    variables = scope if scope is not None else paddle.static.global_scope()
    startup, owner = getattr(program, _STARTUP, (None, None))
    if owner is not None and startup is program:
        return owner.start(functools.partial(original, scope=variables), program, variables)
    main, pipeline = getattr(program, _PIPELINE, (None, None))
    if pipeline is not None and main is program:
        fetches = fetch_list if isinstance(fetch_list, (list, tuple)) else [fetch_list]
        wanted = [] if fetch_list is None else list(fetches)
        items = items_for(program, feed)
        given = feed if items is None else items
        return pipeline.run(executor.place, given, wanted, variables, return_numpy)
    if pipeline is not None and not pipeline.local:
        raise ConfigError(
            "a clone of a pipeline's program cannot run on a rank",
            cause="each rank has the parameters of its own stages only",
            fix="clone the program before minimize and run it in one process on saved parameters",
        )
    names = (feed_var_name, fetch_var_name)
    return original(program, feed, fetch_list, *names, scope, return_numpy, *more, **named)


def _stamp() -> Callable[[int | None], None] | None:
    """Returns what stamps operations with a stage; None where guards mark them by themselves."""
    if not hasattr(getattr(paddle, "pir", None), "set_chunk_id"):
        return None
    from fleetpipe.static._pir import stamp

    return stamp


def _hook_guard(stamp: Callable[[int | None], None]) -> Callable[[], None]:
    def switch(device: str | None) -> Any:
        stamp(stage_of_device(device))
        return original(device)

    original = swap_switch_device(switch)

    def restore() -> None:
        swap_switch_device(original)
        stamp(None)

    return restore
