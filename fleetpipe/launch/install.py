"""``fleetpipe.install()``: what ``fleetpipe run`` does, from within a script.

For scripts that something else starts, ``paddle.distributed.launch`` or a notebook, and that import
a library built on ``paddle.distributed.fleet``.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import ExitStack
from types import ModuleType

from fleetpipe import fleet as our_fleet
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.overlay import PADDLES
from fleetpipe.launch.substitution import in_place_of_paddles

_installed = ExitStack()


def install() -> None:
    """Puts fleetpipe's modules in the place of ``paddle.distributed.fleet`` from here on.

    Under ``fleetpipe run``, and the second time, nothing is left to do.

    Raises:
        ConfigError: Some module has imported from ``paddle.distributed.fleet`` what fleetpipe has
            too, and would go on with Paddle's.
    """
    if sys.modules[PADDLES] is our_fleet:
        return
    stock = {name: module for name, module in sys.modules.items() if _is_fleets(name)}
    _installed.enter_context(in_place_of_paddles())
    try:
        _refuse_early_imports(stock)
    except ConfigError:
        _installed.close()
        raise
    # Taken back in order: at the very end Python would do it with half of its modules gone.
    atexit.register(_installed.close)


def _is_fleets(name: str) -> bool:
    return name == PADDLES or name.startswith(PADDLES + ".")


def _refuse_early_imports(modules: dict[str, ModuleType]) -> None:
    """Refuses modules that hold what was replaced: Paddle's modules, classes, functions."""
    replaced = {
        id(modules[name]): name for name in modules if sys.modules[name] is not modules[name]
    }
    for name in list(replaced.values()):
        for key in getattr(sys.modules[name], "__all__", ()):
            stock = getattr(modules[name], key, None)
            if stock is not getattr(sys.modules[name], key) and callable(stock):
                replaced[id(stock)] = f"{name}.{key}"
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("paddle", "fleetpipe"):
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            if id(value) in replaced:
                raise ConfigError(
                    "fleetpipe.install() came too late",
                    got=f"{name} has imported {replaced[id(value)]}, and would go on with Paddle's",
                    fix="import fleetpipe; fleetpipe.install() at the top of the script, above all "
                    "other imports; or start the script with fleetpipe run",
                )
