"""``fleetpipe.install()``: does from within a script what ``fleetpipe run`` does.

It is for scripts that ``paddle.distributed.launch`` or a notebook starts, and that import a library
built on ``paddle.distributed.fleet``.
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
    """Replaces ``paddle.distributed.fleet`` by fleetpipe's modules from here on.

    Under ``fleetpipe run``, and the second time, it does nothing.

    Raises:
        ConfigError: A module has imported a name from ``paddle.distributed.fleet`` that fleetpipe
            replaces, and would continue to use Paddle's.
    """
    if sys.modules[PADDLES] is our_fleet:
        return
    within = f"{PADDLES}."
    stock = {name: one for name, one in sys.modules.items() if f"{name}.".startswith(within)}
    _installed.enter_context(in_place_of_paddles())
    try:
        _refuse_early_imports(stock)
    except ConfigError:
        _installed.close()
        raise
    # Taken back in order: at the very end Python would do it with half of its modules gone.
    atexit.register(_installed.close)


def _refuse_early_imports(modules: dict[str, ModuleType]) -> None:
    """Refuses modules that hold a replaced module, class or function of Paddle's."""
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
